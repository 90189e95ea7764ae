"""Costs in whole nanoseconds and bytes: compute (roofline), communication (alpha-beta on the topology), memory."""

from tap_planner.cost.buffers import num_communicators, workspace_bytes
from tap_planner.cost.collectives import COLLECTIVE_KINDS, AlgorithmCost, CollectiveCost, CollectiveModel
from tap_planner.cost.compute import (
    PRECISION_BYTES,
    ComputeModel,
    Work,
    element_bits,
    is_attention,
    operator_work,
)
from tap_planner.cost.groups import GroupShape, LevelShare, group_shape, group_shapes
from tap_planner.cost.link_traffic import leaving_bytes, leaving_bytes_of_step
from tap_planner.cost.memory import (
    OPTIMIZERS,
    ParameterBytes,
    ParameterMemory,
    optimizer_ns,
    parameter_bytes,
    parameter_memory,
    unsharded_bytes,
)
from tap_planner.cost.operators import local_work, operator_times_ns, whole_operator_ns
from tap_planner.cost.prices import CollectivePrices, FlatModel, PriceList, Prices, VolumeModel, prices_of
from tap_planner.cost.products import padded_points
from tap_planner.cost.reductions import ReductionCall, reduction_calls, shard_elements
from tap_planner.cost.rounding import to_ns
from tap_planner.cost.stage_shares import StageCompute, StageShare, stage_prices
from tap_planner.cost.unknown import UnknownOperators, unknown_operators

__all__ = [
    "COLLECTIVE_KINDS",
    "OPTIMIZERS",
    "PRECISION_BYTES",
    "AlgorithmCost",
    "CollectiveCost",
    "CollectiveModel",
    "CollectivePrices",
    "ComputeModel",
    "FlatModel",
    "GroupShape",
    "LevelShare",
    "ParameterBytes",
    "ParameterMemory",
    "PriceList",
    "Prices",
    "ReductionCall",
    "StageCompute",
    "StageShare",
    "UnknownOperators",
    "VolumeModel",
    "Work",
    "element_bits",
    "group_shape",
    "group_shapes",
    "is_attention",
    "leaving_bytes",
    "leaving_bytes_of_step",
    "local_work",
    "num_communicators",
    "operator_times_ns",
    "operator_work",
    "optimizer_ns",
    "padded_points",
    "parameter_bytes",
    "parameter_memory",
    "prices_of",
    "reduction_calls",
    "shard_elements",
    "stage_prices",
    "to_ns",
    "unknown_operators",
    "unsharded_bytes",
    "whole_operator_ns",
    "workspace_bytes",
]
