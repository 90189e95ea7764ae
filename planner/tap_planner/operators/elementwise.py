"""Elementwise operators: one loop index ``d<i>`` per output dim; operands broadcast."""

from __future__ import annotations

from collections.abc import Callable

from tap_planner.operators.attributes import operand, text_of
from tap_planner.operators.building import ALL_OPERANDS, RuleBuilder, Way, aligned, broadcast_shapes, shape_error
from tap_planner.operators.types import ComputeKind, FactorRule, OperatorRecord, OperatorSignature, TensorType

__all__ = ["RECORDS"]

_Ways = Callable[[int], tuple[Way, ...]]


def _no_ways(count: int) -> tuple[Way, ...]:
    return ()


def _all_ways(count: int) -> tuple[Way, ...]:
    return (("P",) * count,)


def _first_ways(count: int) -> tuple[Way, ...]:
    return (("P", *("R",) * (count - 1)),)


def _product_ways(count: int) -> tuple[Way, ...]:
    return (("P", "R"), ("R", "P"))


def _where_ways(count: int) -> tuple[Way, ...]:
    return (("R", "P", "P"),)


def elementwise_rule(signature: OperatorSignature, ways: tuple[Way, ...] = ()) -> FactorRule:
    """Every dim of the output is a parallel factor."""
    builder = RuleBuilder(signature)
    dims = builder.each("d", signature.outputs[0].shape)
    inputs = [None if found is None else aligned(found.shape, dims) for found in signature.inputs]
    return builder.build(inputs, [dims] * len(signature.outputs), partial=ways)


def _rule_with(ways: _Ways) -> Callable[[OperatorSignature], FactorRule]:
    def rule(signature: OperatorSignature) -> FactorRule:
        return elementwise_rule(signature, ways(len(signature.inputs)))

    return rule


def _shape(signature: OperatorSignature) -> tuple[int, ...]:
    return broadcast_shapes(signature, [found.shape for found in signature.inputs if found is not None])


def _infer_same(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    return (TensorType(dtype=operand(signature, 0).dtype, shape=_shape(signature)),)


def _infer_bool(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    return (TensorType(dtype="bool", shape=_shape(signature)),)


def _infer_where(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    return (TensorType(dtype=operand(signature, 1).dtype, shape=_shape(signature)),)


def _infer_cast(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    return (TensorType(dtype=text_of(signature, "to"), shape=operand(signature, 0).shape),)


def _infer_dropout(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data = operand(signature, 0)
    return (data, TensorType(dtype=text_of(signature, "mask", "bool"), shape=data.shape))[:num_outputs]


def _width(dtype: str) -> str:
    """Bits of an element as its type's name says them: 8 of float8e4m3fn."""
    digits = dtype.lstrip("abcdefghijklmnopqrstuvwxyz")[:2].rstrip("e")
    return digits or {"bool": "8"}.get(dtype, dtype)


def _infer_bit_cast(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, dtype = operand(signature, 0), text_of(signature, "to")
    if _width(data.dtype) != _width(dtype):
        raise shape_error(signature, f"elements as wide as {dtype}, got {data.dtype}")
    return (TensorType(dtype=dtype, shape=data.shape),)


def _record(
    name: str,
    *,
    ways: _Ways = _no_ways,
    infer: Callable[[OperatorSignature, int], tuple[TensorType, ...]] = _infer_same,
    kind: ComputeKind = ComputeKind.MEMORY,
    keep_inputs: tuple[int, ...] = (),
    keep_outputs: tuple[int, ...] = (),
    trainable: tuple[int, ...] = (),
    differentiable: tuple[int, ...] | None = None,
    random: bool = False,
) -> OperatorRecord:
    return OperatorRecord(
        type=name,
        rule=_rule_with(ways),
        infer=infer,
        kind=kind,
        saved_inputs=keep_inputs,
        saved_outputs=keep_outputs,
        trainable_operands=trainable,
        differentiable_operands=differentiable,
        random=random,
    )


_KEEP_OUTPUT = ("Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Reciprocal", "Elu", "Selu")

_KEEP_INPUT = (
    *("Abs", "Log", "Erf", "Gelu", "Mish", "Swish", "Celu", "LeakyRelu", "ThresholdedRelu", "Shrink"),
    *("HardSigmoid", "HardSwish", "Softplus", "Softsign", "Clip"),
    *("Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh"),
)

_NO_GRADIENT = ("Floor", "Ceil", "Round", "Sign", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "BitShift")

_TO_BOOL = (
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
    *("And", "Or", "Xor", "Not", "IsNaN", "IsInf"),
)

RECORDS: tuple[OperatorRecord, ...] = (
    *(_record(name, keep_outputs=(0,)) for name in _KEEP_OUTPUT),
    *(_record(name, keep_inputs=(0,), differentiable=(0,)) for name in _KEEP_INPUT),
    *(_record(name, differentiable=()) for name in _NO_GRADIENT),
    *(_record(name, infer=_infer_bool, differentiable=()) for name in _TO_BOOL),
    _record("Identity", ways=_all_ways, kind=ComputeKind.VIEW, trainable=(0,)),
    _record("Neg", ways=_all_ways, trainable=(0,)),
    _record("Cast", ways=_all_ways, infer=_infer_cast, trainable=(0,)),
    _record("BitCast", infer=_infer_bit_cast, differentiable=()),
    _record("Dropout", infer=_infer_dropout, differentiable=(0,), random=True),
    _record("Add", ways=_all_ways, trainable=(0, 1)),
    _record("Sub", ways=_all_ways, trainable=(0, 1)),
    _record("Mul", ways=_product_ways, keep_inputs=(0, 1), trainable=(0, 1)),
    _record("Div", ways=_first_ways, keep_inputs=(0, 1), trainable=(0, 1)),
    _record("Pow", keep_inputs=(0, 1), trainable=(0, 1)),
    _record("Mod", keep_inputs=(0, 1), trainable=(0, 1)),
    _record("PRelu", keep_inputs=(0, 1), trainable=(1,)),
    _record("Where", ways=_where_ways, infer=_infer_where, keep_inputs=(0,), trainable=(1, 2), differentiable=(1, 2)),
    _record("Sum", ways=_all_ways, trainable=ALL_OPERANDS),
    _record("Mean", ways=_all_ways, trainable=ALL_OPERANDS),
    _record("Max", keep_inputs=ALL_OPERANDS, trainable=ALL_OPERANDS),
    _record("Min", keep_inputs=ALL_OPERANDS, trainable=ALL_OPERANDS),
)
"""Records of all elementwise operators."""
