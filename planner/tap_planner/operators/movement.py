"""Operators that cut, join and pad: Slice, Split, Concat, Pad; and those that make values from shapes."""

from __future__ import annotations

from collections.abc import Callable

from tap_planner.errors import UnsupportedGraphError
from tap_planner.operators.attributes import float_of, int_of, ints_of, operand, text_of
from tap_planner.operators.building import ALL_OPERANDS, Dims, RuleBuilder, replicated_rule, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    DimFactors,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


def _cuts(signature: OperatorSignature) -> dict[int, tuple[int, int]]:
    """For each sliced dim its new size and its step (ONNX: negative bounds count from the end, then are clamped)."""
    shape = operand(signature, 0).shape
    starts, ends = ints_of(signature, "starts"), ints_of(signature, "ends")
    axes = ints_of(signature, "axes", tuple(range(len(starts))))
    steps = ints_of(signature, "steps", (1,) * len(starts))
    cuts: dict[int, tuple[int, int]] = {}
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        size = shape[axis]
        low, high = (0, size) if step > 0 else (-1, size - 1)
        first = min(max(start + size if start < 0 else start, max(low, 0)), high)
        last = min(max(end + size if end < 0 else end, low), high)
        span = last - first if step > 0 else first - last
        cuts[axis % len(shape)] = (max(0, -(-span // abs(step))), step)
    return cuts


def _slice_rule(signature: OperatorSignature) -> FactorRule:
    """A dim that is cut is never split; one that is taken whole is parallel."""
    data, result, cuts = operand(signature, 0), signature.outputs[0], _cuts(signature)
    builder = RuleBuilder(signature)
    touched = {dim for dim, (size, step) in cuts.items() if size != data.shape[dim] or step != 1}
    return _cut_rule(builder, data.shape, result.shape, touched, linear=True)


def _cut_rule(
    builder: RuleBuilder, before: tuple[int, ...], after: tuple[int, ...], touched: set[int], *, linear: bool
) -> FactorRule:
    inputs: list[DimFactors] = []
    outputs: list[DimFactors] = []
    for dim, (size, result) in enumerate(zip(before, after, strict=True)):
        if dim in touched:
            inputs.append(builder.fixed(f"in{dim}", size))
            outputs.append(builder.fixed(f"out{dim}", result))
        else:
            inputs.append(builder.factor(f"d{dim}", size))
            outputs.append(inputs[-1])
    return builder.build((tuple(inputs),), (tuple(outputs),), partial=(("P",),) if linear else ())


def _slice_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, cuts = operand(signature, 0), _cuts(signature)
    shape = tuple(cuts[dim][0] if dim in cuts else size for dim, size in enumerate(data.shape))
    return (TensorType(dtype=data.dtype, shape=shape),)


def _pad_rule(signature: OperatorSignature) -> FactorRule:
    """A padded dim is never split; linear where the padding is zero."""
    data, result = operand(signature, 0), signature.outputs[0]
    pads, rank = _pads(signature), len(data.shape)
    touched = {dim for dim in range(rank) if pads[dim] or pads[dim + rank]}
    linear = text_of(signature, "mode", "constant") == "constant" and float_of(signature, "value", 0.0) == 0.0
    return _cut_rule(RuleBuilder(signature), data.shape, result.shape, touched, linear=linear)


def _pads(signature: OperatorSignature) -> tuple[int, ...]:
    pads = ints_of(signature, "pads")
    rank = len(operand(signature, 0).shape)
    if len(pads) != 2 * rank:
        raise shape_error(signature, f"{2 * rank} pads, got {len(pads)}")
    return pads


def _pad_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, pads = operand(signature, 0), _pads(signature)
    rank = len(data.shape)
    shape = tuple(size + pads[dim] + pads[dim + rank] for dim, size in enumerate(data.shape))
    return (TensorType(dtype=data.dtype, shape=shape),)


def _split_axis(signature: OperatorSignature) -> int:
    return int_of(signature, "axis", 0) % len(operand(signature, 0).shape)


def _split_rule(signature: OperatorSignature) -> FactorRule:
    """Equal parts: the input's dim is (c, f), each output's f, so that every part is split alike; unequal: fixed."""
    data, axis = operand(signature, 0), _split_axis(signature)
    sizes = [found.shape[axis] for found in signature.outputs]
    builder = RuleBuilder(signature)
    dims = [() if dim == axis else builder.factor(f"d{dim}", size) for dim, size in enumerate(data.shape)]

    def with_axis(content: DimFactors) -> Dims:
        return (*dims[:axis], content, *dims[axis + 1 :])

    if len(set(sizes)) == 1:
        count = builder.fixed("c", len(sizes))
        part = builder.factor("f", sizes[0])
        return builder.build((with_axis(count + part),), [with_axis(part)] * len(sizes), partial=(("P",),))
    whole = with_axis(builder.fixed("in", data.shape[axis]))
    parts = [with_axis(builder.fixed(f"out{index}", size)) for index, size in enumerate(sizes)]
    return builder.build((whole,), parts, partial=(("P",),))


def _split_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, axis = operand(signature, 0), _split_axis(signature)
    total = data.shape[axis]
    chunk = -(-total // num_outputs)
    even = tuple(max(0, min(chunk, total - index * chunk)) for index in range(num_outputs))
    sizes = ints_of(signature, "split", even)
    if sum(sizes) != total or len(sizes) != num_outputs:
        raise shape_error(signature, f"{num_outputs} parts {list(sizes)} that add up to dim {axis}")
    return tuple(
        TensorType(dtype=data.dtype, shape=(*data.shape[:axis], size, *data.shape[axis + 1 :])) for size in sizes
    )


def _concat_rule(signature: OperatorSignature) -> FactorRule:
    """The joined dim is never split; the other dims are parallel."""
    shape = signature.outputs[0].shape
    axis = int_of(signature, "axis") % len(shape)
    builder = RuleBuilder(signature)
    dims = [() if dim == axis else builder.factor(f"d{dim}", size) for dim, size in enumerate(shape)]
    inputs: list[Dims] = []
    for index in range(len(signature.inputs)):
        part = builder.fixed(f"in{index}", operand(signature, index).shape[axis])
        inputs.append((*dims[:axis], part, *dims[axis + 1 :]))
    output = (*dims[:axis], builder.fixed("out", shape[axis]), *dims[axis + 1 :])
    return builder.build(inputs, (output,), partial=(("P",) * len(inputs),))


def _concat_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    first = operand(signature, 0)
    axis = int_of(signature, "axis") % len(first.shape)
    before, after = first.shape[:axis], first.shape[axis + 1 :]
    total = 0
    for index in range(len(signature.inputs)):
        shape = operand(signature, index).shape
        if len(shape) != len(first.shape) or shape[:axis] != before or shape[axis + 1 :] != after:
            raise shape_error(signature, f"equal dims except dim {axis}")
        total += shape[axis]
    return (TensorType(dtype=first.dtype, shape=(*before, total, *after)),)


def _shape_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    rank = len(operand(signature, 0).shape)
    picked = range(rank)[slice(int_of(signature, "start", 0), int_of(signature, "end", rank))]
    return (TensorType(dtype="int64", shape=(len(picked),)),)


def _size_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    return (TensorType(dtype="int64", shape=()),)


def _constant_of_shape_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    return (TensorType(dtype=text_of(signature, "dtype", "float32"), shape=ints_of(signature, "shape")),)


def _range_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    start, limit, delta = (signature.attribute(name) for name in ("start", "limit", "delta"))
    if not (isinstance(start, int) and isinstance(limit, int) and isinstance(delta, int)) or delta == 0:
        raise UnsupportedGraphError(
            f"operator {signature.type}: bounds start={start!r}, limit={limit!r}, delta={delta!r}, expected integers",
            hint="the range depends on data; fix its value with --value, or export with static shapes",
        )
    length = max(0, -((start - limit) // delta))
    return (TensorType(dtype=text_of(signature, "dtype", "int64"), shape=(length,)),)


def _source(name: str, infer: Callable[[OperatorSignature, int], tuple[TensorType, ...]]) -> OperatorRecord:
    return OperatorRecord(
        type=name,
        rule=replicated_rule,
        infer=infer,
        kind=ComputeKind.MEMORY,
        differentiable_operands=(),
    )


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="Slice", rule=_slice_rule, infer=_slice_infer, kind=ComputeKind.MEMORY, trainable_operands=(0,)
    ),
    OperatorRecord(type="Pad", rule=_pad_rule, infer=_pad_infer, kind=ComputeKind.MEMORY, trainable_operands=(0,)),
    OperatorRecord(
        type="Split", rule=_split_rule, infer=_split_infer, kind=ComputeKind.MEMORY, trainable_operands=(0,)
    ),
    OperatorRecord(
        type="Concat",
        rule=_concat_rule,
        infer=_concat_infer,
        kind=ComputeKind.MEMORY,
        trainable_operands=ALL_OPERANDS,
    ),
    _source("Shape", _shape_infer),
    _source("Size", _size_infer),
    _source("ConstantOfShape", _constant_of_shape_infer),
    _source("Range", _range_infer),
)
"""Records of the operators that cut, join and pad, and of those that read shapes."""
