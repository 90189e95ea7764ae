"""Collectives of one parameter in a step, counted by hand for every ZeRO level and choice of axes."""

from __future__ import annotations

import itertools
import math

import pytest

from tap_planner.cluster import load_cluster, parse_mesh
from tap_planner.cost import CollectiveModel, ReductionCall, reduction_calls, shard_elements, unsharded_bytes

Counted = tuple[str, tuple[int, ...], int, int]


def calls(level: int, zero_axes: tuple[int, ...], data_axes: tuple[int, ...] = (0, 1)) -> list[Counted]:
    """(kind, axes, elements, count) of 1001 elements on 2 x 4 with three microbatches."""
    found = reduction_calls(
        1001, zero_level=level, data_axes=data_axes, zero_axes=zero_axes, mesh_shape=(2, 4), microbatches=3
    )
    return [(call.kind, call.axes, call.elements, call.count) for call in found]


@pytest.mark.parametrize(
    ("level", "zero_axes", "expected"),
    [
        (0, (), [("all_reduce", (0, 1), 1001, 1)]),
        (1, (0, 1), [("reduce_scatter", (0, 1), 1001, 1), ("all_gather", (0, 1), 1001, 1)]),
        (2, (0, 1), [("reduce_scatter", (0, 1), 1001, 3), ("all_gather", (0, 1), 1001, 1)]),
        (3, (0, 1), [("reduce_scatter", (0, 1), 1001, 3), ("all_gather", (0, 1), 1001, 6)]),
        (1, (1,), [("reduce_scatter", (1,), 1001, 1), ("all_reduce", (0,), 251, 1), ("all_gather", (1,), 1001, 1)]),
        (2, (1,), [("reduce_scatter", (1,), 1001, 3), ("all_reduce", (0,), 251, 1), ("all_gather", (1,), 1001, 1)]),
        (3, (0,), [("reduce_scatter", (0,), 1001, 3), ("all_reduce", (1,), 501, 1), ("all_gather", (0,), 1001, 6)]),
    ],
)
def test_calls(level: int, zero_axes: tuple[int, ...], expected: list[Counted]) -> None:
    """Sharded axes reduce-scatter and gather, the rest sums shards once a step."""
    assert calls(level, zero_axes) == expected


def test_without_data_axes_nothing_is_reduced() -> None:
    """A parameter that is split along every axis needs no collective."""
    assert calls(2, (), ()) == []


@pytest.mark.parametrize("level", [1, 2, 3])
def test_hybrid_sends_what_a_hierarchical_reduction_sends(level: int) -> None:
    """Per link a ring moves (n - 1) / n of a payload once for each half of an all-reduce: sharding over all axes, or
    over some with a sum over the rest, leaves the same bytes on one axis and fewer on the other."""
    whole = {call.kind: call for call in map(_call, calls(level, (0, 1)))}
    hybrid = {call.kind: call for call in map(_call, calls(level, (1,)))}
    assert set(hybrid) - set(whole) == {"all_reduce"}
    assert hybrid["all_reduce"].elements == math.ceil(1001 / 4)
    assert hybrid["all_gather"].count == whole["all_gather"].count


def _call(counted: Counted) -> ReductionCall:
    kind, axes, elements, count = counted
    return ReductionCall(kind=kind, axes=axes, elements=elements, count=count)


def test_hybrid_sharding_inside_the_node_gathers_faster() -> None:
    """On 2 nodes of 4, gathering parameters inside the node is at least as fast as over both, for every size."""
    cluster = load_cluster("2x4:a100-sxm4-80gb")
    model = CollectiveModel(cluster, parse_mesh("a=2,b=4", cluster))
    for elements in (10**3, 10**6, 10**9):
        inside, across = (
            sum(call.count * model.rate_ns(call.kind, call.axes, 2 * call.elements) for call in found)
            for found in (
                reduction_calls(
                    elements, zero_level=3, data_axes=(0, 1), zero_axes=axes, mesh_shape=(2, 4), microbatches=8
                )
                for axes in ((1,), (0, 1))
            )
        )
        assert inside < across


def test_shards_are_rounded_up() -> None:
    """The largest shard of n elements over the ranks of some axes."""
    for elements, axes in itertools.product((0, 1, 7, 8, 9), ((), (0,), (1,), (0, 1))):
        ranks = math.prod((2, 4)[axis] for axis in axes)
        assert shard_elements(elements, axes, (2, 4)) == math.ceil(elements / ranks)


@pytest.mark.parametrize(
    ("precision", "expected"), [("bf16", (0, 0, 200, 400)), ("fp32", (0, 0, 400, 800)), ("fp64", (0, 0, 800, 1600))]
)
def test_unsharded_copies(precision: str, expected: tuple[int, ...]) -> None:
    """From ZeRO 2 on a whole gradient exists for a time, at 3 a whole parameter as well."""
    found = tuple(unsharded_bytes(100, zero_level=level, precision=precision, optimizer="adamw") for level in range(4))
    assert found == expected
