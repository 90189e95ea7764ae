"""Fused operators of the com.microsoft domain that are elementwise or normalise, and SwiGLU (opset 28)."""

from __future__ import annotations

from tap_planner.operators.attributes import flag_of, int_of, operand
from tap_planner.operators.building import Dims, RuleBuilder, aligned, broadcast_shapes, infer_first, shape_error
from tap_planner.operators.elementwise import elementwise_rule
from tap_planner.operators.types import (
    ComputeKind,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


def _pointwise_rule(signature: OperatorSignature) -> FactorRule:
    """Every dim is parallel; a bias is broadcast."""
    return elementwise_rule(signature)


def _gated_rule(signature: OperatorSignature) -> FactorRule:
    """Every dim is parallel; linear in what is gated."""
    return elementwise_rule(signature, (("R", "P"),))


def _pointwise_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data = operand(signature, 0)
    shapes = [found.shape for found in signature.inputs if found is not None]
    if broadcast_shapes(signature, shapes) != data.shape:
        raise shape_error(signature, "operands that broadcast to the first")
    return (data,)


def _split_gelu_rule(signature: OperatorSignature) -> FactorRule:
    """``(n, s, (halves c)) ((halves c)) -> (n, s, c)``: channels are split inside both halves."""
    shape = operand(signature, 0).shape
    builder = RuleBuilder(signature)
    leading = builder.each("d", shape[:-1])
    halves, channels = builder.fixed("halves", 2), builder.factor("c", shape[-1] // 2)
    return builder.build(((*leading, halves + channels), (halves + channels,)), ((*leading, channels),))


def _split_gelu_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, bias = operand(signature, 0), operand(signature, 1)
    if not data.shape or data.shape[-1] % 2 or bias.shape != data.shape[-1:]:
        raise shape_error(signature, "an even number of channels and a bias for each")
    return (TensorType(dtype=data.dtype, shape=(*data.shape[:-1], data.shape[-1] // 2)),)


def _bias_softmax_rule(signature: OperatorSignature) -> FactorRule:
    """Dims from the axis on are normalised together, leading ones are parallel; the bias is broadcast."""
    shape = operand(signature, 0).shape
    axis = int_of(signature, "axis", 1) % len(shape)
    builder = RuleBuilder(signature)
    dims = (*builder.each("d", shape[:axis]), *builder.each("x", shape[axis:], FactorKind.FIXED))
    return builder.build((dims, aligned(operand(signature, 1).shape, dims)), (dims,))


def _skip_rule(signature: OperatorSignature) -> FactorRule:
    """The last dim is normalised and never split, leading dims are parallel; skip, scales and bias are broadcast."""
    shape = operand(signature, 0).shape
    builder = RuleBuilder(signature)
    leading = builder.each("d", shape[:-1])
    dims = (*leading, builder.fixed("h", shape[-1]))
    inputs = [None if found is None else aligned(found.shape, dims) for found in signature.inputs]
    statistics = (*leading, ())
    return builder.build(inputs, (dims, statistics, statistics, dims)[: len(signature.outputs)])


def _skip_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, skip = operand(signature, 0), operand(signature, 1)
    width = data.shape[-1:]
    vectors = [found.shape for found in signature.inputs[2:] if found is not None]
    if not width or broadcast_shapes(signature, (data.shape, skip.shape)) != data.shape or set(vectors) != {width}:
        raise shape_error(signature, "data [.., h], a skip that broadcasts to it and vectors [h]")
    statistics = TensorType(dtype="float32", shape=(*data.shape[:-1], 1))
    return (data, statistics, statistics, data)[:num_outputs]


def _embed_rule(signature: OperatorSignature) -> FactorRule:
    """``(b, s) (v, h) -> (b, s, h)``: rows are parallel; the hidden dim is normalised and tables are kept whole.

    Positions are parallel too (a rank knows which it holds) unless the number of valid ones is an output.
    """
    batch, length = operand(signature, 0).shape
    builder = RuleBuilder(signature)
    b = builder.factor("b", batch)
    s = builder.factor("s", length, FactorKind.FIXED if len(signature.outputs) > 1 else FactorKind.PARALLEL)
    h = builder.fixed("h", operand(signature, 2).shape[1])
    tables: list[Dims | None] = [
        None if found is None else (builder.fixed(f"v{index}", found.shape[0]), h)
        for index, found in enumerate(signature.inputs[2:5])
    ]
    known: list[Dims | None] = [(b, s), (b, s), *tables, (h,), (h,), (b, s), (b, s)]
    inputs = [
        None if found is None or dims is None else aligned(found.shape, dims)
        for found, dims in zip(signature.inputs, known, strict=False)
    ]
    return builder.build(inputs, ((b, s, h), (b,), (b, s, h))[: len(signature.outputs)])


def _embed_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    ids, table = operand(signature, 0), operand(signature, 2)
    positions = operand(signature, 3)
    explicit = len(signature.inputs) > 8 and signature.inputs[8] is not None
    if len(ids.shape) != 2 or len(table.shape) != 2 or positions.shape[1:] != table.shape[1:]:
        raise shape_error(signature, "ids [b, s] and tables [.., h]")
    if not explicit and positions.shape[0] < ids.shape[1]:
        raise shape_error(signature, f"a table of at least {ids.shape[1]} positions")
    result = TensorType(dtype=table.dtype, shape=(*ids.shape, table.shape[1]))
    return (result, TensorType(dtype="int32", shape=ids.shape[:1]), result)[:num_outputs]


def _group_rule(signature: OperatorSignature) -> FactorRule:
    """Batch and groups are parallel; channels inside a group and space are never split.

    In ``SkipGroupNorm`` two more operands are added: the skip, perhaps without space, and a bias.
    """
    data, count = operand(signature, 0).shape, int_of(signature, "groups")
    last = flag_of(signature, "channels_last", True)
    builder = RuleBuilder(signature)
    batch, groups = builder.factor("n", data[0]), builder.factor("g", count)
    channels = groups + builder.fixed("c", data[-1 if last else 1] // count)
    space = builder.each("s", data[1:-1] if last else data[2:], FactorKind.FIXED)
    dims = (batch, *space, channels) if last else (batch, channels, *space)
    inputs: list[Dims | None] = [dims]
    for found in signature.inputs[1:]:
        if found is None or len(found.shape) == 1:
            inputs.append(None if found is None else (channels,))
        else:
            inputs.append((batch, channels) if len(found.shape) == 2 else aligned(found.shape, dims))
    return builder.build(inputs, (dims, dims)[: len(signature.outputs)])


def _group_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, count = operand(signature, 0), int_of(signature, "groups")
    if len(data.shape) < 3 or data.shape[-1 if flag_of(signature, "channels_last", True) else 1] % count:
        raise shape_error(signature, f"channels in {count} equal groups")
    return infer_first(signature, num_outputs)


RECORDS: tuple[OperatorRecord, ...] = (
    *(
        OperatorRecord(
            type=name,
            rule=_pointwise_rule,
            infer=_pointwise_infer,
            kind=ComputeKind.MEMORY,
            saved_inputs=(0, 1),
            trainable_operands=(1,),
        )
        for name in ("com.microsoft::BiasGelu", "com.microsoft::FastGelu")
    ),
    OperatorRecord(
        type="SwiGLU",
        rule=_gated_rule,
        infer=_pointwise_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1),
    ),
    OperatorRecord(
        type="com.microsoft::BiasSplitGelu",
        rule=_split_gelu_rule,
        infer=_split_gelu_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1),
        trainable_operands=(1,),
    ),
    OperatorRecord(
        type="com.microsoft::BiasSoftmax",
        rule=_bias_softmax_rule,
        infer=_pointwise_infer,
        kind=ComputeKind.MEMORY,
        saved_outputs=(0,),
    ),
    OperatorRecord(
        type="com.microsoft::SkipLayerNormalization",
        rule=_skip_rule,
        infer=_skip_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1, 2, 4),
        trainable_operands=(2, 3, 4),
    ),
    OperatorRecord(
        type="com.microsoft::SkipSimplifiedLayerNormalization",
        rule=_skip_rule,
        infer=_skip_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1, 2, 3),
        trainable_operands=(2, 3),
    ),
    OperatorRecord(
        type="com.microsoft::EmbedLayerNormalization",
        rule=_embed_rule,
        infer=_embed_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1, 5, 8),
        saved_outputs=(0,),
        trainable_operands=(2, 3, 4, 5, 6),
    ),
    OperatorRecord(
        type="com.microsoft::GroupNorm",
        rule=_group_rule,
        infer=_group_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1, 2),
        trainable_operands=(1, 2),
    ),
    OperatorRecord(
        type="com.microsoft::SkipGroupNorm",
        rule=_group_rule,
        infer=_group_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1, 2, 3, 4),
        trainable_operands=(1, 2, 4),
    ),
)
"""Records of the fused elementwise operators and normalisations."""
