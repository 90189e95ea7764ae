"""Operators that look up and write by index: Gather*, Scatter*, OneHot."""

from __future__ import annotations

from tap_planner.operators.attributes import int_of, operand, text_of
from tap_planner.operators.building import RuleBuilder, infer_first, shape_error
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

_DATA_WAYS = (("P", "R"),)


def _axis(signature: OperatorSignature) -> int:
    return int_of(signature, "axis", 0) % len(operand(signature, 0).shape)


def _gather_rule(signature: OperatorSignature) -> FactorRule:
    """The indexed dim is a sum (a masked lookup in a part of the table gives a part of the result)."""
    data, indices, axis = operand(signature, 0).shape, operand(signature, 1).shape, _axis(signature)
    builder = RuleBuilder(signature)
    before = builder.each("d", data[:axis])
    rows = builder.summed("v", data[axis])
    after = builder.each("e", data[axis + 1 :])
    index_dims = builder.each("i", indices)
    return builder.build(((*before, rows, *after), index_dims), ((*before, *index_dims, *after),), partial=_DATA_WAYS)


def _gather_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, indices, axis = operand(signature, 0), operand(signature, 1), _axis(signature)
    return (TensorType(dtype=data.dtype, shape=(*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])),)


def _gather_elements_rule(signature: OperatorSignature) -> FactorRule:
    """Dims beside the axis are parallel where data and indices are equally long; index positions always."""
    data, indices, axis = operand(signature, 0).shape, operand(signature, 1).shape, _axis(signature)
    builder = RuleBuilder(signature)
    data_dims: list[DimFactors] = []
    index_dims: list[DimFactors] = []
    for dim, (size, count) in enumerate(zip(data, indices, strict=True)):
        if dim == axis:
            data_dims.append(builder.fixed("axis", size))
            index_dims.append(builder.factor("i", count))
        elif size == count:
            data_dims.append(builder.factor(f"d{dim}", size))
            index_dims.append(data_dims[-1])
        else:
            data_dims.append(builder.fixed(f"in{dim}", size))
            index_dims.append(builder.fixed(f"out{dim}", count))
    return builder.build((tuple(data_dims), tuple(index_dims)), (tuple(index_dims),), partial=_DATA_WAYS)


def _gather_elements_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    return (TensorType(dtype=operand(signature, 0).dtype, shape=operand(signature, 1).shape),)


def _gather_nd_rule(signature: OperatorSignature) -> FactorRule:
    """Batch dims, index positions and dims that are taken whole are parallel; indexed dims are fixed."""
    data, indices = operand(signature, 0).shape, operand(signature, 1).shape
    batch, depth = int_of(signature, "batch_dims", 0), indices[-1]
    builder = RuleBuilder(signature)
    shared = builder.each("b", data[:batch])
    indexed = builder.each("x", data[batch : batch + depth], FactorKind.FIXED)
    rest = builder.each("e", data[batch + depth :])
    positions = builder.each("i", indices[batch:-1])
    inputs = ((*shared, *indexed, *rest), (*shared, *positions, builder.fixed("depth", depth)))
    return builder.build(inputs, ((*shared, *positions, *rest),), partial=_DATA_WAYS)


def _gather_nd_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, indices = operand(signature, 0), operand(signature, 1)
    batch = int_of(signature, "batch_dims", 0)
    if data.shape[:batch] != indices.shape[:batch]:
        raise shape_error(signature, f"{batch} equal leading dims")
    return (TensorType(dtype=data.dtype, shape=(*indices.shape[:-1], *data.shape[batch + indices.shape[-1] :])),)


def _scatter_elements_rule(signature: OperatorSignature) -> FactorRule:
    """Dims beside the axis are parallel where all operands are equally long."""
    data, indices, axis = operand(signature, 0).shape, operand(signature, 1).shape, _axis(signature)
    builder = RuleBuilder(signature)
    data_dims: list[DimFactors] = []
    index_dims: list[DimFactors] = []
    for dim, (size, count) in enumerate(zip(data, indices, strict=True)):
        if dim != axis and size == count:
            data_dims.append(builder.factor(f"d{dim}", size))
            index_dims.append(data_dims[-1])
        else:
            data_dims.append(builder.fixed(f"in{dim}", size))
            index_dims.append(builder.fixed(f"i{dim}", count))
    inputs = (tuple(data_dims), tuple(index_dims), tuple(index_dims))
    return builder.build(inputs, (tuple(data_dims),), partial=_scatter_ways(signature))


def _scatter_ways(signature: OperatorSignature) -> tuple[tuple[str, ...], ...]:
    return (("P", "R", "P"),) if text_of(signature, "reduction", "none") in ("none", "add") else ()


def _scatter_nd_rule(signature: OperatorSignature) -> FactorRule:
    """Dims that are written whole are parallel; indexed dims and positions are fixed."""
    data, indices = operand(signature, 0).shape, operand(signature, 1).shape
    depth = indices[-1]
    builder = RuleBuilder(signature)
    indexed = builder.each("x", data[:depth], FactorKind.FIXED)
    rest = builder.each("e", data[depth:])
    positions = builder.each("i", indices[:-1], FactorKind.FIXED)
    inputs = ((*indexed, *rest), (*positions, builder.fixed("depth", depth)), (*positions, *rest))
    return builder.build(inputs, ((*indexed, *rest),), partial=_scatter_ways(signature))


def _one_hot_rule(signature: OperatorSignature) -> FactorRule:
    """Index positions are parallel, the new dim is fixed."""
    shape = signature.outputs[0].shape
    axis = int_of(signature, "axis", -1) % len(shape)
    builder = RuleBuilder(signature)
    dims = builder.each("d", (*shape[:axis], *shape[axis + 1 :]))
    return builder.build((dims,), ((*dims[:axis], builder.fixed("depth", shape[axis]), *dims[axis:]),))


def _one_hot_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    shape = operand(signature, 0).shape
    axis = int_of(signature, "axis", -1) % (len(shape) + 1)
    on_value = signature.attribute("on_value", 1.0)
    guess = "float32" if isinstance(on_value, float) else "int64"
    dtype = text_of(signature, "dtype", guess)
    return (TensorType(dtype=dtype, shape=(*shape[:axis], int_of(signature, "depth"), *shape[axis:])),)


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="Gather",
        rule=_gather_rule,
        infer=_gather_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(1,),
        trainable_operands=(0,),
        differentiable_operands=(0,),
    ),
    OperatorRecord(
        type="GatherElements",
        rule=_gather_elements_rule,
        infer=_gather_elements_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(1,),
        trainable_operands=(0,),
        differentiable_operands=(0,),
    ),
    OperatorRecord(
        type="GatherND",
        rule=_gather_nd_rule,
        infer=_gather_nd_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(1,),
        trainable_operands=(0,),
        differentiable_operands=(0,),
    ),
    OperatorRecord(
        type="ScatterElements",
        rule=_scatter_elements_rule,
        infer=infer_first,
        kind=ComputeKind.MEMORY,
        saved_inputs=(1,),
        trainable_operands=(0, 2),
        differentiable_operands=(0, 2),
    ),
    OperatorRecord(
        type="ScatterND",
        rule=_scatter_nd_rule,
        infer=infer_first,
        kind=ComputeKind.MEMORY,
        saved_inputs=(1,),
        trainable_operands=(0, 2),
        differentiable_operands=(0, 2),
    ),
    OperatorRecord(
        type="OneHot",
        rule=_one_hot_rule,
        infer=_one_hot_infer,
        kind=ComputeKind.MEMORY,
        differentiable_operands=(),
    ),
)
"""Records of the operators that look up and write by index."""
