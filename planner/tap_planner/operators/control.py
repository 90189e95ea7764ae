"""Control flow that depends on data: run in full on every device, from whole operands.

``graph`` unfolds what it can; what is left carries a body, whose results' types ``graph`` has worked out.
"""

from __future__ import annotations

from tap_planner.operators.building import replicated_rule, shape_error
from tap_planner.operators.types import ComputeKind, OperatorRecord, OperatorSignature, TensorType

__all__ = ["RECORDS"]


def _infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    raise shape_error(signature, "a body, which says what it makes")


RECORDS: tuple[OperatorRecord, ...] = tuple(
    OperatorRecord(type=type, rule=replicated_rule, infer=_infer, kind=ComputeKind.MEMORY)
    for type in ("If", "Loop", "Scan")
)
"""Records of control flow. No gradient goes through it: ``graph`` refuses to train such a graph."""
