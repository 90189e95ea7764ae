"""All tries together: best first, never worse than one device, honest where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from tap_planner.device_placement import ORDERS, Problem, makespan_ns, place
from tap_planner.errors import UsageError
from tests.device_placement.problems import Traits, chain, graph, problems


@settings(max_examples=60)
@given(problem=problems(Traits(max_groups=7)))
def test_tries_are_what_they_say(problem: Problem) -> None:
    """Best first; the first one is played with the priority given; none is worse than the best device alone."""
    placing = place(problem, evaluations=30)
    keys = [(tried.overshoot_bytes, tried.makespan_ns) for tried in placing.tries]
    assert keys == sorted(keys)
    first = placing.tries[0]
    assert makespan_ns(problem, first.placement, placing.priority) == first.makespan_ns
    assert (placing.best is first) == first.fits == (placing.shortage is None)
    for tried in placing.tries:
        assert problem.is_allowed(tried.placement)
        assert tried.overshoot_bytes == sum(problem.overshoot_bytes(tried.placement))
    for device in range(problem.num_devices):
        alone = (device,) * problem.num_groups
        if problem.is_allowed(alone) and not any(problem.overshoot_bytes(alone)):
            assert placing.best is not None
            assert placing.best.makespan_ns <= int(problem.task_ns[:, device].sum())


@settings(max_examples=30)
@given(problem=problems(Traits(max_groups=7)))
def test_same_answer_twice(problem: Problem) -> None:
    """Same arguments, same tries."""
    assert place(problem, evaluations=30) == place(problem, evaluations=30)


def test_every_order_and_placer_is_tried() -> None:
    """Each order gives two cuts and one greedy placement; and one device alone is tried once."""
    placing = place(graph([3, 4, 5, 6], [(0, 1), (0, 2), (1, 3)], num_devices=2), improve=False)
    placers = ("contiguous:bottleneck", "contiguous:sequential", "earliest-finish")
    expected = {(name, placer) for name in ORDERS for placer in placers} | {("", "single-device")}
    assert {(tried.order, tried.placer) for tried in placing.tries} == expected
    assert len(placing.tries) == len(expected)
    few = place(graph([3, 4], [], num_devices=2), ("bfs", "random:4"), ("earliest-finish",), improve=False)
    assert {tried.order for tried in few.tries} == {"", "bfs", "random:4"}


def test_branches_beat_one_device() -> None:
    """Two branches on two devices take half of the time of one; known optimum."""
    edges = [(0, 2), (1, 3), (2, 4), (3, 5)]
    placing = place(graph([10] * 6, edges, num_devices=2, tensor_bytes=100))
    assert placing.best is not None and placing.best.makespan_ns == 30


def test_shortage() -> None:
    """Where nothing fits, it says which device lacks how much in the placement that lacks least."""
    problem = replace(chain([1, 1], num_devices=2), fixed_bytes=np.asarray([10, 6]), capacity_bytes=np.asarray([7, 5]))
    placing = place(problem)
    assert placing.best is None and placing.shortage is not None
    shortage = placing.shortage
    assert (shortage.device, shortage.device_bytes, shortage.total_bytes) == (0, 3, 4)  # 10 on 7, and 6 on 5


def test_unknown_placer() -> None:
    """A placer that there is not is refused with those that there are."""
    with pytest.raises(UsageError, match="unknown placer 'first-fit', expected one of contiguous, earliest-finish"):
        place(chain([1], num_devices=1), placers=("first-fit",))


def test_nothing_to_try() -> None:
    """Without orders, and with no device that may hold everything, there is no answer."""
    problem = replace(chain([1, 1], num_devices=2), allowed=np.asarray([[True, False], [False, True]]))
    with pytest.raises(UsageError, match="nothing to try"):
        place(problem, ())
