"""Operators that select by value, and that write or turn around parts of sequences.

How many elements a selection keeps depends on the data; the attribute ``count`` says it, and execution checks it.
"""

from __future__ import annotations

from tap_planner.operators.attributes import int_of, ints_of, operand
from tap_planner.operators.building import RuleBuilder, infer_first, replicated_rule, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    DimFactors,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


def _compress_rule(signature: OperatorSignature) -> FactorRule:
    """The selected dim is fixed, the others are parallel; without an axis nothing is. Linear in the data."""
    data, axis = operand(signature, 0).shape, signature.attribute("axis")
    if not isinstance(axis, int):
        return replicated_rule(signature)
    builder = RuleBuilder(signature)
    before, after = builder.each("d", data[:axis]), builder.each("e", data[axis + 1 :])
    inputs = [(*before, builder.fixed("in", data[axis]), *after)]
    inputs.extend((builder.fixed("condition", found.shape[0]),) for found in signature.inputs[1:] if found)
    output = (*before, builder.fixed("out", signature.outputs[0].shape[axis]), *after)
    return builder.build(inputs, (output,), partial=(("P", *("R",) * (len(inputs) - 1)),))


def _compress_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, axis, count = operand(signature, 0), signature.attribute("axis"), int_of(signature, "count")
    if not isinstance(axis, int):
        return (TensorType(dtype=data.dtype, shape=(count,)),)
    return (TensorType(dtype=data.dtype, shape=(*data.shape[:axis], count, *data.shape[axis + 1 :])),)


def _nonzero_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    rank = len(operand(signature, 0).shape)
    return (TensorType(dtype="int64", shape=(rank, int_of(signature, "count"))),)


def _unique_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, axis, count = operand(signature, 0), signature.attribute("axis"), int_of(signature, "count")
    if isinstance(axis, int):
        shape = (*data.shape[:axis], count, *data.shape[axis + 1 :])
        entries = data.shape[axis]
    else:
        shape, entries = (count,), data.num_elements
    types = (
        TensorType(dtype=data.dtype, shape=shape),
        *(TensorType(dtype="int64", shape=(size,)) for size in (count, entries, count)),
    )
    return types[:num_outputs]


def _reverse_rule(signature: OperatorSignature) -> FactorRule:
    """The time dim is fixed, all others are parallel; linear in the data."""
    shape, time = operand(signature, 0).shape, int_of(signature, "time_axis")
    builder = RuleBuilder(signature)
    dims = tuple(
        builder.fixed("t", size) if dim == time else builder.factor(f"d{dim}", size) for dim, size in enumerate(shape)
    )
    lengths = (dims[int_of(signature, "batch_axis")],)
    return builder.build((dims, lengths), (dims,), partial=(("P", "R"),))


def _cache_rule(signature: OperatorSignature) -> FactorRule:
    """The written dim is fixed, all others are parallel; linear in cache and update together."""
    past, update, axis = operand(signature, 0).shape, operand(signature, 1).shape, int_of(signature, "axis")
    builder = RuleBuilder(signature)
    cached: list[DimFactors] = []
    written: list[DimFactors] = []
    for dim, size in enumerate(past):
        cached.append(builder.fixed("past", size) if dim == axis else builder.factor(f"d{dim}", size))
        written.append(builder.fixed("update", update[dim]) if dim == axis else cached[-1])
    inputs = [tuple(cached), tuple(written), *((cached[0],) for found in signature.inputs[2:] if found)]
    ways = (("P", "P", *("R",) * (len(inputs) - 2)),)
    return builder.build(inputs, (tuple(cached),), partial=ways)


def _cache_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    past, update, axis = operand(signature, 0).shape, operand(signature, 1).shape, int_of(signature, "axis")
    fits = len(past) == len(update) and update[axis] <= past[axis]
    if not fits or any(size != update[dim] for dim, size in enumerate(past) if dim != axis):
        raise shape_error(signature, f"a cache and an update that differ in dim {axis} alone")
    return (operand(signature, 0),)


def _grams_rule(signature: OperatorSignature) -> FactorRule:
    """Texts of a batch are counted by themselves."""
    shape, result = operand(signature, 0).shape, signature.outputs[0].shape
    builder = RuleBuilder(signature)
    batch = builder.each("d", shape[:-1])
    inputs = (*batch, builder.fixed("words", shape[-1]))
    return builder.build((inputs,), ((*batch, builder.fixed("grams", result[-1])),))


def _grams_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    shape, width = operand(signature, 0).shape, max(ints_of(signature, "ngram_indexes")) + 1
    if len(shape) not in (1, 2):
        raise shape_error(signature, "words [w] or [n, w]")
    return (TensorType(dtype="float32", shape=(*shape[:-1], width)),)


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="Compress",
        rule=_compress_rule,
        infer=_compress_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(1,),
        differentiable_operands=(0,),
    ),
    OperatorRecord(
        type="NonZero",
        rule=replicated_rule,
        infer=_nonzero_infer,
        kind=ComputeKind.MEMORY,
        differentiable_operands=(),
    ),
    OperatorRecord(
        type="Unique",
        rule=replicated_rule,
        infer=_unique_infer,
        kind=ComputeKind.MEMORY,
        differentiable_operands=(),
    ),
    OperatorRecord(
        type="ReverseSequence",
        rule=_reverse_rule,
        infer=infer_first,
        kind=ComputeKind.MEMORY,
        saved_inputs=(1,),
        differentiable_operands=(0,),
    ),
    OperatorRecord(
        type="TensorScatter",
        rule=_cache_rule,
        infer=_cache_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(2,),
        differentiable_operands=(0, 1),
    ),
    OperatorRecord(
        type="TfIdfVectorizer",
        rule=_grams_rule,
        infer=_grams_infer,
        kind=ComputeKind.MEMORY,
        differentiable_operands=(),
    ),
)
"""Records of the operators that select, and that write or turn around parts of sequences."""
