"""Canonical forms of operators that move elements: reshapes, slices, gathers, concatenations, casts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tap_planner.graph.compute import default_form
from tap_planner.graph.dtypes import dtype_name
from tap_planner.graph.sampling import seed_of
from tap_planner.graph.values import Call, Form, Value, identity


def reshaped(value: Value, shape: Sequence[int]) -> Form:
    """A Reshape, or nothing where the shape stays."""
    target = tuple(shape)
    if target == value.shape:
        return identity(value)
    return Form(type="Reshape", attributes={"shape": target}, inputs=[value])


def _reshape(call: Call) -> Form:
    value = call.operand(0)
    target = call.ints_either("shape", 1)
    if target is None:
        raise call.error("has no target shape")
    return reshaped(value, resolve_reshape(call, value, target))


def resolve_reshape(call: Call, value: Value, target: Sequence[int]) -> tuple[int, ...]:
    """The static target of a Reshape: 0 copies a dim (unless allowzero), -1 is what remains.

    Where the model is re-batched, a leading 1 that no longer fits becomes the batch.
    """
    allow_zero = call.integer("allowzero", 0) == 1
    sizes = list(target)
    if not allow_zero:
        for dim, size in enumerate(sizes):
            if size == 0:
                if dim >= value.rank:
                    raise call.error(f"target {list(target)} copies dim {dim} of a tensor of shape {list(value.shape)}")
                sizes[dim] = value.shape[dim]
    _set_batch(call, value, sizes)
    count = math.prod(value.shape)
    if sizes.count(-1) > 1 or min(sizes, default=0) < -1:
        raise call.error(f"target {list(target)} is no shape")
    if -1 in sizes:
        rest = -math.prod(sizes)
        if rest == 0 or count % rest:
            raise call.error(f"{list(value.shape)} does not fit the target {list(target)}")
        sizes[sizes.index(-1)] = count // rest
    if math.prod(sizes) != count:
        raise call.error(
            f"{list(value.shape)} does not fit the target {list(target)}",
            hint="the shape is fixed in the file; bind the sizes it was exported with, or export it with dynamic dims",
        )
    return tuple(sizes)


def _set_batch(call: Call, value: Value, sizes: list[int]) -> None:
    batch = call.rebatch
    if batch is None or not value.batched or not sizes or sizes[0] != 1:
        return
    rest = abs(math.prod(sizes[1:]))
    count = math.prod(value.shape)
    leads = bool(value.shape) and value.shape[0] % batch == 0
    if (-1 in sizes and leads) or (-1 not in sizes and rest * batch == count):
        sizes[0] = batch


def _flatten(call: Call) -> Form:
    value = call.operand(0)
    axis = call.integer("axis", 1)
    axis = axis + value.rank if axis < 0 else axis
    return reshaped(value, (math.prod(value.shape[:axis]), math.prod(value.shape[axis:])))


def _squeeze(call: Call) -> Form:
    value = call.operand(0)
    axes = call.ints_either("axes", 1)
    if axes is None:
        return reshaped(value, tuple(size for size in value.shape if size != 1))
    drop = {call.axis(axis, value.rank) for axis in axes}
    for dim in drop:
        if value.shape[dim] != 1:
            raise call.error(f"squeezes dim {dim} of shape {list(value.shape)}, which is not 1")
    return reshaped(value, tuple(size for dim, size in enumerate(value.shape) if dim not in drop))


def _unsqueeze(call: Call) -> Form:
    value = call.operand(0)
    axes = call.ints_either("axes", 1)
    if axes is None:
        raise call.error("has no axes")
    rank = value.rank + len(axes)
    added = {call.axis(axis, rank) for axis in axes}
    if len(added) < len(axes):
        raise call.error(f"adds a dim twice: axes {list(axes)}")
    rest = iter(value.shape)
    return reshaped(value, tuple(1 if dim in added else next(rest) for dim in range(rank)))


def _expand(call: Call) -> Form:
    value = call.operand(0)
    target = broadcast(call, [value.shape, call.ints(1)])
    if target == value.shape:
        return identity(value)
    return Form(type="Expand", attributes={"shape": target}, inputs=[value])


def broadcast(call: Call, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Common shape of ``shapes`` by numpy's broadcasting."""
    rank = max(len(shape) for shape in shapes)
    result = [1] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, start=rank - len(shape)):
            if size not in (1, result[dim]):
                if result[dim] != 1:
                    raise call.error(f"shapes {' and '.join(str(list(item)) for item in shapes)} do not broadcast")
                result[dim] = size
    return tuple(result)


