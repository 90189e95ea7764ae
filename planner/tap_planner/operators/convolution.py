"""Convolutions, pooling and resizing: batch and channels are split, space never."""

from __future__ import annotations

from tap_planner.errors import UnsupportedGraphError
from tap_planner.operators.attributes import flag_of, int_of, ints_of, operand
from tap_planner.operators.building import RuleBuilder, replicated_rule, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]

_BIAS_WAYS = (("P", "R", "P"), ("R", "P", "P"))


def _space(signature: OperatorSignature, name: str, default: int) -> tuple[int, ...]:
    """A spatial attribute with one entry per spatial dim (two for pads)."""
    rank = len(operand(signature, 0).shape) - 2
    count = 2 * rank if name == "pads" else rank
    values = ints_of(signature, name, (default,) * count)
    if len(values) != count:
        raise shape_error(signature, f"{count} entries in {name!r}, got {list(values)}")
    return values


def _conv_rule(signature: OperatorSignature) -> FactorRule:
    """``(n, (g ci), space) ((g co), ci, kernel) [+ (g co)] -> (n, (g co), space)``.

    The product of the factors is the number of multiplications, so that the dims of the input's space, which are
    never split, hold no factor.
    """
    data, weight, result = operand(signature, 0).shape, operand(signature, 1).shape, signature.outputs[0].shape
    count = int_of(signature, "group", 1)
    builder = RuleBuilder(signature)
    batch, groups = builder.factor("n", data[0]), builder.factor("g", count)
    if count == 1:
        produced, consumed = builder.factor("co", weight[0]), builder.summed("ci", weight[1])
    else:
        produced, consumed = builder.fixed("co", weight[0] // count), builder.fixed("ci", weight[1])
    kernel = builder.each("k", weight[2:], FactorKind.FIXED)
    space = builder.each("s", result[2:], FactorKind.FIXED)
    inputs = [
        (batch, groups + consumed, *((),) * (len(data) - 2)),
        (groups + produced, consumed, *kernel),
        *(None if bias is None else (groups + produced,) for bias in signature.inputs[2:]),
    ]
    return builder.build(inputs, ((batch, groups + produced, *space),), additive=(2,), partial=_BIAS_WAYS)


def _conv_transpose_rule(signature: OperatorSignature) -> FactorRule:
    """``(n, (g ci), space) ((g ci), co, kernel) [+ (g co)] -> (n, (g co), space)``; the output's space is bare."""
    data, weight, result = operand(signature, 0).shape, operand(signature, 1).shape, signature.outputs[0].shape
    count = int_of(signature, "group", 1)
    builder = RuleBuilder(signature)
    batch, groups = builder.factor("n", data[0]), builder.factor("g", count)
    if count == 1:
        produced, consumed = builder.factor("co", weight[1]), builder.summed("ci", weight[0])
    else:
        produced, consumed = builder.fixed("co", weight[1]), builder.fixed("ci", weight[0] // count)
    kernel = builder.each("k", weight[2:], FactorKind.FIXED)
    space = builder.each("s", data[2:], FactorKind.FIXED)
    inputs = [
        (batch, groups + consumed, *space),
        (groups + consumed, produced, *kernel),
        *(None if bias is None else (groups + produced,) for bias in signature.inputs[2:]),
    ]
    output = (batch, groups + produced, *((),) * (len(result) - 2))
    return builder.build(inputs, (output,), additive=(2,), partial=_BIAS_WAYS)


def _windows(signature: OperatorSignature, kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of the output's space."""
    sizes = operand(signature, 0).shape[2:]
    strides, dilations = _space(signature, "strides", 1), _space(signature, "dilations", 1)
    pads, ceil = _space(signature, "pads", 0), flag_of(signature, "ceil_mode")
    result: list[int] = []
    for dim, size in enumerate(sizes):
        begin, end, stride = pads[dim], pads[dim + len(sizes)], strides[dim]
        span = size + begin + end - dilations[dim] * (kernel[dim] - 1) - 1
        if span < 0:
            raise shape_error(signature, f"space of at least the kernel {list(kernel)}")
        count = (-(-span // stride) if ceil else span // stride) + 1
        # A last window that would start in the padding at the end is left out (ONNX operators, MaxPool).
        if ceil and (count - 1) * stride >= size + begin:
            count -= 1
        result.append(count)
    return tuple(result)


def _conv_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, weight = operand(signature, 0), operand(signature, 1)
    if len(data.shape) < 3 or len(weight.shape) != len(data.shape):
        raise shape_error(signature, "data and kernel of one rank, 3 or more")
    if data.shape[1] != weight.shape[1] * int_of(signature, "group", 1):
        raise shape_error(signature, "as many channels as the kernel takes")
    space = _windows(signature, weight.shape[2:])
    return (TensorType(dtype=data.dtype, shape=(*data.shape[:1], *weight.shape[:1], *space)),)


def _conv_transpose_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, weight = operand(signature, 0), operand(signature, 1)
    strides, dilations = _space(signature, "strides", 1), _space(signature, "dilations", 1)
    pads, extra = _space(signature, "pads", 0), _space(signature, "output_padding", 0)
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
    """Batch and channels are parallel, space is fixed. Positions of maxima count over the whole tensor: then fixed."""
    result, *positions = (found.shape for found in signature.outputs)
    if positions:
        return replicated_rule(signature)
    data = operand(signature, 0).shape
    builder = RuleBuilder(signature)
    leading = (builder.factor("n", data[0]), builder.factor("c", data[1]))
    inputs = (*leading, *builder.each("in", data[2:], FactorKind.FIXED))
    outputs = (*leading, *builder.each("out", result[2:], FactorKind.FIXED))
    ways = (("P",),) if signature.type == "AveragePool" else ()
    return builder.build((inputs,), (outputs,), partial=ways)


def _pool_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data = operand(signature, 0)
    shape = (*data.shape[:2], *_windows(signature, _space(signature, "kernel_shape", 1)))
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


def _resize_rule(signature: OperatorSignature) -> FactorRule:
    """Dims that keep their size are parallel, the others are fixed; linear."""
    data, result = operand(signature, 0).shape, signature.outputs[0].shape
    builder = RuleBuilder(signature)
    pairs = list(enumerate(zip(data, result, strict=True)))
    inputs = tuple(
        builder.factor(f"d{dim}", size, FactorKind.PARALLEL if size == new else FactorKind.FIXED)
        for dim, (size, new) in pairs
    )
    outputs = tuple(inputs[dim] if size == new else builder.fixed(f"out{dim}", new) for dim, (size, new) in pairs)
    others = tuple(
        None if found is None else builder.each(f"in{index}_", found.shape, FactorKind.FIXED)
        for index, found in enumerate(signature.inputs[1:], start=1)
    )
    return builder.build((inputs, *others), (outputs,), partial=(("P", *("R",) * len(others)),))


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
