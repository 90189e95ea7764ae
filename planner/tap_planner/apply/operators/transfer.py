"""The border between pipeline stages where both lie on one rank: the value as it is."""

from __future__ import annotations

from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, present


@operator("Transfer")
def transfer(context: OperatorContext, operands: Operands) -> Tensor:
    """The operand."""
    value = present(operands, 0)
    return value.view_as(value)
