"""Every order with every placer, each try played, the best one improved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tap_planner.device_placement.bounds import lower_bound_ns
from tap_planner.device_placement.contiguous import contiguous
from tap_planner.device_placement.earliest_finish import earliest_finish
from tap_planner.device_placement.improvement import default_evaluations, improve
from tap_planner.device_placement.orders import order_groups, orders_for
from tap_planner.device_placement.priorities import order_priority, rank_priority
from tap_planner.device_placement.problem import Placement, Problem
from tap_planner.device_placement.subsets import device_subsets
from tap_planner.device_placement.timeline import makespan_ns
from tap_planner.device_placement.traffic import Traffic, traffic_of
from tap_planner.errors import UsageError

__all__ = ["PLACERS", "Placing", "Shortage", "Try", "place", "priority_of"]

PLACERS = ("contiguous", "earliest-finish")
"""What makes a placement of an order."""
_IMPROVED = 3
"""So many of the best distinct placements are improved."""
_SMALL = 20_000
"""Tasks times devices up to which all that is done on all devices is done on fewer too."""
_FEW = 2
"""Orders that are tried on fewer devices beyond that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One placement and how it was found."""

    order: str
    """Name of the traversal order; empty for a single device."""
    placer: str
    """``contiguous:bottleneck``, ``contiguous:sequential``, ``earliest-finish``, ``single-device``; after improvement
    with `` improved``."""
    devices: tuple[int, ...]
    """On which it was tried: all, or fewer (:func:`device_subsets`). What may lie on none of them lies elsewhere; what
    was improved may too."""
    priority: str
    """By which tasks run: ``order``, ``upward-rank`` (means over the devices on which it was tried), or ``placed-rank``
    (upward rank with the placement's times)."""
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
    orders: Sequence[str] | None = None,
    placers: Sequence[str] = PLACERS,
    *,
    improve: bool = True,
    evaluations: int | None = None,
) -> Placing:
    """Try every order with every placer, and the best single device; keep the best.

    Each placement is played with the priorities ``upward-rank`` and, as its order lists groups, ``order``; the better
    one counts (ties: ``upward-rank``). With improvement, the three best are improved, each with a third of the
    evaluations, and the best of all is played with ``placed-rank`` too; unless it is proven that nothing is faster.

    All this is done first on fewer devices (:func:`device_subsets`, the smallest set first), since neither placers nor
    improvement see that more of them can be a trap; what is found there is improved further on more. So the result is
    no worse than that of the same orders (of :data:`ORDERS`), placers and evaluations on any of these sets alone. Where
    there are more than 20,000 tasks times devices, only earliest-finish with the first two orders is tried on fewer,
    without improvement; so then that promise holds for these two.

    Args:
        problem: what is placed.
        orders: names for :func:`order_groups`; None: those of :func:`orders_for`.
        placers: of :data:`PLACERS`.
        improve: whether the best placements are improved.
        evaluations: how many placements the improvement plays at most on each set of devices; None: fewer for larger
            problems.

    Raises:
        UsageError: an order or a placer is unknown.
    """
    for placer in placers:
        if placer not in PLACERS:
            raise UsageError(f"unknown placer {placer!r}, expected one of {', '.join(PLACERS)}", hint="Choose one.")
    names = orders_for(problem) if orders is None else orders
    limit = default_evaluations(problem) if evaluations is None else evaluations
    everywhere = tuple(range(problem.num_devices))
    run = _Run(problem)
    for devices in (*reversed(device_subsets(problem)), everywhere):
        if devices == everywhere or problem.num_tasks * problem.num_devices <= _SMALL:
            run.try_on(devices, names, placers)
            if improve:
                run.improve(devices, limit)
        else:
            run.try_on(devices, names[:_FEW], [placer for placer in placers if placer == "earliest-finish"])
    if not run.tries:
        raise UsageError(
            "nothing to try: no order or no placer, and no device that may hold all groups",
            hint="Name at least one order and one placer.",
        )
    return run.result()


def priority_of(problem: Problem, tried: Try) -> tuple[int, ...]:
    """The priority by which a try was played, so that it can be played again.

    Args:
        problem: what was placed.
        tried: one of its tries.

    Returns:
        [num_tasks], smaller first, as :func:`play` takes it.
    """
    if tried.priority == "order":
        return tuple(order_priority(problem, order_groups(problem, tried.order)))
    if tried.priority == "placed-rank":
        return tuple(rank_priority(problem, tried.placement))
    return tuple(rank_priority(problem, devices=tried.devices))


