"""Terms: what a tensor costs, given the strategies of its producer and of all its consumers.

A term holds the redistributions of a tensor (one per distinct destination and gradient placement, paid once) and the
memory of what backward keeps of it (one entry per distinct placement), as definitions.md has it. It couples the
producer with every consumer; ``dense`` gives the exact table, ``shares`` a lower bound that is a sum of
(producer, consumer) tables and is tight where all consumers agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tap_planner.search.elimination import INFINITE

SCALE = 12
"""Costs in tables are multiples of 1/12 ns and 1/12 byte: a cost shared by 2, 3, 4 or 6 consumers stays whole."""


PARTS = 720_720
"""Parts in which a destination's cost can be shared out; a multiple of all numbers up to 16."""
UNREACHABLE = np.int64(1) << 50
"""Redistribution costs from here on stand for placements that cannot be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One operand of one consumer that reads the tensor."""

    variable: int
    destination: np.ndarray
    """[num_strategies] state (index into the redistribution table) that the operand must have."""
    gradient: np.ndarray
    """[num_strategies] state of the gradient that backward makes; -1 where none is needed."""
    kept: bool
    """Whether backward reads the operand."""
    region: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPolicy:
    """How regions are treated under the recompute setting."""

    recomputed: frozenset[int]
    """Regions whose forward runs again before their backward."""
    working: frozenset[int]
    """Recomputed regions whose kept activations count all the same: the last occurrence of every run stands for the
    working set of recomputation."""

    def counts(self, region: int) -> bool:
        """Whether what backward keeps inside the region is held from forward to backward."""
        return region not in self.recomputed or region in self.working


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A tensor's redistributions and kept copies."""

    tensor: str
    producer: int | None
    """Variable of the producer; None for a graph input, which is read in any placement for free."""
    producer_region: int
    source: np.ndarray
    """[producer strategies] state of the producer's output."""
    wanted: np.ndarray
    """[producer strategies] state in which the producer wants the gradient."""
    producer_keeps: bool
    is_activation: bool
    """False for parameters, whose copies are not activations."""
    slots: tuple[Slot, ...]
    cost_ns: np.ndarray
    """[num_states, num_states] of the redistribution table."""
    state_bytes: np.ndarray
    """[num_states] bytes of the largest local part."""

    @property
    def variables(self) -> tuple[int, ...]:
        """Producer first (where there is one), then the consumers in order, each once."""
        first = () if self.producer is None else (self.producer,)
        return tuple(dict.fromkeys((*first, *(slot.variable for slot in self.slots))))

    def point(self, strategies: Sequence[tuple[int, int]], source: int, policy: RegionPolicy) -> tuple[int, int]:
        """Exact (ns, bytes) with given choices.

        Args:
            strategies: per slot (strategy of its variable, region), which may differ from the slot's own region.
            source: strategy of the producer (0 where there is none).
            policy: treatment of regions.
        """
        src, want = int(self.source[source]), int(self.wanted[source])
        edges: dict[tuple[int, int], set[int]] = {}
        kept: set[int] = set()
        if self.producer_keeps and policy.counts(self.producer_region):
            kept.add(src)
        for slot, (strategy, region) in zip(self.slots, strategies, strict=True):
            destination, gradient = int(slot.destination[strategy]), int(slot.gradient[strategy])
            edges.setdefault((destination, gradient), set()).add(region)
            if slot.kept and policy.counts(region):
                kept.add(destination)
            if region in policy.recomputed and region != self.producer_region:
                kept.add(destination if self.producer is None else src)
        ns = 0
        for (destination, gradient), regions in edges.items():
            if self.producer is not None:
                again = len(regions) == 1 and next(iter(regions)) in policy.recomputed
                ns += int(self.cost_ns[src, destination]) * (2 if again else 1)
            if gradient >= 0:
                ns += int(self.cost_ns[gradient, want])
            if len(regions) > 1 and any(region in policy.recomputed for region in regions):
                kept.add(destination)
        num_bytes = sum(int(self.state_bytes[state]) for state in kept) if self.is_activation else 0
        return ns, num_bytes

    def dense(self, alive: Sequence[np.ndarray], policy: RegionPolicy) -> tuple[np.ndarray, np.ndarray]:
        """Exact tables (SCALE x ns, SCALE x bytes) over ``variables``, restricted to the alive strategies."""
        axes = {variable: axis for axis, variable in enumerate(self.variables)}
        rank = len(axes)

        def spread(values: np.ndarray, variable: int) -> np.ndarray:
            shape = [1] * rank
            shape[axes[variable]] = -1
            return values[alive[axes[variable]]].reshape(shape)

        src = spread(self.source, self.producer) if self.producer is not None else np.zeros([1] * rank, np.int64)
        want = spread(self.wanted, self.producer) if self.producer is not None else src
        destinations = [spread(slot.destination, slot.variable) for slot in self.slots]
        gradients = [spread(slot.gradient, slot.variable) for slot in self.slots]
        shape = tuple(len(values) for values in alive)
        ns = np.zeros(shape, dtype=np.int64)
        entries: list[tuple[np.ndarray, np.ndarray]] = []
        true, false = np.ones([1] * rank, dtype=bool), np.zeros([1] * rank, dtype=bool)
        if self.producer_keeps and policy.counts(self.producer_region):
            entries.append((src, true))
        for i, slot in enumerate(self.slots):
            recomputed = slot.region in policy.recomputed
            first, alone = true, true
            for j, other in enumerate(self.slots):
                if j == i or (j > i and other.region == slot.region):
                    continue
                equal = (destinations[j] == destinations[i]) & (gradients[j] == gradients[i])
                if j < i:
                    first = first & ~equal
                if other.region != slot.region:
                    alone = alone & ~equal
                    if recomputed or other.region in policy.recomputed:
                        entries.append((destinations[i], equal))
            if self.producer is not None:
                forward = self.cost_ns[src, destinations[i]]
                ns += np.where(first, forward * np.where(alone & recomputed, 2, 1), 0)
            backward = np.where(gradients[i] >= 0, self.cost_ns[gradients[i], want], 0)
            ns += np.where(first, backward, 0)
            if slot.kept and policy.counts(slot.region):
                entries.append((destinations[i], true))
            if recomputed and slot.region != self.producer_region:
                entries.append((destinations[i] if self.producer is None else src, true))
        num_bytes = np.zeros(shape, dtype=np.int64)
        if self.is_activation:
            for i, (state, active) in enumerate(entries):
                fresh = active | false
                for earlier, earlier_active in entries[:i]:
                    fresh = fresh & ~((earlier == state) & earlier_active)
                num_bytes += np.where(fresh, self.state_bytes[state], 0)
        return ns * SCALE, num_bytes * SCALE

    def shares(
        self,
        alive: Sequence[np.ndarray],
        policy: RegionPolicy,
        multiplicity: Sequence[int],
        recompute_shared: bool,
        split: Mapping[tuple[int, int], Sequence[int]],
        kept_split: Mapping[int, Sequence[int]],
    ) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """A lower bound: per slot (index, SCALE x ns, SCALE x bytes) tables over (producer, slot's variable).

        Every slot bears a part of what it would cost alone, an equal one unless ``split`` says otherwise. The parts of
        one destination add up to one, so whatever slots choose it pay at most its cost; if all do, they pay it whole.

        Args:
            alive: alive strategies of the producer, then of each slot's variable.
            policy: treatment of regions.
            multiplicity: how many occurrences each slot stands for.
            recompute_shared: whether all slots lie in one region, so that its recomputation repeats the collectives.
            split: per (destination, gradient) the parts of the slots in 1/PARTS; their sum is at most PARTS.
            kept_split: the same per kept state, with the producer's part last.
        """
        total = sum(multiplicity)
        keeping = sum(m for slot, m in zip(self.slots, multiplicity, strict=True) if self._keeps(slot, policy))
        keeping += 1 if self.producer_keeps and policy.counts(self.producer_region) else 0
        src = self.source[alive[0]][:, None] if self.producer is not None else np.zeros((1, 1), dtype=np.int64)
        want = self.wanted[alive[0]][:, None] if self.producer is not None else src
        result: list[tuple[int, np.ndarray, np.ndarray]] = []
        for index, slot in enumerate(self.slots):
            values = alive[index + 1]
            destination, gradient = slot.destination[values][None, :], slot.gradient[values][None, :]
            again = 2 if recompute_shared and slot.region in policy.recomputed else 1
            ns = np.where(gradient >= 0, self.cost_ns[gradient, want], 0)
            if self.producer is not None:
                ns = ns + self.cost_ns[src, destination] * again
            num_bytes = np.zeros(np.broadcast_shapes(src.shape, destination.shape), dtype=np.int64)
            if self.is_activation and self._keeps(slot, policy):
                state = destination if slot.kept and policy.counts(slot.region) else src
                num_bytes = num_bytes + self._kept_share(state, index, keeping, kept_split)
            if self.is_activation and index == 0 and self.producer_keeps and policy.counts(self.producer_region):
                num_bytes = num_bytes + self._kept_share(src, len(self.slots), keeping, kept_split)
            shared = ns * SCALE // total
            if split:
                keys = zip(destination[0].tolist(), gradient[0].tolist(), strict=True)
                parts = np.array([split[key][index] if key in split else -1 for key in keys], dtype=np.int64)
                whole, remainder = np.divmod(ns * SCALE, PARTS)
                shared = np.where(parts >= 0, whole * parts + remainder * parts // PARTS, shared)
            ns = np.where(ns >= UNREACHABLE, INFINITE, shared)
            result.append((index, np.broadcast_to(ns, num_bytes.shape), num_bytes))
        return result

    def _kept_share(
        self, state: np.ndarray, position: int, keeping: int, kept_split: Mapping[int, Sequence[int]]
    ) -> np.ndarray:
        """SCALE x bytes that one of ``keeping`` readers bears of a kept copy."""
        equal = self.state_bytes * SCALE // keeping
        if kept_split:
            equal = equal.copy()
            for number, parts in kept_split.items():
                equal[number] = int(self.state_bytes[number]) * SCALE * parts[position] // PARTS
        return equal[state]

    def kept_states(self, strategies: Sequence[int], source: int, policy: RegionPolicy) -> list[tuple[int, int]]:
        """(position, state) of every reader that keeps a copy; the producer's position is the number of slots."""
        src = int(self.source[source])
        found: list[tuple[int, int]] = []
        for position, (slot, strategy) in enumerate(zip(self.slots, strategies, strict=True)):
            if self._keeps(slot, policy):
                own = slot.kept and policy.counts(slot.region)
                found.append((position, int(slot.destination[strategy]) if own else src))
        if self.producer_keeps and policy.counts(self.producer_region):
            found.append((len(self.slots), src))
        return found

    def _keeps(self, slot: Slot, policy: RegionPolicy) -> bool:
        boundary = slot.region in policy.recomputed and slot.region != self.producer_region
        return (slot.kept and policy.counts(slot.region)) or (boundary and self.producer is not None)
