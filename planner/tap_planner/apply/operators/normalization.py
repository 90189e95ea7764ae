"""Normalisations. Normalised dims are never split."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present


def _per_channel(value: Tensor, rank: int) -> Tensor:
    """A channel vector that broadcasts against [N, C, ...]."""
    return value.reshape(-1, *(1,) * max(rank - 2, 0))


@operator("LayerNormalization")
def layer_normalization(context: OperatorContext, operands: Operands) -> Tensor | tuple[Tensor, ...]:
    """Zero mean and unit variance over trailing dims, then scale and bias."""
    value, scale, bias = present(operands, 0), present(operands, 1), optional(operands, 2)
    dims = tuple(range(context.axis(-1), value.dim()))
    epsilon = context.float("epsilon", 1e-5)
    mean = value.mean(dims, keepdim=True)
    inverse = torch.rsqrt(((value - mean) ** 2).mean(dims, keepdim=True) + epsilon)
    result = (value - mean) * inverse * scale
    result = result if bias is None else result + bias
    return (result, mean, inverse)[: len(context.outputs)]


@operator("RMSNormalization")
def rms_normalization(context: OperatorContext, operands: Operands) -> Tensor:
    """Unit mean square over trailing dims, then scale."""
    value, scale = present(operands, 0), present(operands, 1)
    dims = tuple(range(context.axis(-1), value.dim()))
    inverse = torch.rsqrt((value * value).mean(dims, keepdim=True) + context.float("epsilon", 1e-5))
    return value * inverse * scale


@operator("BatchNormalization")
def batch_normalization(context: OperatorContext, operands: Operands) -> Tensor | tuple[Tensor, ...]:
    """Stored statistics; in training mode those of the batch, with the running ones as further outputs."""
    value, scale, bias, mean, variance = (present(operands, index) for index in range(5))
    rank, epsilon = value.dim(), context.float("epsilon", 1e-5)
    outputs: tuple[Tensor, ...] = ()
    if context.flag("training_mode"):
        dims = (0, *range(2, rank))
        momentum = context.float("momentum", 0.9)
        batch_mean, batch_variance = value.mean(dims), value.var(dims, correction=0)
        outputs = (
            mean * momentum + batch_mean.detach() * (1 - momentum),
            variance * momentum + batch_variance.detach() * (1 - momentum),
        )
        mean, variance = batch_mean, batch_variance
    factor = torch.rsqrt(variance + epsilon)
    normal = (value - _per_channel(mean, rank)) * _per_channel(factor, rank)
    result = normal * _per_channel(scale, rank) + _per_channel(bias, rank)
    return (result, *outputs)[: len(context.outputs)]


def _over(value: Tensor, dims: tuple[int, ...], epsilon: float) -> Tensor:
    mean = value.mean(dims, keepdim=True)
    return (value - mean) * torch.rsqrt(((value - mean) ** 2).mean(dims, keepdim=True) + epsilon)


@operator("InstanceNormalization")
def instance_normalization(context: OperatorContext, operands: Operands) -> Tensor:
    """Over space, per instance and channel."""
    value, scale, bias = (present(operands, index) for index in range(3))
    normal = _over(value, tuple(range(2, value.dim())), context.float("epsilon", 1e-5))
    return normal * _per_channel(scale, value.dim()) + _per_channel(bias, value.dim())


@operator("GroupNormalization")
def group_normalization(context: OperatorContext, operands: Operands) -> Tensor:
    """Over the channels of a group and space; scale and bias per channel, or per group before opset 21."""
    value, scale, bias = (present(operands, index) for index in range(3))
    channels = context.input_shape(0)[1] // context.int("num_groups")
    grouped = value.unflatten(1, (value.shape[1] // channels, channels))
    normal = _over(grouped, tuple(range(2, grouped.dim())), context.float("epsilon", 1e-5)).reshape(value.shape)
    if scale.shape[0] != value.shape[1]:
        scale, bias = scale.repeat_interleave(channels), bias.repeat_interleave(channels)
    return normal * _per_channel(scale, value.dim()) + _per_channel(bias, value.dim())


@operator("LRN")
def local_response_normalization(context: OperatorContext, operands: Operands) -> Tensor:
    """Division by a power of the squares of neighbouring channels."""
    value, size = present(operands, 0), context.int("size")
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    pads = [0, 0] * (value.dim() - 2) + [before, after]
    squares = F.pad(value * value, pads).unfold(1, size, 1).sum(-1)
    alpha, beta = context.float("alpha", 1e-4), context.float("beta", 0.75)
    return value / (context.float("bias", 1.0) + alpha / size * squares) ** beta


@operator("MeanVarianceNormalization")
def mean_variance_normalization(context: OperatorContext, operands: Operands) -> Tensor:
    """Zero mean and unit variance over dims (the epsilon is that of the ONNX function body)."""
    value = present(operands, 0)
    dims = tuple(dim % value.dim() for dim in context.ints("axes", (0, 2, 3)))
    mean = value.mean(dims, keepdim=True)
    deviation = torch.sqrt((value * value).mean(dims, keepdim=True) - mean * mean)
    return (value - mean) / (deviation + 1e-9)
