"""Sets of fewer devices, and what placers do with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.device_placement import ORDERS, Problem, Shared, contiguous, earliest_finish, improve, order_groups
from tap_planner.device_placement.priorities import rank_priority
from tap_planner.device_placement.subsets import device_subsets
from tests.bench.placement_orders import branchy_problem
from tests.device_placement.problems import Traits, graph, problems, restricted


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, ()),
        (2, ()),
        (3, ((0, 1),)),
        (4, ((0, 1),)),
        (6, ((0, 1, 2), (0, 1))),
        (8, ((0, 1, 2, 3), (0, 1))),
    ],
)
def test_halves(count: int, expected: tuple[tuple[int, ...], ...]) -> None:
    """Of devices that are alike half, rounded up, then half of that, down to two."""
    assert device_subsets(graph([1, 1], [(0, 1)], num_devices=count)) == expected


def test_nodes_before_parts_of_nodes() -> None:
    """Half of two nodes is one node, whatever the numbers of its devices."""
    assert device_subsets(branchy_problem(4, 0)) == ((0, 1, 2, 3), (0, 1))
    mixed = [0, 4, 1, 5, 2, 6, 3, 7]
    assert device_subsets(restricted(branchy_problem(4, 0), mixed)) == ((0, 2, 4, 6), (0, 2))


def test_a_node_of_the_right_size() -> None:
    """Half of a node of two and one of six devices lies in the larger one."""
    problem = graph([1, 1], [(0, 1)], num_devices=8)
    node = np.asarray([0, 0, 1, 1, 1, 1, 1, 1])
    latency = np.where(node[:, None] != node[None, :], 9, 2)
    nodes = replace(problem, links=replace(problem.links, latency_ns=latency))
    assert device_subsets(nodes) == ((2, 3, 4, 5), (2, 3))


def test_slow_devices_are_left_out_first() -> None:
    """Without the slowest kind, without the next one, then halves of the fastest; never one device alone."""
    problem = graph([1, 1], [], num_devices=6)
    kinds = np.asarray([3, 1, 2, 1, 1, 2])
    assert device_subsets(replace(problem, task_ns=np.stack([kinds, kinds]))) == ((1, 2, 3, 4, 5), (1, 3, 4), (1, 3))
    kinds = np.asarray([3, 2, 1, 3, 3, 3])
    assert device_subsets(replace(problem, task_ns=np.stack([kinds, kinds]))) == ((1, 2),)


def test_sets_have_the_memory() -> None:
    """Sets that cannot hold all groups are left out; what may lie on none of their devices does not count."""
    problem = replace(graph([1, 1], [], num_devices=8, capacity_bytes=3), fixed_bytes=np.asarray([4, 4]))
    shared = (Shared(num_bytes=5, groups=(0, 1)),)
    assert device_subsets(problem) == ((0, 1, 2, 3),)
    assert device_subsets(replace(problem, shared=shared)) == ()
    elsewhere = np.ones((2, 8), dtype=bool)
    elsewhere[1, :4] = False
    assert device_subsets(replace(problem, shared=shared, allowed=elsewhere)) == ((0, 1, 2, 3), (0, 1))


SUBSETS = problems(Traits(max_groups=8, max_devices=5, constraints=False)).flatmap(
    lambda problem: st.tuples(
        st.just(problem),
        st.sets(st.integers(0, problem.num_devices - 1), min_size=1).map(lambda chosen: (*sorted(chosen),)),
    )
)


@given(case=SUBSETS, name=st.sampled_from(ORDERS))
def test_placers_on_some_devices(case: tuple[Problem, tuple[int, ...]], name: str) -> None:
    """Placers do on some of the devices what they do where there are no others; so do ranks and improvement."""
    problem, devices = case
    alone, order = restricted(problem, devices), order_groups(problem, name)
    rank = rank_priority(problem, devices=devices)
    assert rank == rank_priority(alone)
    greedy = earliest_finish(alone, order)
    assert earliest_finish(problem, order, devices=devices) == tuple(devices[device] for device in greedy)
    cuts = [
        (cut.objective, cut.objective_ns, tuple(devices[d] for d in cut.placement)) for cut in contiguous(alone, order)
    ]
    found = contiguous(problem, order, devices=devices)
    assert [(cut.objective, cut.objective_ns, cut.placement) for cut in found] == cuts
    better = improve(alone, greedy, rank, evaluations=20)
    moved = improve(problem, [devices[device] for device in greedy], rank, evaluations=20, devices=devices)
    assert moved.placement == tuple(devices[device] for device in better.placement)
    assert moved.makespan_ns == better.makespan_ns


def test_groups_that_must_lie_elsewhere() -> None:
    """A group that is allowed on none of the devices goes where it may, others do not follow; there is no cut."""
    problem = graph([4, 4, 4], [], num_devices=4)
    pinned = replace(problem, allowed=np.asarray([[True] * 4, [False, False, True, True], [True] * 4]))
    assert earliest_finish(pinned, range(3), devices=(0, 1)) == (0, 2, 1)
    assert contiguous(pinned, range(3), devices=(0, 1)) == ()
