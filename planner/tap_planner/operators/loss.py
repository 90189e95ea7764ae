"""The loss that ends a training step: a mean, a sum, or cross-entropy, always over the global count of terms."""

from __future__ import annotations

from tap_planner.errors import UnsupportedGraphError
from tap_planner.operators.attributes import operand, text_of
from tap_planner.operators.building import RuleBuilder, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    FactorRule,
    InternalCollective,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]

_KINDS = ("mean", "sum", "cross-entropy")


def _kind(signature: OperatorSignature) -> str:
    kind = text_of(signature, "kind")
    if kind not in _KINDS:
        raise UnsupportedGraphError(
            f"operator Loss: kind {kind!r}, expected one of {', '.join(_KINDS)}", hint="choose another --loss"
        )
    return kind


def _loss_rule(signature: OperatorSignature) -> FactorRule:
    """Every term's dim is summed over; the vocabulary of cross-entropy is split with two all-reduces inside."""
    shape = operand(signature, 0).shape
    builder = RuleBuilder(signature)
    if _kind(signature) != "cross-entropy":
        terms = tuple(builder.summed(f"d{dim}", size) for dim, size in enumerate(shape))
        return builder.build((terms,), ((),), partial=(("P",),))
    terms = tuple(builder.summed(f"d{dim}", size) for dim, size in enumerate(shape[:-1]))
    vocabulary = builder.factor("v", shape[-1])
    elements = tuple(factor for dim in terms for factor in dim)
    collectives = tuple(
        InternalCollective(factor=factor, kind="all_reduce", elements=elements, multiplier=multiplier)
        for factor in vocabulary
        for multiplier in (1, 2)
    )
    return builder.build(((*terms, vocabulary), terms), ((),), collectives=collectives)


def _loss_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data = operand(signature, 0)
    if _kind(signature) == "cross-entropy" and operand(signature, 1).shape != data.shape[:-1]:
        raise shape_error(signature, "labels with the leading dims of the logits")
    return (TensorType(dtype=data.dtype, shape=()),)


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="Loss",
        rule=_loss_rule,
        infer=_loss_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1),
        differentiable_operands=(0,),
    ),
)
"""The record of the loss."""
