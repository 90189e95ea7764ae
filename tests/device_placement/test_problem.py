"""A problem is checked when it is made, and says what transfers and memory take."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given

from tap_planner.device_placement import Links, Problem, Shared
from tap_planner.errors import UsageError
from tests.device_placement.problems import chain, problems


def changed(problem: Problem, name: str, place: int | tuple[int, ...], value: int) -> Problem:
    """The problem with one number of one field set."""
    array = getattr(problem, name).copy()
    array[place] = value
    return replace(problem, **{name: array})


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("task_ns", (1, 0), -3, r"task_ns\[1, 0\] is -3"),
        ("tensor_bytes", 0, -1, r"tensor_bytes\[0\] is -1"),
        ("fixed_bytes", 2, -1, r"fixed_bytes\[2\] is -1"),
        ("capacity_bytes", 1, -1, r"capacity_bytes\[1\] is -1"),
        ("group_of", 1, 3, r"group_of\[1\] is 3, expected 0 to 2"),
        ("group_of", 1, 0, "group 1 has no task"),
        ("tensor_producer", 0, 7, r"tensor_producer\[0\] is 7"),
        ("edge_consumer", 1, 0, "edge 1: task 0 reads tensor 1 of task 1, which is not before it"),
        ("edge_tensor", 0, 5, r"edge_tensor\[0\] is 5"),
        ("task_ns", (0, 0), 1 << 56, "all together are .* ns"),
        ("fixed_bytes", 0, 1 << 56, "all together are .* bytes"),
    ],
)
def test_wrong_numbers(name: str, place: int | tuple[int, ...], value: int, message: str) -> None:
    """A wrong number is refused with its field, place and value, and with what to do."""
    with pytest.raises(UsageError, match=message) as caught:
        changed(chain([1, 2, 3], num_devices=2), name, place, value)
    assert caught.value.hint


def test_wrong_wholes() -> None:
    """So are wrong shapes, kinds of numbers, counts of names, and groups that may lie nowhere."""
    problem = chain([1, 2, 3], num_devices=2)
    links = problem.links
    wrong = {
        "task_ns is int64 .2, 2., expected integer .3, 2.": {"task_ns": problem.task_ns[:2]},
        "tensor_bytes is float64": {"tensor_bytes": problem.tensor_bytes / 2},
        "2 group_names for 3 groups": {"group_names": ("a", "b")},
        r"group 1 \(b\) is allowed on no device": {
            "group_names": ("a", "b", "c"),
            "allowed": np.asarray([[True, True], [False, False], [True, True]]),
        },
        r"shared\[0\].groups\[1\] is 3": {"shared": (Shared(num_bytes=1, groups=(0, 3)),)},
        "links.bytes_per_s.* is 0": {
            "links": Links(latency_ns=links.latency_ns, bytes_per_s=0 * links.bytes_per_s, channels=links.channels)
        },
        "links.channels is int64 .2, 2.,": {
            "links": Links(latency_ns=links.latency_ns, bytes_per_s=links.bytes_per_s, channels=links.channels[:, :, 0])
        },
    }
    for message, fields in wrong.items():
        with pytest.raises(UsageError, match=message):
            replace(problem, **fields)


@given(problem=problems())
def test_transfers(problem: Problem) -> None:
    """A transfer takes the latency and its bytes over the bandwidth, rounded up; nothing on the same device."""
    for tensor, size in enumerate(problem.tensor_bytes.tolist()):
        for source in range(problem.num_devices):
            for target in range(problem.num_devices):
                pace = Fraction(int(problem.links.bytes_per_s[source, target]), 10**9)
                exact = int(problem.links.latency_ns[source, target]) + size / pace if source != target else 0
                got = problem.transfer_ns(tensor, source, target)
                assert got - 1 < exact <= got


def test_large_transfers_are_exact() -> None:
    """Terabytes over odd bandwidths do not overflow or lose the last ns."""
    problem = chain([1, 1], num_devices=2, tensor_bytes=10**13 + 7, bytes_per_s=3 * 10**11 + 1)
    assert problem.transfer_ns(0, 0, 1) == -(-(10**13 + 7) * 10**9 // (3 * 10**11 + 1))


def test_shared_parameters_count_once_per_device() -> None:
    """A device that holds two of three readers holds what they share once; overshoot is what is beyond the memory."""
    problem = replace(
        chain([1, 1, 1], num_devices=3, capacity_bytes=12),
        fixed_bytes=np.asarray([1, 2, 4]),
        shared=(Shared(num_bytes=10, groups=(0, 1, 2)),),
    )
    assert problem.memory_bytes((0, 0, 1)) == (13, 14, 0)
    assert problem.overshoot_bytes((0, 0, 1)) == (1, 2, 0)
