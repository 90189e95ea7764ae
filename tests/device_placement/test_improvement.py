"""Local improvement never harms, and finds what single moves can find."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tap_planner.device_placement import Problem, improve, makespan_ns, play, rank_priority
from tap_planner.device_placement.improvement import critical_groups
from tests.device_placement.problems import Traits, chain, graph, problems


def allowed_at_random(problem: Problem, seed: int) -> tuple[int, ...]:
    """A placement on allowed devices."""
    draw = np.random.default_rng(seed)
    return tuple(int(draw.choice(np.flatnonzero(row))) for row in problem.allowed)


def worth(problem: Problem, placement: tuple[int, ...], priority: list[int]) -> tuple[int, int]:
    """What is minimised: bytes beyond the memory, then the makespan."""
    return sum(problem.overshoot_bytes(placement)), makespan_ns(problem, placement, priority)


@settings(max_examples=150)
@given(problem=problems(Traits(max_groups=7)), seed=st.integers(0, 9), evaluations=st.integers(0, 40))
def test_never_worse(problem: Problem, seed: int, evaluations: int) -> None:
    """Within any number of evaluations the result is allowed, no worse, what it says it is, and always the same."""
    start, priority = allowed_at_random(problem, seed), rank_priority(problem)
    found = improve(problem, start, priority, evaluations=evaluations)
    assert problem.is_allowed(found.placement)
    assert worth(problem, found.placement, priority) == (found.overshoot_bytes, found.makespan_ns)
    assert worth(problem, found.placement, priority) <= worth(problem, start, priority)
    assert found.num_evaluations <= evaluations
    assert improve(problem, start, priority, evaluations=evaluations) == found


@given(problem=problems(Traits(max_groups=7)), seed=st.integers(0, 9))
def test_no_single_move_is_left(problem: Problem, seed: int) -> None:
    """With evaluations enough, no group alone can change devices for the better."""
    priority = rank_priority(problem)
    found = improve(problem, allowed_at_random(problem, seed), priority, evaluations=10_000)
    best = worth(problem, found.placement, priority)
    for group in range(problem.num_groups):
        for device in np.flatnonzero(problem.allowed[group]).tolist():
            moved = (*found.placement[:group], device, *found.placement[group + 1 :])
            assert worth(problem, moved, priority) >= best


def test_runs_move_together() -> None:
    """A chain cut in two, whose every single move costs more transfers, is put together."""
    problem = chain([2] * 8, num_devices=2, tensor_bytes=30)
    start = (0, 0, 0, 1, 1, 0, 0, 0)
    assert improve(problem, start, range(8)).makespan_ns == 16


def test_pairs_change_places() -> None:
    """Full devices only let a small and a large group change places."""
    problem = graph([1, 9, 9, 1], [(0, 1), (2, 3)], num_devices=2, tensor_bytes=5, capacity_bytes=2)
    start = (0, 1, 0, 1)
    found = improve(problem, start, rank_priority(problem))
    assert found.overshoot_bytes == 0 and found.makespan_ns == 10


def test_empty_devices_are_tried_once() -> None:
    """Of empty devices that can change places one is tried: more of them need no more evaluations."""
    few, many = (graph([1, 9, 9, 1], [(0, 1), (2, 3)], num_devices=count) for count in (3, 9))
    found = [improve(problem, (0, 0, 0, 0), rank_priority(problem)) for problem in (few, many)]
    assert found[0].makespan_ns == found[1].makespan_ns == 10
    assert found[0].num_evaluations == found[1].num_evaluations


def test_memory_comes_first() -> None:
    """A placement that does not fit is made to fit, though it takes longer."""
    problem = chain([1] * 6, num_devices=3, tensor_bytes=9, capacity_bytes=2)
    found = improve(problem, (0,) * 6, range(6))
    assert found.overshoot_bytes == 0 and found.makespan_ns > 6


@given(problem=problems(Traits(max_groups=8)), seed=st.integers(0, 9))
def test_critical_groups(problem: Problem, seed: int) -> None:
    """The chain begins with the group that ends last and ends with one that starts the step."""
    placement, priority = allowed_at_random(problem, seed), rank_priority(problem)
    timeline = play(problem, placement, priority)
    groups = critical_groups(problem, placement, timeline)
    assert len(set(groups)) == len(groups)
    ends = {int(problem.group_of[task]) for task in np.flatnonzero(timeline.end_ns == timeline.makespan_ns)}
    starts = {int(problem.group_of[task]) for task in np.flatnonzero(timeline.start_ns == 0)}
    assert groups[0] in ends and starts & set(groups)
