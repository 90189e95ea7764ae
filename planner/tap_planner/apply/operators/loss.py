"""The loss: the only operator that communicates, with its gradient written by hand.

Cross-entropy over a split vocabulary follows Megatron-LM (Shoeybi et al. 2019, section 3): one all-reduce of the
largest logits, one of the sums of exponentials together with the labels' logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.communicator import Communicator
from tap_planner.apply.operators.context import Operands, OperatorContext, present


@dataclass(frozen=True, slots=True)
class LossRecord:
    """What the backward of the loss needs, per rank."""

    gradients: tuple[Tensor, ...]
    """Gradient of the loss with respect to its first operand."""

    def backward(self, seeds: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the first operand, given the gradient of the loss on each rank."""
        return [gradient * seed for gradient, seed in zip(self.gradients, seeds, strict=True)]


def run_loss(
    contexts: Sequence[OperatorContext], operands: Sequence[Operands], communicator: Communicator
) -> tuple[list[Tensor], LossRecord]:
    """Value of the loss on each rank (a sum of terms over the global count) and what backward needs."""
    kind = contexts[0].text("kind")
    count = contexts[0].int("count", 1) if kind != "sum" else 1
    values = [present(each, 0) for each in operands]
    if kind != "cross-entropy":
        gradients = tuple(torch.full_like(value, 1.0 / count) for value in values)
        return [value.sum() / count for value in values], LossRecord(gradients)
    labels = [present(each, 1) for each in operands]
    return _cross_entropy(contexts, values, labels, count, communicator)


def _vocabulary_axes(context: OperatorContext) -> tuple[int, ...]:
    placements = context.inputs[0]
    assert placements is not None
    last = len(context.input_shape(0)) - 1
    return tuple(axis for axis, placement in enumerate(placements) if placement.is_shard and placement.dim == last)


def _cross_entropy(
    contexts: Sequence[OperatorContext],
    logits: Sequence[Tensor],
    labels: Sequence[Tensor],
    count: int,
    communicator: Communicator,
) -> tuple[list[Tensor], LossRecord]:
    axes = _vocabulary_axes(contexts[0])
    largest = [_largest(value) for value in logits]
    if axes:
        largest = communicator.all_reduce(largest, axes, "max")
    hits = [_hits(context, label) for context, label in zip(contexts, labels, strict=True)]
    exponentials = [torch.exp(value - top.unsqueeze(-1)) for value, top in zip(logits, largest, strict=True)]
    packed = [
        torch.stack([exponential.sum(-1), _picked(value, hit)])
        for exponential, value, hit in zip(exponentials, logits, hits, strict=True)
    ]
    if axes:
        packed = communicator.all_reduce(packed, axes)
    losses: list[Tensor] = []
    gradients: list[Tensor] = []
    for top, (total, target), exponential, hit in zip(largest, packed, exponentials, hits, strict=True):
        losses.append((torch.log(total) + top - target).sum() / count)
        probability = exponential / total.unsqueeze(-1)
        gradients.append(_minus_one_at(probability, hit) / count)
    return losses, LossRecord(tuple(gradients))


def _largest(logits: Tensor) -> Tensor:
    if logits.shape[-1] == 0:
        return logits.new_full(logits.shape[:-1], -torch.inf)
    return logits.amax(-1)


def _hits(context: OperatorContext, labels: Tensor) -> Tensor:
    """Local position of each label in the vocabulary, -1 where another rank holds it."""
    size = context.input_shape(0)[-1]
    held = context.input_indices(0, len(context.input_shape(0)) - 1)
    positions = np.full(size, -1, np.int64)
    positions[held] = np.arange(len(held))
    return torch.from_numpy(positions).to(labels.device)[labels.to(torch.int64)]


def _picked(logits: Tensor, hits: Tensor) -> Tensor:
    if logits.shape[-1] == 0:
        return logits.new_zeros(hits.shape)
    values = logits.gather(-1, hits.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(hits >= 0, values, torch.zeros_like(values))


def _minus_one_at(probability: Tensor, hits: Tensor) -> Tensor:
    if probability.shape[-1] == 0:
        return probability
    ones = (hits >= 0).to(probability.dtype).unsqueeze(-1)
    return probability.scatter_add(-1, hits.clamp(min=0).unsqueeze(-1), -ones)
