"""Measurements -> constants of the cost model, with what remains unexplained."""

from tap_planner.calibration.descent import Constant, descend
from tap_planner.calibration.links import (
    MeasuredCluster,
    MeasuredCollective,
    fit_paces,
    log_errors,
    with_paces,
)

__all__ = [
    "Constant",
    "MeasuredCluster",
    "MeasuredCollective",
    "descend",
    "fit_paces",
    "log_errors",
    "with_paces",
]
