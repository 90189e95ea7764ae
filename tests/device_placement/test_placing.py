"""All tries together: best first, never worse than one device, honest where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from tap_planner.device_placement import ORDERS, Problem, makespan_ns, orders_for, place, placing, priority_of
from tap_planner.device_placement.subsets import device_subsets
from tap_planner.errors import UsageError
from tests.bench.placement_orders import branchy_problem
from tests.device_placement.problems import Traits, chain, graph, problems, restricted, widened

ALL = tuple(range(8))


@settings(max_examples=60)
@given(problem=problems(Traits(max_groups=7)))
def test_tries_are_what_they_say(problem: Problem) -> None:
    """Best first; each can be played again, the first by the priority given; none is worse than one device."""
    placing = place(problem, evaluations=30)
    keys = [(tried.overshoot_bytes, tried.makespan_ns) for tried in placing.tries]
    assert keys == sorted(keys)
    first = placing.tries[0]
    assert makespan_ns(problem, first.placement, placing.priority) == first.makespan_ns
    assert (placing.best is first) == first.fits == (placing.shortage is None)
    assert placing.priority == priority_of(problem, first)
    for tried in placing.tries:
        assert makespan_ns(problem, tried.placement, priority_of(problem, tried)) == tried.makespan_ns
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


def worth(problem: Problem, *, improve: bool) -> tuple[int, int]:
    """What the first of all tries lacks in memory, and its makespan."""
    first = place(problem, ORDERS, improve=improve, evaluations=30).tries[0]
    return first.overshoot_bytes, first.makespan_ns


@pytest.mark.parametrize("improve", [False, True])
@settings(max_examples=25)
@given(problem=problems(Traits(max_groups=9, constraints=False)))
def test_more_devices_are_never_worse(improve: bool, problem: Problem) -> None:
    """On 8 devices that are alike nothing is worse than on 4, and on these nothing worse than on 2."""
    two, four, eight = (worth(widened(problem, count), improve=improve) for count in (2, 4, 8))
    assert eight <= four <= two


@pytest.mark.parametrize("improve", [False, True])
@settings(max_examples=25)
@given(problem=problems(Traits(max_groups=7, max_devices=4, constraints=False)))
def test_what_is_tried_on_fewer_devices(improve: bool, problem: Problem) -> None:
    """Whatever devices and links are like: nothing is worse than what is found on fewer devices alone."""
    whole = worth(problem, improve=improve)
    for devices in device_subsets(problem):
        assert whole <= worth(restricted(problem, devices), improve=improve)


def test_large_graphs_on_fewer_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond some size only earliest-finish with the two best orders is tried on fewer devices."""
    monkeypatch.setattr(placing, "_SMALL", 0)
    problem = branchy_problem(30, 0)
    assert device_subsets(problem) == ((0, 1, 2, 3), (0, 1))
    tries = place(problem, improve=False).tries
    tried = {(t.placer, t.devices) for t in tries}
    few = orders_for(problem)[:2]
    assert {t.order for t in tries if t.order and t.devices != ALL} == {*few}
    assert {devices for placer, devices in tried if placer == "earliest-finish"} == {*device_subsets(problem), ALL}
    assert {devices for placer, devices in tried if placer.startswith("contiguous")} == {ALL}
    alone = restricted(problem, (0, 1, 2, 3))
    best = place(alone, few, ("earliest-finish",), improve=False).tries[0]
    assert tries[0].makespan_ns <= best.makespan_ns


def test_fewer_devices_can_be_faster() -> None:
    """Here earliest-finish scatters groups over both nodes; kept in one node it does better, and that is found."""
    problem = branchy_problem(20, 4)
    tries = place(problem, ORDERS, ("earliest-finish",), improve=False).tries
    least = {
        devices: min(t.makespan_ns for t in tries if t.devices == devices) for devices in {t.devices for t in tries}
    }
    assert least[0, 1, 2, 3] < least[ALL]


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


def test_what_is_proven_is_not_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain on one device takes what the lower bound says: nothing is played to improve it."""
    monkeypatch.setattr(placing, "improve", lambda *_, **__: pytest.fail("improved"))
    best = place(chain([2, 3, 4], num_devices=4)).best
    assert best is not None and best.makespan_ns == 9
