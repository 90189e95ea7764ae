"""Sampling at computed positions of space, and the ways back from windows: grids, deformation, unpooling, folding."""

from __future__ import annotations

import math

from tap_planner.operators.attributes import int_of, ints_of, operand
from tap_planner.operators.building import RuleBuilder, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


def _grid_rule(signature: OperatorSignature) -> FactorRule:
    """A grid per batch entry, linear in the matrices."""
    theta, grid = operand(signature, 0).shape, signature.outputs[0].shape
    builder = RuleBuilder(signature)
    n = builder.factor("n", theta[0])
    inputs = (n, *builder.each("m", theta[1:], FactorKind.FIXED))
    outputs = (n, *builder.each("s", grid[1:-1], FactorKind.FIXED), builder.fixed("xyz", grid[-1]))
    return builder.build((inputs,), (outputs,), partial=(("P",),))


def _grid_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    theta, size = operand(signature, 0), ints_of(signature, "size")
    rank = len(size) - 2
    if rank not in (2, 3) or theta.shape != (size[0], rank, rank + 1):
        raise shape_error(signature, f"matrices [{size[0]}, {rank}, {rank + 1}] for the size {list(size)}")
    return (TensorType(dtype=theta.dtype, shape=(size[0], *size[2:], rank)),)


def _sample_rule(signature: OperatorSignature) -> FactorRule:
    """Batch, channels and positions of the grid are parallel; the sampled space is fixed. Linear in the data."""
    data, grid = operand(signature, 0).shape, operand(signature, 1).shape
    builder = RuleBuilder(signature)
    n, c = builder.factor("n", data[0]), builder.factor("c", data[1])
    space = builder.each("in", data[2:], FactorKind.FIXED)
    positions = builder.each("s", grid[1:-1])
    inputs = ((n, c, *space), (n, *positions, builder.fixed("xyz", grid[-1])))
    return builder.build(inputs, ((n, c, *positions),), partial=(("P", "R"),))


def _sample_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, grid = operand(signature, 0), operand(signature, 1)
    rank = len(data.shape) - 2
    if rank < 1 or len(grid.shape) != rank + 2 or grid.shape[-1] != rank or grid.shape[0] != data.shape[0]:
        raise shape_error(signature, f"a grid [{data.shape[0]}, space, {rank}]")
    return (TensorType(dtype=data.dtype, shape=(*data.shape[:2], *grid.shape[1:-1])),)


