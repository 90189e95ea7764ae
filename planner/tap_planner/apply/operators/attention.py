"""Fused attention and rotary embedding (opset 23). Heads are counted from the local parts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present


def _by_heads(value: Tensor, width: int) -> Tensor:
    """[B, S, heads x width] -> [B, heads, S, width]; 4-d operands are so already."""
    return value if value.dim() == 4 else value.unflatten(2, (value.shape[2] // max(width, 1), width)).transpose(1, 2)


def _widths(context: OperatorContext) -> tuple[int, int]:
    """Width of a query (and key) head and of a value head."""
    query, value = context.input_shape(0), context.input_shape(2)
    if len(query) == 4:
        return query[3], value[3]
    return query[2] // context.int("q_num_heads"), value[2] // context.int("kv_num_heads")


def _mask(operands: Operands, scores: Tensor, past: int, causal: bool) -> Tensor:
    """The scores with what may not be seen at minus infinity."""
    queries, keys = scores.shape[-2:]
    if causal:
        rows = torch.arange(queries, device=scores.device)[:, None]
        columns = torch.arange(keys, device=scores.device)[None, :]
        scores = scores.masked_fill(columns > rows + past, -math.inf)
    mask = optional(operands, 3)
    if mask is None:
        return scores
    if mask.shape[-1] < keys:
        fill = False if mask.dtype == torch.bool else -math.inf
        mask = torch.nn.functional.pad(mask, [0, keys - mask.shape[-1]], value=fill)
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


@operator("Attention")
def attention(context: OperatorContext, operands: Operands) -> Tensor | tuple[Tensor, ...]:
    """Scaled dot-product attention with grouped key heads, cache, mask and soft cap."""
    if optional(operands, 6) is not None:
        raise context.unsupported("operand nonpad_kv_seqlen")
    width, value_width = _widths(context)
    query = _by_heads(present(operands, 0), width)
    key, value = _by_heads(present(operands, 1), width), _by_heads(present(operands, 2), value_width)
    past_key, past_value = optional(operands, 4), optional(operands, 5)
    past = 0 if past_key is None else past_key.shape[2]
    key = key if past_key is None else torch.cat([past_key, key], 2)
    value = value if past_value is None else torch.cat([past_value, value], 2)
    scale = context.float("scale", 1.0 / math.sqrt(width))
    group = query.shape[1] // key.shape[1] if key.shape[1] else 1
    scores = query @ key.repeat_interleave(group, 1).mT * scale
    masked = _mask(operands, scores, past, context.flag("is_causal"))
    cap = context.float("softcap", 0.0)
    capped = cap * torch.tanh(masked / cap) if cap else masked
    weights = torch.softmax(capped, -1)
    result = weights @ value.repeat_interleave(group, 1)
    if present(operands, 0).dim() == 3:
        result = result.transpose(1, 2).flatten(2)
    modes = (scores, masked, capped, weights)
    return (result, key, value, modes[context.int("qk_matmul_output_mode", 0)])[: len(context.outputs)]


@operator("RotaryEmbedding")
def rotary_embedding(context: OperatorContext, operands: Operands) -> Tensor:
    """Rotation of pairs of a head's width by tabulated angles."""
    value, cosines, sines = (present(operands, index) for index in range(3))
    shape = context.input_shape(0)
    flat = len(shape) == 3
    heads = context.int("num_heads", 0) or 1
    split = _by_heads(value, shape[2] // heads if flat else shape[3]).transpose(1, 2)
    positions = optional(operands, 3)
    if positions is not None:
        cosines, sines = cosines[positions], sines[positions]
    rotary = context.int("rotary_embedding_dim", 0) or split.shape[-1]
    cosines, sines = (table[..., : rotary // 2].unsqueeze(-2) for table in (cosines, sines))
    turned, rest = split[..., :rotary], split[..., rotary:]
    if context.flag("interleaved"):
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, -1)
    real, imaginary = cosines * first - sines * second, sines * first + cosines * second
    if context.flag("interleaved"):
        turned = torch.stack([real, imaginary], -1).flatten(-2)
    else:
        turned = torch.cat([real, imaginary], -1)
    result = torch.cat([turned, rest], -1)
    return result.flatten(2) if flat else result.transpose(1, 2)
