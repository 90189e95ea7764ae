"""Fused matrix products and convolutions of the com.microsoft domain."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tap_planner.apply.operators.activations import activated
from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present
from tap_planner.apply.operators.contraction import gemm
from tap_planner.apply.operators.convolution import convolution


def _matrix(context: OperatorContext, operands: Operands, index: int) -> Tensor:
    """An operand with its first dim behind the batch dims, and its last two exchanged, as the attributes ask."""
    value, letter = present(operands, index), "AB"[index]
    if value.dim() < 2:
        return value
    value = value.movedim(0, -2) if context.flag(f"transBatch{letter}") else value
    return value.mT if context.flag(f"trans{letter}") else value


@operator("com.microsoft::FusedMatMul")
def fused_matmul(context: OperatorContext, operands: Operands) -> Tensor:
    """``alpha A B`` with dims of A and B in other orders."""
    product = _matrix(context, operands, 0) @ _matrix(context, operands, 1)
    return context.float("alpha", 1.0) * product


@operator("com.microsoft::FusedGemm")
def fused_gemm(context: OperatorContext, operands: Operands) -> Tensor:
    """Gemm, then an activation."""
    names = ("activation_alpha", "activation_beta")
    given = [context.float(name) if context.signature.attribute(name) is not None else None for name in names]
    product = gemm(context, operands)
    assert isinstance(product, Tensor)
    return activated(context, product, context.text("activation", ""), given)


@operator("com.microsoft::FusedConv")
def fused_convolution(context: OperatorContext, operands: Operands) -> Tensor:
    """Conv, a tensor that is added (once, where input channels are split), then an activation."""
    result, added = convolution(context, operands), optional(operands, 3)
    assert isinstance(result, Tensor)
    parameters = context.signature.attribute("activation_params", ())
    given = [float(item) for item in parameters] if isinstance(parameters, tuple) else []
    return activated(context, result if added is None else result + added, context.text("activation", ""), given)


@operator("com.microsoft::GemmFastGelu")
def gemm_fast_gelu(context: OperatorContext, operands: Operands) -> Tensor:
    """MatMul, a bias, then Gelu by its approximation with tanh."""
    product, bias = present(operands, 0) @ present(operands, 1), optional(operands, 2)
    return F.gelu(product if bias is None else product + bias, approximate="tanh")
