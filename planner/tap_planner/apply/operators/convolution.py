"""Convolutions and pooling; groups and channels are counted from the local parts.

Where space is split the first operand comes with the rows of its neighbours around it (``halo.widen``), which take the
place of the padding in that dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present
from tap_planner.apply.operators.halo import exchanges, lowest

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def _spatial_rank(context: OperatorContext) -> int:
    rank = len(context.input_shape(0)) - 2
    if rank not in _CONV:
        raise context.unsupported(f"{rank} spatial dims, expected 1 to 3")
    return rank


def _pads(context: OperatorContext, rank: int) -> list[tuple[int, int]]:
    pads = context.ints("pads", (0,) * (2 * rank))
    return list(zip(pads[:rank], pads[rank:], strict=True))


def _rows_before(context: OperatorContext) -> dict[int, int]:
    """Per spatial dim that is split, how many rows of the previous rank the part begins with."""
    return {exchange.dim - 2: exchange.before for exchange in exchanges(context)}


def _padding(
    context: OperatorContext, value: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> list[tuple[int, int]]:
    """Per spatial dim what a part lacks (or, negative, has too much) of what its windows read."""
    rank, widened = len(kernel), _rows_before(context)
    amounts: list[tuple[int, int]] = []
    for dim, (begin, _) in enumerate(_pads(context, rank)):
        before = 0 if dim in widened else begin
        read = (context.local_outputs[0][dim + 2] - 1) * strides[dim] + dilations[dim] * (kernel[dim] - 1) + 1
        amounts.append((before, read - before - value.shape[dim + 2]))
    return amounts


def _padded(value: Tensor, pads: Sequence[tuple[int, int]], fill: float) -> Tensor:
    """Pads the trailing dims; negative amounts crop."""
    if not any(itertools.chain.from_iterable(pads)):
        return value
    return F.pad(value, list(itertools.chain.from_iterable(reversed(pads))), value=fill)


def _add_channels(value: Tensor, bias: Tensor | None) -> Tensor:
    return value if bias is None else value + bias.reshape(-1, *(1,) * (value.dim() - 2))


@operator("Conv")
def convolution(context: OperatorContext, operands: Operands) -> Tensor:
    """Convolution. Where input channels are split the bias comes as P(sum), so adding it locally counts it once."""
    value, weight, bias = present(operands, 0), present(operands, 1), optional(operands, 2)
    rank = _spatial_rank(context)
    if value.numel() == 0 or weight.numel() == 0:
        return _add_channels(value.new_zeros(context.local_outputs[0]), bias)
    groups = value.shape[1] // weight.shape[1]
    ones = (1,) * rank
    strides, dilations = context.ints("strides", ones), context.ints("dilations", ones)
    value = _padded(value, _padding(context, value, weight.shape[2:], strides, dilations), 0.0)
    result = _CONV[rank](value, weight, None, strides, 0, dilations, groups)
    return _add_channels(result, bias)


@operator("ConvTranspose")
def transposed_convolution(context: OperatorContext, operands: Operands) -> Tensor:
    """Transposed convolution, made without padding and then cut to the output's size."""
    value, weight, bias = present(operands, 0), present(operands, 1), optional(operands, 2)
    rank = _spatial_rank(context)
    shape = context.local_outputs[0]
    if value.numel() == 0 or weight.numel() == 0:
        return _add_channels(value.new_zeros(shape), bias)
    ones = (1,) * rank
    strides, dilations = context.ints("strides", ones), context.ints("dilations", ones)
    groups = shape[1] // weight.shape[1]
    full = _CONV_TRANSPOSE[rank](value, weight, None, strides, 0, 0, groups, dilations)
    widened = _rows_before(context)
    starts = [begin + widened.get(dim, 0) * strides[dim] for dim, (begin, _) in enumerate(_pads(context, rank))]
    amounts = [(-start, shape[dim + 2] + start - full.shape[dim + 2]) for dim, start in enumerate(starts)]
    return _add_channels(_padded(full, amounts, 0.0), bias)


