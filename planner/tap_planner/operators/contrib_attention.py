"""Attention and MultiHeadAttention of the com.microsoft domain: batch, heads and queries are split."""

from __future__ import annotations

from tap_planner.operators.attending import Factors, Sizes, counts_batch, given, types_of
from tap_planner.operators.attributes import flag_of, int_of, ints_of, operand
from tap_planner.operators.building import Dims, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    DimFactors,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


def _projected_sizes(signature: OperatorSignature) -> Sizes:
    data, weight, heads = operand(signature, 0).shape, operand(signature, 1).shape, int_of(signature, "num_heads")
    if len(data) != 3 or len(weight) != 2 or weight[0] != data[2]:
        raise shape_error(signature, "data [b, s, i] and weights [i, q + k + v]")
    widths = ints_of(signature, "qkv_hidden_sizes", (weight[1] // 3,) * 3)
    if len(widths) != 3 or sum(widths) != weight[1] or widths[0] != widths[1] or any(w % heads for w in widths):
        raise shape_error(signature, f"columns for queries, keys and values of {heads} heads")
    past = given(signature, 4)
    cached = 0 if past is None else past.shape[3]
    shared = flag_of(signature, "past_present_share_buffer")
    return Sizes(
        batch=data[0],
        key_heads=heads,
        queries=data[1],
        keys=data[1],
        cached=cached,
        total=cached if shared else cached + data[1],
        width=widths[0] // heads,
        value_width=widths[2] // heads,
    )


def _projected_rule(signature: OperatorSignature) -> FactorRule:
    """``(b, s, i) (i, (parts h d)) -> (b, s, (h e))``: the columns of the weights are three blocks of heads.

    The data hold queries and keys: in a ring a rank projects its own part and passes keys and values on.
    """
    sizes = _projected_sizes(signature)
    columns = 2 * sizes.width + sizes.value_width
    projection = -(-operand(signature, 1).shape[0] * columns // sizes.total)
    factors = Factors(
        signature,
        sizes,
        whole_heads=sizes.width != sizes.value_width,
        whole_queries=True,
        whole_batch=counts_batch(signature, 3, sizes.batch),
        products=sizes.width + sizes.value_width + projection,
    )
    packed = factors.packed()
    inputs: dict[int, Dims] = {0: (factors.b, factors.s, ()), 1: ((), packed), 2: (packed,)}
    if given(signature, 3) is not None:
        inputs[3] = factors.mask(3)
    inputs[4] = ((), *factors.caches(factors.past)[0])
    if given(signature, 5) is not None:
        inputs[5] = factors.bias(5)
    return factors.build(inputs, (((), *factors.caches(factors.all)[0]),), keys=(0,), made_of=(1, 2))


def _projected_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    sizes = _projected_sizes(signature)
    return types_of(signature, (sizes.output, (2, *sizes.present(sizes.width))), num_outputs)


def _multi_head_sizes(signature: OperatorSignature) -> Sizes:
    query, heads = operand(signature, 0).shape, int_of(signature, "num_heads")
    key, value, past = (given(signature, index) for index in (1, 2, 6))
    if len(query) == 5:
        keys, width, value_width = query[1], query[4], query[4]
    else:
        if len(query) != 3 or key is None or query[2] % heads:
            raise shape_error(signature, f"queries [b, s, {heads} heads] with keys, or all packed")
        width = value_width = query[2] // heads
        keys = key.shape[2] if len(key.shape) == 4 else key.shape[1]
        if value is not None:
            value_width = value.shape[3] if len(value.shape) == 4 else value.shape[2] // heads
    cached = 0 if past is None else past.shape[2]
    return Sizes(
        batch=query[0],
        key_heads=heads,
        queries=query[1],
        keys=keys,
        cached=cached,
        total=cached if given(signature, 8) is not None else cached + keys,
        width=width,
        value_width=value_width,
    )


def _key_dims(signature: OperatorSignature, index: int, factors: Factors, width: DimFactors) -> Dims:
    """Dims of keys or values: by position, by head, or packed."""
    rank = len(operand(signature, index).shape)
    if rank == 4:
        return (factors.b, factors.h, factors.t, width)
    return (factors.b, factors.t, factors.h + width) if rank == 3 else (factors.b, factors.t, factors.h, (), width)


def _multi_head_rule(signature: OperatorSignature) -> FactorRule:
    """``(b, s, (h d)) (b, t, (h d)) (b, t, (h e)) -> (b, s, (h e))``; a bias holds three blocks of heads."""
    sizes = _multi_head_sizes(signature)
    rank = len(operand(signature, 0).shape)
    factors = Factors(
        signature,
        sizes,
        whole_heads=given(signature, 3) is not None and sizes.width != sizes.value_width,
        whole_queries=rank == 5,
        whole_batch=counts_batch(signature, 4, sizes.batch),
    )
    heads = factors.h
    inputs: dict[int, Dims] = {
        0: (factors.b, factors.s, heads + factors.d) if rank == 3 else (factors.b, factors.s, heads, (), factors.d)
    }
    for index, width in ((1, factors.d), (2, factors.e)):
        if given(signature, index) is not None:
            inputs[index] = _key_dims(signature, index, factors, width)
    if given(signature, 3) is not None:
        inputs[3] = (factors.packed(),)
    if given(signature, 4) is not None:
        inputs[4] = factors.mask(4)
    if given(signature, 5) is not None:
        inputs[5] = factors.bias(5)
    inputs[6], inputs[7] = factors.caches(factors.past)
    keys = tuple(index for index in (1, 2) if given(signature, index) is not None) if rank == 3 else (0,)
    return factors.build(inputs, factors.caches(factors.all), keys=keys, made_of=(3,))


def _multi_head_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    sizes = _multi_head_sizes(signature)
    shapes = (sizes.output, sizes.present(sizes.width), sizes.present(sizes.value_width), sizes.scores)
    return types_of(signature, shapes, num_outputs)


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="com.microsoft::Attention",
        rule=_projected_rule,
        infer=_projected_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1, 2, 3, 4, 5),
        saved_outputs=(0,),
        trainable_operands=(1, 2),
        caches=((4, 1),),
    ),
    OperatorRecord(
        type="com.microsoft::MultiHeadAttention",
        rule=_multi_head_rule,
        infer=_multi_head_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1, 2, 3, 4, 5, 6, 7),
        saved_outputs=(0,),
        trainable_operands=(3,),
        caches=((6, 1), (7, 2)),
    ),
)
"""Records of attention over given or projected queries, keys and values."""
