"""Attention in a ring: every rank has a part of the queries and of the keys, and keys and values go round.

Forward: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023. The parts
of a result are merged exactly, by the running maximum and sum of the softmax (Milakov, Gimelshein, 2018), so no rank
ever holds the scores of all keys. Backward makes the weights again from the sums (Dao et al., FlashAttention, 2022):
keys and values go round once more, and the gradients of a part travel from the rank behind its owner round to it.
Held in between are the local operands, the result, and one number for each query and head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tap_planner.apply.communicator import Axes, Bundle, Communicator, Parts, group_index, group_size
from tap_planner.apply.operators.attending import PREPARATIONS, Prepared, by_heads, flat_heads
from tap_planner.apply.operators.context import OperatorContext
from tap_planner.apply.operators.running import counted_elsewhere
from tap_planner.operators import rule_of

Rows = Sequence[Sequence[Tensor | None]]
"""Per rank, the local parts of the operands."""


def ring_axes(context: OperatorContext) -> Axes:
    """The axes on which keys go round as the operator is split; () where it is no ring."""
    rule = rule_of(context.signature)
    found: set[int] = set()
    for ring in rule.rings:
        position = ring.operands[0]
        dims, placements = rule.inputs[position], context.inputs[position]
        assert dims is not None and placements is not None
        whole = ring.queries if any(ring.queries in dim for dim in dims) else ring.keys
        found.update(a for a, p in enumerate(placements) if p.is_shard and whole in dims[p.dim])
    return tuple(sorted(found)) if math.prod(context.mesh_shape[axis] for axis in found) > 1 else ()


@dataclass(frozen=True, slots=True)
class RingRecord:
    """What the backward of a ring needs, per rank."""

    contexts: Sequence[OperatorContext]
    axes: Axes
    operands: Rows
    """Without those that are looked up."""
    renewed: Mapping[int, Callable[[], Parts]]
    """Operands that are made again until backward, and how to get at them then."""
    results: Parts
    """[batch, query heads, queries, value width]"""
    sums: Parts
    """Logarithms of the sums of exponentials, [batch, query heads, queries, 1]; infinite where no key is seen."""

    def backward(
        self, positions: Sequence[int], seeds: Sequence[Sequence[Tensor | None]], communicator: Communicator
    ) -> list[Parts]:
        """Gradients of operands.

        Args:
            positions: of which operands.
            seeds: per rank, gradients of the outputs.
            communicator: passes keys, values and their gradients round.

        Returns:
            Per position, one gradient per rank.
        """
        operands = [list(row) for row in self.operands]
        for position, look_up in self.renewed.items():
            for row, part in zip(operands, look_up(), strict=True):
                row[position] = part
        leaves = [_as_leaves(row, positions) for row in operands]
        with torch.enable_grad():
            prepared = [_prepare(context, row) for context, row in zip(self.contexts, leaves, strict=True)]
        gradients = self._ring(prepared, positions, seeds, communicator)
        columns: list[Parts] = [[] for _ in positions]
        for rank, (row, made, found) in enumerate(zip(leaves, prepared, gradients, strict=True)):
            wanted = [value for position in positions if (value := row[position]) is not None]
            pairs = [*found, *self._of_caches(rank, made, seeds[rank])]
            for column, gradient in zip(columns, _products(pairs, wanted), strict=True):
                column.append(gradient)
        return columns

    def _ring(
        self,
        prepared: Sequence[Prepared],
        positions: Sequence[int],
        seeds: Sequence[Sequence[Tensor | None]],
        communicator: Communicator,
    ) -> list[list[tuple[Tensor, Tensor]]]:
        """Per rank, pairs of what an attention works on and its gradient."""
        ranks = [
            _Differentiation(made, result, total, _seed(row[0], result))
            for made, result, total, row in zip(prepared, self.results, self.sums, seeds, strict=True)
        ]
        (exchange,) = (each for each in rule_of(self.contexts[0].signature).collectives if each.ring is not None)
        returned = any(position in (exchange.ring or ()) for position in positions)
        travelling: list[Bundle] = []
        own: list[Bundle] = []
        rounds = _rounds(self.contexts, self.axes, [rank.keys for rank in ranks], communicator)
        for step, parts in enumerate(rounds):
            made = [rank.add(bundle, span) for rank, (bundle, span) in zip(ranks, parts, strict=True)]
            if step == 0:
                own = made
            elif step == 1 or not returned:
                travelling = made
            else:
                travelling = communicator.ring_exchange(travelling, self.axes)
                travelling = [_added(a, b) for a, b in zip(travelling, made, strict=True)]
        if returned:
            own = [_added(a, b) for a, b in zip(own, communicator.ring_exchange(travelling, self.axes), strict=True)]
        return [rank.pairs(bundle) for rank, bundle in zip(ranks, own, strict=True)]

    def _of_caches(
        self, rank: int, prepared: Prepared, seeds: Sequence[Tensor | None]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for index, (cache, seed) in enumerate(zip(prepared.caches, seeds[1:], strict=True), start=1):
            if seed is not None and not counted_elsewhere(self.contexts[rank], index):
                yield cache, seed


def run_ring(
    contexts: Sequence[OperatorContext],
    rows: Rows,
    communicator: Communicator,
    renewed: Mapping[int, Callable[[], Parts]],
) -> tuple[list[tuple[Tensor, ...]], RingRecord]:
    """Outputs per rank, and what backward needs.

    Args:
        contexts: the operator on each rank of this process.
        rows: its local operands.
        communicator: passes keys and values round.
        renewed: operands that are not to be held, and how to get at them in backward.
    """
    axes = ring_axes(contexts[0])
    rows = [[None if value is None else value.detach() for value in row] for row in rows]
    with torch.no_grad():
        prepared = [_prepare(context, row) for context, row in zip(contexts, rows, strict=True)]
        softmaxes = [_RunningSoftmax(made) for made in prepared]
        for parts in _rounds(contexts, axes, [(made.key, made.value) for made in prepared], communicator):
            for softmax, (bundle, span) in zip(softmaxes, parts, strict=True):
                softmax.add(bundle, span)
        results, sums = zip(*(softmax.finished() for softmax in softmaxes), strict=True)
    outputs = [
        (flat_heads(result) if len(context.local_outputs[0]) == 3 else result, *made.caches)
        for context, result, made in zip(contexts, results, prepared, strict=True)
    ]
    held = [[None if position in renewed else value for position, value in enumerate(row)] for row in rows]
    return outputs, RingRecord(contexts, axes, held, renewed, list(results), list(sums))


def _prepare(context: OperatorContext, row: Sequence[Tensor | None]) -> Prepared:
    return PREPARATIONS[context.signature.type](context, row)


def _rounds(
    contexts: Sequence[OperatorContext], axes: Axes, parts: list[Bundle], communicator: Communicator
) -> Iterator[list[tuple[Bundle, range]]]:
    """Each part of the keys in turn: per rank, the part that is there now and the positions of its keys."""
    size = group_size(communicator.mesh_shape, axes)
    places = [group_index(communicator.mesh_shape, axes, context.coordinates) for context in contexts]
    for step in range(size):
        if step:
            parts = communicator.ring_exchange([tuple(p.contiguous() for p in bundle) for bundle in parts], axes)
        spans: list[range] = []
        for place, (key, _) in zip(places, parts, strict=True):
            first = (place - step) % size * key.shape[2]
            spans.append(range(first, first + key.shape[2]))
        yield list(zip(parts, spans, strict=True))


def _logits(prepared: Prepared, key: Tensor, span: range) -> tuple[Tensor, Tensor]:
    """Scores of queries and some keys with what is added to them, and before that."""
    scores = prepared.query @ _for_queries(key, prepared).mT * prepared.scale
    cap = prepared.softcap
    capped = cap * torch.tanh(scores / cap) if cap else scores
    bias = prepared.bias(span)
    return capped if bias is None else capped + bias, capped


def _for_queries(value: Tensor, prepared: Prepared) -> Tensor:
    """Keys or values, each head once for every query head that it serves."""
    return value.repeat_interleave(_group(prepared), 1)


def _group(prepared: Prepared) -> int:
    heads = prepared.key.shape[1]
    return prepared.query.shape[1] // heads if heads else 1


class _RunningSoftmax:
    """The softmax of the keys that came by so far, times their values, on one rank."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        query, sink = prepared.query, prepared.sink
        rows = (*query.shape[:3], 1)
        self._top = query.new_full(rows, -math.inf) if sink is None else sink.expand(rows)
        self._sum = query.new_zeros(rows) if sink is None else query.new_ones(rows)
        self._result = query.new_zeros((*query.shape[:3], prepared.value.shape[3]))

    def add(self, bundle: Bundle, span: range) -> None:
        """Take in the keys at some positions, and their values."""
        key, value = bundle
        logits, _ = _logits(self._prepared, key, span)
        top = torch.maximum(self._top, logits.amax(-1, keepdim=True))
        base = torch.where(top == -math.inf, torch.zeros_like(top), top)
        shrunk, weights = torch.exp(self._top - base), torch.exp(logits - base)
        self._sum = self._sum * shrunk + weights.sum(-1, keepdim=True)
        self._result = self._result * shrunk + weights @ _for_queries(value, self._prepared)
        self._top = top

    def finished(self) -> tuple[Tensor, Tensor]:
        """The result, and the logarithm of the sum; zero and infinity for queries that see no key."""
        seen = self._top > -math.inf
        total = torch.where(seen, self._sum, torch.ones_like(self._sum))
        return self._result / total, torch.where(seen, self._top + torch.log(total), math.inf)


