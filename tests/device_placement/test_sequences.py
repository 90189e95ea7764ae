"""Which devices are alike, and the sequences that are tried."""

from __future__ import annotations

from dataclasses import replace
from math import comb

import numpy as np
import pytest

from tap_planner.device_placement import Problem
from tap_planner.device_placement.sequences import device_sequences, interchangeable, kinds_of_devices
from tests.bench.placement_orders import branchy_problem
from tests.device_placement.problems import graph


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
