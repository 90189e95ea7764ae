"""Collectives on meshes whose axes lie otherwise than listed: the same groups by another name, and rings that go by
rank or by place."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tap_planner.cluster import Cluster, load_cluster, parse_mesh
from tap_planner.cost import COLLECTIVE_KINDS, CollectiveModel, leaving_bytes

KIB = 1024
RINGS = ("all_reduce", "all_gather", "reduce_scatter")


def model_of(cluster: Cluster, mesh: str) -> CollectiveModel:
    """Costs on a mesh."""
    return CollectiveModel(cluster, parse_mesh(mesh, cluster))


@pytest.mark.parametrize("library", ["nccl", "gloo"])
@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_one_axis_costs_what_its_place_costs(kind: str, library: str) -> None:
    """dp inside and tp outside is, axis by axis, the mesh in which they are listed so: only names differ."""
    cluster = replace(load_cluster("4x8:a100-sxm4-80gb"), library=library)
    laid, listed = model_of(cluster, "tp=4,dp=8/dp,tp"), model_of(cluster, "tp=4,dp=8")
    for axis, size in itertools.product((0, 1), (1, 64 * KIB, KIB**3)):
        assert laid.cost(kind, (axis,), size) == listed.cost(kind, (1 - axis,), size)
        assert leaving_bytes(laid, kind, (axis,), size) == leaving_bytes(listed, kind, (1 - axis,), size)


@pytest.mark.parametrize("kind", [*RINGS, "broadcast", "all_to_all"])
def test_a_library_that_lays_rings_does_not_mind(kind: str) -> None:
    """Of the group of all ranks nccl makes the rings that suit the links, whatever the ranks are called."""
    cluster = load_cluster("4x8:a100-sxm4-80gb")
    laid, listed = model_of(cluster, "tp=4,dp=8/dp,tp"), model_of(cluster, "tp=4,dp=8")
    for size in (1, 64 * KIB, KIB**3):
        assert laid.cost(kind, (0, 1), size) == listed.cost(kind, (0, 1), size)
        assert leaving_bytes(laid, kind, (0, 1), size) == leaving_bytes(listed, kind, (0, 1), size)


@pytest.mark.parametrize("mesh", ["tp=4,dp=8/dp,tp", "tp=8,dp=4/dp,tp", "tp=16,dp=2/dp,tp", "tp=2,dp=16/dp,tp"])
@pytest.mark.parametrize("kind", RINGS)
def test_rings_by_rank_cross_as_often_as_neighbours_lie_apart(kind: str, mesh: str) -> None:
    """gloo's ring of all ranks, counted hop by hop: the bytes that leave each node, and the bandwidth they take."""
    cluster = replace(load_cluster("4x8:a100-sxm4-80gb"), library="gloo")
    model, size = model_of(cluster, mesh), 32 * KIB**2
    dp, tp = model.mesh.shape
    node = [(column * dp + row) // 8 for row, column in itertools.product(range(dp), range(tp))]  # by rank
    crossing = [a for a, b in zip(node, [*node[1:], node[0]], strict=True) if a != b]
    passes = 1 if kind == "all_gather" else 2
    sent = [passes * size * 31 // 32 * crossing.count(number) for number in range(4)]
    assert leaving_bytes(model, kind, (0, 1), size) == tuple(sent)
    listed = model_of(cluster, "tp=4,dp=8")
    ratio = model.algorithms(kind, (0, 1))[0].ns_per_byte / listed.algorithms(kind, (0, 1))[0].ns_per_byte
    assert ratio == pytest.approx(max(crossing.count(number) for number in range(4)))


def test_rounds_of_a_broadcast() -> None:
    """gloo on 2 nodes of 2, the second axis outside: one message over the network, then one inside each node. As listed
    the first stays inside and two cross at once."""
    cluster = replace(load_cluster("2x2:a100-sxm4-80gb"), library="gloo")
    laid, listed = (model_of(cluster, mesh).algorithms("broadcast", (0, 1))[0] for mesh in ("b=2,a=2/a,b", "a=2,b=2"))
    inside, across = (model_of(cluster, "a=2,b=2").algorithms("broadcast", (axis,))[0] for axis in (1, 0))
    assert laid.ns_per_byte == pytest.approx(across.ns_per_byte / 2 + inside.ns_per_byte)  # both groups across share
    assert listed.ns_per_byte == pytest.approx(inside.ns_per_byte + across.ns_per_byte)


def test_neighbours_are_neighbours_by_rank() -> None:
    """Parts of an image pass their edges on in the order of the parts, with nccl too: from node to node at every step
    where the second axis lies outside."""
    cluster = load_cluster("2x4:a100-sxm4-80gb")
    laid, listed = model_of(cluster, "tp=2,dp=4/dp,tp"), model_of(cluster, "dp=4,tp=2")
    size = 64 * KIB
    assert leaving_bytes(listed, "halo_exchange", (0, 1), size) == (size // 2, size // 2)
    assert leaving_bytes(laid, "halo_exchange", (0, 1), size) == (7 * size // 2, 7 * size // 2)
    (apart,), (near,) = (model.algorithms("halo_exchange", (0, 1)) for model in (laid, listed))
    assert apart.ns_per_byte > near.ns_per_byte


def test_three_axes_in_every_order() -> None:
    """Whatever the order, the groups of each set of axes part the devices, each of them once."""
    cluster = load_cluster("4x6:a100-sxm4-80gb")
    for order in itertools.permutations("abc"):
        model = model_of(cluster, "a=2,b=3,c=4/" + ",".join(order))
        for count in (1, 2, 3):
            for axes in itertools.combinations(range(3), count):
                groups = model.mesh.groups(axes)
                assert np.array_equal(np.sort(groups.ravel()), np.arange(24))
                assert groups.shape[1] == int(np.prod([model.mesh.shape[axis] for axis in axes]))
