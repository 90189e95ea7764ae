"""Times of collectives, by the communicator that runs plans; all groups of the mesh speak at once."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCase:
    """A collective to be measured."""

    kind: str
    mesh_shape: tuple[int, ...]
    axes: Axes
    num_bytes: int
    """Logical payload on one rank; a multiple of 4 x the group's size."""


def measure_collectives(
    cases: Sequence[CollectiveCase], backend: str, team: Team, seconds: float, progress: Callable[[int], None]
) -> list[float | None]:
    """Nanoseconds of each collective, the mean over the processes; None for those that no time was left for.

    Args:
        cases: on meshes of all processes of the team.
        backend: ``gloo`` or ``nccl``.
        team: all its processes call this.
        seconds: for all of them.
        progress: called with the number of collectives that are done, before each.
    """
    budget = Budget(team, seconds, len(cases))
    shapes = dict.fromkeys(case.mesh_shape for case in cases)
    communicators = {shape: ProcessGroupCommunicator(shape, backend) for shape in shapes}
    found: list[float | None] = []
    for number, case in enumerate(cases):
        progress(number)
        share = budget.next_share()
        found.append(_measured(case, communicators[case.mesh_shape], team, share) if share > 0 else None)
    return found


def _measured(case: CollectiveCase, communicator: Communicator, team: Team, share_s: float) -> float:
    call = _call(case, communicator)
    call()
    team.wait_for_all()
    once_ns = team.most(_block_ns(call, team, 2))
    size = repetitions(once_ns / 1e9, share_s, _LEAST_CALLS, _MOST_CALLS) // _BLOCKS
    team.wait_for_all()
    blocks = [_block_ns(call, team, size) for _ in range(_BLOCKS)]
    return team.means([statistics.median(blocks)])[0]


def _block_ns(call: Callable[[], object], team: Team, calls: int) -> float:
    begin = team.now_ns()
    for _ in range(calls):
        call()
    return (team.now_ns() - begin) / calls


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
