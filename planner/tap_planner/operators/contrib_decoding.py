"""Attention of the com.microsoft domain that writes into a cache, and the rotary embedding that goes with it."""

from __future__ import annotations

from tap_planner.operators.attending import Factors, Sizes, given, types_of
from tap_planner.operators.attributes import flag_of, int_of, operand
from tap_planner.operators.building import Dims, RuleBuilder, aligned, infer_first, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    DimFactors,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


# GroupQueryAttention --------------------------------------------------------------------------------------------------


def _group_sizes(signature: OperatorSignature) -> Sizes:
    """Sizes, with the length that the whole batch may have as attribute ``total_sequence_length``."""
    query, key, past = operand(signature, 0).shape, given(signature, 1), given(signature, 3)
    heads, key_heads = int_of(signature, "num_heads"), int_of(signature, "kv_num_heads")
    columns = heads if key is not None else heads + 2 * key_heads
    if len(query) != 3 or heads % key_heads or query[2] % columns:
        raise shape_error(signature, f"queries [b, s, {columns} heads], {heads} heads in groups over {key_heads}")
    width = query[2] // columns
    if key is not None and (len(key.shape) != 3 or key.shape[2] != key_heads * width):
        raise shape_error(signature, f"keys of {key_heads} heads of width {width}")
    cached = 0 if past is None else past.shape[2]
    return Sizes(
        batch=query[0],
        key_heads=key_heads,
        group=heads // key_heads,
        queries=query[1],
        keys=query[1] if key is None else key.shape[1],
        cached=cached,
        total=max(cached, int_of(signature, "total_sequence_length")),
        width=width,
        value_width=width,
    )


def _group_rule(signature: OperatorSignature) -> FactorRule:
    """``(b, s, (h g d)) (b, t, (h d)) (b, t, (h d)) + caches -> (b, s, (h g d))``.

    Packed queries, keys and values keep positions whole, and heads too unless there are as many key heads as others.
    """
    sizes = _group_sizes(signature)
    packed = given(signature, 1) is None
    factors = Factors(signature, sizes, whole_heads=packed and sizes.group > 1, whole_queries=packed)
    keys: Dims = (factors.b, factors.t, factors.h + factors.d)
    inputs: dict[int, Dims] = {
        0: (factors.b, factors.s, factors.packed() if packed else factors.heads + factors.d),
        1: keys,
        2: keys,
        11: (factors.heads,),
    }
    inputs[3], inputs[4] = factors.caches(factors.past)
    for index in (5, 9, 16):
        found = given(signature, index)
        if found is not None:
            inputs[index] = (*aligned(found.shape[:1], (factors.b,)), *((),) * (len(found.shape) - 1))
    if given(signature, 10) is not None:
        inputs[10] = factors.bias(10)
    return factors.build(inputs, factors.caches(factors.all), keys=(0,) if packed else (1, 2), made_of=(15,))


def _group_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    sizes, past = _group_sizes(signature), given(signature, 3)
    cache = sizes.present(sizes.width) if past is None else (*sizes.present(sizes.width)[:3], past.shape[3])
    result, key, value, scores = types_of(signature, (sizes.output, cache, cache, sizes.scores), 4)
    if past is not None:  # a quantised cache keeps its type
        key = value = TensorType(dtype=past.dtype, shape=cache)
    return (result, key, value, scores)[:num_outputs]


# DecoderMaskedMultiHeadAttention --------------------------------------------------------------------------------------


def _decoder_sizes(signature: OperatorSignature) -> Sizes:
    query, heads = operand(signature, 0).shape, int_of(signature, "num_heads")
    key, value, past = (given(signature, index) for index in (1, 2, 5))
    columns = heads if key is not None else 3 * heads
    if len(query) != 3 or query[1] != 1 or query[2] % columns:
        raise shape_error(signature, f"one query [b, 1, {columns} heads]")
    width = value_width = query[2] // columns
    if value is not None:
        value_width = value.shape[3] if len(value.shape) == 4 else value.shape[2] // heads
    keys = key.shape[2] if key is not None and len(key.shape) == 4 else 1
    cached = 0 if past is None else past.shape[2]
    shared = past is not None and flag_of(signature, "past_present_share_buffer")
    return Sizes(
        batch=query[0],
        key_heads=heads,
        queries=1,
        keys=keys,
        cached=cached,
        total=cached if shared else cached + keys,
        width=width,
        value_width=value_width,
    )


