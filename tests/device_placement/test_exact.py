"""The exact scheduler and the lower bounds against exhaustive search."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from tap_planner.device_placement import (
    ExactStatus,
    Problem,
    lower_bound_ns,
    makespan_ns,
    place,
    play,
    rank_priority,
    solve_exactly,
)
from tap_planner.device_placement.bounds import shared_work_ns
from tests.device_placement.exhaustive import fitting, shortest_ns
from tests.device_placement.problems import Traits, chain, graph, problems, random_problem

SMALL = Traits(max_groups=4, training=False)
TINY = Traits(max_groups=3, max_devices=2)


@settings(max_examples=80)
@given(problem=st.one_of(problems(SMALL), problems(TINY)))
def test_exact_is_the_shortest_of_all(problem: Problem) -> None:
    """The makespan is that of exhaustive search, proven; nothing fits exactly if there nothing fits."""
    expected = shortest_ns(problem)
    found = solve_exactly(problem)
    if expected is None:
        assert found.status is ExactStatus.INFEASIBLE and found.placement is None
        return
    assert found.status is ExactStatus.OPTIMAL
    assert found.makespan_ns == found.bound_ns == expected
    assert found.placement in set(fitting(problem))


@settings(max_examples=60)
@given(problem=problems(Traits(max_groups=3, max_devices=2)))
def test_no_priority_beats_the_bound(problem: Problem) -> None:
    """Over all placements that fit and all priorities, nothing that is played is shorter than what is proven."""
    found = solve_exactly(problem)
    played = [
        makespan_ns(problem, placement, priority)
        for placement in fitting(problem)
        for priority in itertools.permutations(range(problem.num_tasks))
    ]
    assert (found.makespan_ns is None) == (not played)
    if found.makespan_ns is not None:
        assert found.bound_ns <= found.makespan_ns <= min(played)


@settings(max_examples=60)
@given(problem=problems(Traits(max_groups=6)))
def test_starts_are_a_schedule(problem: Problem) -> None:
    """Tasks start after what they read has been made and sent, one at a time on a device, and end by the makespan."""
    found = solve_exactly(problem, deterministic_seconds=0.5)
    assume(found.placement is not None and found.start_ns is not None and found.makespan_ns is not None)
    assert found.placement is not None and found.start_ns is not None
    device = [found.placement[group] for group in problem.group_of]
    ends = [start + int(problem.task_ns[task, device[task]]) for task, start in enumerate(found.start_ns)]
    assert max(ends) == found.makespan_ns
    for tensor, reader in zip(problem.edge_tensor.tolist(), problem.edge_consumer.tolist(), strict=True):
        maker = int(problem.tensor_producer[tensor])
        sent = problem.transfer_ns(tensor, device[maker], device[reader])
        assert found.start_ns[reader] >= ends[maker] + sent
    for a, b in itertools.combinations(range(problem.num_tasks), 2):
        if device[a] == device[b]:
            assert ends[a] <= found.start_ns[b] or ends[b] <= found.start_ns[a]


@settings(max_examples=40)
@given(problem=problems(Traits(max_groups=6)))
def test_hints_are_never_made_worse(problem: Problem) -> None:
    """With next to no effort the answer is still no longer than the hint, and bound and status agree with it."""
    placing = place(problem, ("topo",), improve=False)
    assume(placing.best is not None)
    assert placing.best is not None
    found = solve_exactly(problem, hint=placing.best.placement, priority=placing.priority, deterministic_seconds=1e-6)
    assert found.makespan_ns is not None
    assert found.bound_ns <= found.makespan_ns <= placing.best.makespan_ns
    assert (found.status is ExactStatus.OPTIMAL) == (found.bound_ns == found.makespan_ns)


def test_transfers_share_channels() -> None:
    """Tensors of three devices that a fourth reads come in one after the other: 2 + 3 x 5 + 1."""
    problem = graph([2, 2, 2, 1], [(0, 3), (1, 3), (2, 3)], num_devices=4, tensor_bytes=5)
    assert solve_exactly(replace(problem, allowed=np.eye(4, dtype=bool))).makespan_ns == 18


def test_waiting_may_be_best() -> None:
    """A device that waits for the urgent task on purpose beats every list schedule: exact finds it, play cannot."""
    problem = graph([9, 2, 1, 10], [(1, 2), (2, 3)], num_devices=2, tensor_bytes=1)
    pinned = replace(problem, allowed=np.asarray([[True, False], [False, True], [True, False], [False, True]]))
    assert solve_exactly(pinned).makespan_ns == 2 + 1 + 1 + 1 + 10
    played = {makespan_ns(pinned, (0, 1, 0, 1), priority) for priority in itertools.permutations(range(4))}
    assert played == {9 + 1 + 1 + 10}


def test_twenty_groups_are_proven() -> None:
    """A branchy graph of twenty operators on three devices is solved to its bound, the same both times."""
    edges = [(a, b) for a in range(20) for b in (a + 1, a + 3) if b < 20 and (a + b) % 4]
    problem = graph([3 + group % 5 for group in range(20)], edges, num_devices=3, tensor_bytes=1)
    placing = place(problem)
    assert placing.best is not None
    first, second = (solve_exactly(problem, hint=placing.best.placement, priority=placing.priority) for _ in range(2))
    assert first == second
    assert first.status is ExactStatus.OPTIMAL and first.bound_ns == first.makespan_ns
    assert first.bound_ns >= lower_bound_ns(problem)


def test_nothing_fits() -> None:
    """Memory for no placement at all is proven."""
    found = solve_exactly(chain([1, 1, 1], num_devices=2, capacity_bytes=1))
    assert found.status is ExactStatus.INFEASIBLE


@given(problem=problems(Traits(max_groups=8)), seed=st.integers(0, 20))
def test_lower_bound(problem: Problem, seed: int) -> None:
    """No allowed placement is played faster than the lower bound."""
    draw = np.random.default_rng(seed)
    placement = [int(draw.choice(np.flatnonzero(row))) for row in problem.allowed]
    assert lower_bound_ns(problem) <= play(problem, placement, rank_priority(problem, placement)).makespan_ns


@pytest.mark.parametrize("seed", range(40))
def test_shared_work_is_nearly_the_linear_program(seed: int) -> None:
    """Divisible work on unlike devices: at most the linear program's optimum, and at least 95 % of it."""
    problem = random_problem(seed, Traits(max_groups=9, max_devices=4, alike=False, memory=False))
    problem = replace(problem, task_ns=1000 * problem.task_ns + 1)
    group_ns = problem.group_ns()
    groups, devices = group_ns.shape
    cost = np.zeros(groups * devices + 1)
    cost[-1] = 1
    loads = np.zeros((devices, groups * devices + 1))
    for device in range(devices):
        loads[device, device : groups * devices : devices] = group_ns[:, device]
        loads[device, -1] = -1
    whole = np.zeros((groups, groups * devices + 1))
    for group in range(groups):
        whole[group, group * devices : (group + 1) * devices] = 1
    limits = [(0, 1 if allowed else 0) for allowed in problem.allowed.ravel()] + [(0, None)]
    optimum = linprog(cost, A_ub=loads, b_ub=np.zeros(devices), A_eq=whole, b_eq=np.ones(groups), bounds=limits).fun
    assert 0.95 * optimum <= shared_work_ns(problem) <= optimum + 1


def test_shared_work_of_paces() -> None:
    """Devices of paces 1, 2 and 5 share work as their paces say."""
    work = np.asarray([[60], [100], [20], [220]])
    problem = replace(
        graph([1] * 4, [], num_devices=3), task_ns=np.concatenate([10 * work, 5 * work, 2 * work], axis=1)
    )
    assert shared_work_ns(problem) == pytest.approx(400 * 10 / 8, rel=1e-4)
