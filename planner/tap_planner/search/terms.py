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

from tap_planner.search.configuration import Recompute
from tap_planner.search.factors import INFINITE

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
    rerun: bool = False
    """Whether the consumer runs again in its region under selective recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPolicy:
    """How regions are treated."""

    modes: Mapping[int, Recompute]
    """Regions that recompute; all others keep everything."""
    working: frozenset[int]
    """Regions whose kept activations count all the same: the last occurrence of every run stands for the working set
    of recomputation."""

    def mode(self, region: int) -> Recompute:
        """How a region recomputes."""
        return self.modes.get(region, Recompute.NONE)

    def counts(self, region: int, *, remade: bool = False) -> bool:
        """Whether what backward reads inside the region is held from forward to backward.

        Args:
            region: which one.
            remade: whether the tensor's producer runs again there under selective recomputation.
        """
        mode = self.mode(region)
        if mode is Recompute.NONE or region in self.working:
            return True
        return mode is Recompute.SELECTIVE and not remade


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
    producer_rerun: bool = False
    """Whether the producer runs again under selective recomputation; then all consumers lie in its region."""

    @property
    def variables(self) -> tuple[int, ...]:
        """Producer first (where there is one), then the consumers in order, each once."""
        first = () if self.producer is None else (self.producer,)
        return tuple(dict.fromkeys((*first, *(slot.variable for slot in self.slots))))

    @property
    def regions(self) -> tuple[int, ...]:
        """Regions whose recomputation matters, each once."""
        first = (self.producer_region,) if self.producer_keeps else ()
        return tuple(dict.fromkeys((*first, *(slot.region for slot in self.slots))))

    # -- redistributions ---------------------------------------------------------------------------------------

    def between(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """ns from states to states, over the broadcast shape of the two."""
        return self.cost_ns.take(source * len(self.cost_ns) + target)

    def gradient_ns(self, gradient: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """``between`` from states of the gradient, of which -1 (there is none) costs nothing, to those wanted."""
        needed = gradient >= 0
        if not needed.any():
            return np.zeros(np.broadcast_shapes(gradient.shape, wanted.shape), dtype=np.int64)
        ns = self.between(gradient, wanted)
        return ns if needed.all() else np.where(needed, ns, 0)

    # -- exact -------------------------------------------------------------------------------------------------

    def is_remade(self, policy: RegionPolicy) -> bool:
        """Whether the producer runs again by itself, so that its output need not be kept."""
        return self.producer_rerun and policy.mode(self.producer_region) is Recompute.SELECTIVE

    def point(self, strategies: Sequence[tuple[int, int]], source: int, policy: RegionPolicy) -> tuple[int, int]:
        """Exact (ns, bytes) with given choices.

        Args:
            strategies: per slot (strategy of its variable, region), which may differ from the slot's own region.
            source: strategy of the producer (0 where there is none).
            policy: treatment of regions.
        """
        src, want = int(self.source[source]), int(self.wanted[source])
        remade = self.is_remade(policy)
        edges: dict[tuple[int, int], set[int]] = {}
        needed: set[tuple[int, int]] = set()
        kept: set[int] = set()
        if self.producer_keeps and policy.counts(self.producer_region, remade=remade):
            kept.add(src)
        for slot, (strategy, region) in zip(self.slots, strategies, strict=True):
            destination, gradient = int(slot.destination[strategy]), int(slot.gradient[strategy])
            mode = policy.mode(region)
            edges.setdefault((destination, gradient), set()).add(region)
            if slot.kept or slot.rerun:
                needed.add((destination, gradient))
            if slot.kept and policy.counts(region, remade=remade):
                kept.add(destination)
            if mode is Recompute.FULL and region != self.producer_region:
                kept.add(destination if self.producer is None else src)
            if mode is Recompute.SELECTIVE and slot.rerun and not remade:
                kept.add(destination)
        ns = 0
        for (destination, gradient), regions in edges.items():
            full = any(policy.mode(region) is Recompute.FULL for region in regions)
            if self.producer is not None:
                again = (full and len(regions) == 1) or (remade and (destination, gradient) in needed)
                ns += int(self.cost_ns[src, destination]) * (2 if again else 1)
            if gradient >= 0:
                ns += int(self.cost_ns[gradient, want])
            if full and len(regions) > 1:
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
        remade = self.is_remade(policy)
        entries: list[tuple[np.ndarray, np.ndarray]] = []
        true, false = np.ones([1] * rank, dtype=bool), np.zeros([1] * rank, dtype=bool)
        if self.producer_keeps and policy.counts(self.producer_region, remade=remade):
            entries.append((src, true))
        for i, slot in enumerate(self.slots):
            full = policy.mode(slot.region) is Recompute.FULL
            first, alone = true, true
            needed = true if slot.kept or slot.rerun else false
            for j, other in enumerate(self.slots):
                if j == i or (j > i and other.region == slot.region and not remade):
                    continue
                equal = (destinations[j] == destinations[i]) & (gradients[j] == gradients[i])
                if j < i:
                    first = first & ~equal
                if remade and (other.kept or other.rerun):
                    needed = needed | equal
                if other.region != slot.region:
                    alone = alone & ~equal
                    if full or policy.mode(other.region) is Recompute.FULL:
                        entries.append((destinations[i], equal))
            if self.producer is not None:
                forward = self.cost_ns[src, destinations[i]]
                again = needed if remade else (alone if full else false)
                ns += np.where(first, forward * np.where(again, 2, 1), 0)
            backward = np.where(gradients[i] >= 0, self.cost_ns[gradients[i], want], 0)
            ns += np.where(first, backward, 0)
            if slot.kept and policy.counts(slot.region, remade=remade):
                entries.append((destinations[i], true))
            if full and slot.region != self.producer_region:
                entries.append((destinations[i] if self.producer is None else src, true))
            if policy.mode(slot.region) is Recompute.SELECTIVE and slot.rerun and not remade:
                entries.append((destinations[i], true))
        num_bytes = np.zeros(shape, dtype=np.int64)
        if self.is_activation:
            for i, (state, active) in enumerate(entries):
                fresh = active | false
                for earlier, earlier_active in entries[:i]:
                    fresh = fresh & ~((earlier == state) & earlier_active)
                num_bytes += np.where(fresh, self.state_bytes[state], 0)
        return ns * SCALE, num_bytes * SCALE

    # -- shared out --------------------------------------------------------------------------------------------

    def shared_time(
        self,
        index: int,
        alive: Sequence[np.ndarray],
        mode: Recompute,
        total: int,
        together: bool,
        split: Mapping[tuple[int, int], Sequence[int]],
    ) -> np.ndarray:
        """A lower bound: the SCALE x ns over (producer, slot's variable) that slot ``index`` bears.

        Every slot bears a part of what it would cost alone, an equal one unless ``split`` says otherwise. The parts of
        one destination add up to one, so whatever slots choose it pay at most its cost; if all do, they pay it whole.

        Args:
            index: which slot.
            alive: alive strategies of the producer, and of the slot's variable.
            mode: how the slot's region recomputes.
            total: occurrences that all slots stand for.
            together: whether all slots lie in one region, so that its full recomputation repeats the collectives.
            split: per (destination, gradient) the parts of the slots in 1/PARTS; their sum is at most PARTS.
        """
        slot = self.slots[index]
        src, want = self._producer_states(alive[0])
        destination, gradient = slot.destination[alive[1]], slot.gradient[alive[1]]
        ns = self.gradient_ns(gradient, want)
        if self.producer is not None:
            forward = self.between(src, destination)
            ns = ns + (forward * 2 if self._runs_twice(slot, mode, together) else forward)
        scaled = ns * SCALE
        shared = scaled // total
        if split:
            keys = zip(destination.tolist(), gradient.tolist(), strict=True)
            parts = np.array([split[key][index] if key in split else -1 for key in keys], dtype=np.int64)
            whole, remainder = np.divmod(scaled, PARTS)
            moved = whole * parts + remainder * parts // PARTS
            listed = parts >= 0
            shared = moved if listed.all() else np.where(listed, moved, shared)
        forbidden = ns >= UNREACHABLE
        return np.where(forbidden, INFINITE, shared) if forbidden.any() else shared

    def share_case(self, index: int, policy: RegionPolicy, together: bool) -> tuple[bool, bool | None]:
        """All that ``shared_time`` and ``shared_bytes`` of a slot depend on of the treatment of regions."""
        slot = self.slots[index]
        twice = self._runs_twice(slot, policy.mode(slot.region), together)
        return twice, self._keeps(slot, policy, self.is_remade(policy))

    def _runs_twice(self, slot: Slot, mode: Recompute, together: bool) -> bool:
        """Whether a slot's region repeats forward's redistribution."""
        return (mode is Recompute.FULL and together) or (
            mode is Recompute.SELECTIVE and self.producer_rerun and (slot.kept or slot.rerun)
        )

    def shared_bytes(
        self,
        position: int,
        alive: Sequence[np.ndarray],
        policy: RegionPolicy,
        keeping: int,
        split: Mapping[int, Sequence[int]],
    ) -> np.ndarray | None:
        """A lower bound: the SCALE x bytes over (producer, slot's variable) that a keeper bears; None for nothing.

        Args:
            position: the slot; the number of slots stands for the producer, with a single column.
            alive: alive strategies of the producer, and of the slot's variable.
            policy: treatment of the regions of slot and producer.
            keeping: the most keepers that there can be, under any policy.
            split: per kept state the parts of the slots in 1/PARTS, with the producer's part last.
        """
        if not self.is_activation:
            return None
        remade = self.is_remade(policy)
        src = self._producer_states(alive[0])[0]
        if position == len(self.slots):
            if not (self.producer_keeps and policy.counts(self.producer_region, remade=remade)):
                return None
            return self._kept_share(src, position, keeping, split)
        slot = self.slots[position]
        how = self._keeps(slot, policy, remade)
        if how is None:
            return None
        state = slot.destination[alive[1]] if how else src
        return np.broadcast_to(self._kept_share(state, position, keeping, split), (len(src), len(alive[1])))

    def _producer_states(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[values, 1] state of the producer's output, and the one wanted of its gradient."""
        if self.producer is None:
            none = np.zeros((1, 1), dtype=np.int64)
            return none, none
        return self.source[values][:, None], self.wanted[values][:, None]

    def _kept_share(
        self, state: np.ndarray, position: int, keeping: int, split: Mapping[int, Sequence[int]]
    ) -> np.ndarray:
        """SCALE x bytes that one of ``keeping`` readers bears of a kept copy."""
        equal = self.state_bytes * SCALE // keeping
        if split:
            equal = equal.copy()
            for number, parts in split.items():
                equal[number] = int(self.state_bytes[number]) * SCALE * parts[position] // PARTS
        return equal[state]

    def _keeps(self, slot: Slot, policy: RegionPolicy, remade: bool) -> bool | None:
        """Which copy a reader makes sure to be held: True the one that it reads, False the producer's; None: none."""
        mode = policy.mode(slot.region)
        if slot.kept and policy.counts(slot.region, remade=remade):
            return True
        if mode is Recompute.SELECTIVE and slot.rerun and not remade:
            return True
        if mode is Recompute.FULL and slot.region != self.producer_region:
            return self.producer is None
        return None

    def may_keep(self, position: int, settings: Sequence[Recompute]) -> bool:
        """Whether a slot (past the last one: the producer) is a keeper under any of the settings of its region.

        Args:
            position: which one.
            settings: what its region may choose from.
        """
        if position == len(self.slots):
            return self.producer_keeps
        slot = self.slots[position]
        if slot.kept:
            return True
        if Recompute.SELECTIVE in settings and slot.rerun:
            return True
        return Recompute.FULL in settings and slot.region != self.producer_region

    def kept_states(self, strategies: Sequence[int], source: int, policy: RegionPolicy) -> list[tuple[int, int]]:
        """(position, state) of every reader that keeps a copy; the producer's position is the number of slots."""
        src, remade = int(self.source[source]), self.is_remade(policy)
        found: list[tuple[int, int]] = []
        for position, (slot, strategy) in enumerate(zip(self.slots, strategies, strict=True)):
            how = self._keeps(slot, policy, remade)
            if how is not None:
                found.append((position, int(slot.destination[strategy]) if how else src))
        if self.producer_keeps and policy.counts(self.producer_region, remade=remade):
            found.append((len(self.slots), src))
        return found
