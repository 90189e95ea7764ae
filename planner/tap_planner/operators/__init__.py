"""One record per ONNX operator: factor rule, shapes, work, what backward keeps, linearity."""

from tap_planner.operators.types import (
    AttributeValue,
    ComputeKind,
    DimFactors,
    Factor,
    FactorKind,
    FactorRule,
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
    "OperatorRecord",
    "OperatorSignature",
    "TensorType",
]
