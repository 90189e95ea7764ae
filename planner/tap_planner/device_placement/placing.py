"""Every order with every placer, each try played, the best one improved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tap_planner.device_placement.contiguous import contiguous
from tap_planner.device_placement.earliest_finish import earliest_finish
from tap_planner.device_placement.improvement import default_evaluations, improve
from tap_planner.device_placement.orders import ORDERS, order_groups
from tap_planner.device_placement.priorities import order_priority, rank_priority
from tap_planner.device_placement.problem import Placement, Problem
from tap_planner.device_placement.timeline import makespan_ns
from tap_planner.device_placement.traffic import Traffic, traffic_of
from tap_planner.errors import UsageError

__all__ = ["PLACERS", "Placing", "Shortage", "Try", "place"]

PLACERS = ("contiguous", "earliest-finish")
"""What makes a placement of an order."""
_IMPROVED = 3
"""So many of the best distinct placements are improved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One placement and how it was found."""

    order: str
    """Name of the traversal order; empty for a single device."""
    placer: str
    """``contiguous:bottleneck``, ``contiguous:sequential``, ``earliest-finish``, ``single-device``; after improvement
    with `` improved``."""
    priority: str
    """By which tasks run: ``order``, ``upward-rank``, or ``placed-rank`` (upward rank with the placement's times)."""
    makespan_ns: int
    overshoot_bytes: int
    """What devices hold beyond their memory, together; 0: it fits."""
    placement: Placement

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return self.overshoot_bytes == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Where the placement that lacks least lacks most."""

    device: int
    device_bytes: int
    """What the device lacks."""
    total_bytes: int
    """What all devices lack together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """All tries, best first: those that fit, by makespan; then those that do not, by what they lack."""

    tries: tuple[Try, ...]
    best: Try | None
    """The first of them; None if nothing fits."""
    priority: tuple[int, ...]
    """[num_tasks], by which the first of the tries is played."""
    shortage: Shortage | None
    """Of the first of the tries; None if it fits. That something else fits is not excluded."""


def place(
    problem: Problem,
    orders: Sequence[str] = ORDERS,
    placers: Sequence[str] = PLACERS,
    *,
    improve: bool = True,
    evaluations: int | None = None,
) -> Placing:
    """Try every order with every placer, and the best single device; keep the best.

    Each placement is played with the priorities ``upward-rank`` and, as its order lists groups, ``order``; the better
    one counts (ties: ``upward-rank``). With improvement, the three best are improved, each with a third of the
    evaluations, and the best of all is played with ``placed-rank`` too.

    Args:
        problem: what is placed.
        orders: names for :func:`order_groups`.
        placers: of :data:`PLACERS`.
        improve: whether the best placements are improved.
        evaluations: how many placements the improvement plays at most; None: fewer for larger problems.

    Raises:
        UsageError: an order or a placer is unknown.
    """
    run = _Run(problem)
    for placer in placers:
        if placer not in PLACERS:
            raise UsageError(f"unknown placer {placer!r}, expected one of {', '.join(PLACERS)}", hint="Choose one.")
    run.add_single_device()
    for name in orders:
        run.try_order(name, placers)
    if not run.tries:
        raise UsageError(
            "nothing to try: no order or no placer, and no device that may hold all groups",
            hint="Name at least one order and one placer.",
        )
    if improve:
        run.improve(default_evaluations(problem) if evaluations is None else evaluations)
    return run.result()


class _Run:
    """The tries so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.rank = rank_priority(problem)
        self.tries: list[Try] = []
        self.priorities: dict[tuple[str, str], list[int]] = {}
        self.played: dict[tuple[Placement, str], int] = {}
        self.traffic: Traffic | None = None

    def try_order(self, name: str, placers: Sequence[str]) -> None:
        """One order with all placers."""
        order = order_groups(self.problem, name)
        for placer, placement in self._placements(order, placers):
            self.add(name, placer, placement, order)

    def _placements(self, order: Sequence[int], placers: Sequence[str]) -> Iterator[tuple[str, Placement]]:
        if "contiguous" in placers:
            if self.traffic is None:
                self.traffic = traffic_of(self.problem)
            for cut in contiguous(self.problem, order, traffic=self.traffic):
                yield f"contiguous:{cut.objective}", cut.placement
        if "earliest-finish" in placers:
            yield "earliest-finish", earliest_finish(self.problem, order)

    def add_single_device(self) -> None:
        """The best device that may hold all groups: one that has the memory, then the fastest, then the smallest."""
        problem = self.problem
        times = problem.task_ns.sum(axis=0).tolist()
        possible = [
            (sum(problem.overshoot_bytes((device,) * problem.num_groups)), times[device], device)
            for device in range(problem.num_devices)
            if problem.allowed[:, device].all()
        ]
        if possible:
            overshoot, makespan, device = min(possible)
            self.tries.append(
                Try(
                    order="",
                    placer="single-device",
                    priority="upward-rank",
                    makespan_ns=makespan,
                    overshoot_bytes=overshoot,
                    placement=(device,) * problem.num_groups,
                )
            )

    def add(self, name: str, placer: str, placement: Placement, order: Sequence[int]) -> None:
        """Play a placement with both priorities and note the better one."""
        own = self.priorities.setdefault((name, "order"), order_priority(self.problem, order))
        makespans = {
            "upward-rank": self._played(placement, "upward-rank", self.rank),
            "order": self._played(placement, f"order of {name}", own),
        }
        priority = min(makespans, key=lambda key: makespans[key])
        self.tries.append(
            Try(
                order=name,
                placer=placer,
                priority=priority,
                makespan_ns=makespans[priority],
                overshoot_bytes=sum(self.problem.overshoot_bytes(placement)),
                placement=placement,
            )
        )

    def _played(self, placement: Placement, name: str, priority: Sequence[int]) -> int:
        key = placement, name
        if key not in self.played:
            self.played[key] = makespan_ns(self.problem, placement, priority)
        return self.played[key]

    def _priority(self, tried: Try) -> list[int]:
        if tried.priority == "order":
            return self.priorities[tried.order, "order"]
        return rank_priority(self.problem, tried.placement) if tried.priority == "placed-rank" else self.rank

    def improve(self, evaluations: int) -> None:
        """Improve the best distinct placements; then look whether ranks with true times help."""
        self._sort()
        first = list({tried.placement: tried for tried in reversed(self.tries)}.values())[::-1][:_IMPROVED]
        for tried in first:
            priority = self._priority(tried)
            found = improve(self.problem, tried.placement, priority, evaluations=evaluations // len(first))
            if found.placement != tried.placement:
                self._note(tried, f"{tried.placer} improved", tried.priority, found.placement, found.makespan_ns)
        self._sort()
        best = self.tries[0]
        makespan = makespan_ns(self.problem, best.placement, rank_priority(self.problem, best.placement))
        if makespan < best.makespan_ns:
            self._note(best, best.placer, "placed-rank", best.placement, makespan)

    def _note(self, tried: Try, placer: str, priority: str, placement: Placement, makespan: int) -> None:
        overshoot = sum(self.problem.overshoot_bytes(placement))
        self.tries.append(
            Try(
                order=tried.order,
                placer=placer,
                priority=priority,
                makespan_ns=makespan,
                overshoot_bytes=overshoot,
                placement=placement,
            )
        )

    def _sort(self) -> None:
        """Stable: of equal tries, the one that was made first."""
        self.tries.sort(key=lambda tried: (tried.overshoot_bytes, tried.makespan_ns))

    def result(self) -> Placing:
        """All tries in their order."""
        self._sort()
        best = self.tries[0]
        lacks = self.problem.overshoot_bytes(best.placement)
        device = lacks.index(max(lacks))
        return Placing(
            tries=tuple(self.tries),
            best=best if best.fits else None,
            priority=tuple(self._priority(best)),
            shortage=None
            if best.fits
            else Shortage(device=device, device_bytes=lacks[device], total_bytes=best.overshoot_bytes),
        )
