"""Operators that pick elements by index. Indices are global; negative ones count from the global end."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, present, torch_dtype
from tap_planner.errors import ApplyError
from tap_planner.sharding import local_indices


def _normalised(context: OperatorContext, indices: Tensor, size: int) -> Tensor:
    """Indices counted from the front.

    Raises:
        ApplyError: one lies outside the dim.
    """
    wrong = indices[(indices < -size) | (indices >= size)]
    if wrong.numel():
        name = f" {context.id!r}" if context.id else ""
        raise ApplyError(
            f"operator {context.signature.type}{name}: index {int(wrong[0])} is outside a dim of {size}, "
            f"expected {-size} to {size - 1}",
            hint="correct the inputs: some id is larger than its table",
        )
    return torch.where(indices < 0, indices + size, indices).to(torch.int64)


@operator("Gather")
def gather(context: OperatorContext, operands: Operands) -> Tensor:
    """Rows of a table. Where the looked-up dim is split, rows held elsewhere count as zero: the output is P(sum)."""
    table, indices = present(operands, 0), present(operands, 1)
    dim = context.axis(0)
    indices = _normalised(context, indices, context.input_shape(0)[dim])
    if not context.is_split(0, dim):
        return _rows(table, dim, indices)
    held = context.input_indices(0, dim)
    position = np.full(context.input_shape(0)[dim], -1, np.int64)
    position[held] = np.arange(len(held))
    local = torch.from_numpy(position).to(table.device)[indices]
    if len(held) == 0:
        return table.new_zeros(context.local_outputs[0])
    rows = _rows(table, dim, local.clamp(min=0))
    mask = (local >= 0).reshape((1,) * dim + tuple(local.shape) + (1,) * (table.dim() - dim - 1))
    return torch.where(mask, rows, torch.zeros_like(rows))


def _rows(table: Tensor, dim: int, indices: Tensor) -> Tensor:
    shape = (*table.shape[:dim], *indices.shape, *table.shape[dim + 1 :])
    return table.index_select(dim, indices.reshape(-1)).reshape(shape)


@operator("GatherElements")
def gather_elements(context: OperatorContext, operands: Operands) -> Tensor:
    """One element per index along a dim."""
    value, indices = present(operands, 0), present(operands, 1)
    dim = context.axis(0)
    return torch.gather(value, dim, _normalised(context, indices, context.input_shape(0)[dim]))


@operator("GatherND")
def gather_nd(context: OperatorContext, operands: Operands) -> Tensor:
    """Slices picked by index tuples, after leading batch dims."""
    value, indices = present(operands, 0), present(operands, 1)
    batch = context.int("batch_dims", 0)
    batch_shape = value.shape[:batch]
    count = int(np.prod(batch_shape, dtype=np.int64))
    flat_value = value.reshape((count, *value.shape[batch:]))
    flat_indices = indices.reshape((count, -1, indices.shape[-1]))
    sizes = context.input_shape(0)[batch:]
    picks = [_normalised(context, flat_indices[..., index], sizes[index]) for index in range(indices.shape[-1])]
    rows = torch.arange(count, device=value.device)[:, None]
    result = flat_value[(rows, *picks)]
    return result.reshape((*batch_shape, *indices.shape[batch:-1], *value.shape[batch + indices.shape[-1] :]))


@operator("ScatterElements")
def scatter_elements(context: OperatorContext, operands: Operands) -> Tensor:
    """Elements written, added, ... at indices along a dim."""
    value, indices, updates = (present(operands, index) for index in range(3))
    dim = context.axis(0)
    indices = _normalised(context, indices, context.input_shape(0)[dim])
    reduction = context.text("reduction", "none")
    if reduction == "none":
        return value.scatter(dim, indices, updates)
    return value.scatter_reduce(dim, indices, updates, _REDUCTIONS[reduction])


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("ScatterND")
def scatter_nd(context: OperatorContext, operands: Operands) -> Tensor:
    """Slices written, added, ... at index tuples."""
    value, indices, updates = (present(operands, index) for index in range(3))
    sizes = context.input_shape(0)
    picks = tuple(_normalised(context, indices[..., index], sizes[index]) for index in range(indices.shape[-1]))
    reduction = context.text("reduction", "none")
    if reduction in ("none", "add"):
        return value.index_put(picks, updates, accumulate=reduction == "add")
    rows = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=value.device)
    for pick, size in zip(picks, sizes, strict=False):
        rows = rows * size + pick
    rest = int(np.prod(value.shape[len(picks) :], dtype=np.int64))
    flat, new = value.reshape(-1, rest), updates.reshape(-1, rest)
    index = rows.reshape(-1, 1).expand(new.shape)
    return flat.scatter_reduce(0, index, new, _REDUCTIONS[reduction]).reshape(value.shape)


@operator("OneHot")
def one_hot(context: OperatorContext, operands: Operands) -> Tensor:
    """A new dim of ``depth`` with ``on_value`` at the index; the new dim may be split."""
    indices, depth = present(operands, 0), context.int("depth")
    rank = indices.dim() + 1
    dim = context.int("axis", -1) % rank
    indices = torch.where(indices < 0, indices + depth, indices).to(torch.int64)
    whole = context.signature.outputs[0].shape
    held = local_indices(whole, context.outputs[0], context.mesh_shape, context.coordinates)
    classes = torch.as_tensor(held[dim], device=indices.device)
    hit = indices.unsqueeze(dim) == classes.reshape((-1,) + (1,) * (rank - 1 - dim))
    output = context.signature.outputs[0]
    dtype = torch_dtype(output.dtype, context.dtype)
    on = torch.tensor(context.float("on_value", 1.0), dtype=dtype, device=indices.device)
    off = torch.tensor(context.float("off_value", 0.0), dtype=dtype, device=indices.device)
    return torch.where(hit, on, off)
