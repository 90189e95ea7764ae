"""Fused attention and rotary embedding (opset 23 and later). Heads are counted from the local parts."""

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
    rotated,
    within,
)
from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present


def _widths(context: OperatorContext) -> tuple[int, int]:
    """Width of a query (and key) head and of a value head."""
    query, value = context.input_shape(0), context.input_shape(2)
    if len(query) == 4:
        return query[3], value[3]
    return query[2] // context.int("q_num_heads"), value[2] // context.int("kv_num_heads")


def _mask(operands: Operands, keys: int) -> Tensor | None:
    """The mask operand; keys beyond its end are hidden."""
    mask = optional(operands, 3)
    if mask is None or mask.shape[-1] >= keys:
        return mask
    fill = False if mask.dtype == torch.bool else -math.inf
    return torch.nn.functional.pad(mask, [0, keys - mask.shape[-1]], value=fill)


def _hides(
    context: OperatorContext, operands: Operands, query: Tensor, mask: Tensor | None, span: range
) -> Tensor | None:
    """What hides keys: a mask of truth values, bounds on the distance of keys, keys that are padding."""
    parts: list[Tensor] = []
    if mask is not None and mask.dtype == torch.bool:
        parts.append(hidden(mask[..., span.start : span.stop], query))
    behind, ahead = context.int("left_window_size", -1), context.int("right_window_size", -1)
    ahead = 0 if context.flag("is_causal") else ahead
    if behind >= 0 or ahead >= 0:
        positions = _positions(context, operands, query)
        parts.append(hidden(within(positions, span, behind=behind, ahead=ahead), query))
    valid = optional(operands, 6)
    if valid is not None:
        places = torch.arange(span.start, span.stop, device=query.device)
        parts.append(hidden(places < valid.reshape(-1, 1, 1, 1), query))
    return sum(parts[1:], parts[0]) if parts else None


def _positions(context: OperatorContext, operands: Operands, query: Tensor) -> Tensor:
    """Positions of the queries held here among the keys: after those of the cache."""
    dim = 1 if len(context.input_shape(0)) == 3 else 2
    held = torch.as_tensor(context.input_indices(0, dim), device=query.device)
    past, valid = optional(operands, 4), optional(operands, 6)
    if valid is not None:
        return held + (valid.reshape(-1, 1, 1) - context.input_shape(0)[dim])
    return held if past is None else held + past.shape[2]


@prepares("Attention")
def prepared_attention(context: OperatorContext, operands: Operands) -> Prepared:
    """Grouped key heads, cache, mask, window and soft cap."""
    width, value_width = _widths(context)
    query = by_heads(present(operands, 0), width)
    key, value = by_heads(present(operands, 1), width), by_heads(present(operands, 2), value_width)
    past_key, past_value = optional(operands, 4), optional(operands, 5)
    key = key if past_key is None else torch.cat([past_key, key], 2)
    value = value if past_value is None else torch.cat([past_value, value], 2)
    new_keys = context.input_shape(1)[1 if present(operands, 1).dim() == 3 else 2]
    mask = _mask(operands, new_keys + (0 if past_key is None else past_key.shape[2]))
    return Prepared(
        query,
        key,
        value,
        scale=context.float("scale", 1.0 / math.sqrt(width)),
        hides=lambda span: _hides(context, operands, query, mask, span),
        added=None if mask is None or mask.dtype == torch.bool else mask,
        softcap=context.float("softcap", 0.0),
        caches=(key, value)[: len(context.outputs) - 1],
    )


@operator("Attention")
def attention(context: OperatorContext, operands: Operands) -> Tensor | tuple[Tensor, ...]:
    """Scaled dot-product attention."""
    prepared = prepared_attention(context, operands)
    done = attend_prepared(prepared)
    result = flat_heads(done.output) if present(operands, 0).dim() == 3 else done.output
    modes = (done.scores, done.capped, done.biased, done.weights)
    shown = modes[context.int("qk_matmul_output_mode", 0)]
    return (result, *prepared.caches, shown)[: len(context.outputs)]


@operator("RotaryEmbedding")
def rotary_embedding(context: OperatorContext, operands: Operands) -> Tensor:
    """Rotation of pairs of a head's width by tabulated angles."""
    value, cosines, sines = (present(operands, index) for index in range(3))
    shape = context.input_shape(0)
    flat = len(shape) == 3
    heads = context.int("num_heads", 0) or 1
    split = by_heads(value, shape[2] // heads if flat else shape[3]).transpose(1, 2)
    positions = optional(operands, 3)
    if positions is not None:
        cosines, sines = cosines[positions], sines[positions]
    rotary = context.int("rotary_embedding_dim", 0) or split.shape[-1]
    cosines, sines = (table[..., : rotary // 2].unsqueeze(-2) for table in (cosines, sines))
    result = rotated(split, cosines, sines, interleaved=context.flag("interleaved"))
    return result.flatten(2) if flat else result.transpose(1, 2)
