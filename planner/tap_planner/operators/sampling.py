"""Random numbers. Each is a function of a key and of its global position, so that any split gives the same tensor."""

from __future__ import annotations

from collections.abc import Callable

from tap_planner.operators.attributes import int_of, ints_of, operand, text_of
from tap_planner.operators.building import RuleBuilder, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


def _everywhere_rule(signature: OperatorSignature) -> FactorRule:
    """Every position is drawn by itself; an operand that gives the shape or the odds is split alike."""
    builder = RuleBuilder(signature)
    dims = builder.each("d", signature.outputs[0].shape)
    return builder.build([dims] * len(signature.inputs), (dims,))


def _rows_rule(signature: OperatorSignature) -> FactorRule:
    """Rows are drawn by themselves; the classes of a row are compared with one another."""
    rows, classes = operand(signature, 0).shape
    builder = RuleBuilder(signature)
    n, draws = builder.factor("n", rows), builder.fixed("draws", signature.outputs[0].shape[1])
    return builder.build(((n, builder.fixed("classes", classes)),), ((n, draws),))


def _shaped_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    return (TensorType(dtype=text_of(signature, "dtype"), shape=ints_of(signature, "shape")),)


def _alike_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data = operand(signature, 0)
    return (TensorType(dtype=text_of(signature, "dtype", data.dtype), shape=data.shape),)


def _multinomial_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data = operand(signature, 0)
    if len(data.shape) != 2:
        raise shape_error(signature, "log-probabilities [batch, classes]")
    shape = (data.shape[0], int_of(signature, "sample_size", 1))
    return (TensorType(dtype=text_of(signature, "dtype", "int32"), shape=shape),)


def _record(
    name: str,
    infer: Callable[[OperatorSignature, int], tuple[TensorType, ...]],
    rule: Callable[[OperatorSignature], FactorRule] = _everywhere_rule,
) -> OperatorRecord:
    return OperatorRecord(
        type=name,
        rule=rule,
        infer=infer,
        kind=ComputeKind.MEMORY,
        differentiable_operands=(),
        random=True,
    )


RECORDS: tuple[OperatorRecord, ...] = (
    _record("RandomNormal", _shaped_infer),
    _record("RandomUniform", _shaped_infer),
    _record("RandomNormalLike", _alike_infer),
    _record("RandomUniformLike", _alike_infer),
    _record("Bernoulli", _alike_infer),
    _record("Multinomial", _multinomial_infer, _rows_rule),
)
"""Records of the random operators."""
