"""Measured steps on one device -> launch floors, rates of matrix products and of memory.

The formula is the cost model's own (``cost.ComputeModel``): an operator takes its FLOPs over the rate of its element
type and its bytes over that of the memory, or its floor if that is more; views take nothing, so that what they really
take is part of the floors of the others, as many as there usually are. All constants are fitted together to the least
mean of abs(log(model / measured)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tap_planner.calibration.descent import Constant, descend
from tap_planner.calibration.residuals import fit_rows
from tap_planner.calibration.samples import Sample
from tap_planner.cluster import CalibratedDevice, Device, FitRow
from tap_planner.cost import ComputeModel, Work, local_work
from tap_planner.operators import ComputeKind, record_of
from tap_planner.program import Program, local_factor_sizes, local_operands, made_gradients
from tap_planner.sharding import local_elements

__all__ = ["MeasuredStep", "fit_device", "sample_work"]

_DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
_FLOORS = {"forward": 10_000.0, "backward": 30_000.0}
"""Where the search for the floors begins, in ns."""
_FLOOR_RANGE = (100.0, 1e8)
_RATE_RANGE = 1e3
"""Rates may be that much below or above the largest that was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """What a sample's step took."""

    sample: Sample
    forward_ns: float
    backward_ns: float


@dataclass(frozen=True, slots=True)
class _Pass:
    """The operators of one direction of a sample that are not free."""

    precision: str
    flops: np.ndarray
    num_bytes: np.ndarray
    backward: bool
    ns: float
    """Measured."""
    kind: str


def _passes(step: MeasuredStep, device: Device) -> list[_Pass]:
    """Forward and backward of a step."""
    sample = step.sample
    found: list[_Pass] = []
    works = _works(sample.program, ComputeModel(device, sample.precision))
    for backward, ns in ((False, step.forward_ns), (True, step.backward_ns)):
        part = np.array([work[2:] if backward else work[:2] for work in works], dtype=np.int64)
        part = part[part.any(axis=1)]
        found.append(_Pass(sample.precision, part[:, 0], part[:, 1], backward, ns, sample.kind))
    return found


def _works(program: Program, compute: ComputeModel) -> list[tuple[int, int, int, int]]:
    """Per operator that is no view FLOPs and bytes forward, and backward."""
    shape = program.decisions.mesh_shape
    found: list[tuple[int, int, int, int]] = []
    for index, operator in enumerate(program.graph.operators):
        if record_of(operator.signature).kind is ComputeKind.VIEW:
            continue
        decision = program.decisions.operators[index]
        work = local_work(
            compute,
            operator.signature,
            factor_sizes=local_factor_sizes(program, index),
            input_elements=local_operands(program, index),
            output_elements=[
                local_elements(output.shape, given.placement, shape)
                for output, given in zip(operator.signature.outputs, decision.outputs, strict=True)
            ],
            requires_gradient=made_gradients(decision),
        )
        found.append((work.forward_flops, work.forward_bytes, work.backward_flops, work.backward_bytes))
    return found


def sample_work(sample: Sample, device: Device) -> Work:
    """All FLOPs and bytes of a sample's step."""
    totals = np.array(_works(sample.program, ComputeModel(device, sample.precision)), dtype=np.int64).sum(axis=0)
    return Work(
        forward_flops=int(totals[0]),
        forward_bytes=int(totals[1]),
        backward_flops=int(totals[2]),
        backward_bytes=int(totals[3]),
    )


def fit_device(device: Device, steps: Sequence[MeasuredStep]) -> tuple[CalibratedDevice, tuple[FitRow, ...]]:
    """The figures of a device that explain measured steps best.

    Args:
        device: as the cluster file or the catalogue has it; its efficiencies stay where they can, its peaks are set to
            what is reached at them.
        steps: at one or more precisions that the device has a peak for, or a stand-in.

    Returns:
        The figures, and per kind of sample how well they explain its times.
    """
    passes = [one for step in steps for one in _passes(step, device)]
    precisions = list(dict.fromkeys(one.precision for one in passes))
    rates = {precision: _most_rate(passes, precision) for precision in precisions}
    memory = max(float(one.num_bytes.sum()) / one.ns for one in passes) * 1e9
    constants = [
        *(
            Constant(name=name, start=start, least=_FLOOR_RANGE[0], most=_FLOOR_RANGE[1])
            for name, start in _FLOORS.items()
        ),
        *(_rate_constant(precision, rate) for precision, rate in rates.items()),
        _rate_constant("memory", memory),
    ]
    measured = np.log([one.ns for one in passes])

    def errors(values: Mapping[str, float]) -> np.ndarray:
        at = _device_at(device, values, precisions)
        models = {precision: ComputeModel(at, precision) for precision in precisions}
        found = [
            models[one.precision]
            .times_ns(one.flops, one.num_bytes, ComputeKind.CONTRACTION, backward=one.backward)
            .sum()
            for one in passes
        ]
        return np.log(np.maximum(found, 1)) - measured

    values = descend(constants, lambda values: float(np.abs(errors(values)).mean()))
    kinds = [f"{one.kind} {'backward' if one.backward else 'forward'}" for one in passes]
    return _calibrated(device, values, precisions), fit_rows(kinds, errors(values))


def _most_rate(passes: Sequence[_Pass], precision: str) -> float:
    return max(float(one.flops.sum()) / one.ns for one in passes if one.precision == precision) * 1e9


def _rate_constant(name: str, rate: float) -> Constant:
    return Constant(name=name, start=rate, least=rate / _RATE_RANGE, most=rate * _RATE_RANGE)


def _device_at(device: Device, values: Mapping[str, float], precisions: Sequence[str]) -> Device:
    """The device at rates that are its peaks."""
    return replace(
        device,
        launch_ns=round(values["forward"]),
        backward_launch_ns=round(values["backward"]),
        peak_flops={_DTYPES[precision]: max(round(values[precision]), 1) for precision in precisions},
        matrix_efficiency_permille=1000,
        own_efficiency_permille={},
        memory_bandwidth_bytes_per_s=max(round(values["memory"]), 1),
        memory_efficiency_permille=1000,
    )


def _calibrated(device: Device, values: Mapping[str, float], precisions: Sequence[str]) -> CalibratedDevice:
    """Rates as peaks and efficiencies. The one efficiency of matrix products is the largest share of a known peak that
    an element type reaches; peaks of the others are what gives their rates at it."""
    known = {precision: device.peak_flops.get(_DTYPES[precision]) for precision in precisions}
    shares = [values[precision] / peak for precision, peak in known.items() if peak]
    matrix = _permille(max(shares, default=1.0))
    reached = values["memory"]
    memory = _permille(reached / device.memory_bandwidth_bytes_per_s)
    return CalibratedDevice(
        name=device.name,
        launch_ns=round(values["forward"]),
        backward_launch_ns=round(values["backward"]),
        peak_flops={_DTYPES[precision]: round(values[precision] * 1000 / matrix) for precision in precisions},
        matrix_efficiency_permille=matrix,
        memory_bandwidth_bytes_per_s=round(reached * 1000 / memory),
        memory_efficiency_permille=memory,
    )


def _permille(share: float) -> int:
    return min(max(round(1000 * share), 1), 1000)
