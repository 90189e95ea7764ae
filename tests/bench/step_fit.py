"""Constants of devices, fitted on measured steps: what ``--refit`` does, and where the catalogue's figures come from.

Five constants, none of them of a model: for A100 the launch floors forward and backward and the shares of peak and of
memory bandwidth that are reached, for H100 its own share of the peak. What is fitted on, and nothing else:

- one node of Megatron-DeepSpeed on A100, models of 12 and of 24 layers;
- one node of FSDP at sequences of up to 4096, on A100 for all four and on H100 for its one.

Both are needed: the first rows are bound by the host, so that only forward + recompute + backward launches together are
determined by them, and efficiencies hardly; the second by the device. What is minimised is the mean of the relative
errors of both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import minimize

from tests.bench.measured_steps import FITTED, FSDP, MeasuredStep
from tests.bench.step_constants import Constants, Fitted
from tests.bench.step_features import FeatureTable, StepFeatures

_LONGEST = 4096
"""Longer sequences are bound by the attention kernel, whose efficiency no constant describes."""
_ROUNDS = 6
"""Restarts of the simplex from where it ended."""


def is_fitted_on(step: MeasuredStep) -> bool:
    """Whether a row is one that constants are fitted on."""
    if step.table == FSDP:
        return step.part.endswith("1 node") and step.shape.seq <= _LONGEST
    return step.part == FITTED


def refit(rows: Sequence[tuple[MeasuredStep, StepFeatures]]) -> Fitted:
    """Fit all constants.

    Args:
        rows: measured steps that ``is_fitted_on`` accepts, with their features.
    """
    a100 = [row for row in rows if row[0].device.startswith("a100")]
    h100 = [row for row in rows if row[0].device.startswith("h100")]
    of_a100 = _simplex(_errors(a100), Constants(
        launch_ns=50_000, backward_launch_ns=100_000, matrix_efficiency_permille=600, memory_efficiency_permille=850
    ))
    fitted = {"a100": of_a100}
    if h100:
        error = _errors(h100)
        shares = range(200, 1000, 5)
        best = min(shares, key=lambda share: error(replace(of_a100, matrix_efficiency_permille=share)))
        fitted["h100"] = replace(of_a100, matrix_efficiency_permille=best)
    return fitted


def _errors(rows: Sequence[tuple[MeasuredStep, StepFeatures]]) -> Callable[[Constants], float]:
    """Constants -> the mean, over the tables, of their rows' mean relative error.

    Of FSDP's rows operators alone count: on one node the communication is hidden behind them.
    """
    features = FeatureTable([feature for _, feature in rows])
    measured = np.array([step.measured_ns for step, _ in rows], dtype=np.float64)
    of_fsdp = np.array([step.table == FSDP for step, _ in rows])
    exposed_ns = np.where(of_fsdp, 0, features.collective_ns())
    device = rows[0][1].cluster.device
    kinds = [kind for kind in (of_fsdp, ~of_fsdp) if kind.any()]

    def error(constants: Constants) -> float:
        relative = np.abs((features.compute_ns(constants.of(device)) + exposed_ns) / measured - 1)
        return float(np.mean([relative[kind].mean() for kind in kinds]))

    return error


def _simplex(error: Callable[[Constants], float], start: Constants) -> Constants:
    """Nelder-Mead over the logarithms; efficiencies stay below 1."""

    def constants(logarithms: np.ndarray) -> Constants:
        launch, backward, matrix, memory = (round(float(value)) for value in np.exp(logarithms))
        return Constants(
            launch_ns=launch,
            backward_launch_ns=backward,
            matrix_efficiency_permille=min(matrix, 1000),
            memory_efficiency_permille=min(memory, 1000),
        )

    at = np.log(
        [
            start.launch_ns,
            start.backward_launch_ns,
            start.matrix_efficiency_permille,
            start.memory_efficiency_permille,
        ]
    )
    for _ in range(_ROUNDS):
        at = minimize(lambda logarithms: error(constants(logarithms)), at, method="Nelder-Mead").x
    return constants(at)