class _Differentiation:
    """Gradients of one rank's queries, of what is added to its scores, and of the keys that come by."""

    def __init__(self, prepared: Prepared, result: Tensor, sums: Tensor, seed: Tensor) -> None:
        self._prepared = prepared
        self._sums, self._seed = sums, seed
        self._mean = (seed * result).sum(-1, keepdim=True)
        self._query = torch.zeros_like(prepared.query, memory_format=torch.contiguous_format)
        added = prepared.added
        if added is not None and added.requires_grad:
            self._added = torch.zeros_like(added, memory_format=torch.contiguous_format)
        else:
            self._added = None

    @property
    def keys(self) -> Bundle:
        """Keys and values that this rank holds."""
        return self._prepared.key.detach(), self._prepared.value.detach()

    @torch.no_grad()
    def add(self, bundle: Bundle, span: range) -> Bundle:
        """Take in the keys at some positions, and their values; returns what these queries add to the gradients."""
        key, value = bundle
        prepared, group = self._prepared, _group(self._prepared)
        logits, capped = _logits(prepared, key, span)
        weights = torch.exp(logits - self._sums)
        towards = weights * (self._seed @ _for_queries(value, prepared).mT - self._mean)
        if self._added is not None:
            place = self._added if self._added.shape[-1] == 1 else self._added[..., span.start : span.stop]
            place += towards.sum_to_size(place.shape)
        if prepared.softcap:
            towards = towards * (1 - (capped / prepared.softcap) ** 2)
        towards = towards * prepared.scale
        self._query += towards @ _for_queries(key, prepared)
        return _by_key_heads(towards.mT @ prepared.query, group), _by_key_heads(weights.mT @ self._seed, group)

    def pairs(self, of_keys: Bundle) -> list[tuple[Tensor, Tensor]]:
        """What this rank prepared, each with its gradient."""
        prepared = self._prepared
        found = [(prepared.query, self._query), (prepared.key, of_keys[0]), (prepared.value, of_keys[1])]
        if prepared.added is not None and self._added is not None:
            found.append((prepared.added, self._added))
        if prepared.sink is not None:
            towards = -torch.exp(prepared.sink.detach() - self._sums) * self._mean
            found.append((prepared.sink, towards.sum_to_size(prepared.sink.shape)))
        return found


