"""Figures of a device are found again from times that they made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tap_planner.calibration import MeasuredStep, Sample, attention, elementwise, fit_device, layer, product
from tap_planner.cluster import CalibratedDevice, Device, catalogue_device
from tap_planner.program import Compute, Phase
from tap_planner.simulate.durations import Durations
from tests.calibration.clusters import on_one_device

SAMPLES = (
    *(layer(1, 8, 32, 2, precision) for precision in ("fp32", "fp64")),
    *(product(size, size, size, precision) for size in (128, 256, 512) for precision in ("fp32", "fp64")),
    *(elementwise(rows, 1024, "fp32") for rows in (256, 1024, 4096)),
    attention(4, 64, 4, 32, "fp32"),
)


def _step(sample: Sample, device: Device, noise: float = 1.0) -> MeasuredStep:
    """What the simulator says a sample's step takes: another piece of code than the fit's."""
    durations = Durations(sample.program, on_one_device(device))
    totals = {Phase.FORWARD: 0, Phase.BACKWARD: 0}
    for instruction in sample.program.microbatch:
        if isinstance(instruction, Compute):
            forward, backward = durations.operator_ns(instruction.operator)
            totals[instruction.phase] += backward if instruction.phase is Phase.BACKWARD else forward
    return MeasuredStep(
        sample=sample, forward_ns=totals[Phase.FORWARD] * noise, backward_ns=totals[Phase.BACKWARD] * noise
    )


def _rates(device: Device | CalibratedDevice) -> dict[str, float]:
    """What products and memory reach."""
    assert device.matrix_efficiency_permille and device.memory_efficiency_permille
    assert device.memory_bandwidth_bytes_per_s
    found = {dtype: peak * device.matrix_efficiency_permille / 1000 for dtype, peak in device.peak_flops.items()}
    found["memory"] = device.memory_bandwidth_bytes_per_s * device.memory_efficiency_permille / 1000
    return found


@settings(max_examples=6, deadline=None)
@given(
    launch_us=st.integers(5, 60),
    backward_us=st.integers(5, 120),
    gflops=st.integers(10, 200),
    slower=st.integers(2, 4),
    gigabytes=st.integers(2, 60),
)
def test_constants_are_found_again(launch_us: int, backward_us: int, gflops: int, slower: int, gigabytes: int) -> None:
    """From times without noise every figure comes back, and nothing is left unexplained."""
    true = replace(
        catalogue_device("cpu-core"),
        launch_ns=1000 * launch_us,
        backward_launch_ns=1000 * backward_us,
        peak_flops={"float32": gflops * 10**9, "float64": gflops * 10**9 // slower},
        matrix_efficiency_permille=1000,
        memory_bandwidth_bytes_per_s=gigabytes * 10**9,
        memory_efficiency_permille=1000,
    )
    device, fit = fit_device(catalogue_device("cpu-core"), [_step(sample, true) for sample in SAMPLES])
    assert device.launch_ns == pytest.approx(true.launch_ns, rel=0.05)
    assert device.backward_launch_ns == pytest.approx(true.backward_floor_ns, rel=0.05)
    assert _rates(device) == pytest.approx(_rates(true), rel=0.05)
    assert max(row.median_permille for row in fit) <= 20
    assert sum(row.rows for row in fit) == 2 * len(SAMPLES)


def test_noise_shows_in_the_residuals() -> None:
    """Times that are off by a tenth are reported as about that."""
    generator = np.random.default_rng(0)
    true = catalogue_device("cpu-core")
    steps = [_step(sample, true, generator.choice([0.9, 1.1])) for sample in SAMPLES]
    _, fit = fit_device(true, steps)
    assert 20 <= max(row.median_permille for row in fit) <= 250


def test_efficiencies_stay_shares() -> None:
    """A device that is faster than its data sheet says gets a higher peak and bandwidth, never more than all of it."""
    known = catalogue_device("cpu-core")
    peaks = {dtype: 5 * peak for dtype, peak in known.peak_flops.items()}
    true = replace(known, peak_flops=peaks, memory_bandwidth_bytes_per_s=7 * known.memory_bandwidth_bytes_per_s)
    device, _ = fit_device(known, [_step(sample, true) for sample in SAMPLES])
    assert device.matrix_efficiency_permille == device.memory_efficiency_permille == 1000
    assert _rates(device) == pytest.approx(_rates(true), rel=0.05)


def test_a_slower_device_keeps_the_peak_of_its_data_sheet() -> None:
    """Less than the peak is an efficiency."""
    known = catalogue_device("cpu-core")
    true = replace(known, matrix_efficiency_permille=200)
    device, _ = fit_device(known, [_step(sample, true) for sample in SAMPLES])
    assert device.matrix_efficiency_permille == pytest.approx(200, rel=0.05)
    assert device.peak_flops["float32"] == pytest.approx(known.peak_flops["float32"], rel=0.01)
