"""Which devices are alike, and the sequences that are tried."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.device_placement import Problem, in_order_of_use
from tap_planner.device_placement.sequences import device_sequences, interchangeable, kinds_of_devices
from tests.bench.placement_orders import branchy_problem
from tests.device_placement.problems import Traits, graph, problems


def of_kinds(kinds: str, groups: int = 4) -> Problem:
    """Devices whose times differ by kind."""
    problem = graph([1] * groups, [], num_devices=len(kinds))
    return replace(problem, task_ns=np.asarray([[ord(kind) for kind in kinds]] * groups))


def test_devices_of_a_node_are_interchangeable() -> None:
    """Devices on one node can change places, devices on two nodes cannot: other links, other NICs."""
    assert interchangeable(branchy_problem(4, 0)) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_what_tells_devices_apart() -> None:
    """Times, memory, constraints, and links each make devices unlike."""
    problem = graph([1, 2], [], num_devices=3)
    latency = problem.links.latency_ns.copy()
    latency[0, 1] = 5
    channels = problem.links.channels.copy()
    channels[0, 1, 1] = 5  # the way into the third device
    cases = [
        (problem, ((0, 1, 2),)),
        (replace(problem, task_ns=np.asarray([[1, 1, 1], [2, 3, 2]])), ((0, 2),)),
        (replace(problem, capacity_bytes=np.asarray([7, 7, 8])), ((0, 1),)),
        (replace(problem, allowed=np.asarray([[True] * 3, [False, True, True]])), ((1, 2),)),
        (replace(problem, links=replace(problem.links, latency_ns=latency)), ()),
        (replace(problem, links=replace(problem.links, channels=channels)), ()),
    ]
    for case, expected in cases:
        assert interchangeable(case) == expected


@given(problem=problems(Traits(max_devices=5, max_groups=3, alike=True)), seed=st.integers(0, 99))
def test_interchangeable_by_definition(problem: Problem, seed: int) -> None:
    """Exchanging two of a class changes no link, and maps channels one to one; exchanging others does."""
    channels = np.random.default_rng(seed).integers(0, 4, (problem.num_devices, problem.num_devices, 1))
    problem = replace(problem, links=replace(problem.links, channels=channels))
    class_of = {device: found for found in interchangeable(problem) for device in found}
    for a, b in itertools.combinations(range(problem.num_devices), 2):
        assert (b in class_of.get(a, ())) == can_swap(problem, a, b)


def can_swap(problem: Problem, a: int, b: int) -> bool:
    """By all pairs of devices."""
    swapped = np.arange(problem.num_devices)
    swapped[[a, b]] = b, a
    if set(kinds_of_devices(problem)) != {0}:
        return False
    images: set[tuple[int, int]] = set()
    for one, other in itertools.permutations(range(problem.num_devices), 2):
        pair, new = (one, other), (swapped[one], swapped[other])
        links = problem.links
        if (links.latency_ns[pair], links.bytes_per_s[pair]) != (links.latency_ns[new], links.bytes_per_s[new]):
            return False
        images.add((int(links.channels[pair][0]), int(links.channels[new][0])))
    return len({x for x, _ in images}) == len(images) == len({y for _, y in images})


@pytest.mark.parametrize(("kinds", "count"), [("aaaa", 1), ("aab", 3), ("abcd", 24), ("aabbaa", comb(6, 2))])
def test_sequences_of_kinds(kinds: str, count: int) -> None:
    """As many distinct sequences of kinds as there are, each once; the cluster's own first."""
    problem = of_kinds(kinds)
    found = device_sequences(problem)
    assert found[0] == tuple(range(len(kinds)))
    arranged = ["".join(kinds[device] for device in sequence) for sequence in found]
    assert len(set(arranged)) == len(arranged) == count
    assert all(sorted(sequence) == list(range(len(kinds))) for sequence in found)
    assert len(set(kinds_of_devices(problem))) == len(set(kinds))


def test_many_kinds() -> None:
    """Where there are too many sequences, or the graph is large, the cluster's and the reverse are tried."""
    own = tuple(range(7))
    assert device_sequences(of_kinds("abcdefg")) == (own, own[::-1])
    assert device_sequences(of_kinds("aab", groups=5_000)) == ((0, 1, 2), (2, 1, 0))


@given(problem=problems(Traits(max_devices=5, alike=True)), seed=st.integers(0, 99))
def test_devices_in_order_of_use(problem: Problem, seed: int) -> None:
    """Which of the devices that can change places is used first does not matter: placements that differ in nothing else
    become equal, hold what they held, and stay as they are the next time."""
    draw = np.random.default_rng(seed)
    placement = tuple(draw.integers(0, problem.num_devices, problem.num_groups).tolist())
    renamed = list(range(problem.num_devices))
    for devices in interchangeable(problem):
        for device, other in zip(devices, draw.permutation(list(devices)).tolist(), strict=True):
            renamed[device] = other
    found = in_order_of_use(problem, placement)
    assert found == in_order_of_use(problem, [renamed[device] for device in placement])
    assert found == in_order_of_use(problem, found)
    assert sorted(problem.memory_bytes(found)) == sorted(problem.memory_bytes(placement))
    assert sorted(problem.overshoot_bytes(found)) == sorted(problem.overshoot_bytes(placement))
    assert problem.is_allowed(found) == problem.is_allowed(placement)
