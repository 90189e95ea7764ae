"""Operators that move elements: their target sizes are global, the local ones come from the output's placement."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, present


@operator("Reshape")
def reshape(context: OperatorContext, operands: Operands) -> Tensor:
    """The same elements in other dims."""
    return present(operands, 0).reshape(context.local_outputs[0])


@operator("Transpose")
def transpose(context: OperatorContext, operands: Operands) -> Tensor:
    """Permuted dims."""
    value = present(operands, 0)
    return value.permute(context.ints("perm", tuple(reversed(range(value.dim())))))


@operator("Expand")
def expand(context: OperatorContext, operands: Operands) -> Tensor:
    """Broadcast to a shape."""
    return present(operands, 0).expand(context.local_outputs[0])


@operator("Tile")
def tile(context: OperatorContext, operands: Operands) -> Tensor:
    """Repeats along dims; a split repeat leaves fewer copies here."""
    value = present(operands, 0)
    sizes = zip(context.local_outputs[0], value.shape, strict=True)
    return value.repeat([after // before if before else 1 for after, before in sizes])


@operator("Concat")
def concat(context: OperatorContext, operands: Operands) -> Tensor:
    """Operands one after another along a dim."""
    return torch.cat([present(operands, index) for index in range(len(operands))], context.axis(0))


@operator("Split")
def split(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """Pieces along a dim."""
    dim = context.axis(0)
    return torch.split(present(operands, 0), [shape[dim] for shape in context.local_outputs], dim)


def _range(size: int, start: int, end: int, step: int) -> range:
    """Indices that ONNX Slice picks from a dim: out-of-range bounds are clamped."""
    start, end = start + size * (start < 0), end + size * (end < 0)
    if step > 0:
        return range(min(max(start, 0), size), min(max(end, 0), size), step)
    return range(min(max(start, -1), size - 1), min(max(end, -1), size - 1), step)


@operator("Slice")
def slice_dims(context: OperatorContext, operands: Operands) -> Tensor:
    """Ranges of dims; a dim that is taken whole may be split."""
    value, shape = present(operands, 0), context.input_shape(0)
    starts, ends = context.ints("starts"), context.ints("ends")
    axes = context.ints("axes", tuple(range(len(starts))))
    steps = context.ints("steps", (1,) * len(starts))
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        dim = axis % len(shape)
        picked = _range(shape[dim], start, end, step)
        if picked == range(shape[dim]):
            continue
        if context.is_split(0, dim):
            raise context.unsupported(f"dim {dim} is sliced and split")
        if step == 1:
            value = value.narrow(dim, picked.start, len(picked))
        else:
            value = value.index_select(dim, torch.tensor(list(picked), dtype=torch.int64, device=value.device))
    return value.clone() if value is operands[0] else value


@operator("Pad")
def pad(context: OperatorContext, operands: Operands) -> Tensor:
    """Padding with a constant or by reflection, edge or wrapping; negative padding crops."""
    value, pads = present(operands, 0), context.ints("pads")
    axes = context.ints("axes", tuple(range(value.dim())))
    mode = context.text("mode", "constant")
    before = {axis % value.dim(): pads[index] for index, axis in enumerate(axes)}
    after = {axis % value.dim(): pads[len(axes) + index] for index, axis in enumerate(axes)}
    if mode == "constant":
        flat = itertools.chain.from_iterable(
            (before.get(dim, 0), after.get(dim, 0)) for dim in reversed(range(value.dim()))
        )
        fill = context.signature.attribute("value", context.signature.attribute("constant_value", 0.0))
        return F.pad(value, list(flat), value=fill)  # type: ignore[arg-type]
    for dim in range(value.dim()):
        if before.get(dim, 0) or after.get(dim, 0):
            picked = _padded_indices(value.shape[dim], before[dim], after[dim], mode)
            value = value.index_select(dim, torch.tensor(picked, dtype=torch.int64, device=value.device))
    return value.clone() if value is operands[0] else value


def _padded_indices(size: int, before: int, after: int, mode: str) -> list[int]:
    positions = range(-before, size + after)
    if mode == "edge":
        return [min(max(position, 0), size - 1) for position in positions]
    if mode == "wrap":
        return [position % size for position in positions]
    period = max(2 * (size - 1), 1)
    return [min(position % period, period - position % period) if size > 1 else 0 for position in positions]


@operator("Trilu")
def triangle(context: OperatorContext, operands: Operands) -> Tensor:
    """Upper or lower triangle of matrices."""
    function = torch.triu if context.flag("upper", True) else torch.tril
    return function(present(operands, 0), context.int("k", 0))


@operator("DepthToSpace")
def depth_to_space(context: OperatorContext, operands: Operands) -> Tensor:
    """Channels into blocks of space."""
    value, block = present(operands, 0), context.int("blocksize")
    n, c, h, w = value.shape
    if context.text("mode", "DCR") == "DCR":
        value = value.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        value = value.reshape(n, c // block**2, block, block, h, w).permute(0, 1, 4, 2, 5, 3)
    return value.reshape(n, c // block**2, h * block, w * block)


@operator("SpaceToDepth")
def space_to_depth(context: OperatorContext, operands: Operands) -> Tensor:
    """Blocks of space into channels."""
    value, block = present(operands, 0), context.int("blocksize")
    n, c, h, w = value.shape
    value = value.reshape(n, c, h // block, block, w // block, block)
    value = value.permute(0, 3, 5, 1, 2, 4) if context.text("mode", "DCR") == "DCR" else value.permute(0, 1, 3, 5, 2, 4)
    return value.reshape(n, c * block**2, h // block, w // block)
