"""From floats to quantised elements and back: QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear.

A scale is one number, one per index of a dim, or one per block of a dim; it is split as that dim is, and a zero point
as its scale. Quantising rounds, so no sum passes through it unreduced, and no gradient: graphs are trained as written.
"""

from __future__ import annotations

from tap_planner.operators.attributes import int_of, operand, text_of
from tap_planner.operators.building import Dims, RuleBuilder, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    DimFactors,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


def _block(signature: OperatorSignature) -> int:
    """Elements that share a scale along the axis; 0 where scales are not blocked."""
    data, scale = operand(signature, 0).shape, operand(signature, 1).shape
    block = int_of(signature, "block_size", 0)
    if block and (len(scale) != len(data) or not data):
        raise shape_error(signature, "a scale with as many dims as the data, since it is blocked")
    return block


def _axis(signature: OperatorSignature) -> int:
    rank = len(operand(signature, 0).shape)
    return int_of(signature, "axis", 1 if rank > 1 else 0) % max(rank, 1)


def _check_scale(signature: OperatorSignature) -> None:
    data, scale = operand(signature, 0).shape, operand(signature, 1).shape
    block = _block(signature)
    if block:
        axis = _axis(signature)
        expected = tuple(-(-size // block) if dim == axis else size for dim, size in enumerate(data))
        if scale != expected:
            raise shape_error(signature, f"a scale of shape {list(expected)} for blocks of {block} along dim {axis}")
    elif scale not in ((), (1,)) and (not data or scale != (data[_axis(signature)],)):
        raise shape_error(signature, f"a scale that is one number or one per index of dim {_axis(signature)}")
    points = signature.inputs[2] if len(signature.inputs) > 2 else None
    if points is not None and points.shape not in (scale, (), (1,)):
        raise shape_error(signature, "a zero point of the scale's shape")


def _rule(signature: OperatorSignature) -> FactorRule:
    """Every dim is parallel; a blocked dim is (blocks, elements of a block), of which the blocks are split."""
    shape, scale = operand(signature, 0).shape, operand(signature, 1).shape
    axis, block = _axis(signature), _block(signature)
    builder = RuleBuilder(signature)
    dims: list[DimFactors] = []
    blocks: DimFactors = ()
    for dim, size in enumerate(shape):
        if not block or dim != axis:
            dims.append(builder.factor(f"d{dim}", size))
        elif size % block:  # the last block is short: a split between blocks would not be even
            dims.append(builder.fixed(f"d{dim}", size))
        else:
            blocks = builder.factor(f"d{dim}", size // block)
            dims.append(blocks + builder.fixed("block", block))
    inputs: list[Dims | None] = [tuple(dims)]
    for found in signature.inputs[1:]:
        inputs.append(None if found is None else _scale_dims(found.shape, scale, tuple(dims), axis, block, blocks))
    return builder.build(inputs, (tuple(dims),))


def _scale_dims(
    shape: tuple[int, ...], scale: tuple[int, ...], dims: Dims, axis: int, block: int, blocks: DimFactors
) -> Dims:
    if shape != scale or all(size == 1 for size in shape):
        return ((),) * len(shape)
    if block:
        return tuple(blocks if dim == axis else content for dim, content in enumerate(dims))
    return (dims[axis],)


def _quantise_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    """The zero point says which type; without one the attribute does, else it is uint8."""
    _check_scale(signature)
    points = signature.inputs[2] if len(signature.inputs) > 2 else None
    dtype = text_of(signature, "output_dtype", "uint8") if points is None else points.dtype
    return (TensorType(dtype=dtype, shape=operand(signature, 0).shape),)


def _dequantise_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    """The type of the scale, unless the attribute says another."""
    _check_scale(signature)
    dtype = text_of(signature, "output_dtype", operand(signature, 1).dtype)
    return (TensorType(dtype=dtype, shape=operand(signature, 0).shape),)


def _dynamic_rule(signature: OperatorSignature) -> FactorRule:
    """The scale comes from the least and the largest element of the whole tensor: nothing is split."""
    builder = RuleBuilder(signature)
    dims = builder.each("d", operand(signature, 0).shape, FactorKind.FIXED)
    return builder.build((dims,), (dims, (), ())[: len(signature.outputs)])


def _dynamic_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data = operand(signature, 0)
    types = (
        TensorType(dtype="uint8", shape=data.shape),
        TensorType(dtype=data.dtype, shape=()),
        TensorType(dtype="uint8", shape=()),
    )
    return types[:num_outputs]


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="QuantizeLinear",
        rule=_rule,
        infer=_quantise_infer,
        kind=ComputeKind.MEMORY,
        differentiable_operands=(),
        quantised_operands=(1, 2),
    ),
    OperatorRecord(
        type="DequantizeLinear",
        rule=_rule,
        infer=_dequantise_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 2),
        differentiable_operands=(1,),
        quantised_operands=(0, 1, 2),
    ),
    OperatorRecord(
        type="DynamicQuantizeLinear",
        rule=_dynamic_rule,
        infer=_dynamic_infer,
        kind=ComputeKind.MEMORY,
        differentiable_operands=(),
    ),
)
"""Records of the operators that quantise and restore."""
