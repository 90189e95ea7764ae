"""Losses that the file itself holds: negative log-likelihood and softmax cross-entropy over the classes of dim 1."""

from __future__ import annotations

from tap_planner.operators.attributes import operand, text_of
from tap_planner.operators.building import Dims, RuleBuilder, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


def _global_count(signature: OperatorSignature) -> bool:
    """Whether the mean divides by the number of terms; weights and ignored labels make the divisor a sum of data."""
    weighted = len(signature.inputs) > 2 and signature.inputs[2] is not None
    return not weighted and signature.attribute("ignore_index") is None


def _rule(signature: OperatorSignature) -> FactorRule:
    """Classes are fixed. Terms are parallel where they are kept and where they are summed a sum; where a mean divides
    by a sum of weights they are fixed."""
    shape, reduction = operand(signature, 0).shape, text_of(signature, "reduction", "mean")
    builder = RuleBuilder(signature)
    if reduction == "none":
        make = builder.factor
    elif len(signature.outputs) == 1 and (reduction == "sum" or _global_count(signature)):
        make = builder.summed
    else:
        make = builder.fixed
    n, *rest = (make(f"d{dim}", size) for dim, size in enumerate((shape[0], *shape[2:])))
    classes = builder.fixed("classes", shape[1])
    logits, terms = (n, classes, *rest), (n, *rest)
    inputs: list[Dims | None] = [logits, terms]
    inputs.extend(None if found is None else (classes,) for found in signature.inputs[2:])
    outputs = [terms if reduction == "none" else (), logits]
    linear = signature.type == "NegativeLogLikelihoodLoss"
    ways = (("P", *("R",) * (len(inputs) - 1)),) if linear else ()
    return builder.build(inputs, outputs[: len(signature.outputs)], partial=ways)


def _infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, labels = operand(signature, 0), operand(signature, 1)
    if len(data.shape) < 2 or labels.shape != (data.shape[0], *data.shape[2:]):
        raise shape_error(signature, "labels [n, ...] for scores [n, classes, ...]")
    if len(signature.inputs) > 2 and operand(signature, 2).shape != data.shape[1:2]:
        raise shape_error(signature, f"{data.shape[1]} weights of classes")
    reduction = text_of(signature, "reduction", "mean")
    loss = TensorType(dtype=data.dtype, shape=labels.shape if reduction == "none" else ())
    return (loss, data)[:num_outputs]


RECORDS: tuple[OperatorRecord, ...] = tuple(
    OperatorRecord(
        type=name,
        rule=_rule,
        infer=_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1, 2),
        differentiable_operands=(0,),
    )
    for name in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
)
"""Records of the losses that files hold."""
