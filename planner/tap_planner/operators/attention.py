"""Fused attention and rotary embedding (opset 23 and later): batch, heads and queries are split."""

from __future__ import annotations

from dataclasses import dataclass

from tap_planner.operators.attending import ring_collectives
from tap_planner.operators.attributes import int_of, operand
from tap_planner.operators.building import Dims, RuleBuilder, aligned, infer_first, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    DimFactors,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    Ring,
    TensorType,
)

__all__ = ["RECORDS"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Sizes of an attention operator, whichever layout its operands have."""

    batch: int
    key_heads: int
    query_heads: int
    queries: int
    new_keys: int
    past_keys: int
    key_width: int
    value_width: int
    flat: bool
    """Operands are [B, S, heads x width] rather than [B, heads, S, width]."""

    @property
    def keys(self) -> int:
        """Number of keys that a query sees."""
        return self.past_keys + self.new_keys


def _sizes(signature: OperatorSignature) -> _Sizes:
    query, key, value = (operand(signature, index).shape for index in range(3))
    past = signature.inputs[4] if len(signature.inputs) > 4 else None
    past_keys = 0 if past is None else past.shape[2]
    if len(query) == 4:
        batch, query_heads, queries, width = query
        key_heads, new_keys, value_width = key[1], key[2], value[3]
    elif len(query) == 3:
        query_heads, key_heads = int_of(signature, "q_num_heads"), int_of(signature, "kv_num_heads")
        batch, queries, new_keys = query[0], query[1], key[1]
        width, value_width = query[2] // query_heads, value[2] // key_heads
    else:
        raise shape_error(signature, "3 or 4 dims each")
    if query_heads % key_heads or (key[-1] != width if len(query) == 4 else key[2] != key_heads * width):
        raise shape_error(signature, "query heads in equal groups over key heads, all of one width")
    return _Sizes(
        batch=batch,
        key_heads=key_heads,
        query_heads=query_heads,
        queries=queries,
        new_keys=new_keys,
        past_keys=past_keys,
        key_width=width,
        value_width=value_width,
        flat=len(query) == 3,
    )


def _layout(sizes: _Sizes, batch: DimFactors, heads: DimFactors, positions: DimFactors, width: DimFactors) -> Dims:
    return (batch, positions, heads + width) if sizes.flat else (batch, heads, positions, width)


def _attention_rule(signature: OperatorSignature) -> FactorRule:
    """``(b, (h g), s, d) (b, h, t, d) (b, h, t, e) -> (b, (h g), s, e)``: h key heads with g query heads each.

    Queries are parallel, also where they see only keys of certain positions: a rank knows which queries it holds. In a
    ring it holds a part of the keys as well; not where there is a cache or the scores are shown. The two matrix
    products do ``d + e`` multiplications for each query and key; the widths by themselves are layout.
    """
    sizes = _sizes(signature)
    builder = RuleBuilder(signature)
    batch = builder.factor("b", sizes.batch)
    heads = builder.factor("h", sizes.key_heads)
    group_kind = FactorKind.PARALLEL if sizes.key_heads == 1 else FactorKind.FIXED
    all_heads = heads + builder.factor("g", sizes.query_heads // sizes.key_heads, group_kind)
    queries = builder.factor("s", sizes.queries)
    new_keys = keys = builder.fixed("t", sizes.new_keys)
    past_keys: DimFactors = ()
    layout: DimFactors = ()
    if sizes.past_keys:
        past_keys, keys = builder.fixed("past", sizes.past_keys), builder.fixed("all", sizes.keys)
        layout += new_keys + past_keys
    width = value_width = builder.fixed("d", sizes.key_width)
    if sizes.value_width != sizes.key_width:
        value_width = builder.fixed("e", sizes.value_width)
        layout += value_width
    layout += width
    builder.fixed("products", sizes.key_width + sizes.value_width)
    inputs: list[Dims | None] = [
        _layout(sizes, batch, all_heads, queries, width),
        _layout(sizes, batch, heads, new_keys, width),
        _layout(sizes, batch, heads, new_keys, value_width),
    ]
    scores = (batch, all_heads, queries, keys)
    extra = (scores, (batch, heads, past_keys, width), (batch, heads, past_keys, value_width))
    for index, (found, dims) in enumerate(zip(signature.inputs[3:], extra, strict=False)):
        aligned_dims = None if found is None else aligned(found.shape, dims)
        if index == 0 and found is not None and aligned_dims and found.shape[-1] != sizes.keys:
            aligned_dims = (*aligned_dims[:-1], ())
        inputs.append(aligned_dims)
    inputs.extend(None if found is None else (batch,) * len(found.shape) for found in signature.inputs[6:])
    outputs = (
        _layout(sizes, batch, all_heads, queries, value_width),
        (batch, heads, keys, width),
        (batch, heads, keys, value_width),
        scores,
    )
    rings = tuple(
        Ring(queries=query, keys=key, operands=(1, 2))
        for query, key in zip(queries, keys, strict=False)
        if not sizes.past_keys and len(signature.outputs) < len(outputs)
    )
    return builder.build(
        inputs,
        outputs[: len(signature.outputs)],
        layout=layout,
        rings=rings,
        collectives=ring_collectives(rings, (1, 2), batch + heads, sizes.key_width + sizes.value_width),
    )


def _attention_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    sizes, dtype = _sizes(signature), operand(signature, 0).dtype
    if sizes.flat:
        result = (sizes.batch, sizes.queries, sizes.query_heads * sizes.value_width)
    else:
        result = (sizes.batch, sizes.query_heads, sizes.queries, sizes.value_width)
    shapes = (
        result,
        (sizes.batch, sizes.key_heads, sizes.keys, sizes.key_width),
        (sizes.batch, sizes.key_heads, sizes.keys, sizes.value_width),
        (sizes.batch, sizes.query_heads, sizes.queries, sizes.keys),
    )
    return tuple(TensorType(dtype=dtype, shape=shape) for shape in shapes[:num_outputs])


def _rotary_rule(signature: OperatorSignature) -> FactorRule:
    """Batch, heads and positions are parallel; a head's width is fixed. Linear in the data."""
    data = operand(signature, 0).shape
    count = int_of(signature, "num_heads", 0) if len(data) == 3 else data[1]
    builder = RuleBuilder(signature)
    batch = builder.factor("b", data[0])
    heads = builder.factor("h", count) if count else ()
    positions = builder.factor("s", data[1] if len(data) == 3 else data[2])
    width = builder.fixed("d", data[-1] // count if len(data) == 3 and count else data[-1])
    dims = (batch, positions, heads + width) if len(data) == 3 else (batch, heads, positions, width)
    cache = operand(signature, 1).shape
    half = builder.fixed("half", cache[-1])
    by_position = len(cache) == 2
    table = (builder.fixed("cache", cache[0]), half) if by_position else aligned(cache, (batch, positions, half))
    inputs: list[Dims | None] = [dims, table, table]
    inputs.extend(None if ids is None else aligned(ids.shape, (batch, positions)) for ids in signature.inputs[3:])
    return builder.build(inputs, (dims,), partial=(("P", "R", "R", "R"),))


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="Attention",
        rule=_attention_rule,
        infer=_attention_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1, 2, 3, 4, 5),
        saved_outputs=(0,),
        caches=((4, 1), (5, 2)),
    ),
    OperatorRecord(
        type="RotaryEmbedding",
        rule=_rotary_rule,
        infer=infer_first,
        kind=ComputeKind.MEMORY,
        saved_inputs=(1, 2, 3),
        differentiable_operands=(0,),
    ),
)
"""Records of attention and rotary embedding."""
