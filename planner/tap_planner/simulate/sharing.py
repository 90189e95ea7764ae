"""What transfers share levels of the topology with."""

from __future__ import annotations

from collections.abc import Sequence

from tap_planner.simulate.overlap import Levels
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.sending import Out, StageOrder


def contends(passes: Sequence[Pass], outs: Sequence[tuple[Out, ...]], orders: Sequence[StageOrder]) -> bool:
    """Whether any transfer uses a level that one of its stages uses for anything else."""
    if not any(out.levels for of_pass in outs for out in of_pass):
        return False
    used = [_levels_of(passes, order) for order in orders]
    every = (out for of_pass in outs for out in of_pass if out.levels)
    return any(not out.levels.isdisjoint(used[stage]) for out in every for stage in out.route.stages)


def _levels_of(passes: Sequence[Pass], order: StageOrder) -> Levels:
    """What a stage uses."""
    found: set[str] = set()
    for index in set(order.passes):
        for pieces in passes[index].main:
            for piece in pieces:
                found |= piece.levels
        found.update(level for job in passes[index].background for level in job.levels)
    found.update(level for jobs in order.loose.values() for job in jobs for level in job.levels)
    return frozenset(found)


class Sharing:
    """Which parts of the background stand still for transfers.

    Args:
        passes: what slots may do.
        outs: per pass, what it sends.
        orders: per stage.
    """

    def __init__(self, passes: Sequence[Pass], outs: Sequence[tuple[Out, ...]], orders: Sequence[StageOrder]) -> None:
        used: list[set[str]] = [set() for _ in orders]
        for out in (out for of_pass in outs for out in of_pass):
            for stage in out.route.stages:
                used[stage] |= out.levels
        self.is_soft = [False] * len(passes)
        """Per pass whether it has background that does."""
        for order, shared in zip(orders, used, strict=True):
            for index in set(order.passes):
                self.is_soft[index] = any(not job.levels.isdisjoint(shared) for job in passes[index].background)
        self.has_loose = [self._has_loose(order, shared) for order, shared in zip(orders, used, strict=True)]
        """Per stage whether any reduction of the end of the step does, or waits for what does."""
        last = [order.passes[min(order.loose) :] if order.loose else () for order in orders]
        opens = any(
            has_loose and passes[index].background
            for has_loose, indices in zip(self.has_loose, last, strict=True)
            for index in indices
        )
        self.changes_slots = opens or any(self.is_soft)
        """Whether transfers may change when any slot does what."""
        self.counts = self.changes_slots or any(self.has_loose)
        """Whether it matters when transfers move."""

    def _has_loose(self, order: StageOrder, shared: set[str]) -> bool:
        needed = [job.levels for jobs in order.loose.values() for job in jobs]
        if any(not levels.isdisjoint(shared) for levels in needed):
            return True
        return bool(needed) and any(self.is_soft[index] for index in order.passes[min(order.loose) :])