def _by_key_heads(value: Tensor, group: int) -> Tensor:
    """The sum over the query heads that each key head serves."""
    return value.unflatten(1, (value.shape[1] // group, group)).sum(2)


def _added(first: Bundle, second: Bundle) -> Bundle:
    return tuple(a + b for a, b in zip(first, second, strict=True))


def _seed(seed: Tensor | None, result: Tensor) -> Tensor:
    """The gradient of the result by heads; zeros where there is none."""
    return torch.zeros_like(result) if seed is None else by_heads(seed, result.shape[3])


def _as_leaves(row: Sequence[Tensor | None], positions: Sequence[int]) -> list[Tensor | None]:
    return [
        None if value is None else value.detach().requires_grad_(position in positions)
        for position, value in enumerate(row)
    ]


def _products(pairs: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of ``wanted``, given those of tensors made of them."""
    live = [(made, seed) for made, seed in pairs if made.requires_grad]
    if not live:
        return [torch.zeros_like(value, memory_format=torch.contiguous_format) for value in wanted]
    made, seeds = zip(*live, strict=True)
    found = torch.autograd.grad(made, wanted, seeds, allow_unused=True)
    return [
        torch.zeros_like(value, memory_format=torch.contiguous_format) if gradient is None else gradient
        for value, gradient in zip(wanted, found, strict=True)
    ]
