"""Random values of quantised weights, scales and zero points, such that results are of the size of a real model's."""

from __future__ import annotations

import math

from tap_planner.graph import Graph, Operator, TensorKind
from tap_planner.operators import lookup

_RANGES = {
    "int2": (-2, 1),
    "uint2": (0, 3),
    "int4": (-8, 7),
    "uint4": (0, 15),
    "int8": (-128, 127),
    "uint8": (0, 255),
    "float4e2m1": (-3, 3),
    "float8e4m3fn": (-8, 7),
    "float8e4m3fnuz": (-8, 7),
    "float8e5m2": (-8, 7),
    "float8e5m2fnuz": (-8, 7),
    "float8e8m0": (1, 1),
}
"""Integers that a stored element may be; of floats, numbers that all of their types hold."""
_BIASES = (-100, 100)
_STEPS = (0.01, 0.03)
"""Scales of activations: with 8 bits they reach from about -2.5 to 2.5."""
_WEIGHT_OF_SCALE = {
    ("DequantizeLinear", 1): 0,
    ("QLinearConv", 4): 3,
    ("QLinearMatMul", 4): 3,
    ("com.microsoft::DynamicQuantizeMatMul", 2): 1,
    ("com.microsoft::MatMulIntegerToFloat", 3): 1,
    ("com.microsoft::QGemm", 4): 3,
    ("com.microsoft::MatMulNBits", 2): 1,
    ("com.microsoft::GatherBlockQuantized", 2): 0,
}
"""By operator and operand that is a weight's scale: the operand that is the weight."""


def element_range(dtype: str) -> tuple[int, int] | None:
    """Least and largest random value of a stored element; None for types that hold no weights."""
    return _RANGES.get(dtype)


def quantised_range(graph: Graph, operator: Operator, position: int) -> tuple[float, float] | None:
    """Least and largest random value of an operand that is quantised, a scale or a zero point; None for another."""
    operand = operator.signature.inputs[position]
    if operand is None or position not in lookup(operator.type).quantised_operands:
        return None
    if operand.is_float:
        return _scale_range(graph, operator, position)
    if operand.dtype == "int32":
        return (0, 0) if _is_zero_point(operator, position) else _BIASES
    known = _RANGES.get(operand.dtype)
    if known is None or not _is_zero_point(operator, position):
        return known
    middle = (known[0] + known[1] + 1) // 2
    return (middle - 1, middle) if operand.dtype.startswith(("int", "uint")) else (0, 0)


def _is_zero_point(operator: Operator, position: int) -> bool:
    """Whether the operand before is a float that is quantised in one type with this: its scale."""
    before = operator.signature.inputs[position - 1] if position else None
    packed = operator.type.endswith(("MatMulNBits", "GatherBlockQuantized"))
    if operator.type.endswith("Integer"):
        return position >= 2
    if operator.type.endswith("MatMulIntegerToFloat"):
        return position in (4, 5)
    return not packed and before is not None and before.is_float


def _scale_range(graph: Graph, operator: Operator, position: int) -> tuple[float, float]:
    weight = _WEIGHT_OF_SCALE.get((operator.type, position))
    name = None if weight is None else operator.inputs[weight]
    if weight is None or name is None or graph.tensors[name].kind is not TensorKind.PARAMETER:
        return _STEPS
    stored = operator.signature.inputs[weight]
    assert stored is not None
    bits = operator.signature.attribute("bits")
    low, high = (0, 2**bits - 1) if isinstance(bits, int) else _RANGES.get(stored.dtype, _BIASES)
    deviation = (high - low + 1) / math.sqrt(12)
    size = 1.0 / (deviation * math.sqrt(max(_fan_in(operator, stored.shape), 1)))
    return 0.5 * size, 1.5 * size


def _fan_in(operator: Operator, shape: tuple[int, ...]) -> int:
    inner = operator.signature.attribute("K")
    if isinstance(inner, int):
        return inner
    if "Gather" in operator.type or len(shape) < 2:
        return shape[-1] if shape else 1
    return math.prod(shape[1:]) if len(shape) > 2 else shape[-2]
