"""What is played is a valid list schedule, and exactly the one that is described."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.device_placement import Problem, Timeline, makespan_ns, order_priority, play, rank_priority
from tests.device_placement.problems import Traits, chain, graph, problems

LARGER = Traits(max_groups=10, max_devices=4)


def drawn(problem: Problem, seed: int) -> tuple[list[int], list[int]]:
    """A placement and a priority with ties."""
    draw = random.Random(seed)
    placement = [draw.randrange(problem.num_devices) for _ in range(problem.num_groups)]
    return placement, [draw.randint(0, 5) for _ in range(problem.num_tasks)]


def ready_ns(problem: Problem, placement: Sequence[int], timeline: Timeline) -> list[int]:
    """When all that each task reads lies on its device."""
    arrival = {(tensor, target): end for tensor, _, target, _, end in timeline.transfers.tolist()}
    ready = [0] * problem.num_tasks
    for tensor, reader in zip(problem.edge_tensor.tolist(), problem.edge_consumer.tolist(), strict=True):
        maker = int(problem.tensor_producer[tensor])
        source, target = placement[int(problem.group_of[maker])], placement[int(problem.group_of[reader])]
        there = int(timeline.end_ns[maker]) if source == target else arrival[tensor, target]
        ready[reader] = max(ready[reader], there)
    return ready


@given(problem=problems(LARGER), seed=st.integers(0, 99))
def test_devices_run_the_best_ready_task(problem: Problem, seed: int) -> None:
    """A device runs one task at a time, never waits while one is ready, and takes the one of least priority."""
    placement, priority = drawn(problem, seed)
    timeline = play(problem, placement, priority)
    ready = ready_ns(problem, placement, timeline)
    starts, ends = timeline.start_ns.tolist(), timeline.end_ns.tolist()
    for device in range(problem.num_devices):
        own = [task for task in range(problem.num_tasks) if placement[problem.group_of[task]] == device]
        own.sort(key=lambda task: (starts[task], ends[task]))
        until = 0
        for position, task in enumerate(own):
            waiting = own[position:]
            assert starts[task] == max(until, min(ready[other] for other in waiting))
            if ends[task] > starts[task]:  # tasks that take nothing may wait for each other at one time
                rivals = [other for other in waiting if ready[other] <= starts[task] and ends[other] > starts[other]]
                nothing = any(ends[other] == starts[other] == starts[task] for other in range(problem.num_tasks))
                assert nothing or (priority[task], task) == min((priority[other], other) for other in rivals)
            assert ends[task] == starts[task] + problem.task_ns[task, device]
            until = ends[task]


@given(problem=problems(LARGER), seed=st.integers(0, 99))
def test_transfers_are_first_come_first_served(problem: Problem, seed: int) -> None:
    """A tensor goes once to every other device that reads it, when its channels have carried what came before."""
    placement, priority = drawn(problem, seed)
    timeline = play(problem, placement, priority)
    wanted = set()
    for tensor, reader in zip(problem.edge_tensor.tolist(), problem.edge_consumer.tolist(), strict=True):
        source = placement[problem.group_of[problem.tensor_producer[tensor]]]
        target = placement[problem.group_of[reader]]
        if source != target:
            wanted.add((tensor, source, target))
    rows = timeline.transfers.tolist()
    assert sorted(tuple(row[:3]) for row in rows) == sorted(wanted)
    made = [int(timeline.end_ns[problem.tensor_producer[row[0]]]) for row in rows]
    assert made == sorted(made)
    makers = [int(problem.tensor_producer[row[0]]) for row in rows]
    for maker in set(makers):
        own = [
            (tensor, target) for (tensor, _, target, _, _), other in zip(rows, makers, strict=True) if other == maker
        ]
        assert own == sorted(own)
    free: dict[int, int] = {}
    for (tensor, source, target, start, end), asked in zip(rows, made, strict=True):
        channels = problem.links.channels[source, target].tolist()
        assert start == max(asked, *(free.get(channel, 0) for channel in channels))
        assert end == start + problem.transfer_ns(tensor, source, target)
        free.update(dict.fromkeys(channels, end))
    assert timeline.sent_bytes == sum(int(problem.tensor_bytes[tensor]) for tensor, _, _ in wanted)


@given(problem=problems(LARGER), seed=st.integers(0, 99))
def test_makespan_and_its_bounds(problem: Problem, seed: int) -> None:
    """The makespan is the last end, and no less than the longest way, the busiest device and the busiest channel."""
    placement, priority = drawn(problem, seed)
    timeline = play(problem, placement, priority)
    assert timeline.makespan_ns == makespan_ns(problem, placement, priority) == timeline.end_ns.max()
    assert timeline.makespan_ns >= -min(rank_priority(problem, placement))
    assert timeline.makespan_ns >= max(timeline.busy_ns)
    assert sum(timeline.busy_ns) == sum(
        int(problem.task_ns[task, placement[group]]) for task, group in enumerate(problem.group_of)
    )
    carried = np.zeros(2 * problem.num_devices, dtype=np.int64)
    for _, source, target, start, end in timeline.transfers.tolist():
        carried[problem.links.channels[source, target]] += end - start
    tail = max((int(end) for end in timeline.transfers[:, 4]), default=0)
    assert tail <= timeline.makespan_ns  # whatever is sent is read
    assert timeline.makespan_ns >= carried.max(initial=0)


def test_a_chain_takes_its_sum() -> None:
    """Tasks one after the other on alternating devices take their times and the transfers between."""
    problem = chain([3, 4, 5, 6], num_devices=2, tensor_bytes=2)
    assert play(problem, (0, 1, 0, 1), range(4)).makespan_ns == 3 + 4 + 5 + 6 + 3 * 2
    assert play(problem, (0, 0, 0, 0), range(4)).makespan_ns == 3 + 4 + 5 + 6


def test_transfers_wait_for_each_other() -> None:
    """Three producers' tensors queue on the one way into the fourth device: worked by hand."""
    problem = graph([2, 2, 2, 1], [(0, 3), (1, 3), (2, 3)], num_devices=4, tensor_bytes=5)
    timeline = play(problem, (0, 1, 2, 3), range(4))
    assert timeline.transfers[:, 3:].tolist() == [[2, 7], [7, 12], [12, 17]]
    assert timeline.makespan_ns == 18


def test_priority_decides() -> None:
    """Of two ready tasks that one runs first whose priority is less; which saves time if something waits for it."""
    problem = graph([5, 1, 9], [(1, 2)], num_devices=2, tensor_bytes=0)
    assert play(problem, (0, 0, 1), (0, 1, 2)).makespan_ns == 5 + 1 + 9
    assert play(problem, (0, 0, 1), (1, 0, 2)).makespan_ns == 1 + 9
    assert rank_priority(problem, (0, 0, 1)) == [-5, -10, -9]


@given(problem=problems(Traits(training=True)))
def test_order_priority_runs_backward_backwards(problem: Problem) -> None:
    """Forward tasks come as listed, all backward tasks after them, the last group's first."""
    order = list(range(problem.num_groups))[::-1]
    priority = order_priority(problem, order)
    ranked = sorted(range(problem.num_tasks), key=lambda task: priority[task])
    count = problem.num_groups
    assert [int(problem.group_of[task]) for task in ranked] == [*order, *order[::-1]]
    assert not problem.is_backward[ranked[:count]].any() and problem.is_backward[ranked[count:]].all()
