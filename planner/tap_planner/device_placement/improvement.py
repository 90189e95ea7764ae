"""Local improvement: single groups, runs and pairs of groups change devices while the played step gets shorter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np

from tap_planner.device_placement.problem import Placement, Problem
from tap_planner.device_placement.sequences import interchangeable
from tap_planner.device_placement.timeline import Timeline, makespan_ns, play

__all__ = ["Improved", "default_evaluations", "improve"]

_TASK_EVALUATIONS = 1_000_000
"""Evaluations times tasks, as a rule."""
_FEWEST = 3
_MOST = 5_000
_RUNS = (2, 4, 8, 16, 32, 64, 128, 256)
"""Lengths of runs that are moved."""

_PARTNERS = 4
"""So many groups of a device, the nearest by number, are tried to change places with, beside neighbours."""
_FAR_PARTNER = 100
"""Those are nearer than this."""

_Move = tuple[tuple[int, int], ...]
"""(Group, new device)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Improved:
    """What became of a placement."""

    placement: Placement
    makespan_ns: int
    overshoot_bytes: int
    """Beyond the memory of all devices together."""
    num_evaluations: int


def default_evaluations(problem: Problem) -> int:
    """How many placements are played unless something else is asked for: fewer for larger problems."""
    return max(_FEWEST, min(_MOST, _TASK_EVALUATIONS // problem.num_tasks))


def improve(
    problem: Problem,
    placement: Sequence[int],
    priority: Sequence[int],
    *,
    evaluations: int | None = None,
    devices: Sequence[int] | None = None,
) -> Improved:
    """Change a placement, move by move, as long as that makes it better.

    Better is first less memory beyond the devices' limits, then a shorter step. In each round the groups on the
    critical chain of what was played come first (backwards from the task that ends last), then all others by number.
    For each these moves are tried: the group alone to the devices of its neighbours in the forward graph, then to the
    others (of empty ones that are interchangeable only to the first); with the next 1, 3, 7 ... groups by number that
    lie on its device, and with those before it, to its neighbours' devices; and to change places with a group on one of
    these, a neighbour or one that is near by number. The first move that makes it better is made, and the next group is
    tried. It ends when a round finds nothing, or when the evaluations are used up.

    Args:
        problem: what is placed.
        placement: on allowed devices.
        priority: [num_tasks], as :func:`play` takes it; it stays the same.
        evaluations: at most so many placements are played; None: :func:`default_evaluations`.
        devices: to which groups are moved, ascending; None: to all.

    Returns:
        A placement that is no worse, the same for the same arguments.
    """
    limit = default_evaluations(problem) if evaluations is None else evaluations
    search = _Search(problem, placement, priority, limit, range(problem.num_devices) if devices is None else devices)
    search.run()
    return Improved(
        placement=tuple(search.placement),
        makespan_ns=search.value[1],
        overshoot_bytes=search.value[0],
        num_evaluations=search.played,
    )


class _Search:
    """The placement, what it is worth, and how many were played."""

    def __init__(
        self,
        problem: Problem,
        placement: Sequence[int],
        priority: Sequence[int],
        evaluations: int,
        devices: Sequence[int],
    ) -> None:
        self.problem, self.priority, self.limit = problem, priority, evaluations
        self.devices = devices
        self.alike = {device: same[0] for same in interchangeable(problem, devices) for device in same}
        self.placement = list(placement)
        self.allowed: list[list[bool]] = problem.allowed.tolist()
        self.played = 0
        self.value = sum(problem.overshoot_bytes(placement)), makespan_ns(problem, placement, priority)
        self.fixed: list[int] = problem.fixed_bytes.tolist()

    def run(self) -> None:
        """Rounds over all groups until one changes nothing."""
        changed = True
        while changed and self.played < self.limit:
            changed = False
            for group in self._groups():
                if self.played >= self.limit:
                    return
                changed |= self._try_group(group)

    def _try_group(self, group: int) -> bool:
        """Make the first move of a group that helps."""
        return any(self._try(move) for move in self._moves(group))

    def _try(self, move: _Move) -> bool:
        """Make a move if that helps."""
        if self.played >= self.limit:
            return False
        changed = list(self.placement)
        for group, device in move:
            if not self.allowed[group][device]:
                return False
            changed[group] = device
        overshoot = sum(self.problem.overshoot_bytes(changed))
        if overshoot > self.value[0]:
            return False
        self.played += 1
        value = overshoot, makespan_ns(self.problem, changed, self.priority)
        if value >= self.value:
            return False
        self.placement, self.value = changed, value
        return True

    def _groups(self) -> list[int]:
        """Those on the critical chain first, then the others."""
        chain = critical_groups(self.problem, self.placement, play(self.problem, self.placement, self.priority))
        return list(dict.fromkeys([*chain, *range(self.problem.num_groups)]))

    def _moves(self, group: int) -> Iterator[_Move]:
        tasks, own = self.problem.index.tasks, self.placement[group]
        neighbours = [*tasks.predecessors[group], *tasks.successors[group]]
        near = list(dict.fromkeys(self.placement[other] for other in neighbours if self.placement[other] != own))
        near = [device for device in near if device in self.devices]
        far = [device for device in self._distinct() if device != own and device not in near]
        for device in (*near, *far):
            yield ((group, device),)
        for run in self._runs(group):
            for device in near or far:
                yield tuple((member, device) for member in run)
        for device in near or far:
            for other in self._partners(group, device):
                yield (group, device), (other, own)

    def _distinct(self) -> list[int]:
        """Devices, without empty ones that can change places with an empty one before them."""
        used, empty = set(self.placement), set[int]()
        found: list[int] = []
        for device in self.devices:
            kind = self.alike.get(device, device)
            if device in used or kind not in empty:
                found.append(device)
            if device not in used:
                empty.add(kind)
        return found

    def _partners(self, group: int, device: int) -> list[int]:
        """Groups on a device with which one may change places: neighbours, then the nearest by number."""
        tasks = self.problem.index.tasks
        neighbours = [*tasks.predecessors[group], *tasks.successors[group]]
        around = [group + sign * distance for distance in range(1, _FAR_PARTNER) for sign in (-1, 1)]
        nearest = [other for other in around if 0 <= other < len(self.placement) and self.placement[other] == device]
        found = [other for other in neighbours if self.placement[other] == device]
        return list(dict.fromkeys([*found, *nearest[:_PARTNERS]]))

    def _runs(self, group: int) -> Iterator[list[int]]:
        """Longer and longer runs on the device from the group on, and up to it."""
        own, count = self.placement[group], self.problem.num_groups
        onward = [other for other in range(group, min(count, group + 4 * _RUNS[-1])) if self.placement[other] == own]
        back = [other for other in range(group, max(-1, group - 4 * _RUNS[-1]), -1) if self.placement[other] == own]
        lengths = [[run[:length] for length in _RUNS if length <= len(run)] for run in (onward, back)]
        for pair in zip_longest(*lengths):
            yield from (run for run in pair if run is not None)


def critical_groups(problem: Problem, placement: Sequence[int], timeline: Timeline) -> list[int]:
    """The groups of a chain of tasks that explains the makespan, from the last task back, each once.

    What a task waited for is, of all that ended last before its start (tasks that made what it reads, or sent it, and
    the task before it on its device), the one that made something for it, the smallest of these, else the one before.
    """
    tasks = problem.index.tasks
    before = _previous_on_device(problem, placement, timeline)
    arrival = {(tensor, target): end for tensor, _, target, _, end in timeline.transfers.tolist()}
    ends = timeline.end_ns.tolist()
    task = int(timeline.end_ns.argmax())
    chain: dict[int, None] = {}
    while task >= 0:
        group = tasks.group_of[task]
        chain[group] = None
        device = placement[group]
        waited = max(
            (
                (arrival.get((tensor, device), ends[tasks.producer[tensor]]), -tasks.producer[tensor])
                for tensor in tasks.inputs[task]
            ),
            default=(-1, 1),
        )
        previous = before[task]
        task = previous if previous >= 0 and ends[previous] > waited[0] else -waited[1]
    return list(chain)


def _previous_on_device(problem: Problem, placement: Sequence[int], timeline: Timeline) -> list[int]:
    """By task, the task that ran before it on its device; -1: none."""
    devices = np.asarray(placement, dtype=np.int64)[problem.group_of]
    order = np.lexsort((np.arange(problem.num_tasks), timeline.end_ns, timeline.start_ns, devices)).tolist()
    before = [-1] * problem.num_tasks
    for previous, task in pairwise(order):
        if devices[previous] == devices[task]:
            before[task] = previous
    return before
