"""Losses that the file itself holds. Classes lie in dim 1 and are never split."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present


def _reduced(context: OperatorContext, scores: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Terms, their sum, or their mean: over the global count, or over the sum of the weights of what is not ignored."""
    labels, ignored = labels.to(torch.int64), context.signature.attribute("ignore_index")
    kept = torch.ne(labels, int(ignored)) if isinstance(ignored, int) else None
    known = labels if kept is None else torch.where(kept, labels, torch.zeros_like(labels))
    terms = -scores.gather(1, known.unsqueeze(1)).squeeze(1)
    factors = None if weights is None else weights[known]
    if kept is not None:
        factors = kept.to(scores.dtype) if factors is None else torch.where(kept, factors, torch.zeros_like(factors))
    if factors is not None:
        terms = terms * factors
    reduction = context.text("reduction", "mean")
    if reduction == "none":
        return terms
    if reduction == "sum":
        return terms.sum()
    if factors is not None:
        return terms.sum() / factors.sum()
    shape = context.input_shape(1)
    return terms.sum() / math.prod(shape)


@operator("NegativeLogLikelihoodLoss")
def negative_log_likelihood(context: OperatorContext, operands: Operands) -> Tensor:
    """Minus the score of the labelled class."""
    return _reduced(context, present(operands, 0), present(operands, 1), optional(operands, 2))


@operator("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """Minus the log-probability of the labelled class; and the log-probabilities."""
    logs = torch.log_softmax(present(operands, 0), 1)
    loss = _reduced(context, logs, present(operands, 1), optional(operands, 2))
    return (loss, logs)[: len(context.outputs)]
