"""Attention and MultiHeadAttention of the com.microsoft domain. Heads are counted from the local parts.

Packed operands are held in blocks: a local part of ``(parts, heads, width)`` has all parts of the local heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tap_planner.apply.operators.attending import (
    Prepared,
    attend_prepared,
    by_heads,
    flat_heads,
    hidden,
    prepares,
    within,
)
from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present


def mask_bias(
    context: OperatorContext, mask: Tensor, index: int, keys: int, like: Tensor, span: range | None = None
) -> Tensor:
    """What a mask adds to the scores, broadcast to [batch, heads, queries, keys].

    A mask holds 1 for keys that are seen, by key or by query and key; or each text's length; or ends, then starts.

    Args:
        context: of the operator.
        mask: local part.
        index: which operand it is.
        keys: number of keys.
        like: a tensor of the type of the scores.
        span: positions of the keys that are asked for; None: all.
    """
    fill = context.float("mask_filter_value", -10000.0)
    if mask.dim() == 1:
        whole, batch = context.input_shape(index)[0], context.input_shape(0)[0]
        if whole not in (batch, 2 * batch):
            raise context.unsupported("a mask of running sums")
        ends, starts = (mask, torch.zeros_like(mask)) if whole == batch else mask.chunk(2)
        position = torch.arange(keys, device=mask.device)
        seen = (position < ends[:, None]) & (position >= starts[:, None])
    elif mask.dim() <= 3:
        seen = mask > 0
    else:
        raise context.unsupported("a mask of 4 dims")
    if seen.shape[-1] != keys:
        raise context.unsupported(f"a mask of {seen.shape[-1]} keys, expected {keys}")
    seen = seen if span is None else seen[..., span.start : span.stop]
    return hidden(seen[:, None, None] if seen.dim() == 2 else seen[:, None], like, fill)


def _scale(context: OperatorContext, width: int) -> float:
    return context.float("scale", 0.0) or 1.0 / math.sqrt(width)


def _columns(packed: Tensor, sizes: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """Local columns of queries, keys and values; ``sizes`` are those of the whole operand."""
    share = packed.shape[-1] * 1.0 / sum(sizes)
    return torch.split(packed, [round(size * share) for size in sizes], -1)


@prepares("com.microsoft::Attention")
def prepared_projection(context: OperatorContext, operands: Operands) -> Prepared:
    """Projection to queries, keys and values; caches are stacked in one tensor."""
    for name, what in (("do_rotary", "rotary embedding"), ("past_present_share_buffer", "a shared cache")):
        if context.flag(name):
            raise context.unsupported(what)
    heads, columns = context.int("num_heads"), context.input_shape(1)[1]
    sizes = context.ints("qkv_hidden_sizes", (columns // 3,) * 3)
    packed = present(operands, 0) @ present(operands, 1)
    bias = optional(operands, 2)
    packed = packed if bias is None else packed + bias
    width, value_width = sizes[0] // heads, sizes[2] // heads
    flat = _columns(packed, (sizes[0], sizes[1], sizes[2]))
    query, key, value = (by_heads(p, w) for p, w in zip(flat, (width, width, value_width), strict=True))
    past = optional(operands, 4)
    if past is not None:
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
    cached = 0 if past is None else past.shape[3]
    prepared = _prepared(
        context, operands, (query, key, value), mask=3, bias=5, sizes=(cached, context.input_shape(0)[1])
    )
    return prepared if len(context.outputs) == 1 else prepared._replace(caches=(torch.stack([key, value]),))


@operator("com.microsoft::Attention")
def projected_attention(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """Projection, then attention."""
    prepared = prepared_projection(context, operands)
    return flat_heads(attend_prepared(prepared).output), *prepared.caches


def _prepared(
    context: OperatorContext,
    operands: Operands,
    qkv: tuple[Tensor, Tensor, Tensor],
    *,
    mask: int,
    bias: int,
    sizes: tuple[int, int],
) -> Prepared:
    """An attention without further outputs.

    Args:
        context: of the operator.
        operands: its local parts.
        qkv: queries, keys and values by heads, with the cache.
        mask: position of the mask operand.
        bias: position of the operand that is added to the scores.
        sizes: length of the cache, and number of keys that come on top of it on all ranks of a ring.
    """
    query, key, value = qkv
    masked, (cached, new) = optional(operands, mask), sizes

    def hides(span: range) -> Tensor | None:
        parts: list[Tensor] = []
        if masked is not None:
            parts.append(mask_bias(context, masked, mask, cached + new, query, span))
        if context.flag("unidirectional"):
            held = torch.as_tensor(context.input_indices(0, 1), device=query.device)
            parts.append(hidden(within(held + cached, span, ahead=0), query))
        return sum(parts[1:], parts[0]) if parts else None

    return Prepared(
        query, key, value, scale=_scale(context, query.shape[3]), hides=hides, added=optional(operands, bias)
    )


@prepares("com.microsoft::MultiHeadAttention")
def prepared_heads(context: OperatorContext, operands: Operands) -> Prepared:
    """Queries, keys and values that are given by position, by head, or packed."""
    if optional(operands, 8) is not None or optional(operands, 9) is not None:
        raise context.unsupported("a shared cache")
    query, key, value = _given(context, operands)
    past_key, past_value = optional(operands, 6), optional(operands, 7)
    key = key if past_key is None else torch.cat([past_key, key], 2)
    value = value if past_value is None else torch.cat([past_value, value], 2)
    sizes = (0 if past_key is None else past_key.shape[2], _new_keys(context))
    prepared = _prepared(context, operands, (query, key, value), mask=4, bias=5, sizes=sizes)
    return prepared._replace(caches=(key, value)[: len(context.outputs) - 1])


@operator("com.microsoft::MultiHeadAttention")
def multi_head_attention(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """Attention of queries, keys and values that are given."""
    prepared = prepared_heads(context, operands)
    done = attend_prepared(prepared)
    return (flat_heads(done.output), *prepared.caches, done.biased)[: len(context.outputs)]


def _new_keys(context: OperatorContext) -> int:
    """Number of keys that are given, without the cache."""
    packed = len(context.input_shape(0)) == 5
    shape = context.input_shape(0 if packed else 1)
    return shape[2] if len(shape) == 4 else shape[1]


def _given(context: OperatorContext, operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by heads, with the bias added to what is not a cache already."""
    first, second, third, bias = (optional(operands, index) for index in range(4))
    assert first is not None
    if first.dim() == 5:
        found = [part.transpose(1, 2) for part in first.unbind(3)]
    elif second is not None and second.dim() == 5:
        width = context.input_shape(0)[2] // context.int("num_heads")
        found = [by_heads(first, width), *(part.transpose(1, 2) for part in second.unbind(3))]
    else:
        assert second is not None and third is not None
        width = context.input_shape(0)[2] // context.int("num_heads")
        shape = context.input_shape(2)
        value_width = shape[3] if len(shape) == 4 else shape[2] // context.int("num_heads")
        found = [by_heads(first, width), by_heads(second, width), by_heads(third, value_width)]
    query, key, value = found
    if bias is None:
        return query, key, value
    sizes = tuple(part.shape[1] * part.shape[3] for part in found)
    biases = [by_heads(piece[None, None], part.shape[3]) for piece, part in zip(bias.split(sizes), found, strict=True)]
    if second is not None and second.dim() == 4:
        return query + biases[0], key, value
    return query + biases[0], key + biases[1], value + biases[2]