class _Run:
    """The tries so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tries: list[Try] = []
        self.orders: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.played: dict[tuple[Placement, tuple[int, ...]], int] = {}

    @cached_property
    def traffic(self) -> Traffic:
        """What goes between groups."""
        return traffic_of(self.problem)

    @cached_property
    def bound_ns(self) -> int:
        """Nothing is faster."""
        return lower_bound_ns(self.problem)

    def try_on(self, devices: tuple[int, ...], names: Sequence[str], placers: Sequence[str]) -> None:
        """All orders with all placers on some devices, and the best of these alone."""
        self._add_single_device(devices)
        rank = tuple(rank_priority(self.problem, devices=devices))
        for name in names:
            order, own = self._order(name)
            for placer, placement in self._placements(order, placers, devices):
                makespans = {"upward-rank": self._played(placement, rank), "order": self._played(placement, own)}
                priority = min(makespans, key=lambda key: makespans[key])
                self._add(name, placer, devices, priority, placement, makespans[priority])

    def _order(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """An order, and the priority of tasks by it."""
        if name not in self.orders:
            order = order_groups(self.problem, name)
            self.orders[name] = order, tuple(order_priority(self.problem, order))
        return self.orders[name]

    def _placements(
        self, order: Sequence[int], placers: Sequence[str], devices: tuple[int, ...]
    ) -> Iterator[tuple[str, Placement]]:
        if "contiguous" in placers:
            for cut in contiguous(self.problem, order, traffic=self.traffic, devices=devices):
                yield f"contiguous:{cut.objective}", cut.placement
        if "earliest-finish" in placers:
            yield "earliest-finish", earliest_finish(self.problem, order, devices=devices)

    def _add_single_device(self, devices: tuple[int, ...]) -> None:
        """The best device that may hold all groups: one that has the memory, then the fastest, then the smallest."""
        problem = self.problem
        times = problem.task_ns.sum(axis=0).tolist()
        possible = [
            (sum(problem.overshoot_bytes((device,) * problem.num_groups)), times[device], device)
            for device in devices
            if problem.allowed[:, device].all()
        ]
        if possible:
            _, makespan, device = min(possible)
            self._add("", "single-device", devices, "upward-rank", (device,) * problem.num_groups, makespan)

    def _add(
        self, order: str, placer: str, devices: tuple[int, ...], priority: str, placement: Placement, makespan: int
    ) -> None:
        self.tries.append(
            Try(
                order=order,
                placer=placer,
                devices=devices,
                priority=priority,
                makespan_ns=makespan,
                overshoot_bytes=sum(self.problem.overshoot_bytes(placement)),
                placement=placement,
            )
        )

    def _played(self, placement: Placement, priority: tuple[int, ...]) -> int:
        key = placement, priority
        if key not in self.played:
            self.played[key] = makespan_ns(self.problem, placement, priority)
        return self.played[key]

    def improve(self, devices: tuple[int, ...], evaluations: int) -> None:
        """Improve the best distinct placements on some devices; then look whether ranks with true times help."""
        if not self.tries or self._is_optimal():
            return
        first = list({tried.placement: tried for tried in reversed(self.tries)}.values())[::-1][:_IMPROVED]
        for tried in first:
            found = improve(
                self.problem,
                tried.placement,
                priority_of(self.problem, tried),
                evaluations=evaluations // len(first),
                devices=devices,
            )
            if found.placement != tried.placement:
                self._add_changed(
                    tried,
                    f"{tried.placer.removesuffix(' improved')} improved",
                    tried.priority,
                    found.placement,
                    found.makespan_ns,
                )
        self._sort()
        best = self.tries[0]
        makespan = self._played(best.placement, tuple(rank_priority(self.problem, best.placement)))
        if makespan < best.makespan_ns:
            self._add_changed(best, best.placer, "placed-rank", best.placement, makespan)

    def _is_optimal(self) -> bool:
        self._sort()
        return self.tries[0].fits and self.tries[0].makespan_ns <= self.bound_ns

    def _add_changed(self, tried: Try, placer: str, priority: str, placement: Placement, makespan: int) -> None:
        """What became of a try."""
        self._add(tried.order, placer, tried.devices, priority, placement, makespan)

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
            priority=priority_of(self.problem, best),
            shortage=None
            if best.fits
            else Shortage(device=device, device_bytes=lacks[device], total_bytes=best.overshoot_bytes),
        )
