"""Measurements -> constants of the cost model, with what remains unexplained."""

from tap_planner.calibration.descent import Constant, descend
from tap_planner.calibration.device_fit import MeasuredStep, fit_device, sample_work
from tap_planner.calibration.link_fit import collectives_to_measure, fit_links
from tap_planner.calibration.links import (
    MeasuredCluster,
    MeasuredCollective,
    fit_paces,
    log_errors,
    with_paces,
)
from tap_planner.calibration.samples import Sample, attention, elementwise, fused_attention, layer, product

__all__ = [
    "Constant",
    "MeasuredCluster",
    "MeasuredCollective",
    "MeasuredStep",
    "Sample",
    "attention",
    "collectives_to_measure",
    "descend",
    "elementwise",
    "fit_device",
    "fit_links",
    "fit_paces",
    "fused_attention",
    "layer",
    "log_errors",
    "product",
    "sample_work",
    "with_paces",
]
