"""One record per ONNX operator: factor rule, shapes, work, what backward keeps, linearity."""

from tap_planner.operators.registry import known_types, lookup, rule_of
from tap_planner.operators.saved import kept_for_backward
from tap_planner.operators.types import (
    AttributeValue,
    ComputeKind,
    DimFactors,
    Factor,
    FactorKind,
    FactorRule,
    InternalCollective,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = [
    "AttributeValue",
    "ComputeKind",
    "DimFactors",
    "Factor",
    "FactorKind",
    "FactorRule",
    "InternalCollective",
    "OperatorRecord",
    "OperatorSignature",
    "TensorType",
    "kept_for_backward",
    "known_types",
    "lookup",
    "rule_of",
]
