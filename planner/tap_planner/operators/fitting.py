"""Whether a rule describes the tensors of its signature: what does not fit together is refused when it is bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tap_planner.errors import UnsupportedGraphError
from tap_planner.operators.building import shape_error
from tap_planner.operators.registry import rule_of
from tap_planner.operators.types import DimFactors, FactorKind, OperatorSignature, TensorType

__all__ = ["check_fit"]


def check_fit(signature: OperatorSignature) -> None:
    """Refuse a signature whose operands do not fit together.

    Args:
        signature: with its outputs filled in.

    Raises:
        UnsupportedGraphError: some operand has another rank or another size than the rule, made from all operands,
            says (a dim without factors is not described: it may have any size); or what is added to a sum over devices
            cannot itself be such a sum.
    """
    rule = rule_of(signature)
    sizes = [factor.size for factor in rule.factors]
    tensors = (*signature.inputs, *signature.outputs)
    contents = (*rule.inputs, *rule.outputs)
    if len(rule.inputs) != len(signature.inputs) or len(rule.outputs) != len(signature.outputs):
        raise shape_error(signature, f"{len(rule.inputs)} operands and {len(rule.outputs)} results")
    if not all(_fits(tensor, dims, sizes) for tensor, dims in zip(tensors, contents, strict=True)):
        raise shape_error(signature, "shapes that fit together")
    if any(factor.kind is FactorKind.SUM for factor in rule.factors):
        for index in rule.additive:
            added = signature.inputs[index]
            if added is not None and not added.is_float:
                raise UnsupportedGraphError(f"operator {signature.type}: adds {added.dtype} to a sum of floats")


def _fits(tensor: TensorType | None, dims: Sequence[DimFactors] | None, sizes: Sequence[int]) -> bool:
    if tensor is None or dims is None:
        return tensor is None and dims is None
    return len(tensor.shape) == len(dims) and all(
        not factors or math.prod(sizes[factor] for factor in factors) == size
        for size, factors in zip(tensor.shape, dims, strict=True)
    )
