"""The end of a graph in inference: what it returns, whole or in parts, and where the caches of a decoder live.

``Output(value)`` is the identity and costs nothing. It is not linear, so a sum must be done before it. A cache that a
step reads and returns has both ends in one operator, ``Output(present, past)``: between steps it lies on the devices in
one placement, that of the result, in which the next step finds the past.
"""

from __future__ import annotations

from tap_planner.operators.attributes import operand
from tap_planner.operators.building import Dims, RuleBuilder, infer_first, shape_error
from tap_planner.operators.types import ComputeKind, DimFactors, FactorRule, OperatorRecord, OperatorSignature

__all__ = ["CACHE_OPERAND", "OUTPUT", "RECORDS"]

OUTPUT = "Output"
"""Type of the operator."""
CACHE_OPERAND = 1
"""Position of the operand that is the cache as the step finds it."""


def _output_rule(signature: OperatorSignature) -> FactorRule:
    """Every dim is parallel, but for one in which a cache grows: past and present are split alike, or not at all."""
    value = operand(signature, 0)
    builder = RuleBuilder(signature)
    if len(signature.inputs) <= CACHE_OPERAND:
        dims = builder.each("d", value.shape)
        return builder.build((dims,), (dims,))
    past = operand(signature, CACHE_OPERAND)
    if len(past.shape) != len(value.shape):
        raise shape_error(signature, "a cache of as many dims as what becomes of it")
    present: list[DimFactors] = []
    before: list[DimFactors] = []
    for dim, (size, old) in enumerate(zip(value.shape, past.shape, strict=True)):
        grows = size != old
        present.append(builder.fixed(f"d{dim}", size) if grows else builder.factor(f"d{dim}", size))
        before.append(builder.fixed(f"past{dim}", old) if grows else present[-1])
    dims = tuple(present)
    operands: tuple[Dims, ...] = (dims, tuple(before))
    return builder.build(operands, (dims,))


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(type=OUTPUT, rule=_output_rule, infer=infer_first, kind=ComputeKind.VIEW),
)
"""The record of the end of a graph."""
