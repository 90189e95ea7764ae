"""What one GPU really reaches: matrix products, memory-bound operators, attention, launches; and its calibration file.

    python -m tests.bench.gpu_calibration --like h200-sxm-141gb [-o h200.json] [--json] [--budget 240]
    python -m tests.bench.gpu_calibration --like cpu-core --device cpu --budget 5

Everything runs through the executor of ``tap-apply``, eagerly: that is what the launch floors are of. Shown are per
step the rates that were reached, whole; the file holds what the cost model makes of all of them together.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tap_planner.apply import StepTimes, alone, measure_steps
from tap_planner.calibrating import samples_for, samples_for_gpu
from tap_planner.calibration import MeasuredStep, Sample, fit_device, sample_work
from tap_planner.cluster import Calibration, Device, calibration_text, catalogue_device, load_cluster
from tap_planner.plan import write_text
from tests.bench.instances import markdown

PRECISIONS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a step reached, with everything that it holds."""

    sample: str
    forward_us: float
    backward_us: float
    forward_tflops: float
    backward_tflops: float
    forward_gb_per_s: float
    backward_gb_per_s: float


def measure(device: Device, kind: str, seconds: float) -> tuple[list[Row], Calibration]:
    """Measure one device.

    Args:
        device: what it should be, of the catalogue.
        kind: ``cuda`` or ``cpu``.
        seconds: for measuring.
    """
    samples = samples_for_gpu(PRECISIONS) if kind == "cuda" else samples_for(load_cluster("1x1:cpu-core"))

    def progress(done: int, total: int) -> None:
        print(f"\r{done} of {total} blocks", end="", file=sys.stderr)

    times = measure_steps([sample.program for sample in samples], alone(kind), seconds, progress)
    print(file=sys.stderr)
    found = [(sample, time) for sample, time in zip(samples, times, strict=True) if time is not None]
    steps = [MeasuredStep(sample=s, forward_ns=t.forward_ns, backward_ns=t.backward_ns) for s, t in found]
    calibrated, fit = fit_device(device, steps)
    library = "nccl" if kind == "cuda" else "gloo"
    return [_row(s, t, device) for s, t in found], Calibration(device=calibrated, library=library, fit=fit)


def _row(sample: Sample, times: StepTimes, device: Device) -> Row:
    work = sample_work(sample, device)
    return Row(
        sample=sample.name,
        forward_us=round(times.forward_ns / 1e3, 1),
        backward_us=round(times.backward_ns / 1e3, 1),
        forward_tflops=round(work.forward_flops / times.forward_ns / 1e3, 3),
        backward_tflops=round(work.backward_flops / times.backward_ns / 1e3, 3),
        forward_gb_per_s=round(work.forward_bytes / times.forward_ns, 2),
        backward_gb_per_s=round(work.backward_bytes / times.backward_ns, 2),
    )


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--like", required=True, help="the device's name in the catalogue")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds")
    parser.add_argument("-o", "--output", type=Path, help="calibration file")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows, calibration = measure(catalogue_device(given.like), given.device, given.budget)
    if given.output is not None:
        write_text(given.output, calibration_text(calibration))
    if given.json:
        fit = [asdict(row) for row in calibration.fit]
        print(json.dumps({"rows": [asdict(row) for row in rows], "fit": fit}, indent=2))
        return
    print(markdown([asdict(row) for row in rows]))
    print()
    print(markdown([asdict(row) for row in calibration.fit]))


if __name__ == "__main__":
    main()
