"""Scaled dot-product attention on local parts: what all fused attention operators have in common.

An operator *prepares* what it works on: queries, keys and values by heads, and what is added to the scores. What then
happens is the same for all: attention here (``attend_prepared``), or in a ring of ranks (``ring``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext


class Attended(NamedTuple):
    """Result of an attention and the stages on the way to it, each [batch, query heads, queries, keys]."""

    output: Tensor
    """[batch, query heads, queries, value width]"""
    scores: Tensor
    """Scaled products of queries and keys."""
    capped: Tensor
    """Scores after the soft cap."""
    biased: Tensor
    """Capped scores with bias and masks added."""
    weights: Tensor
    """What each key counts for."""


class Prepared(NamedTuple):
    """What an attention works on. In a ring keys and values are a part of all keys."""

    query: Tensor
    """[batch, query heads, queries, width]"""
    key: Tensor
    """[batch, key heads, keys, width]"""
    value: Tensor
    """[batch, key heads, keys, value width]"""
    scale: float
    hides: Callable[[range], Tensor | None]
    """Positions of keys -> what hides some of them from queries, added to the scores; no gradient reaches it."""
    added: Tensor | None = None
    """Added to the scores of all keys; gradients reach it."""
    softcap: float = 0.0
    sink: Tensor | None = None
    caches: tuple[Tensor, ...] = ()
    """Outputs beside the result, made of keys and values."""

    def bias(self, span: range) -> Tensor | None:
        """What is added to the (capped) scores of the keys at some positions."""
        parts = [part for part in (self.added_to(span), self.hides(span)) if part is not None]
        return sum(parts[1:], parts[0]) if parts else None

    def added_to(self, span: range) -> Tensor | None:
        """The part of ``added`` for the keys at some positions."""
        added = self.added
        return added if added is None or added.shape[-1] == 1 else added[..., span.start : span.stop]


Preparation = Callable[[OperatorContext, Operands], Prepared]
_Preparation = TypeVar("_Preparation", bound=Preparation)

PREPARATIONS: dict[str, Preparation] = {}
"""Of the attention operators that can run in a ring."""


def prepares(name: str) -> Callable[[_Preparation], _Preparation]:
    """Registers how an operator prepares an attention."""

    def register(function: _Preparation) -> _Preparation:
        PREPARATIONS[name] = function
        return function

    return register


def attend_prepared(prepared: Prepared) -> Attended:
    """Attention where all keys are here."""
    return attend(
        prepared.query,
        prepared.key,
        prepared.value,
        scale=prepared.scale,
        bias=prepared.bias(range(prepared.key.shape[2])),
        softcap=prepared.softcap,
        sink=prepared.sink,
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
) -> Attended:
    """Softmax of scaled products of queries and keys, times values.

    Args:
        query: [batch, query heads, queries, width].
        key: [batch, key heads, keys, width]; each head serves equally many consecutive query heads.
        value: [batch, key heads, keys, value width].
        scale: factor of the products.
        bias: added to the products (after the cap); where it is minus infinity a key is not seen. A query that sees
            no key has a result of zero.
        softcap: bound of the products, 0 for none.
        sink: logits that are part of the softmax but have no value, broadcast to [batch, query heads, queries, 1].
    """
    group = query.shape[1] // key.shape[1] if key.shape[1] else 1
    scores = query @ key.repeat_interleave(group, 1).mT * scale
    capped = softcap * torch.tanh(scores / softcap) if softcap else scores
    biased = capped if bias is None else capped + bias
    blind = None if bias is None else (bias == -math.inf).all(-1, keepdim=True)
    logits = biased if blind is None else torch.where(blind, torch.zeros_like(biased), biased)
    if sink is not None:
        logits = torch.cat([logits, sink.expand(*logits.shape[:-1], 1)], -1)
    weights = torch.softmax(logits, -1)[..., : key.shape[2]]
    if blind is not None:
        weights = torch.where(blind, torch.zeros_like(weights), weights)
    return Attended(weights @ value.repeat_interleave(group, 1), scores, capped, biased, weights)


def by_heads(value: Tensor, width: int) -> Tensor:
    """[B, S, heads x width] -> [B, heads, S, width]; 4-d operands are so already."""
    return value if value.dim() == 4 else value.unflatten(2, (value.shape[2] // max(width, 1), width)).transpose(1, 2)


def flat_heads(value: Tensor) -> Tensor:
    """[B, heads, S, width] -> [B, S, heads x width]."""
    return value.transpose(1, 2).flatten(2)


def hidden(visible: Tensor, like: Tensor, fill: float = -math.inf) -> Tensor:
    """The bias that hides what is not visible: 0 where ``visible`` holds, ``fill`` elsewhere."""
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill(~visible, fill)


def within(positions: Tensor, keys: range, *, behind: int = -1, ahead: int = -1) -> Tensor:
    """Which keys queries at these positions see.

    Args:
        positions: [.., queries], of the queries among the keys.
        keys: positions of the keys.
        behind: how many keys before its own position a query sees; -1 for all.
        ahead: how many keys after its own position a query sees; -1 for all.

    Returns:
        [.., queries, keys], bool.
    """
    distance = torch.arange(keys.start, keys.stop, device=positions.device) - positions.unsqueeze(-1)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if ahead >= 0:
        seen &= distance <= ahead
    if behind >= 0:
        seen &= distance >= -behind
    return seen


def rotated(value: Tensor, cosines: Tensor, sines: Tensor, *, interleaved: bool) -> Tensor:
    """Pairs of the leading elements of the last dim rotated by angles; elements beyond the pairs stay.

    Args:
        value: [.., width].
        cosines: broadcast to [.., pairs].
        sines: broadcast to [.., pairs].
        interleaved: pairs are neighbours rather than an element of each half.
    """
    pairs = cosines.shape[-1]
    turned, rest = value[..., : 2 * pairs], value[..., 2 * pairs :]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = [cosines * first - sines * second, sines * first + cosines * second]
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([turned, rest], -1)