def _decoder_rule(signature: OperatorSignature) -> FactorRule:
    """``(b, 1, (h d)) (b, t, (h d)) (b, t, (h e)) + caches -> (b, 1, (h e))``."""
    sizes = _decoder_sizes(signature)
    packed = given(signature, 1) is None
    whole = given(signature, 10) is not None and sizes.width != sizes.value_width
    factors = Factors(signature, sizes, whole_heads=whole)
    inputs: dict[int, Dims] = {0: (factors.b, (), factors.packed() if packed else factors.h + factors.d)}
    for index, width in ((1, factors.d), (2, factors.e)):
        found = given(signature, index)
        if found is not None:
            cross = len(found.shape) == 4
            inputs[index] = (
                (factors.b, factors.h, factors.t, width) if cross else (factors.b, factors.t, factors.h + width)
            )
    if given(signature, 3) is not None:
        inputs[3] = factors.mask(3)
    if given(signature, 4) is not None:
        inputs[4] = factors.bias(4)
    inputs[5], inputs[6] = factors.caches(factors.past)
    if given(signature, 9) is not None:
        inputs[9] = (factors.b, (), ())
    if given(signature, 10) is not None:
        inputs[10] = (factors.packed(),)
    return factors.build(inputs, factors.caches(factors.all))


def _decoder_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    sizes = _decoder_sizes(signature)
    shapes = (sizes.output, sizes.present(sizes.width), sizes.present(sizes.value_width), sizes.scores)
    return types_of(signature, shapes, num_outputs)


# RotaryEmbedding ------------------------------------------------------------------------------------------------------


def _rotary_rule(signature: OperatorSignature) -> FactorRule:
    """Batch, heads and positions are parallel; a head's width and the tables are whole. Linear in the data."""
    data, ids, heads = operand(signature, 0).shape, operand(signature, 1).shape, int_of(signature, "num_heads")
    builder = RuleBuilder(signature)
    flat = len(data) == 3
    batch, count = builder.factor("b", data[0]), builder.factor("h", heads)
    positions = builder.factor("s", data[1 if flat else 2])
    width = builder.fixed("d", data[-1] // heads if flat else data[-1])
    dims: Dims = (batch, positions, count + width) if flat else (batch, count, positions, width)
    table: Dims = ((), ())
    by_position: tuple[DimFactors, ...] = (batch, positions) if len(ids) == 2 else ((),)
    return builder.build((dims, by_position, table, table), (dims,), partial=(("P", "R", "R", "R"),))


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="com.microsoft::GroupQueryAttention",
        rule=_group_rule,
        infer=_group_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 14, 15),
        saved_outputs=(0,),
        trainable_operands=(11, 14, 15),
        differentiable_operands=(0, 1, 2, 3, 4, 10, 11, 14, 15),
        caches=((3, 1), (4, 2)),
    ),
    OperatorRecord(
        type="com.microsoft::DecoderMaskedMultiHeadAttention",
        rule=_decoder_rule,
        infer=_decoder_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1, 2, 3, 4, 5, 6, 10),
        saved_outputs=(0,),
        trainable_operands=(10,),
        caches=((5, 1), (6, 2)),
    ),
    OperatorRecord(
        type="com.microsoft::RotaryEmbedding",
        rule=_rotary_rule,
        infer=infer_first,
        kind=ComputeKind.MEMORY,
        saved_inputs=(1, 2, 3),
        differentiable_operands=(0,),
    ),
)
"""Records of attention with a cache, and of rotary embedding."""
