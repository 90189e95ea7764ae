"""Operators that lay out the same elements in other dims, or repeat them: Reshape, Transpose, Expand, Tile."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tap_planner.operators.attributes import int_of, ints_of, operand
from tap_planner.operators.building import RuleBuilder, aligned, infer_first, replicated_rule, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    DimFactors,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS", "inner_is_parallel"]

_MAX_BLOCKS = 4
"""An inner factor may be split inside at most so many equal blocks of a dim (fused QKV has 3)."""

_Piece = tuple[int, int | None, int | None]
"""Size of a common factor, its input dim, its output dim; None on the side that does not hold it."""


def inner_is_parallel(dim: int, outer: int) -> bool:
    """Whether a factor with ``outer`` positions outside it in dim ``dim`` of a tensor may be split.

    Dim 0 may always be: there the blocks are a batch; elsewhere few blocks are allowed.
    """
    return dim == 0 or outer <= _MAX_BLOCKS


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pairs of minimal runs of dims (indices, sizes of 1 left out) that hold equally many elements."""
    left = [dim for dim, size in enumerate(before) if size != 1]
    right = [dim for dim, size in enumerate(after) if size != 1]
    groups: list[tuple[list[int], list[int]]] = []
    next_left = next_right = 0
    while next_left < len(left) and next_right < len(right):
        run_left, run_right = [left[next_left]], [right[next_right]]
        next_left, next_right = next_left + 1, next_right + 1
        product_left, product_right = before[run_left[0]], after[run_right[0]]
        while product_left != product_right:
            if product_left < product_right:
                run_left.append(left[next_left])
                product_left *= before[left[next_left]]
                next_left += 1
            else:
                run_right.append(right[next_right])
                product_right *= after[right[next_right]]
                next_right += 1
        groups.append((run_left, run_right))
    return groups


def _refine(before: Sequence[int], after: Sequence[int], run_left: list[int], run_right: list[int]) -> list[_Piece]:
    """The common factors of one group, outermost first; where the sides do not refine, the rests stand alone."""
    left = [(dim, before[dim]) for dim in run_left]
    right = [(dim, after[dim]) for dim in run_right]
    pieces: list[_Piece] = []
    while left and right:
        (left_dim, left_size), (right_dim, right_size) = left.pop(0), right.pop(0)
        common = math.gcd(left_size, right_size)
        if common > 1:
            pieces.append((common, left_dim, right_dim))
        left_rest, right_rest = left_size // common, right_size // common
        if left_rest > 1:
            left.insert(0, (left_dim, left_rest))
        if right_rest > 1:
            right.insert(0, (right_dim, right_rest))
        if left_rest > 1 and right_rest > 1:
            break
    pieces.extend((size, dim, None) for dim, size in left)
    pieces.extend((size, None, dim) for dim, size in right)
    return pieces


def _kind(piece: _Piece, outer_left: list[int], outer_right: list[int]) -> FactorKind:
    _, left, right = piece
    if left is None or right is None:
        return FactorKind.FIXED
    free = inner_is_parallel(left, outer_left[left]) and inner_is_parallel(right, outer_right[right])
    return FactorKind.PARALLEL if free else FactorKind.FIXED


def _reshape_rule(signature: OperatorSignature) -> FactorRule:
    """Dims are refined to common factors ``f<i>``: ``(b) (s) (h d) -> (b) (s) (h) (d)``."""
    before, after = operand(signature, 0).shape, signature.outputs[0].shape
    if 0 in before:
        return replicated_rule(signature)
    builder = RuleBuilder(signature)
    dims_left: list[DimFactors] = [()] * len(before)
    dims_right: list[DimFactors] = [()] * len(after)
    outer_left, outer_right = [1] * len(before), [1] * len(after)
    pieces = [piece for pair in _groups(before, after) for piece in _refine(before, after, *pair)]
    for index, piece in enumerate(pieces):
        size, left, right = piece
        factor = builder.factor(f"f{index}", size, _kind(piece, outer_left, outer_right))
        if left is not None:
            dims_left[left] += factor
            outer_left[left] *= size
        if right is not None:
            dims_right[right] += factor
            outer_right[right] *= size
    return builder.build((tuple(dims_left),), (tuple(dims_right),), partial=(("P",),))


def _reshape_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data = operand(signature, 0)
    result = TensorType(dtype=data.dtype, shape=ints_of(signature, "shape"))
    if result.num_elements != data.num_elements:
        raise shape_error(signature, f"{result.num_elements} elements for the shape {list(result.shape)}")
    return (result,)


def _transpose_rule(signature: OperatorSignature) -> FactorRule:
    """The output's dims are the input's, permuted."""
    data = operand(signature, 0)
    builder = RuleBuilder(signature)
    dims = builder.each("d", data.shape)
    return builder.build((dims,), (tuple(dims[dim] for dim in _permutation(signature)),), partial=(("P",),))


