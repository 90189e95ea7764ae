"""Products and lookups with weights of 2, 4 or 8 bits. Parts hold whole blocks, so that bytes and scales stay whole."""

from __future__ import annotations

import torch
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present
from tap_planner.apply.operators.quantised import wide_dtype

_MICROSOFT = "com.microsoft::"


def unpacked(data: Tensor, bits: int) -> Tensor:
    """Numbers of ``bits`` bits in the bytes along the last dim, lowest bits first."""
    shifts = torch.arange(0, 8, bits, device=data.device, dtype=torch.int32)
    numbers = (data.to(torch.int32).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2)


@operator(f"{_MICROSOFT}MatMulNBits")
def matmul_nbits(context: OperatorContext, operands: Operands) -> Tensor:
    """``A W^T + bias``; W has a scale and a zero point per row and block of columns."""
    value, matrix = present(operands, 0), restored_matrix(context, operands)
    product = value @ matrix.to(value.dtype).mT
    bias = optional(operands, 5)
    return product if bias is None else product + bias


def restored_matrix(context: OperatorContext, operands: Operands) -> Tensor:
    """The local ``[N, K]`` of a MatMulNBits."""
    packed, bits, block = present(operands, 1), context.int("bits", 4), context.int("block_size")
    columns, blocks, inner = packed.shape[0], packed.shape[1], present(operands, 0).shape[-1]
    dtype = wide_dtype(context)
    numbers = unpacked(packed, bits).reshape(columns, blocks * block)[:, :inner].to(dtype)
    groups = optional(operands, 4)
    if groups is None:
        groups = torch.arange(inner, device=packed.device) // block
    scales = present(operands, 2).reshape(columns, blocks).to(dtype)
    zeros = _zero_points(context, operands, columns, blocks, bits).to(dtype)
    return (numbers - zeros[:, groups.long()]) * scales[:, groups.long()]


def _zero_points(context: OperatorContext, operands: Operands, columns: int, blocks: int, bits: int) -> Tensor:
    points = optional(operands, 3)
    if points is None:
        return present(operands, 2).new_full((columns, blocks), float(1 << (bits - 1)))
    stored = context.signature.inputs[3]
    if stored is not None and stored.dtype == "uint8" and bits < 8:
        return unpacked(points.reshape(columns, -1), bits)[:, :blocks]
    return points.reshape(columns, blocks)


@operator(f"{_MICROSOFT}GatherBlockQuantized")
def gather_block_quantized(context: OperatorContext, operands: Operands) -> Tensor:
    """Restored rows of a table. Where rows are split, those held elsewhere count as zero: the output is P(sum)."""
    data, indices, scale = (present(operands, index) for index in range(3))
    axis, along, block = context.int("gather_axis"), context.int("quantize_axis"), context.int("block_size")
    bits = context.int("bits", 4)
    stored = context.signature.inputs[0]
    packed = stored is not None and stored.dtype == "uint8"
    numbers = unpacked(data, bits) if packed else data.to(torch.int32)
    points = optional(operands, 3)
    if points is not None:
        points = unpacked(points, bits).narrow(along, 0, scale.shape[along]) if packed else points.to(torch.int32)
    elif packed:
        points = torch.full_like(scale, float(1 << (bits - 1)), dtype=torch.int32)
    dtype, size = wide_dtype(context), numbers.shape[along]

    def spread(value: Tensor) -> Tensor:
        return value.to(dtype).repeat_interleave(block, along).narrow(along, 0, size)

    rows = numbers.to(dtype) if points is None else numbers.to(dtype) - spread(points)
    table = (rows * spread(scale)).to(context.dtype)
    return looked_up(context, table, indices, axis)


def looked_up(context: OperatorContext, table: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Rows of a local table by global index, zeros for rows that are held elsewhere."""
    count = context.input_shape(0)[axis]
    indices = torch.where(indices < 0, indices + count, indices).to(torch.int64)
    held = torch.as_tensor(context.input_indices(0, axis), device=table.device)
    position = torch.full((count,), -1, dtype=torch.int64, device=table.device)
    position[held] = torch.arange(len(held), device=table.device)
    local = position[indices]
    if len(held) == 0:
        return table.new_zeros(context.local_outputs[0])
    shape = (*table.shape[:axis], *local.shape, *table.shape[axis + 1 :])
    rows = table.index_select(axis, local.clamp(min=0).reshape(-1)).reshape(shape)
    mask = (local >= 0).reshape((1,) * axis + tuple(local.shape) + (1,) * (table.dim() - axis - 1))
    return torch.where(mask, rows, torch.zeros_like(rows))
