"""Convolutions, pooling and resizing: batch, channels and, where halo rows can be exchanged, space are split."""

from __future__ import annotations

from tap_planner.errors import UnsupportedGraphError
from tap_planner.operators.attributes import int_of, operand, text_of
from tap_planner.operators.building import RuleBuilder, replicated_rule, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    DimFactors,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)
from tap_planner.operators.windows import gathered_space, scattered_space, spatial, window_counts

__all__ = ["RECORDS"]

_BIAS_WAYS = (("P", "R", "P"), ("R", "P", "P"))


def _conv_rule(signature: OperatorSignature) -> FactorRule:
    """``(n, (g ci), (space stride)) ((g co), ci, kernel) [+ (g co)] -> (n, (g co), space)``.

    The product of the factors, without those for the stride, is the number of multiplications, so that dims of the
    input's space that are never split hold no factor.
    """
    data, weight = operand(signature, 0).shape, operand(signature, 1).shape
    count = int_of(signature, "group", 1)
    builder = RuleBuilder(signature)
    batch, groups = builder.factor("n", data[0]), builder.factor("g", count)
    if count == 1:
        produced, consumed = builder.factor("co", weight[0]), builder.summed("ci", weight[1])
    else:
        produced, consumed = builder.fixed("co", weight[0] // count), builder.fixed("ci", weight[1])
    kernel = builder.each("k", weight[2:], FactorKind.FIXED)
    space = gathered_space(builder, signature, weight[2:], ("", "s"))
    inputs = [
        (batch, groups + consumed, *space.operand),
        (groups + produced, consumed, *kernel),
        *(None if bias is None else (groups + produced,) for bias in signature.inputs[2:]),
    ]
    return builder.build(
        inputs,
        ((batch, groups + produced, *space.result),),
        additive=(2,),
        partial=_BIAS_WAYS,
        collectives=space.exchanges((batch, groups + consumed), data),
        layout=space.layout,
    )


def _conv_transpose_rule(signature: OperatorSignature) -> FactorRule:
    """``(n, (g ci), space) ((g ci), co, kernel) [+ (g co)] -> (n, (g co), (space stride))``; an output dim that is
    never split is bare."""
    data, weight = operand(signature, 0).shape, operand(signature, 1).shape
    count = int_of(signature, "group", 1)
    builder = RuleBuilder(signature)
    batch, groups = builder.factor("n", data[0]), builder.factor("g", count)
    if count == 1:
        produced, consumed = builder.factor("co", weight[1]), builder.summed("ci", weight[0])
    else:
        produced, consumed = builder.fixed("co", weight[1]), builder.fixed("ci", weight[0] // count)
    kernel = builder.each("k", weight[2:], FactorKind.FIXED)
    space = scattered_space(builder, signature, weight[2:], ("s", ""))
    inputs = [
        (batch, groups + consumed, *space.operand),
        (groups + consumed, produced, *kernel),
        *(None if bias is None else (groups + produced,) for bias in signature.inputs[2:]),
    ]
    return builder.build(
        inputs,
        ((batch, groups + produced, *space.result),),
        additive=(2,),
        partial=_BIAS_WAYS,
        collectives=space.exchanges((batch, groups + consumed), data),
        layout=space.layout,
    )


def _conv_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, weight = operand(signature, 0), operand(signature, 1)
    if len(data.shape) < 3 or len(weight.shape) != len(data.shape):
        raise shape_error(signature, "data and kernel of one rank, 3 or more")
    if data.shape[1] != weight.shape[1] * int_of(signature, "group", 1):
        raise shape_error(signature, "as many channels as the kernel takes")
    space = window_counts(signature, weight.shape[2:])
    return (TensorType(dtype=data.dtype, shape=(*data.shape[:1], *weight.shape[:1], *space)),)


def _conv_transpose_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, weight = operand(signature, 0), operand(signature, 1)
    strides, dilations = spatial(signature, "strides", 1), spatial(signature, "dilations", 1)
    pads, extra = spatial(signature, "pads", 0), spatial(signature, "output_padding", 0)
    rank = len(strides)
    space = tuple(
        strides[dim] * (data.shape[dim + 2] - 1)
        + extra[dim]
        + (weight.shape[dim + 2] - 1) * dilations[dim]
        + 1
        - pads[dim]
        - pads[dim + rank]
        for dim in range(rank)
    )
    channels = weight.shape[1] * int_of(signature, "group", 1)
    return (TensorType(dtype=data.dtype, shape=(data.shape[0], channels, *space)),)


def _pool_rule(signature: OperatorSignature) -> FactorRule:
    """Batch, channels and space are parallel. Positions of maxima count over the whole tensor: then all is fixed."""
    if len(signature.outputs) > 1:
        return replicated_rule(signature)
    data = operand(signature, 0).shape
    builder = RuleBuilder(signature)
    leading = (builder.factor("n", data[0]), builder.factor("c", data[1]))
    space = gathered_space(builder, signature, spatial(signature, "kernel_shape", 1), ("in", "out"))
    return builder.build(
        ((*leading, *space.operand),),
        ((*leading, *space.result),),
        partial=(("P",),) if signature.type == "AveragePool" else (),
        collectives=space.exchanges(leading, data),
        layout=space.layout,
    )


def _pool_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data = operand(signature, 0)
    shape = (*data.shape[:2], *window_counts(signature, spatial(signature, "kernel_shape", 1)))
    return (TensorType(dtype=data.dtype, shape=shape), TensorType(dtype="int64", shape=shape))[:num_outputs]


def _global_pool_rule(signature: OperatorSignature) -> FactorRule:
    """Batch and channels are parallel; an average sums over space (over the global count), else space is fixed."""
    data = operand(signature, 0).shape
    average = signature.type == "GlobalAveragePool"
    builder = RuleBuilder(signature)
    leading = (builder.factor("n", data[0]), builder.factor("c", data[1]))
    make = builder.summed if average else builder.fixed
    space = tuple(make(f"s{dim}", size) for dim, size in enumerate(data[2:]))
    output = (*leading, *((),) * len(space))
    return builder.build(((*leading, *space),), (output,), partial=(("P",),) if average else ())


def _global_pool_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data = operand(signature, 0)
    return (TensorType(dtype=data.dtype, shape=(*data.shape[:2], *(1,) * (len(data.shape) - 2))),)


def _repeats(signature: OperatorSignature, dim: int) -> int | None:
    """How often each row of a dim comes, one after another; None where a row is made in another way.

    A dim that keeps its size keeps its rows, unless a part of it is enlarged or a scale a little over 1 is stated. Of
    the nearest row by a whole factor f, result o is row ``floor(o / f)``: with centres of pixels because
    ``(o mod f + 1/2) / f`` lies between 0 and 1, whichever way halves are rounded (ONNX Resize, nearest_mode).
    """
    size, new = operand(signature, 0).shape[dim], signature.outputs[0].shape[dim]
    scales = signature.attribute("scales")
    if size == 0 or new % size or (isinstance(scales, tuple) and scales and float(scales[dim]) != new // size):
        return None
    upsample = signature.type == "Upsample"
    positions = "asymmetric" if upsample else text_of(signature, "coordinate_transformation_mode", "half_pixel")
    if size == new:
        return None if positions == "tf_crop_and_resize" else 1
    if text_of(signature, "mode", "nearest") != "nearest":
        return None
    rounding = "floor" if upsample else text_of(signature, "nearest_mode", "round_prefer_floor")
    if positions == "asymmetric" and rounding == "floor":
        return new // size
    centred = positions in ("half_pixel", "pytorch_half_pixel") and rounding.startswith("round_prefer")
    return new // size if centred and new > 1 else None


def _resize_rule(signature: OperatorSignature) -> FactorRule:
    """Dims that keep their size or repeat their rows are parallel, the others are fixed; linear."""
    data, result = operand(signature, 0).shape, signature.outputs[0].shape
    builder = RuleBuilder(signature)
    inputs: list[DimFactors] = []
    outputs: list[DimFactors] = []
    layout: list[int] = []
    for dim, (size, new) in enumerate(zip(data, result, strict=True)):
        times = _repeats(signature, dim)
        inputs.append(builder.factor(f"d{dim}", size, FactorKind.FIXED if times is None else FactorKind.PARALLEL))
        copies = builder.fixed(f"out{dim}", new) if times is None else builder.fixed(f"t{dim}", times)
        outputs.append(copies if times is None else inputs[dim] + copies)
        layout.extend(() if times is None else copies)
    others = tuple(
        None if found is None else builder.each(f"in{index}_", found.shape, FactorKind.FIXED)
        for index, found in enumerate(signature.inputs[1:], start=1)
    )
    ways = (("P", *("R",) * len(others)),)
    return builder.build((tuple(inputs), *others), (tuple(outputs),), partial=ways, layout=layout)


def _resize_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data = operand(signature, 0)
    sizes, scales = signature.attribute("sizes"), signature.attribute("scales")
    if isinstance(sizes, tuple) and len(sizes) == len(data.shape):
        return (TensorType(dtype=data.dtype, shape=tuple(int(size) for size in sizes)),)
    if isinstance(scales, tuple) and len(scales) == len(data.shape):
        shape = tuple(int(size * float(scale)) for size, scale in zip(data.shape, scales, strict=True))
        return (TensorType(dtype=data.dtype, shape=shape),)
    raise UnsupportedGraphError(
        f"operator {signature.type}: neither sizes nor scales for the {len(data.shape)} dims, expected one of them",
        hint="export the model with constant sizes",
    )


def _pool(
    name: str, *, keep_inputs: tuple[int, ...] = (), keep_outputs: tuple[int, ...] = (), everywhere: bool = False
) -> OperatorRecord:
    return OperatorRecord(
        type=name,
        rule=_global_pool_rule if everywhere else _pool_rule,
        infer=_global_pool_infer if everywhere else _pool_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=keep_inputs,
        saved_outputs=keep_outputs,
    )


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="Conv",
        rule=_conv_rule,
        infer=_conv_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1),
        trainable_operands=(1, 2),
    ),
    OperatorRecord(
        type="ConvTranspose",
        rule=_conv_transpose_rule,
        infer=_conv_transpose_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1),
        trainable_operands=(1, 2),
    ),
    _pool("MaxPool", keep_inputs=(0,), keep_outputs=(0,)),
    _pool("LpPool", keep_inputs=(0,), keep_outputs=(0,)),
    _pool("AveragePool"),
    _pool("GlobalAveragePool", everywhere=True),
    _pool("GlobalMaxPool", keep_inputs=(0,), keep_outputs=(0,), everywhere=True),
    _pool("GlobalLpPool", keep_inputs=(0,), keep_outputs=(0,), everywhere=True),
    *(
        OperatorRecord(
            type=name,
            rule=_resize_rule,
            infer=_resize_infer,
            kind=ComputeKind.MEMORY,
            differentiable_operands=(0,),
        )
        for name in ("Resize", "Upsample")
    ),
)
"""Records of convolutions, pooling and resizing."""
