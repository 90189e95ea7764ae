"""Matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present


@operator("MatMul")
def matmul(context: OperatorContext, operands: Operands) -> Tensor:
    """Product of matrices, batch dims broadcast."""
    return torch.matmul(present(operands, 0), present(operands, 1))


@operator("Gemm")
def gemm(context: OperatorContext, operands: Operands) -> Tensor:
    """``alpha A B + beta C``. Where the sum is split, C comes as P(sum), so adding it locally counts it once."""
    left, right, added = present(operands, 0), present(operands, 1), optional(operands, 2)
    left = left.mT if context.flag("transA") else left
    right = right.mT if context.flag("transB") else right
    product = left @ right
    alpha, beta = context.float("alpha", 1.0), context.float("beta", 1.0)
    product = product if alpha == 1.0 else alpha * product
    if added is None:
        return product
    return product + (added if beta == 1.0 else beta * added)


@operator("Einsum")
def einsum(context: OperatorContext, operands: Operands) -> Tensor:
    """Sum of products by an equation."""
    equation = context.text("equation").replace(" ", "")
    return torch.einsum(equation, *(present(operands, index) for index in range(len(operands))))
