"""Attention of the com.microsoft domain that writes into a cache, and the rotary embedding that goes with it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tap_planner.apply.operators.attending import (
    Prepared,
    attend,
    attend_prepared,
    by_heads,
    flat_heads,
    hidden,
    prepares,
    rotated,
    within,
)
from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present
from tap_planner.apply.operators.contrib_attention import mask_bias

_UNSUPPORTED = {
    "sliding_window_cache": "a cache of the size of a window",
    "kv_cache_bit_width": "a quantised cache",
}


def _written(past: Tensor | None, new: Tensor, starts: Tensor, length: int) -> Tensor:
    """A cache of some length, with new entries at each text's own position; zeros where nothing ever was written."""
    cache = new.new_zeros(*new.shape[:2], length, new.shape[3])
    if past is not None:
        cache = torch.cat([past, cache[:, :, past.shape[2] :]], 2)
    places = (starts[:, None] + torch.arange(new.shape[2], device=new.device)).reshape(-1, 1, new.shape[2], 1)
    return cache.scatter(2, places.expand(new.shape), new)


def _rms(value: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """RMS normalisation of every head, if there is a weight."""
    if weight is None:
        return value
    return value * torch.rsqrt((value * value).mean(-1, keepdim=True) + epsilon) * weight


@prepares("com.microsoft::GroupQueryAttention")
def prepared_groups(context: OperatorContext, operands: Operands) -> Prepared:
    """Grouped attention over a cache; each text has its own length, at whose end the new keys stand."""
    _check_group(context, operands)
    query, key, value, width = _group_operands(context, operands)
    lengths = present(operands, 5).reshape(-1).to(torch.int64) + 1
    packed = optional(operands, 1) is None
    whole = context.input_shape(0 if packed else 1)[1]
    starts = (lengths - whole).clamp(min=0)
    held = torch.as_tensor(context.input_indices(0, 1), device=query.device)
    places = held if packed else torch.as_tensor(context.input_indices(1, 1), device=query.device)
    query, key = _group_norm_and_turn(context, operands, query, key, starts, (held, places))
    total = context.signature.outputs[1].shape[2] if len(context.outputs) > 1 else _length(context)
    if key.shape[2] == whole:  # else a part of a ring, of keys that are the whole cache
        key = _written(optional(operands, 3), key, starts, total)
        value = _written(optional(operands, 4), value, starts, total)
    sink = optional(operands, 11)
    if context.flag("smooth_softmax"):
        sink = query.new_zeros(1)
    added = optional(operands, 10)
    return Prepared(
        query,
        key,
        value,
        scale=context.float("scale", 0.0) or 1.0 / math.sqrt(width),
        hides=lambda span: _group_hides(context, query, starts[:, None] + held, lengths, span),
        added=None if added is None else torch.nn.functional.pad(added, [0, total - added.shape[-1]]),
        softcap=context.float("softcap", 0.0),
        sink=None if sink is None else sink.reshape(-1, 1, 1),
        caches=(key, value)[: len(context.outputs) - 1],
    )


@operator("com.microsoft::GroupQueryAttention")
def group_query_attention(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """Grouped attention."""
    prepared = prepared_groups(context, operands)
    return flat_heads(attend_prepared(prepared).output), *prepared.caches


def _check_group(context: OperatorContext, operands: Operands) -> None:
    for name, what in _UNSUPPORTED.items():
        if context.int(name, 0):
            raise context.unsupported(what)
    if optional(operands, 12) is not None or optional(operands, 13) is not None:
        raise context.unsupported("a quantised cache")
    if optional(operands, 16) is not None:
        raise context.unsupported("operand query_seqlens")
    if len(context.outputs) > 3:
        raise context.unsupported("output output_qk")


def _length(context: OperatorContext) -> int:
    """Length of the cache that goes out."""
    past = context.signature.inputs[3]
    return max(0 if past is None else past.shape[2], context.int("total_sequence_length"))


def _group_operands(context: OperatorContext, operands: Operands) -> tuple[Tensor, Tensor, Tensor, int]:
    """Queries, keys and values by heads, and the width of a head."""
    first, heads, key_heads = present(operands, 0), context.int("num_heads"), context.int("kv_num_heads")
    if optional(operands, 1) is not None:
        width = context.input_shape(0)[2] // heads
        parts = (first, present(operands, 1), present(operands, 2))
    else:
        width = context.input_shape(0)[2] // (heads + 2 * key_heads)
        unit = first.shape[2] // (heads + 2 * key_heads)
        parts = first.split([heads * unit, key_heads * unit, key_heads * unit], -1)
    query, key, value = (by_heads(part, width) for part in parts)
    return query, key, value, width


def _group_norm_and_turn(
    context: OperatorContext,
    operands: Operands,
    query: Tensor,
    key: Tensor,
    starts: Tensor,
    held: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Queries and keys normalised by head, then turned by their positions, as far as the operator says so.

    Args:
        context: of the operator.
        operands: its local parts.
        query: by heads.
        key: by heads, without the cache.
        starts: per text, the position of the first new key.
        held: which of the queries and which of the new keys are here.
    """
    common = context.float("qk_norm_epsilon", 1e-6)
    query = _rms(query, optional(operands, 14), context.float("q_norm_epsilon", common))
    key = _rms(key, optional(operands, 15), context.float("k_norm_epsilon", common))
    if not context.flag("do_rotary"):
        return query, key
    positions = optional(operands, 9)
    if positions is None:
        new = context.input_shape(0 if optional(operands, 1) is None else 1)[1]
        positions = starts[:, None] + torch.arange(new, device=key.device)
    cosines, sines = present(operands, 7), present(operands, 8)
    interleaved = context.flag("rotary_interleaved")

    def turned(value: Tensor, at: Tensor) -> Tensor:
        return rotated(value, cosines[at].unsqueeze(1), sines[at].unsqueeze(1), interleaved=interleaved)

    return turned(query, positions[:, held[0]]), turned(key, positions[:, held[1]])


def _group_hides(context: OperatorContext, query: Tensor, positions: Tensor, lengths: Tensor, span: range) -> Tensor:
    """What hides keys that are later, too far back or beyond a text's end."""
    window = context.int("local_window_size", -1)
    if context.flag("causal", True):
        seen = within(positions, span, ahead=0, behind=window - 1 if window > 0 else -1)
    else:
        seen = (torch.arange(span.start, span.stop, device=query.device) < lengths[:, None]).unsqueeze(1)
    return hidden(seen.unsqueeze(1), query)


@operator("com.microsoft::DecoderMaskedMultiHeadAttention")
def decoder_masked_multi_head_attention(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """Attention of one query over a cache that it extends, or over keys of an encoder."""
    if optional(operands, 8) is not None or optional(operands, 9) is not None:
        raise context.unsupported("beam search")
    if len(context.outputs) > 3:
        raise context.unsupported("output qk")
    query, key, value = _decoder_operands(context, operands)
    length = key.shape[2]
    past, past_value = optional(operands, 5), optional(operands, 6)
    if past is not None and past_value is not None:
        shared = context.flag("past_present_share_buffer")
        start = int(present(operands, 7).reshape(-1)[0]) if shared else past.shape[2]
        room, length = past.shape[2] + (0 if shared else 1), start + 1
        if not 0 <= start < room:
            raise context.unsupported(f"a cache of {room} that holds {start} already")
        starts = torch.full((key.shape[0],), start, device=key.device)
        key, value = _written(past, key, starts, room), _written(past_value, value, starts, room)
    mask, added = optional(operands, 3), optional(operands, 4)
    bias = None if mask is None else mask_bias(context, mask, 3, length, query)
    if added is not None:
        bias = added[..., :length] if bias is None else bias + added[..., :length]
    scale = context.float("scale", 0.0) or 1.0 / math.sqrt(query.shape[3])
    done = attend(query, key[:, :, :length], value[:, :, :length], scale=scale, bias=bias)
    return (flat_heads(done.output), key, value)[: len(context.outputs)]


def _decoder_operands(context: OperatorContext, operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values by heads, with the bias added to what is not by heads already."""
    first, second, third, bias = (optional(operands, index) for index in (0, 1, 2, 10))
    assert first is not None
    heads = context.int("num_heads")
    if second is None or third is None:
        parts, widths = first.chunk(3, -1), (context.input_shape(0)[2] // (3 * heads),) * 3
    else:
        width, shape = context.input_shape(0)[2] // heads, context.input_shape(2)
        parts, widths = (first, second, third), (width, width, shape[3] if len(shape) == 4 else shape[2] // heads)
    sizes = [part.shape[1] * part.shape[3] if part.dim() == 4 else part.shape[2] for part in parts]
    pieces = [None] * 3 if bias is None else bias.split(sizes)
    query, key, value = (
        by_heads(part if piece is None or part.dim() == 4 else part + piece, width)
        for part, piece, width in zip(parts, pieces, widths, strict=True)
    )
    return query, key, value


@operator("com.microsoft::RotaryEmbedding")
def rotary_embedding(context: OperatorContext, operands: Operands) -> Tensor:
    """Rotation of pairs of a head's width, by positions that are given or count from one number."""
    if context.float("scale", 1.0) != 1.0:
        raise context.unsupported("a scale")
    value, positions, cosines, sines = (present(operands, index) for index in range(4))
    shape = context.input_shape(0)
    flat = len(shape) == 3
    split = by_heads(value, shape[2] // context.int("num_heads")) if flat else value
    if positions.dim() == 1:
        held = torch.as_tensor(context.input_indices(0, 1 if flat else 2), device=value.device)
        positions = (positions + held)[None]
    tables = (table[positions].unsqueeze(1) for table in (cosines, sines))
    result = rotated(split, *tables, interleaved=context.flag("interleaved"))
    return flat_heads(result) if flat else result
