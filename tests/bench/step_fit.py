"""Constants of devices, fitted on measured steps: what ``--refit`` does, and where the catalogue's figures come from.

Four constants, none of them of a model: for A100 the floor of an operator's backward and the shares of peak and of
memory bandwidth that are reached, for H100 its own share of the peak. With ``--attention`` each device has one more,
the share of the peak that fused attention reaches. What is fitted on, and nothing else:

- one node of Megatron-DeepSpeed on A100, models of 12 and of 24 layers;
- one node of FSDP, on A100 for all of them and on H100 for its own.

A100 needs both: the first rows are bound by the host, so that efficiencies hardly show; the second by the device. Of
the launches little more than the sum over forward, recompute and backward shows, so the floor forward stays what it is.
What is minimised is the mean relative error of the first kind and the median of the second, added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tap_planner.calibration import Constant, descend
from tests.bench.measured_steps import FITTED, FSDP, MeasuredStep
from tests.bench.step_constants import Constants, Fitted
from tests.bench.step_features import FeatureTable, StepFeatures

_OF_A100 = (
    Constant(name="backward_launch_ns", start=100_000, least=5_000, most=1_000_000),
    Constant(name="memory_efficiency_permille", start=900, least=200, most=940),
)
"""That streaming kernels reach at most 94 % of the memory's bandwidth is an assumption."""
_OF_EACH = (Constant(name="matrix_efficiency_permille", start=600, least=200, most=950),)
"""Of A100 as well as of H100."""
_OF_ATTENTION = (Constant(name="attention_efficiency_permille", start=500, least=100, most=950),)


def is_fitted_on(step: MeasuredStep) -> bool:
    """Whether a row is one that constants are fitted on."""
    if step.table == FSDP:
        return step.part.endswith("1 node")
    return step.part == FITTED


def refit(rows: Sequence[tuple[MeasuredStep, StepFeatures]], *, attention: bool = False) -> Fitted:
    """Fit all constants.

    Args:
        rows: measured steps that ``is_fitted_on`` accepts, with their features; without any of A100 nothing is fitted.
        attention: whether fused attention has a share of its own.
    """
    a100 = [row for row in rows if row[0].device.startswith("a100")]
    if not a100:
        return {}
    error_of_a100 = _errors(a100)
    of_each = (*_OF_EACH, *_OF_ATTENTION) if attention else _OF_EACH
    of_a100 = _constants(descend((*_OF_A100, *of_each), lambda values: error_of_a100(_constants(values))))
    h100 = [row for row in rows if row[0].device.startswith("h100")]
    if not h100:
        return {"a100": of_a100}
    error = _errors(h100)
    found = descend(of_each, lambda values: error(_with(of_a100, values)))
    return {"a100": of_a100, "h100": _with(of_a100, found)}


def _errors(rows: Sequence[tuple[MeasuredStep, StepFeatures]]) -> Callable[[Constants], float]:
    """Constants -> what is minimised.

    Of FSDP's rows operators alone count: on one node the communication is hidden behind them.
    """
    features = FeatureTable([feature for _, feature in rows])
    measured = np.array([step.measured_ns for step, _ in rows], dtype=np.float64)
    of_fsdp = np.array([step.table == FSDP for step, _ in rows])
    exposed_ns = np.where(of_fsdp, 0, features.collective_ns())
    device = rows[0][1].cluster.device

    def error(constants: Constants) -> float:
        relative = np.abs((features.compute_ns(constants.of(device)) + exposed_ns) / measured - 1)
        mean = relative[~of_fsdp].mean() if not of_fsdp.all() else 0
        return float(mean + (np.median(relative[of_fsdp]) if of_fsdp.any() else 0))

    return error


def _with(constants: Constants, values: Mapping[str, float]) -> Constants:
    return replace(constants, **{name: round(value) for name, value in values.items()})


def _constants(values: Mapping[str, float]) -> Constants:
    return Constants(**{name: round(value) for name, value in values.items()})
