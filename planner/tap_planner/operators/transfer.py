"""The border between pipeline stages: a tensor that one stage makes goes to another that reads it.

``Transfer(value)`` is the identity: every rank sends what it holds to its counterpart, in forward the value, in
backward its gradient. A sum that is still to be done may pass, each rank's part by itself.
"""

from __future__ import annotations

from tap_planner.operators.attributes import operand
from tap_planner.operators.building import RuleBuilder, infer_first
from tap_planner.operators.types import ComputeKind, FactorRule, OperatorRecord, OperatorSignature

__all__ = ["RECORDS", "TRANSFER"]

TRANSFER = "Transfer"
"""Type of the operator."""


def _transfer_rule(signature: OperatorSignature) -> FactorRule:
    """Every dim is parallel."""
    builder = RuleBuilder(signature)
    dims = builder.each("d", operand(signature, 0).shape)
    return builder.build((dims,), (dims,), partial=(("P",),))


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(type=TRANSFER, rule=_transfer_rule, infer=infer_first, kind=ComputeKind.VIEW),
)
"""The record of the border."""
