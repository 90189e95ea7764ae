"""What greedy placement promises, by closed forms and by its own rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.device_placement import ORDERS, Problem, earliest_finish, makespan_ns, order_groups, rank_priority
from tests.device_placement.problems import Traits, chain, graph, heft_example, problems

NAMES = st.sampled_from((*ORDERS, "random:3", "upward-rank"))


def test_equal_groups_spread_evenly() -> None:
    """Groups that do not depend on each other are dealt out in turn."""
    assert earliest_finish(graph([4] * 7, [], num_devices=3), range(7)) == (0, 1, 2, 0, 1, 2, 0)


@pytest.mark.parametrize("name", ORDERS)
def test_chains_stay_together(name: str) -> None:
    """A chain whose transfers take longer than its tasks stays on one device, in whatever order it is taken."""
    problem = chain([3] * 8, num_devices=3, tensor_bytes=50)
    assert len(set(earliest_finish(problem, order_groups(problem, name)))) == 1


@pytest.mark.parametrize("name", [*ORDERS, "upward-rank"])
def test_branches_part(name: str) -> None:
    """Two long branches with short transfers go to two devices and save nearly half."""
    edges = [(0, 1), (0, 2), *((a, a + 2) for a in range(1, 17)), (17, 19), (18, 19)]
    problem = graph([1, *[10] * 18, 1], edges, num_devices=2, tensor_bytes=1)
    placement = earliest_finish(problem, order_groups(problem, name))
    assert makespan_ns(problem, placement, rank_priority(problem)) <= 1 + 90 + 1 + 2 * 10


def test_links_are_shared() -> None:
    """What a device sends goes one after the other: the second of two readers elsewhere waits, so it stays."""
    edges = [(0, 2), (1, 3)]
    problem = graph([10, 10, 6, 6], edges, num_devices=2, tensor_bytes=5)
    both = replace(problem, allowed=np.asarray([[True, False], [True, False], [False, True], [True, True]]))
    assert earliest_finish(both, range(4)) == (0, 0, 1, 0)
    free = replace(both.links, channels=np.full((2, 2, 0), 0, dtype=np.int64))
    first = replace(both, task_ns=np.asarray([[10, 10], [1, 1], [6, 6], [12, 1]]), links=free)
    assert earliest_finish(first, range(4)) == (0, 0, 1, 1)


def test_ways_in_are_shared() -> None:
    """Two tensors come into a third device one after the other: so the group goes to one of its producers, at 23."""
    problem = graph([10, 10, 6], [(0, 2), (1, 2)], num_devices=3, tensor_bytes=5)
    pinned = replace(
        problem,
        task_ns=np.asarray([[10] * 3, [10] * 3, [8, 8, 6]]),
        allowed=np.asarray([[True, False, False], [False, True, False], [True, False, True]]),
    )
    assert earliest_finish(pinned, range(3)) == (0, 1, 0)
    free = replace(pinned.links, channels=np.zeros((3, 3, 0), dtype=np.int64))
    assert earliest_finish(replace(pinned, links=free), range(3)) == (0, 1, 2)


def test_published_example() -> None:
    """HEFT's own example, in its own order: the published makespan of 80, the first three tasks where they were."""
    placement = earliest_finish(heft_example(), order_groups(heft_example(), "upward-rank"))
    assert placement[0] == 2 and placement[2] == 2 and placement[3] == 1  # tasks 1, 3 on P3 and 4 on P2
    assert makespan_ns(heft_example(), placement, rank_priority(heft_example())) == 3 * 80


@given(problem=problems(Traits(max_groups=8)), name=NAMES)
def test_memory_and_constraints(problem: Problem, name: str) -> None:
    """Groups lie where they may; and within the memory unless at some group no device had room for it."""
    order = order_groups(problem, name)
    placement = earliest_finish(problem, order)
    assert problem.is_allowed(placement)
    held = [0] * problem.num_devices
    held_shared: set[tuple[int, int]] = set()
    for group in order:
        need = {
            device: int(problem.fixed_bytes[group])
            + sum(
                shared.num_bytes
                for entry, shared in enumerate(problem.shared)
                if group in shared.groups and (entry, device) not in held_shared
            )
            for device in np.flatnonzero(problem.allowed[group]).tolist()
        }
        lacks = {device: held[device] + need[device] - int(problem.capacity_bytes[device]) for device in need}
        chosen = placement[group]
        if min(lacks.values()) <= 0:
            assert lacks[chosen] <= 0
        else:
            assert (lacks[chosen], chosen) == min((lack, device) for device, lack in lacks.items())
        held[chosen] += need[chosen]
        held_shared |= {(e, chosen) for e, shared in enumerate(problem.shared) if group in shared.groups}


@given(problem=problems(Traits(training=False, memory=False, constraints=False)))
def test_the_last_group_goes_where_it_ends_first(problem: Problem) -> None:
    """With free links, the last group's place is the best of all, all others where they are, played in that order."""
    links = replace(problem.links, channels=np.zeros((problem.num_devices, problem.num_devices, 0), dtype=np.int64))
    free = replace(problem, links=links)
    order = list(range(problem.num_groups))
    placement = list(earliest_finish(free, order))
    last = order[-1]

    def end(device: int) -> int:
        """A device runs its groups as listed, each after what it reads has come."""
        there = [*placement[:-1], device]
        until = [0] * free.num_devices
        ends: list[int] = []
        for group in order:
            begin = until[there[group]]
            for tensor in free.index.tasks.inputs[group]:
                maker = free.index.tasks.producer[tensor]
                begin = max(begin, ends[maker] + free.transfer_ns(tensor, there[maker], there[group]))
            ends.append(begin + int(free.task_ns[group, there[group]]))
            until[there[group]] = ends[group]
        return ends[last]

    ends = [end(device) for device in range(free.num_devices)]
    assert placement[last] == ends.index(min(ends))


@pytest.mark.parametrize(("num_bytes", "device"), [(3, 1), (5, 0)])
def test_gradients_come_back(num_bytes: int, device: int) -> None:
    """In training a transfer counts twice: a device that is faster by 8 is chosen for 2 x 3 but not for 2 x 5."""
    problem = Problem(
        task_ns=np.asarray([[4, 4], [10, 6], [10, 6], [4, 4]]),
        group_of=np.asarray([0, 1, 1, 0]),
        is_backward=np.asarray([False, False, True, True]),
        tensor_producer=np.asarray([0, 1, 2]),
        tensor_bytes=np.asarray([num_bytes, 0, num_bytes]),
        edge_tensor=np.asarray([0, 1, 2]),
        edge_consumer=np.asarray([1, 2, 3]),
        fixed_bytes=np.asarray([1, 1]),
        capacity_bytes=np.asarray([2, 2]),
        allowed=np.asarray([[True, False], [True, True]]),
        links=chain([1], num_devices=2).links,
    )
    assert earliest_finish(problem, (0, 1)) == (0, device)


def test_backward_counts() -> None:
    """In training a group's backward time counts: the device with the faster backward is chosen."""
    problem = Problem(
        task_ns=np.asarray([[2, 3], [9, 1]]),
        group_of=np.asarray([0, 0]),
        is_backward=np.asarray([False, True]),
        tensor_producer=np.asarray([0]),
        tensor_bytes=np.asarray([1]),
        edge_tensor=np.asarray([0]),
        edge_consumer=np.asarray([1]),
        fixed_bytes=np.asarray([1]),
        capacity_bytes=np.asarray([1, 1]),
        allowed=np.ones((1, 2), dtype=bool),
        links=chain([1], num_devices=2).links,
    )
    assert earliest_finish(problem, (0,)) == (1,)