def _tile(call: Call) -> Form:
    value = call.operand(0)
    repeats = call.ints(1)
    if len(repeats) != value.rank:
        raise call.error(f"{len(repeats)} repeats for {value.rank} dims")
    if all(count == 1 for count in repeats):
        return identity(value)
    return Form(type="Tile", attributes={"repeats": repeats}, inputs=[value])


def _transpose(call: Call) -> Form:
    value = call.operand(0)
    perm = call.integers("perm") or tuple(reversed(range(value.rank)))
    if sorted(perm) != list(range(value.rank)):
        raise call.error(f"permutation {list(perm)} of {value.rank} dims")
    if perm == tuple(range(value.rank)):
        return identity(value)
    return Form(type="Transpose", attributes={"perm": perm}, inputs=[value])


def _cast(call: Call) -> Form:
    return _cast_to(call, dtype_name(call.integer("to")))


def _cast_like(call: Call) -> Form:
    return _cast_to(call, call.operand(1).type.dtype)


def _cast_to(call: Call, dtype: str) -> Form:
    """Between the usual floats nothing changes: they are computed in the plan's precision."""
    value = call.operand(0)
    floats = ("float64", "float32", "float16", "bfloat16")
    if dtype == value.type.dtype or (dtype in floats and value.type.is_float and not value.is_constant):
        return identity(value)
    attributes: dict = {"to": dtype}
    if dtype.startswith("float8") and not call.integer("saturate", 1):
        attributes["saturate"] = 0
    if dtype == "float8e8m0":
        attributes["round_mode"] = call.text("round_mode", "up")
    return Form(type="Cast", attributes=attributes, inputs=[value])


def _slice(call: Call) -> Form:
    value = call.operand(0)
    starts, ends = call.ints_either("starts", 1), call.ints_either("ends", 2)
    if starts is None or ends is None:
        raise call.error("has no starts or ends")
    axes = call.ints_either("axes", 3) or tuple(range(len(starts)))
    steps = call.ints(4) if call.has(4) else (1,) * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise call.error(f"{len(starts)} starts, {len(ends)} ends, {len(axes)} axes and {len(steps)} steps")
    kept: list[tuple[int, int, int, int]] = []
    for start, end, axis, step in sorted(zip(starts, ends, axes, steps, strict=True), key=lambda item: item[2]):
        dim = call.axis(axis, value.rank)
        if step == 0:
            raise call.error("has a step of 0")
        first, last, step = slice(start, end, step).indices(value.shape[dim])
        if (first, last, step) != (0, value.shape[dim], 1):
            kept.append((dim, first, last, step))
    if not kept:
        return identity(value)
    kept.sort()
    attributes = {
        "axes": tuple(item[0] for item in kept),
        "starts": tuple(item[1] for item in kept),
        "ends": tuple(end if end >= 0 else end - value.shape[dim] for dim, _, end, _ in kept),
        "steps": tuple(item[3] for item in kept),
    }
    return Form(type="Slice", attributes=dict(attributes), inputs=[value])


