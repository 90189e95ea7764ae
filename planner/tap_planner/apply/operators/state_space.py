"""Linear attention and causal convolution with a carried state. Heads are counted from the local parts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present


def _by_heads(value: Tensor, width: int) -> Tensor:
    """[b, t, heads x width] -> [b, heads, t, width]."""
    return value.unflatten(2, (value.shape[2] // width, width)).transpose(1, 2)


@operator("LinearAttention")
def linear_attention(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """A state per head that each step decays, corrects and writes, and that queries read (Yang et al. 2024)."""
    rule = context.text("update_rule", "gated_delta")
    width = context.input_shape(0)[2] // context.int("q_num_heads")
    value_width = context.input_shape(2)[2] // context.int("kv_num_heads")
    query, key = _by_heads(present(operands, 0), width), _by_heads(present(operands, 1), width)
    value = _by_heads(present(operands, 2), value_width)
    decay, rate, state = optional(operands, 4), optional(operands, 5), optional(operands, 3)
    heads = key.shape[1]
    if decay is not None:
        decay = torch.exp(_by_heads(decay, decay.shape[2] // heads))
    rate = None if rate is None else rate.transpose(1, 2).unsqueeze(-1)
    if state is None:
        state = value.new_zeros((*key.shape[:2], width, value_width))
    made: list[Tensor] = []
    for time in range(query.shape[2]):
        k, v = key[:, :, time], value[:, :, time]
        if rule in ("gated", "gated_delta"):
            assert decay is not None
            state = state * decay[:, :, time].unsqueeze(-1)
        if rule in ("delta", "gated_delta"):
            assert rate is not None
            v = rate[:, :, time] * (v - torch.einsum("bhde,bhd->bhe", state, k))
        state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
        seen = state.repeat_interleave(query.shape[1] // heads, 1)
        made.append(torch.einsum("bhd,bhde->bhe", query[:, :, time], seen))
    scale = context.float("scale", 0.0) or 1.0 / math.sqrt(width)
    result = scale * torch.stack(made, 1).flatten(2)
    return (result, state)[: len(context.outputs)]


@operator("CausalConvWithState")
def causal_convolution(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """A convolution per channel over current and past positions, and the positions that the next call needs."""
    value, weight = present(operands, 0), present(operands, 1)
    bias, past = optional(operands, 2), optional(operands, 3)
    carried = weight.shape[2] - 1
    padded = F.pad(value, [carried, 0]) if past is None else torch.cat([past, value], 2)
    result = F.conv1d(padded, weight, bias, groups=value.shape[1])
    if context.text("activation", "none") in ("silu", "swish"):
        result = F.silu(result)
    return (result, padded.narrow(2, padded.shape[2] - carried, carried).clone())[: len(context.outputs)]
