"""Operators that work along dims: reductions, softmax, scans, top-k."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, present


def _axes(context: OperatorContext) -> tuple[int, ...]:
    rank = len(context.input_shape(0))
    return tuple(dim % rank for dim in context.ints("axes", tuple(range(rank))))


def _reduce(
    context: OperatorContext, operands: Operands, function: Callable[[Tensor, tuple[int, ...], bool], Tensor]
) -> Tensor:
    value, axes = present(operands, 0), _axes(context)
    if not axes:
        return function(value.unsqueeze(0), (0,), False)
    return function(value, axes, context.flag("keepdims", True))


@operator("ReduceSum")
def reduce_sum(context: OperatorContext, operands: Operands) -> Tensor:
    """Sum over dims."""
    return _reduce(context, operands, lambda x, axes, keep: x.sum(axes, keepdim=keep, dtype=x.dtype))


@operator("ReduceMean")
def reduce_mean(context: OperatorContext, operands: Operands) -> Tensor:
    """Mean over dims: the local sum over the global count, P(sum) where a reduced dim is split."""
    shape = context.input_shape(0)
    count = math.prod(shape[dim] for dim in _axes(context))
    total = _reduce(context, operands, lambda x, axes, keep: x.sum(axes, keepdim=keep, dtype=x.dtype))
    return total / count if total.is_floating_point() else torch.div(total, count, rounding_mode="trunc")


@operator("ReduceSumSquare")
def reduce_sum_square(context: OperatorContext, operands: Operands) -> Tensor:
    """Sum of squares."""
    return _reduce(context, operands, lambda x, axes, keep: (x * x).sum(axes, keepdim=keep))


@operator("ReduceL1")
def reduce_l1(context: OperatorContext, operands: Operands) -> Tensor:
    """Sum of absolute values."""
    return _reduce(context, operands, lambda x, axes, keep: x.abs().sum(axes, keepdim=keep))


@operator("ReduceL2")
def reduce_l2(context: OperatorContext, operands: Operands) -> Tensor:
    """Root of the sum of squares."""
    return _reduce(context, operands, lambda x, axes, keep: torch.linalg.vector_norm(x, dim=axes, keepdim=keep))


@operator("ReduceLogSum")
def reduce_log_sum(context: OperatorContext, operands: Operands) -> Tensor:
    """Logarithm of the sum."""
    return _reduce(context, operands, lambda x, axes, keep: x.sum(axes, keepdim=keep).log())


@operator("ReduceLogSumExp")
def reduce_log_sum_exp(context: OperatorContext, operands: Operands) -> Tensor:
    """Logarithm of the sum of exponentials."""
    return _reduce(context, operands, lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep))


def _filled(value: Tensor, axes: tuple[int, ...], highest: bool) -> Tensor:
    """The value, or, of no elements, one at the end of the type's range: the extreme of nothing."""
    if value.numel():
        return value
    shape = [1 if dim in axes else size for dim, size in enumerate(value.shape)]
    if value.is_floating_point():
        return value.new_full(shape, math.inf if highest else -math.inf)
    if value.dtype == torch.bool:
        return value.new_full(shape, highest)
    limits = torch.iinfo(value.dtype)
    return value.new_full(shape, limits.max if highest else limits.min)


@operator("ReduceMax")
def reduce_max(context: OperatorContext, operands: Operands) -> Tensor:
    """Largest; the gradient is split between ties."""
    return _reduce(context, operands, lambda x, axes, keep: torch.amax(_filled(x, axes, False), axes, keepdim=keep))


@operator("ReduceMin")
def reduce_min(context: OperatorContext, operands: Operands) -> Tensor:
    """Smallest; the gradient is split between ties."""
    return _reduce(context, operands, lambda x, axes, keep: torch.amin(_filled(x, axes, True), axes, keepdim=keep))


@operator("ReduceProd")
def reduce_prod(context: OperatorContext, operands: Operands) -> Tensor:
    """Product over dims."""

    def product(value: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
        for dim in sorted(axes, reverse=True):
            value = value.prod(dim, keepdim=keep, dtype=value.dtype)
        return value

    return _reduce(context, operands, product)


@operator("ArgMax", "ArgMin")
def arg_extreme(context: OperatorContext, operands: Operands) -> Tensor:
    """Position of the extreme; of equal ones the first, or the last where asked for."""
    value, dim = present(operands, 0), context.axis(0)
    function = torch.argmax if context.signature.type == "ArgMax" else torch.argmin
    keep = context.flag("keepdims", True)
    if context.flag("select_last_index"):
        return value.shape[dim] - 1 - function(value.flip(dim), dim=dim, keepdim=keep)
    return function(value, dim=dim, keepdim=keep)


def _softmax_axes(context: OperatorContext) -> tuple[int, ...]:
    rank = len(context.input_shape(0))
    return tuple(dim % rank for dim in context.ints("axes", (-1,)))


@operator("Softmax")
def softmax(context: OperatorContext, operands: Operands) -> Tensor:
    """Exponentials over their sum."""
    value, axes = present(operands, 0), _softmax_axes(context)
    if len(axes) == 1:
        return torch.softmax(value, axes[0])
    return torch.exp(value - torch.logsumexp(value, axes, keepdim=True))


@operator("LogSoftmax")
def log_softmax(context: OperatorContext, operands: Operands) -> Tensor:
    """Logarithm of softmax."""
    value, axes = present(operands, 0), _softmax_axes(context)
    if len(axes) == 1:
        return torch.log_softmax(value, axes[0])
    return value - torch.logsumexp(value, axes, keepdim=True)


@operator("Hardmax")
def hardmax(context: OperatorContext, operands: Operands) -> Tensor:
    """One at the first largest position, zero elsewhere; several dims (the last ones) count as one."""
    value, axes = present(operands, 0), _softmax_axes(context)
    dim = min(axes, default=0)
    flat = value.flatten(dim) if len(axes) > 1 else value
    ones = torch.zeros_like(flat).scatter(dim, flat.argmax(dim, keepdim=True), 1)
    return ones.reshape(value.shape)


@operator("LpNormalization")
def lp_normalization(context: OperatorContext, operands: Operands) -> Tensor:
    """Division by the norm along a dim; where that is zero, so is the result."""
    value, dim = present(operands, 0), context.axis(-1)
    norm = torch.linalg.vector_norm(value, ord=context.int("p", 2), dim=dim, keepdim=True)
    return value / torch.where(norm == 0, 1.0, norm)


@operator("CumSum")
def cumulative_sum(context: OperatorContext, operands: Operands) -> Tensor:
    """Running sum along a dim."""
    value, dim = present(operands, 0), context.axis(0)
    backwards = context.flag("reverse")
    value = value.flip(dim) if backwards else value
    result = torch.cumsum(value, dim, dtype=value.dtype)
    result = result - value if context.flag("exclusive") else result
    return result.flip(dim) if backwards else result


@operator("TopK")
def top_k(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """The k largest or smallest and their positions; of equal ones the first comes first."""
    value, dim = present(operands, 0), context.axis(-1)
    values, positions = torch.sort(value, dim=dim, descending=context.flag("largest", True), stable=True)
    count = context.int("k")
    return (values.narrow(dim, 0, count), positions.narrow(dim, 0, count))[: len(context.outputs)]