def _split(call: Call) -> Form:
    value = call.operand(0)
    axis = call.axis(call.integer("axis", 0), value.rank)
    size = value.shape[axis]
    sizes = call.ints_either("split", 1)
    if sizes is None:
        parts = call.integer("num_outputs", call.num_outputs)
        if parts != call.num_outputs:
            raise call.error(f"splits into {parts} parts for {call.num_outputs} outputs")
        chunk = -(-size // parts)
        sizes = tuple(max(0, min(chunk, size - index * chunk)) for index in range(parts))
    if sum(sizes) != size or len(sizes) != call.num_outputs:
        raise call.error(f"splits {size} into {list(sizes)} for {call.num_outputs} outputs")
    if len(sizes) == 1:
        return identity(value)
    return Form(type="Split", attributes={"axis": axis, "split": sizes}, inputs=[value])


def _concat(call: Call) -> Form:
    values = [value for value in call.inputs if value is not None]
    if len({value.rank for value in values}) != 1:
        raise call.error(f"joins tensors of {', '.join(str(value.rank) for value in values) or 'no'} dims")
    axis = call.axis(call.integer("axis", 1), values[0].rank)
    empty = [value for value in values if value.shape[axis] != 0]
    values = empty or values[:1]
    if len(values) == 1:
        return identity(values[0])
    return Form(type="Concat", attributes={"axis": axis}, inputs=list(values))


def _with_axis(default: int) -> Callable[[Call], Form]:
    def canonical(call: Call) -> Form:
        attributes: dict = {"axis": call.axis(call.integer("axis", default), call.operand(0).rank)}
        kind = "ScatterElements" if call.node.type == "Scatter" else call.node.type
        if kind == "ScatterElements":
            attributes["reduction"] = call.text("reduction", "none")
        return Form(type=kind, attributes=attributes, inputs=call.data())

    return canonical


def _gather_nd(call: Call) -> Form:
    return Form(type="GatherND", attributes={"batch_dims": call.integer("batch_dims", 0)}, inputs=call.data())


def _pad(call: Call) -> Form:
    value = call.operand(0)
    pads = call.ints_either("pads", 1)
    if pads is None:
        raise call.error("has no pads")
    fill = call.scalar(2) if call.has(2) else call.number("value", 0.0)
    if call.has(3):
        axes = [call.axis(axis, value.rank) for axis in call.ints(3)]
        full = [0] * (2 * value.rank)
        for index, dim in enumerate(axes):
            full[dim], full[dim + value.rank] = pads[index], pads[index + len(axes)]
        pads = tuple(full)
    if not any(pads):
        return identity(value)
    attributes = {"mode": call.text("mode", "constant"), "pads": pads, "value": float(fill)}
    return Form(type="Pad", attributes=dict(attributes), inputs=[value])


def _trilu(call: Call) -> Form:
    offset = int(call.scalar(1)) if call.has(1) else 0
    return Form(type="Trilu", attributes={"k": offset, "upper": call.integer("upper", 1)}, inputs=[call.operand(0)])


def _dropout(call: Call) -> Form:
    """The identity but in training mode; where its mask is read it stays, with a ratio of 0."""
    value = call.operand(0)
    training = call.has(2) and bool(call.scalar(2))
    if training:
        ratio = float(call.scalar(1)) if call.has(1) else 0.5
    else:
        ratio = 0.0
    if ratio == 0.0 and not call.wants(1):
        return identity(value)
    attributes: dict = {"ratio": ratio, "training_mode": int(training), **seed_of(call)}
    if call.opset < 10:
        attributes["mask"] = value.type.dtype
    return Form(type="Dropout", attributes=attributes, inputs=[value])


def _identity(call: Call) -> Form:
    return identity(call.operand(0))


def _blocks(call: Call) -> Form:
    attributes: dict = {"blocksize": call.integer("blocksize")}
    mode = call.text("mode", "DCR")
    if call.node.type == "DepthToSpace" or mode != "DCR":
        attributes["mode"] = mode
    return Form(type=call.node.type, attributes=attributes, inputs=[call.operand(0)])


def _bounds(call: Call) -> Form:
    """A ConstantOfShape or Range that the binder could not make: some operand is no constant, and is named."""
    for index in range(len(call.inputs)):
        call.array(index)
    return default_form(call)


CANONICAL: dict[str, Callable[[Call], Form]] = {
    "Cast": _cast,
    "CastLike": _cast_like,
    "Concat": _concat,
    "ConstantOfShape": _bounds,
    "DepthToSpace": _blocks,
    "Dropout": _dropout,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _with_axis(0),
    "GatherElements": _with_axis(0),
    "GatherND": _gather_nd,
    "Identity": _identity,
    "Pad": _pad,
    "Range": _bounds,
    "Reshape": _reshape,
    "Scatter": _with_axis(0),
    "ScatterElements": _with_axis(0),
    "Slice": _slice,
    "SpaceToDepth": _blocks,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
}
