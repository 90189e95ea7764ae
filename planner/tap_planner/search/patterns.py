"""Terms of few consumers in the exact stage, however many destinations there are: a variable that says who agrees.

What a tensor costs is the sum of what every consumer would cost alone, less what is not paid twice where consumers
want the same destination. The value of a *pattern variable* says which consumers agree, and on what: it takes off what
they save, and forbids them everything else. Saying of consumers who agree that they do not takes nothing off, so the
least over all patterns is the exact price, and a clique over all consumers becomes pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tap_planner.search.configuration import Recompute
from tap_planner.search.factors import INFINITE, WidthError
from tap_planner.search.terms import SCALE, UNREACHABLE, RegionPolicy, Slot, Term

MAX_AGREEING = 4
"""Consumers up to which all patterns are enumerated."""
MAX_PATTERNS = 1500
"""Values that a pattern variable may have."""

_Slots = tuple[int, ...]
"""Places of slots, ascending."""
_Edges = dict[_Slots, tuple[int, int]]
"""By slots that want the same destination and gradient, these two."""
_Copies = dict[_Slots, int]
"""By slots that want the same destination, whatever their gradients, the destination."""


@dataclass(frozen=True, slots=True)
class _Pattern:
    edges: _Edges = field(default_factory=dict)
    copies: _Copies = field(default_factory=dict)


class PatternTerm:
    """A term with all ways in which its consumers can agree.

    Args:
        term: the tensor.
        consumers: every consumer with its possible values.
        most: patterns that are still enumerated.

    Raises:
        WidthError: there are too many consumers or patterns.
    """

    def __init__(self, term: Term, consumers: Sequence[tuple[int, np.ndarray]], most: int = MAX_PATTERNS) -> None:
        if len(term.slots) > MAX_AGREEING:
            raise WidthError(f"{len(term.slots)} operands that read one tensor")
        self.term = term
        self._values = dict(consumers)
        self._patterns = tuple(itertools.islice(self._all_patterns(), most + 1))
        if len(self._patterns) > most:
            raise WidthError(f"more than {most} ways in which the readers of one tensor agree")

    @property
    def num_patterns(self) -> int:
        """Number of values of the pattern variable."""
        return len(self._patterns)

    # -- patterns ----------------------------------------------------------------------------------------------

    def _all_patterns(self) -> Iterator[_Pattern]:
        for blocks in _partitions(tuple(range(len(self.term.slots)))):
            options = [list(self._agreements(block)) for block in blocks if len(block) > 1]
            for chosen in itertools.product(*options):
                yield _Pattern(
                    {slots: key for found in chosen for slots, key in found.edges.items()},
                    {slots: state for found in chosen for slots, state in found.copies.items()},
                )

    def _agreements(self, block: _Slots) -> Iterator[_Pattern]:
        """All ways in which the slots of a block want one destination."""
        for destination in sorted(set.intersection(*({d for d, _ in self._wanted(i)} for i in block))):
            for parts in _partitions(block):
                if len(parts) > 1 and not all(any(self._may_keep(i) for i in part) for part in parts):
                    continue  # a part that keeps nothing saves nothing by belonging to the block
                agreeing = [part for part in parts if len(part) > 1]
                gradients = [
                    sorted(set.intersection(*({g for d, g in self._wanted(i) if d == destination} for i in part)))
                    for part in agreeing
                ]
                for chosen in itertools.product(*gradients):
                    edges = {part: (destination, g) for part, g in zip(agreeing, chosen, strict=True)}
                    yield _Pattern(edges, {block: destination})

    def _wanted(self, position: int) -> set[tuple[int, int]]:
        slot = self.term.slots[position]
        values = self._values[slot.variable]
        return set(zip(slot.destination[values].tolist(), slot.gradient[values].tolist(), strict=True))

    def _may_keep(self, position: int) -> bool:
        slot = self.term.slots[position]
        return self.term.is_activation and (slot.kept or slot.rerun or self.term.producer is None)

    # -- tables ------------------------------------------------------------------------------------------------

    def allowed(self, reader: int) -> np.ndarray:
        """[patterns, values] 0 where a reader wants what the pattern says, else ``INFINITE``."""
        values = self._values[reader]
        allowed = np.ones((len(self._patterns), len(values)), dtype=bool)
        for position, slot in enumerate(self.term.slots):
            if slot.variable != reader:
                continue
            destination, gradient = slot.destination[values], slot.gradient[values]
            for number, pattern in enumerate(self._patterns):
                for slots, state in pattern.copies.items():
                    if position in slots:
                        allowed[number] &= destination == state
                for slots, (_, state) in pattern.edges.items():
                    if position in slots:
                        allowed[number] &= gradient == state
        return np.where(allowed, 0, int(INFINITE))

    def producers_copy(self, values: np.ndarray, policy: RegionPolicy) -> tuple[np.ndarray, np.ndarray]:
        """([producer's values] SCALE x ns, SCALE x bytes) of the copy that is held where it was made.

        Args:
            values: possible values of the producer.
            policy: treatment of regions.
        """
        term = self.term
        none = np.zeros(len(values), dtype=np.int64)
        held = self._holds_source(policy) and term.is_activation
        return none, term.state_bytes[term.source[values]] * SCALE if held else none

    def alone(self, reader: int, values: np.ndarray, policy: RegionPolicy) -> tuple[np.ndarray, np.ndarray]:
        """([producer's values, reader's values] SCALE x ns, SCALE x bytes) of what a reader costs by itself.

        Args:
            reader: which one.
            values: possible values of the producer.
            policy: treatment of regions.
        """
        term = self.term
        wanted = self._values[reader]
        ns = np.zeros((len(values), len(wanted)), dtype=np.int64)
        num_bytes = np.zeros_like(ns)
        for slot in term.slots:
            if slot.variable == reader:
                destination = slot.destination[wanted]
                ns += self._edge_ns(values, destination, slot.gradient[wanted], self._times([slot], policy), 1)
                if self._keeps(slot, policy):
                    num_bytes += self._copy_bytes(values, destination, policy)
        return np.where(ns >= UNREACHABLE, int(INFINITE), ns * SCALE), num_bytes * SCALE

    def savings(self, values: np.ndarray, policy: RegionPolicy) -> tuple[np.ndarray, np.ndarray]:
        """([producer's values, patterns] SCALE x ns, SCALE x bytes) of what agreeing takes off: at most 0.

        Args:
            values: possible values of the producer.
            policy: treatment of regions.

        Raises:
            WidthError: readers in several regions of which one runs again as a whole: what they cost together is not
                what they cost alone less what they save.
        """
        regions = {slot.region for slot in self.term.slots}
        if len(regions) > 1 and any(policy.mode(region) is Recompute.FULL for region in regions):
            raise WidthError("readers in several regions, of which one runs again as a whole")
        ns = np.zeros((len(values), len(self._patterns)), dtype=np.int64)
        num_bytes = np.zeros_like(ns)
        for slots in {slots for pattern in self._patterns for slots in pattern.edges}:
            found = [(n, *pattern.edges[slots]) for n, pattern in enumerate(self._patterns) if slots in pattern.edges]
            numbers, destination, gradient = np.array(found, dtype=np.int64).T
            chosen = [self.term.slots[i] for i in slots]
            times = self._times(chosen, policy) - sum(self._times([slot], policy) for slot in chosen)
            saved = self._edge_ns(values, destination, gradient, times, 1 - len(slots))
            ns[:, numbers] += np.where(saved <= -UNREACHABLE, 0, saved)
        for slots in {slots for pattern in self._patterns for slots in pattern.copies}:
            keeping = sum(self._keeps(self.term.slots[i], policy) for i in slots)
            if keeping < 2:
                continue
            found = [(n, pattern.copies[slots]) for n, pattern in enumerate(self._patterns) if slots in pattern.copies]
            numbers, destination = np.array(found, dtype=np.int64).T
            num_bytes[:, numbers] -= (keeping - 1) * self._copy_bytes(values, destination, policy)
        return ns * SCALE, num_bytes * SCALE

    # -- costs -------------------------------------------------------------------------------------------------

    def _edge_ns(
        self, values: np.ndarray, destination: np.ndarray, gradient: np.ndarray, times: int, back: int
    ) -> np.ndarray:
        """[producer's values, destinations] ``times`` x the forward and ``back`` x the backward redistribution."""
        term = self.term
        ns = np.zeros((len(values), len(destination)), dtype=np.int64)
        if term.producer is not None:
            ns += term.cost_ns[term.source[values][:, None], destination[None, :]] * times
        return ns + np.where(gradient >= 0, term.cost_ns[gradient[None, :], term.wanted[values][:, None]], 0) * back

    def _copy_bytes(self, values: np.ndarray, destination: np.ndarray, policy: RegionPolicy) -> np.ndarray:
        """[producer's values, destinations] bytes of a held copy, unless it is the producer's, which is held anyway."""
        term = self.term
        if not term.is_activation:
            return np.zeros((len(values), len(destination)), dtype=np.int64)
        num_bytes = np.broadcast_to(term.state_bytes[destination][None, :], (len(values), len(destination)))
        if not self._holds_source(policy):
            return num_bytes
        return np.where(term.source[values][:, None] == destination[None, :], 0, num_bytes)

    def _is_remade(self, policy: RegionPolicy) -> bool:
        return self.term.producer_rerun and policy.mode(self.term.producer_region) is Recompute.SELECTIVE

    def _times(self, slots: Iterable[Slot], policy: RegionPolicy) -> int:
        """How often readers who agree have the forward redistribution."""
        remade = self._is_remade(policy)
        again = (policy.mode(slot.region) is Recompute.FULL or (remade and (slot.kept or slot.rerun)) for slot in slots)
        return 2 if any(again) else 1

    def _keeps(self, slot: Slot, policy: RegionPolicy) -> bool:
        """Whether a reader makes sure that the copy which it reads is held."""
        mode, remade = policy.mode(slot.region), self._is_remade(policy)
        if slot.kept and policy.counts(slot.region, remade=remade):
            return True
        if mode is Recompute.SELECTIVE and slot.rerun and not remade:
            return True
        return mode is Recompute.FULL and self.term.producer is None

    def _holds_source(self, policy: RegionPolicy) -> bool:
        """Whether the producer's own copy is held, whatever readers want."""
        term = self.term
        if term.producer is None:
            return False
        if term.producer_keeps and policy.counts(term.producer_region, remade=self._is_remade(policy)):
            return True
        return any(policy.mode(s.region) is Recompute.FULL and s.region != term.producer_region for s in term.slots)


def _partitions(items: _Slots) -> Iterator[tuple[_Slots, ...]]:
    """All ways to part a sequence into groups, the finest first."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = tuple(item for item in rest if item not in others)
            for parts in _partitions(left):
                yield ((first, *others), *parts)
