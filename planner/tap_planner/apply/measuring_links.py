"""Times of collectives, by the communicator that runs plans; all groups of the mesh speak at once.

Over gloo a collective's time is what it adds to a stretch of computation before it, on all processes: there the host
computes and communicates, and what a step loses at a collective is mostly the wait for the last process to arrive.
Over nccl collectives run one after the other, as the device waits for nobody's host.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tap_planner.apply.communicator import Axes, Communicator, group_size
from tap_planner.apply.process_group import ProcessGroupCommunicator
from tap_planner.apply.team import Budget, Team, repetitions

_BLOCKS = 5
_LEAST_CALLS, _MOST_CALLS = 5, 200
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
    progress: Callable[[int], None],
    *,
    stretch_ns: float,
) -> list[float | None]:
    """Nanoseconds of each collective, the mean over the processes; None for those that no time was left for.

    Args:
        cases: on meshes of all processes of the team.
        backend: ``gloo`` or ``nccl``.
        team: all its processes call this.
        seconds: for all of them.
        progress: called with the number of collectives that are done, before each.
        stretch_ns: how long processes compute before each collective, over gloo.
    """
    budget = Budget(team, seconds, len(cases))
    shapes = dict.fromkeys(case.mesh_shape for case in cases)
    compute = _stretch(team, stretch_ns) if team.device.type == "cpu" else None
    communicators = {shape: ProcessGroupCommunicator(shape, backend) for shape in shapes}
    found: list[float | None] = []
    for number, case in enumerate(cases):
        progress(number)
        share = budget.next_share()
        found.append(_measured(case, communicators[case.mesh_shape], compute, team, share) if share > 0 else None)
    return found


def _measured(
    case: CollectiveCase, communicator: Communicator, compute: Work | None, team: Team, share_s: float
) -> float:
    call = _call(case, communicator)
    call()
    team.wait_for_all()
    both, alone = _together(call, compute)
    once_ns = team.most(_block_ns(both, team, 2) + _block_ns(alone, team, 2))
    size = repetitions(once_ns / 1e9, share_s, _LEAST_CALLS, _MOST_CALLS) // _BLOCKS
    blocks: list[float] = []
    for _ in range(_BLOCKS):
        team.wait_for_all()
        blocks.append(_block_ns(both, team, size))
        team.wait_for_all()
        blocks[-1] -= _block_ns(alone, team, size)
    return max(team.means([statistics.median(blocks)])[0], _LEAST_NS)


def _together(call: Work, compute: Work | None) -> tuple[Work, Work]:
    """What is timed, and what of it is not the collective's."""
    if compute is None:
        return call, lambda: None

    def both() -> None:
        compute()
        call()

    return both, compute


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
