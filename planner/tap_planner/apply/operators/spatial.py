"""Sampling at computed positions of space, deformed windows, unpooling and folding. Space is never split."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present


@operator("AffineGrid")
def affine_grid(context: OperatorContext, operands: Operands) -> Tensor:
    """Positions of a regular grid in [-1, 1], moved by an affine matrix per batch entry."""
    theta, align = present(operands, 0), context.flag("align_corners")
    lines = []
    for size in context.ints("size")[2:]:
        steps = torch.arange(size, dtype=theta.dtype, device=theta.device)
        lines.append(2 * steps / max(size - 1, 1) - 1 if align else (2 * steps + 1) / size - 1)
    mesh = torch.meshgrid(*lines, indexing="ij")
    points = torch.stack([*reversed(mesh), torch.ones_like(mesh[0])], -1)
    return torch.einsum("...k,nck->n...c", points, theta)


@operator("GridSample")
def grid_sample(context: OperatorContext, operands: Operands) -> Tensor:
    """Values at the positions of a grid, interpolated."""
    value, grid = present(operands, 0), present(operands, 1)
    mode, rank = context.text("mode", "linear"), value.dim() - 2
    if rank not in (2, 3) or (rank == 3 and mode == "cubic"):
        raise context.unsupported(f"mode {mode!r} in {rank} spatial dims")
    return F.grid_sample(
        value,
        grid,
        mode={"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}[mode],
        padding_mode=context.text("padding_mode", "zeros"),
        align_corners=context.flag("align_corners"),
    )


def _interpolated(value: Tensor, points: list[Tensor]) -> Tensor:
    """[g, c, ...]: [g, c, space] interpolated linearly at one [g, ...] position per spatial dim; zero outside."""
    sizes, rank = value.shape[2:], len(points)
    lows = [point.detach().floor() for point in points]
    flat = value.flatten(2)
    total: Tensor | None = None
    for corner in itertools.product((0, 1), repeat=rank):
        index = torch.zeros_like(lows[0], dtype=torch.int64)
        weight = torch.ones_like(points[0])
        inside = torch.ones_like(index, dtype=torch.bool)
        for point, low, step, size in zip(points, lows, corner, sizes, strict=True):
            place = low.to(torch.int64) + step
            inside = inside & (place >= 0) & (place < size)
            weight = weight * (1 - (point - (low + step)).abs())
            index = index * size + place.clamp(0, size - 1)
        picked = flat.gather(2, index.flatten(1).unsqueeze(1).expand(-1, flat.shape[1], -1))
        term = picked.unflatten(2, index.shape[1:]) * torch.where(inside, weight, 0.0).unsqueeze(1)
        total = term if total is None else total + term
    assert total is not None
    return total


@operator("DeformConv")
def deform_convolution(context: OperatorContext, operands: Operands) -> Tensor:
    """Convolution whose taps are moved by offsets and scaled by a mask (Dai et al. 2017, Zhu et al. 2019)."""
    value, weight, offset = (present(operands, index) for index in range(3))
    bias, mask = optional(operands, 3), optional(operands, 4)
    kernel, space = weight.shape[2:], offset.shape[2:]
    rank, batch, groups = len(kernel), value.shape[0], context.int("offset_group", 1)
    taps, ones = math.prod(kernel), (1,) * rank
    strides, dilations = context.ints("strides", ones), context.ints("dilations", ones)
    pads = context.ints("pads", (0,) * 2 * rank)
    moved = offset.reshape(batch * groups, taps, rank, *space)
    points: list[Tensor] = []
    for dim in range(rank):
        cells = torch.arange(kernel[dim], dtype=value.dtype, device=value.device) * dilations[dim]
        cells = cells.reshape([-1 if other == dim else 1 for other in range(rank)]).expand(kernel).reshape(-1)
        steps = torch.arange(space[dim], dtype=value.dtype, device=value.device) * strides[dim] - pads[dim]
        steps = steps.reshape([-1 if other == dim else 1 for other in range(rank)])
        points.append(moved[:, :, dim] + cells.reshape(-1, *ones) + steps)
    sampled = _interpolated(value.reshape(batch * groups, -1, *value.shape[2:]), points)
    if mask is not None:
        sampled = sampled * mask.reshape(batch * groups, 1, taps, *space)
    columns = sampled.reshape(batch, context.int("group", 1), weight.shape[1] * taps, -1)
    matrix = weight.reshape(columns.shape[1], -1, columns.shape[2])
    result = (matrix @ columns).reshape(batch, weight.shape[0], *space)
    return result if bias is None else result + bias.reshape(-1, *ones)


@operator("MaxUnpool")
def max_unpool(context: OperatorContext, operands: Operands) -> Tensor:
    """Values written back to the positions that MaxPool found, zero elsewhere. Positions count over the whole tensor;
    inside a channel's plane they are what remains."""
    value, positions = present(operands, 0), present(operands, 1)
    plane, shape = context.ints("plane"), context.ints("shape")
    inside = (positions % math.prod(plane)).flatten(2)
    flat = value.new_zeros((*value.shape[:2], math.prod(plane))).scatter(2, inside, value.flatten(2))
    spread = flat.unflatten(2, plane)
    amounts = [(0, size - held) for size, held in zip(shape[2:], plane, strict=True)]
    return F.pad(spread, list(itertools.chain.from_iterable(reversed(amounts))))


@operator("Col2Im")
def fold(context: OperatorContext, operands: Operands) -> Tensor:
    """Columns of blocks added up to an image; where blocks overlap they are summed."""
    columns = present(operands, 0)
    image, block = context.ints("image_shape"), context.ints("block_shape")
    rank = len(image)
    ones = (1,) * rank
    strides, dilations = context.ints("strides", ones), context.ints("dilations", ones)
    pads = context.ints("pads", (0,) * 2 * rank)
    sizes = [image[dim] + pads[dim] + pads[dim + rank] for dim in range(rank)]
    counts = [(sizes[dim] - dilations[dim] * (block[dim] - 1) - 1) // strides[dim] + 1 for dim in range(rank)]
    index = torch.zeros(1, 1, dtype=torch.int64, device=columns.device)
    for dim in range(rank):
        cells = torch.arange(block[dim], device=columns.device) * dilations[dim]
        starts = torch.arange(counts[dim], device=columns.device) * strides[dim]
        index = index[:, None, :, None] * sizes[dim] + cells[None, :, None, None] + starts
        index = index.reshape(index.shape[0] * block[dim], -1)
    flat = columns.reshape(columns.shape[0], -1, index.numel())
    spread = flat.new_zeros((*flat.shape[:2], math.prod(sizes)))
    spread = spread.index_add(2, index.reshape(-1), flat).unflatten(2, sizes)
    crops = [(-pads[dim], -pads[dim + rank]) for dim in range(rank)]
    return F.pad(spread, list(itertools.chain.from_iterable(reversed(crops))))