def _deform_rule(signature: OperatorSignature) -> FactorRule:
    """Batch is parallel, and output channels where there is one group; linear in the kernel."""
    data, weight = operand(signature, 0).shape, operand(signature, 1).shape
    offset, result = operand(signature, 2).shape, signature.outputs[0].shape
    count = int_of(signature, "group", 1)
    builder = RuleBuilder(signature)
    n, g = builder.factor("n", data[0]), builder.fixed("g", count)
    make = builder.factor if count == 1 else builder.fixed
    co, ci = make("co", weight[0] // count), builder.fixed("ci", weight[1])
    kernel = builder.each("k", weight[2:], FactorKind.FIXED)
    space = builder.each("s", result[2:], FactorKind.FIXED)
    bare = ((),) * (len(data) - 2)
    known = [
        (n, g + ci, *bare),
        (g + co, ci, *kernel),
        (n, (), *space),
        (g + co,),
        (n, (), *space),
    ]
    assert len(offset) == len(data)
    inputs = [None if found is None else dims for found, dims in zip(signature.inputs, known, strict=False)]
    return builder.build(inputs, ((n, g + co, *space),))


def _deform_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, weight, offset = (operand(signature, index) for index in range(3))
    rank = len(data.shape) - 2
    if rank < 1 or len(weight.shape) != rank + 2 or len(offset.shape) != rank + 2:
        raise shape_error(signature, "data, kernel and offsets of one rank, 3 or more")
    ones = (1,) * rank
    strides, dilations = ints_of(signature, "strides", ones), ints_of(signature, "dilations", ones)
    pads = ints_of(signature, "pads", (0,) * (2 * rank))
    space = tuple(
        (size + pads[dim] + pads[dim + rank] - dilations[dim] * (weight.shape[dim + 2] - 1) - 1) // strides[dim] + 1
        for dim, size in enumerate(data.shape[2:])
    )
    expected = int_of(signature, "offset_group", 1) * math.prod(weight.shape[2:]) * rank
    if data.shape[1] != weight.shape[1] * int_of(signature, "group", 1):
        raise shape_error(signature, "as many channels as the kernel takes")
    if offset.shape != (data.shape[0], expected, *space):
        raise shape_error(signature, f"offsets {[data.shape[0], expected, *space]}")
    return (TensorType(dtype=data.dtype, shape=(data.shape[0], weight.shape[0], *space)),)


def _unpool_rule(signature: OperatorSignature) -> FactorRule:
    """Batch and channels are parallel (positions count inside a channel's plane); space is fixed."""
    data, result = operand(signature, 0).shape, signature.outputs[0].shape
    builder = RuleBuilder(signature)
    leading = (builder.factor("n", data[0]), builder.factor("c", data[1]))
    inputs = (*leading, *builder.each("in", data[2:], FactorKind.FIXED))
    outputs = (*leading, *builder.each("out", result[2:], FactorKind.FIXED))
    return builder.build((inputs, inputs), (outputs,), partial=(("P", "R"),))


def _unpool_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, places = operand(signature, 0), operand(signature, 1)
    if places.shape != data.shape:
        raise shape_error(signature, "as many positions as values")
    shape = ints_of(signature, "shape")
    if len(shape) != len(data.shape) or shape[:2] != data.shape[:2]:
        raise shape_error(signature, f"batch and channels of the output shape {list(shape)}")
    return (TensorType(dtype=data.dtype, shape=shape),)


def _fold_rule(signature: OperatorSignature) -> FactorRule:
    """Batch and channels are parallel: the columns are (channel, position in the block)."""
    columns, image = operand(signature, 0).shape, signature.outputs[0].shape
    builder = RuleBuilder(signature)
    n, c = builder.factor("n", columns[0]), builder.factor("c", image[1])
    block = builder.fixed("block", columns[1] // image[1])
    inputs = (n, c + block, builder.fixed("l", columns[2]))
    return builder.build((inputs,), ((n, c, *builder.each("s", image[2:], FactorKind.FIXED)),), partial=(("P",),))


def _fold_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    columns, image, block = operand(signature, 0), ints_of(signature, "image_shape"), ints_of(signature, "block_shape")
    cells, rank = math.prod(block), len(image)
    strides, dilations = ints_of(signature, "strides", (1,) * rank), ints_of(signature, "dilations", (1,) * rank)
    pads = ints_of(signature, "pads", (0,) * (2 * rank))
    blocks = math.prod(
        (size + pads[dim] + pads[dim + rank] - dilations[dim] * (block[dim] - 1) - 1) // strides[dim] + 1
        for dim, size in enumerate(image)
    )
    if len(columns.shape) != 3 or columns.shape[1] % cells or columns.shape[2] != blocks:
        raise shape_error(signature, f"columns [n, channels x {cells}, {blocks}]")
    return (TensorType(dtype=columns.dtype, shape=(columns.shape[0], columns.shape[1] // cells, *image)),)


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(type="AffineGrid", rule=_grid_rule, infer=_grid_infer, kind=ComputeKind.MEMORY),
    OperatorRecord(
        type="GridSample", rule=_sample_rule, infer=_sample_infer, kind=ComputeKind.MEMORY, saved_inputs=(0, 1)
    ),
    OperatorRecord(
        type="DeformConv",
        rule=_deform_rule,
        infer=_deform_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1),
        trainable_operands=(1, 3),
    ),
    OperatorRecord(
        type="MaxUnpool",
        rule=_unpool_rule,
        infer=_unpool_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(1,),
        differentiable_operands=(0,),
    ),
    OperatorRecord(type="Col2Im", rule=_fold_rule, infer=_fold_infer, kind=ComputeKind.MEMORY),
)
"""Records of the operators that sample space."""
