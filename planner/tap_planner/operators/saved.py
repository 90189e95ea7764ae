"""What backward keeps of an operator, given which operands need a gradient."""

from __future__ import annotations

from collections.abc import Sequence

from tap_planner.operators.types import ComputeKind, OperatorRecord


def kept_for_backward(
    record: OperatorRecord, requires_gradient: Sequence[bool]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Operands and outputs that the operator keeps for its backward.

    A product keeps an operand only for the gradient of another one; every other operator keeps what its record names
    as soon as any operand needs a gradient.

    Args:
        record: the operator's record.
        requires_gradient: per operand, whether its gradient is needed.

    Returns:
        Positions of the kept operands and of the kept outputs.
    """
    if not any(requires_gradient):
        return (), ()
    if record.kind is ComputeKind.CONTRACTION or record.type == "Mul":
        kept = tuple(
            position
            for position in record.saved_inputs
            if position < len(requires_gradient)
            and any(needed for other, needed in enumerate(requires_gradient[:2]) if other != position)
        )
        return kept, record.saved_outputs
    return tuple(p for p in record.saved_inputs if p < len(requires_gradient)), record.saved_outputs
