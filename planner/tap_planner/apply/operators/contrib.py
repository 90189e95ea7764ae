"""Fused operators of the com.microsoft domain that are elementwise or normalise, and SwiGLU (opset 28)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present


@operator("com.microsoft::BiasGelu")
def bias_gelu(context: OperatorContext, operands: Operands) -> Tensor:
    """Gelu of a sum."""
    return F.gelu(present(operands, 0) + present(operands, 1))


@operator("com.microsoft::FastGelu")
def fast_gelu(context: OperatorContext, operands: Operands) -> Tensor:
    """Gelu by its approximation with tanh, of a sum where there is a bias."""
    value, bias = present(operands, 0), optional(operands, 1)
    return F.gelu(value if bias is None else value + bias, approximate="tanh")


@operator("com.microsoft::BiasSplitGelu")
def bias_split_gelu(context: OperatorContext, operands: Operands) -> Tensor:
    """The first half of the channels times the Gelu of the second."""
    first, second = (present(operands, 0) + present(operands, 1)).chunk(2, -1)
    return first * F.gelu(second)


@operator("com.microsoft::BiasSoftmax")
def bias_softmax(context: OperatorContext, operands: Operands) -> Tensor:
    """Softmax of a sum over the dims from the axis on, together."""
    total = present(operands, 0) + present(operands, 1)
    return torch.softmax(total.flatten(context.axis(1)), -1).reshape(total.shape)


@operator("SwiGLU")
def swiglu(context: OperatorContext, operands: Operands) -> Tensor:
    """``a sigmoid(alpha a) b``."""
    gate, value = present(operands, 0), present(operands, 1)
    return gate * torch.sigmoid(context.float("alpha", 1.0) * gate) * value


def _standardised(value: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Zero mean and unit variance over the last dim; mean; inverse deviation."""
    mean = value.mean(-1, keepdim=True)
    inverse = torch.rsqrt(((value - mean) ** 2).mean(-1, keepdim=True) + epsilon)
    return (value - mean) * inverse, mean, inverse


@operator("com.microsoft::SkipLayerNormalization")
def skip_layer_normalization(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """LayerNormalization of a sum; the sum is the fourth result."""
    beta, bias = optional(operands, 3), optional(operands, 4)
    total = present(operands, 0) + present(operands, 1)
    total = total if bias is None else total + bias
    normal, mean, inverse = _standardised(total, context.float("epsilon", 1e-12))
    result = normal * present(operands, 2)
    return (result if beta is None else result + beta, mean, inverse, total)[: len(context.outputs)]


@operator("com.microsoft::SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """RMSNormalization of a sum; there is no mean, and the sum is the fourth result."""
    bias = optional(operands, 3)
    total = present(operands, 0) + present(operands, 1)
    total = total if bias is None else total + bias
    inverse = torch.rsqrt((total * total).mean(-1, keepdim=True) + context.float("epsilon", 1e-12))
    result = total * inverse * present(operands, 2)
    return (result, torch.zeros_like(inverse), inverse, total)[: len(context.outputs)]


@operator("com.microsoft::EmbedLayerNormalization")
def embed_layer_normalization(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """LayerNormalization of the sum of rows of up to three tables; the number of valid words of each text."""
    words, segments, mask, positions = (optional(operands, index) for index in (0, 1, 7, 8))
    assert words is not None
    if positions is None:
        positions = torch.as_tensor(context.input_indices(0, 1), device=words.device)
    total = present(operands, 2)[words] + present(operands, 3)[positions]
    if segments is not None:
        total = total + present(operands, 4)[segments]
    normal, _, _ = _standardised(total, context.float("epsilon", 1e-12))
    result = normal * present(operands, 5) + present(operands, 6)
    if len(context.outputs) == 1:
        return (result,)
    valid = words.new_zeros(words.shape[0]) if mask is None else (mask == 1).sum(1)
    return (result, valid.to(torch.int32), total)[: len(context.outputs)]


def _group_normal(context: OperatorContext, operands: Operands, value: Tensor) -> Tensor:
    """Normalisation over the channels of a group and space, then scale, bias and perhaps SiLU."""
    last = context.flag("channels_last", True)
    size = context.input_shape(0)[-1 if last else 1] // context.int("groups")
    channels_first = value.movedim(-1, 1) if last else value
    grouped = channels_first.unflatten(1, (channels_first.shape[1] // size, size)).flatten(2)
    normal, _, _ = _standardised(grouped, context.float("epsilon", 1e-5))
    normal = normal.reshape(channels_first.shape)
    normal = normal.movedim(1, -1) if last else normal
    scale, bias = (_per_channel(present(operands, index), value, last=last) for index in (1, 2))
    result = normal * scale + bias
    return F.silu(result) if context.int("activation", 0) else result


def _per_channel(vector: Tensor, value: Tensor, *, last: bool) -> Tensor:
    """[c] or [n, c], so that it broadcasts to a value with space between (or behind) the two."""
    space = (1,) * (value.dim() - 2)
    shape = (*space, vector.shape[-1]) if last else (vector.shape[-1], *space)
    return vector.reshape(*vector.shape[:-1], *shape)


@operator("com.microsoft::GroupNorm")
def group_norm(context: OperatorContext, operands: Operands) -> Tensor:
    """GroupNormalization, perhaps with channels at the end and with SiLU behind it."""
    return _group_normal(context, operands, present(operands, 0))


@operator("com.microsoft::SkipGroupNorm")
def skip_group_norm(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """GroupNorm of a sum, which is the second result."""
    value, skip, bias = present(operands, 0), present(operands, 3), optional(operands, 4)
    last = context.flag("channels_last", True)
    total = value + (_per_channel(skip, value, last=last) if skip.dim() == 2 else skip)
    if bias is not None:
        total = total + _per_channel(bias, value, last=last)
    return (_group_normal(context, operands, total), total)[: len(context.outputs)]