class _Windows:
    """Windows of a pooling operator; padding at the end is stretched or cut to what the output's size needs."""

    def __init__(self, context: OperatorContext, value: Tensor) -> None:
        rank = _spatial_rank(context)
        ones = (1,) * rank
        self.rank = rank
        self.kernel = context.ints("kernel_shape")
        self.strides = context.ints("strides", ones)
        self.dilations = context.ints("dilations", ones)
        self.pads = _pads(context, rank)
        self.needed = _padding(context, value, self.kernel, self.strides, self.dilations)

    def unfold(self, value: Tensor) -> Tensor:
        """Adds one trailing dim per spatial dim, holding the window (a view)."""
        for dim in range(self.rank):
            extent = self.dilations[dim] * (self.kernel[dim] - 1) + 1
            value = value.unfold(dim + 2, extent, self.strides[dim])[..., :: self.dilations[dim]]
        return value

    def sum(self, value: Tensor) -> Tensor:
        """Sums over the windows of padded data."""
        return self.unfold(value).sum(tuple(range(-self.rank, 0)))

    def counts(self, context: OperatorContext, *, padding: bool) -> np.ndarray:
        """[space of this rank's part] real positions in each window; with ``padding`` also those that are padding."""
        counts = np.ones((), np.int64)
        for dim, (begin, end) in enumerate(self.pads):
            size, taps = context.input_shape(0)[dim + 2], self.dilations[dim] * np.arange(self.kernel[dim])
            read = context.output_indices(0)[dim + 2][:, None] * self.strides[dim] - begin + taps
            first, last = (-begin, size + end) if padding else (0, size)
            counts = np.multiply.outer(counts, ((read >= first) & (read < last)).sum(1))
        return counts


@operator("MaxPool")
def max_pool(context: OperatorContext, operands: Operands) -> Tensor | tuple[Tensor, ...]:
    """Largest of each window; with a second output also its position in the flattened tensor."""
    value = present(operands, 0)
    windows = _Windows(context, value)
    if value.numel() == 0:
        return value.new_zeros(context.local_outputs[0])
    padded = _padded(value, windows.needed, lowest(value))
    if len(context.outputs) == 1 and value.is_floating_point():
        return _MAX_POOL[windows.rank](padded, windows.kernel, windows.strides, 0, windows.dilations)
    if len(context.outputs) == 1:
        return windows.unfold(padded).flatten(-windows.rank).amax(-1)
    positions = torch.arange(value.numel(), device=value.device).reshape(value.shape)
    if context.int("storage_order", 0):
        planes = positions.reshape(*value.shape[:2], *reversed(value.shape[2:]))
        positions = planes.permute(0, 1, *reversed(range(2, value.dim())))
    places = windows.unfold(_padded(positions, windows.needed, -1)).flatten(-windows.rank)
    result, index = windows.unfold(padded).flatten(-windows.rank).max(-1)
    return result, places.gather(-1, index.unsqueeze(-1)).squeeze(-1)


@operator("AveragePool")
def average_pool(context: OperatorContext, operands: Operands) -> Tensor:
    """Mean of each window over its real positions, or also over its padding (``count_include_pad``)."""
    value = present(operands, 0)
    windows = _Windows(context, value)
    counts = windows.counts(context, padding=context.flag("count_include_pad"))
    return windows.sum(_padded(value, windows.needed, 0.0)) / torch.from_numpy(counts).to(value)


@operator("LpPool")
def lp_pool(context: OperatorContext, operands: Operands) -> Tensor:
    """p-norm of each window."""
    value, p = present(operands, 0), context.int("p", 2)
    windows = _Windows(context, value)
    return windows.sum(_padded(value, windows.needed, 0.0).abs() ** p) ** (1.0 / p)


@operator("GlobalAveragePool")
def global_average_pool(context: OperatorContext, operands: Operands) -> Tensor:
    """Mean over space: the local sum over the global count, P(sum) where space is split."""
    value = present(operands, 0)
    count = math.prod(context.input_shape(0)[2:])
    return value.sum(tuple(range(2, value.dim())), keepdim=True) / count


@operator("GlobalMaxPool")
def global_max_pool(context: OperatorContext, operands: Operands) -> Tensor:
    """Largest over space."""
    value = present(operands, 0)
    return torch.amax(value, tuple(range(2, value.dim())), keepdim=True)


@operator("GlobalLpPool")
def global_lp_pool(context: OperatorContext, operands: Operands) -> Tensor:
    """p-norm over space."""
    value = present(operands, 0)
    dims = tuple(range(2, value.dim()))
    return torch.linalg.vector_norm(value, ord=context.int("p", 2), dim=dims, keepdim=True)
