"""Random numbers by counter: a hash of key and global position, so that parts agree however a tensor is split.

The generator is that of random weights (``random_part``): splitmix64's finaliser over a counter. A file's seed keys it,
else the operator's id; further keys tell apart the steps and the streams of one operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, present, torch_dtype
from tap_planner.apply.weights import random_part


def _uniform(
    context: OperatorContext,
    stream: str,
    *,
    shape: tuple[int, ...] | None = None,
    indices: Sequence[np.ndarray] | None = None,
) -> np.ndarray:
    """Numbers in [0, 1) at this rank's positions of the first output, or at ``indices`` of ``shape``."""
    seed = context.signature.attribute("seed")
    key = f"{stream} {context.id if seed is None else seed} {context.step}"
    shape = context.signature.outputs[0].shape if shape is None else shape
    return random_part(key, shape, context.output_indices(0) if indices is None else indices, 0)


def _made(context: OperatorContext, operands: Operands, value: np.ndarray) -> Tensor:
    dtype = torch_dtype(context.signature.outputs[0].dtype, context.dtype)
    device = present(operands, 0).device if operands else torch.device("cpu")
    return torch.from_numpy(np.ascontiguousarray(value)).to(device, dtype)


@operator("RandomUniform", "RandomUniformLike")
def random_uniform(context: OperatorContext, operands: Operands) -> Tensor:
    """Uniform in [low, high)."""
    low, high = context.float("low", 0.0), context.float("high", 1.0)
    return _made(context, operands, low + (high - low) * _uniform(context, "uniform"))


@operator("RandomNormal", "RandomNormalLike")
def random_normal(context: OperatorContext, operands: Operands) -> Tensor:
    """Normal by mean and scale (Box and Muller 1958)."""
    radius = np.sqrt(-2.0 * np.log1p(-_uniform(context, "radius")))
    value = radius * np.cos(2.0 * math.pi * _uniform(context, "angle"))
    return _made(context, operands, context.float("mean", 0.0) + context.float("scale", 1.0) * value)


@operator("Bernoulli")
def bernoulli(context: OperatorContext, operands: Operands) -> Tensor:
    """One with the probability that the operand gives, else zero."""
    odds = present(operands, 0)
    drawn = torch.from_numpy(_uniform(context, "bernoulli")).to(odds.device)
    return (drawn < odds).to(torch_dtype(context.signature.outputs[0].dtype, context.dtype))


@operator("Multinomial")
def multinomial(context: OperatorContext, operands: Operands) -> Tensor:
    """Classes drawn by unnormalised log-probabilities, by inverting their cumulative sums."""
    logits = present(operands, 0)
    sums = torch.softmax(logits.double(), -1).cumsum(-1)
    drawn = torch.from_numpy(_uniform(context, "multinomial")).to(logits.device)
    picked = torch.searchsorted(sums, drawn * sums[:, -1:], right=True).clamp(max=logits.shape[1] - 1)
    return picked.to(torch_dtype(context.signature.outputs[0].dtype, context.dtype))


@operator("Dropout")
def dropout(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """Drops each element with probability ``ratio`` and scales the others by its inverse; and the mask of these."""
    value, ratio = present(operands, 0), context.float("ratio", 0.0)
    if ratio == 0.0:
        kept = torch.ones_like(value, dtype=torch.bool)
        result = value.clone()
    else:
        kept = torch.from_numpy(_uniform(context, "dropout") >= ratio).to(value.device)
        result = torch.where(kept, value, torch.zeros_like(value)) / max(1.0 - ratio, 1e-300)
    masks = [kept.to(torch_dtype(found.dtype, context.dtype)) for found in context.signature.outputs[1:]]
    return (result, *masks)
