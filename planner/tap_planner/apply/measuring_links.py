"""Times of collectives, by the communicator that runs plans; all groups of the mesh speak at once.

Over gloo a collective's time is what it adds to a stretch of computation before it, on all processes: there the host
computes and communicates, and what a step loses at a collective is mostly the wait for the last process to arrive.
Over nccl collectives run one after the other, as the device waits for nobody's host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tap_planner.apply.communicator import Axes, Communicator, group_size
from tap_planner.apply.process_group import ProcessGroupCommunicator
from tap_planner.apply.rounds import measure_in_rounds
from tap_planner.apply.team import Team

_ELEMENT_BYTES = 4
_SIDE = 64
_LEAST_NS = 1_000.0
Work = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCase:
    """A collective to be measured."""

    kind: str
    mesh_shape: tuple[int, ...]
    axes: Axes
    num_bytes: int
    """Logical payload on one rank; a multiple of 4 x the group's size."""


def measure_collectives(
    cases: Sequence[CollectiveCase],
    backend: str,
    team: Team,
    seconds: float,
    progress: Callable[[int, int], None],
    *,
    stretch_ns: float,
) -> list[float | None]:
    """Nanoseconds of each collective, the mean over the processes; None for those that no time was left for.

    Args:
        cases: on meshes of all processes of the team.
        backend: ``gloo`` or ``nccl``.
        team: all its processes call this.
        seconds: for all of them.
        progress: see ``measure_in_rounds``.
        stretch_ns: how long processes compute before each collective, over gloo.
    """
    shapes = dict.fromkeys(case.mesh_shape for case in cases)
    communicators = {shape: ProcessGroupCommunicator(shape, backend) for shape in shapes}
    compute = _stretch(team, stretch_ns) if backend == "gloo" else None
    found = measure_in_rounds(
        [partial(_Collective, case, communicators[case.mesh_shape], compute, team) for case in cases],
        team,
        seconds,
        progress,
    )
    return [None if times is None else max(times[0], _LEAST_NS) for times in found]


class _Collective:
    """A collective after a stretch of computation, where there is one."""

    def __init__(self, case: CollectiveCase, communicator: Communicator, compute: Work | None, team: Team) -> None:
        self._call = _call(case, communicator)
        self._compute = compute
        self._team = team

    def block(self, runs: int) -> Sequence[float]:
        """What one call adds to the computation."""
        if self._compute is None:
            return [_block_ns(self._call, self._team, runs)]
        with_calls = _block_ns(self._both, self._team, runs)
        self._team.wait_for_all()
        return [with_calls - _block_ns(self._compute, self._team, runs)]

    def _both(self) -> None:
        assert self._compute is not None
        self._compute()
        self._call()


def _stretch(team: Team, stretch_ns: float) -> Work:
    """Computation as between two collectives of a step, the same on every process."""
    matrix = torch.ones((_SIDE, _SIDE), device=team.device)

    def compute(operators: int = 8) -> None:
        for _ in range(operators):
            torch.addmm(matrix, matrix, matrix)

    compute()
    team.wait_for_all()
    each_ns = team.most(_block_ns(compute, team, 8) / 8)
    operators = max(round(stretch_ns / each_ns), 1)
    return lambda: compute(operators)


def _block_ns(work: Work, team: Team, times: int) -> float:
    begin = team.now_ns()
    for _ in range(times):
        work()
    return (team.now_ns() - begin) / times


def _call(case: CollectiveCase, communicator: Communicator) -> Callable[[], object]:
    elements = case.num_bytes // _ELEMENT_BYTES
    group = group_size(case.mesh_shape, case.axes)
    whole = torch.ones(elements, device=communicator.device)
    slots = whole.reshape(group, elements // group)
    match case.kind:
        case "all_reduce":
            return lambda: communicator.all_reduce([whole], case.axes)
        case "all_gather":
            return lambda: communicator.all_gather([slots[0]], case.axes)
        case "reduce_scatter":
            return lambda: communicator.reduce_scatter([slots], case.axes)
        case "all_to_all":
            return lambda: communicator.all_to_all([slots], case.axes)
        case "ring_exchange":
            return lambda: communicator.ring_exchange([(whole,)], case.axes)
        case _:
            raise ValueError(f"collective {case.kind!r} cannot be measured")