def _permutation(signature: OperatorSignature) -> tuple[int, ...]:
    return ints_of(signature, "perm", tuple(reversed(range(len(operand(signature, 0).shape)))))


def _transpose_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data = operand(signature, 0)
    return (TensorType(dtype=data.dtype, shape=tuple(data.shape[dim] for dim in _permutation(signature))),)


def _expand_rule(signature: OperatorSignature) -> FactorRule:
    """A broadcast dim's factor occurs in the output alone."""
    builder = RuleBuilder(signature)
    dims = builder.each("d", signature.outputs[0].shape)
    return builder.build((aligned(operand(signature, 0).shape, dims),), (dims,), partial=(("P",),))


def _expand_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, shape = operand(signature, 0), ints_of(signature, "shape")
    offset = len(shape) - len(data.shape)
    if offset < 0 or any(size not in (1, shape[offset + dim]) for dim, size in enumerate(data.shape)):
        raise shape_error(signature, f"a shape that broadcasts to {list(shape)}")
    return (TensorType(dtype=data.dtype, shape=shape),)


def _tile_rule(signature: OperatorSignature) -> FactorRule:
    """A repeated dim is (copies, dim) in the output; copies of one element behave as a broadcast dim."""
    builder = RuleBuilder(signature)
    inputs: list[DimFactors] = []
    outputs: list[DimFactors] = []
    for dim, (size, count) in enumerate(zip(operand(signature, 0).shape, ints_of(signature, "repeats"), strict=True)):
        copies = builder.factor(f"r{dim}", count, FactorKind.PARALLEL if size == 1 else FactorKind.FIXED)
        kind = FactorKind.PARALLEL if inner_is_parallel(dim, count) else FactorKind.FIXED
        content = builder.factor(f"d{dim}", size, kind)
        inputs.append(content)
        outputs.append(copies + content)
    return builder.build((tuple(inputs),), (tuple(outputs),), partial=(("P",),))


def _tile_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data = operand(signature, 0)
    repeats = ints_of(signature, "repeats")
    shape = tuple(size * count for size, count in zip(data.shape, repeats, strict=True))
    return (TensorType(dtype=data.dtype, shape=shape),)


def _block_rule(signature: OperatorSignature) -> FactorRule:
    """Batch is parallel; channels and space exchange elements."""
    data, result = operand(signature, 0), signature.outputs[0]
    builder = RuleBuilder(signature)
    batch = builder.factor("n", data.shape[0])
    inputs = (batch, *builder.each("in", data.shape[1:], FactorKind.FIXED))
    outputs = (batch, *builder.each("out", result.shape[1:], FactorKind.FIXED))
    return builder.build((inputs,), (outputs,), partial=(("P",),))


def _depth_to_space_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, block = operand(signature, 0), int_of(signature, "blocksize")
    batch, channels, height, width = data.shape
    shape = (batch, channels // (block * block), height * block, width * block)
    return (TensorType(dtype=data.dtype, shape=shape),)


def _space_to_depth_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, block = operand(signature, 0), int_of(signature, "blocksize")
    batch, channels, height, width = data.shape
    shape = (batch, channels * block * block, height // block, width // block)
    return (TensorType(dtype=data.dtype, shape=shape),)


def _trilu_rule(signature: OperatorSignature) -> FactorRule:
    """Matrices of a batch are independent."""
    builder = RuleBuilder(signature)
    shape = operand(signature, 0).shape
    dims = (*builder.each("d", shape[:-2]), builder.fixed("rows", shape[-2]), builder.fixed("columns", shape[-1]))
    return builder.build((dims,), (dims,), partial=(("P",),))


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="Reshape", rule=_reshape_rule, infer=_reshape_infer, kind=ComputeKind.VIEW, trainable_operands=(0,)
    ),
    OperatorRecord(
        type="Transpose",
        rule=_transpose_rule,
        infer=_transpose_infer,
        kind=ComputeKind.MEMORY,
        trainable_operands=(0,),
    ),
    OperatorRecord(
        type="Expand", rule=_expand_rule, infer=_expand_infer, kind=ComputeKind.MEMORY, trainable_operands=(0,)
    ),
    OperatorRecord(type="Tile", rule=_tile_rule, infer=_tile_infer, kind=ComputeKind.MEMORY, trainable_operands=(0,)),
    OperatorRecord(type="DepthToSpace", rule=_block_rule, infer=_depth_to_space_infer, kind=ComputeKind.MEMORY),
    OperatorRecord(type="SpaceToDepth", rule=_block_rule, infer=_space_to_depth_infer, kind=ComputeKind.MEMORY),
    OperatorRecord(type="Trilu", rule=_trilu_rule, infer=infer_first, kind=ComputeKind.MEMORY, trainable_operands=(0,)),
)
"""Records of the layout operators."""
