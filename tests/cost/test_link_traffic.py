"""Bytes that leave each node: what was counted on a link, messages counted one by one, and what links can carry."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.cluster import (
    Cluster,
    Level,
    Mesh,
    MeshAxis,
    catalogue_device,
    load_cluster,
    parse_cluster,
    parse_mesh,
)
from tap_planner.cost import COLLECTIVE_KINDS, CollectiveModel, leaving_bytes, leaving_bytes_of_step
from tap_planner.plan import CollectiveEntry
from tests.cost.counting import counted_groups, laid

MIB = 2**20


def model_of(cluster: str, mesh: str, library: str = "gloo") -> CollectiveModel:
    """Costs on a cluster by its short name."""
    found = dataclasses.replace(load_cluster(cluster), library=library)
    return CollectiveModel(found, parse_mesh(mesh, found))


@pytest.mark.parametrize(
    ("kind", "across", "whole"),
    [
        ("all_reduce", 2, 1.5),
        ("all_gather", 1, 0.75),
        ("reduce_scatter", 2, 1.5),
        ("all_to_all", 1, 1),
        ("halo_exchange", 2, 0.5),
        ("ring_exchange", 2, 1),
    ],
)
def test_two_nodes_of_two(kind: str, across: float, whole: float) -> None:
    """Times the payload, as gloo was seen to send on 2 nodes of 2 ranks: two groups across, one of all; inside none."""
    model = model_of("2x2:cpu-core", "dp=2,tp=2")
    assert leaving_bytes(model, kind, (0,), MIB) == (across * MIB, across * MIB)
    assert leaving_bytes(model, kind, (1,), MIB) == (0, 0)
    assert leaving_bytes(model, kind, (0, 1), MIB) == (whole * MIB, whole * MIB)


def test_the_library_matters() -> None:
    """nccl's reduce_scatter is one pass of a ring, its broadcast a chain; gloo's are an all_reduce and a tree."""
    nccl, gloo = (model_of("4x1:cpu-core", "dp=4", library) for library in ("nccl", "gloo"))
    assert leaving_bytes(nccl, "reduce_scatter", (0,), MIB) == (0.75 * MIB,) * 4
    assert leaving_bytes(gloo, "reduce_scatter", (0,), MIB) == (1.5 * MIB,) * 4
    assert leaving_bytes(nccl, "broadcast", (0,), MIB) == (MIB, MIB, MIB, 0)
    assert leaving_bytes(gloo, "broadcast", (0,), MIB) == (2 * MIB, MIB, 0, 0)


def test_hierarchies_spare_the_network() -> None:
    """4 nodes of 8 as one group: 8 lanes gather an eighth each across 4 nodes; the ring passes on 31/32 of all."""
    hierarchy, ring = (model_of("4x8:cpu-core", "dp=32", library) for library in ("nccl", "gloo"))
    assert hierarchy.cost("all_gather", (0,), 2**30).algorithm == "hierarchical"
    assert leaving_bytes(hierarchy, "all_gather", (0,), 2**30) == (8 * 3 * 2**30 // 4 // 8,) * 4
    assert leaving_bytes(ring, "all_gather", (0,), 2**30) == (31 * 2**30 // 32,) * 4


def test_trees_send_as_little() -> None:
    """Small payloads take nccl's double tree, which sends 2 (k-1)/k of the payload from each of k nodes on average."""
    model = model_of("4x1:cpu-core", "dp=4", "nccl")
    assert model.cost("all_reduce", (0,), 8).algorithm == "tree"
    assert leaving_bytes(model, "all_reduce", (0,), 8) == (12,) * 4


def test_a_step_is_the_sum_of_its_collectives() -> None:
    """Each call counts, by the names of the axes; what stays in the node does not."""

    def entry(kind: str, axes: tuple[str, ...], num_bytes: int, count: int) -> CollectiveEntry:
        return CollectiveEntry(
            phase="forward", kind=kind, axes=axes, algorithm="ring", elements=1, bytes=num_bytes, count=count
        )

    step = (entry("all_gather", ("dp",), 1000, 3), entry("all_reduce", ("tp",), 1000, 5))
    both = (*step, entry("all_reduce", ("dp", "tp"), 100, 2))
    model = model_of("2x2:cpu-core", "dp=2,tp=2")
    assert leaving_bytes_of_step(model, step) == (3000, 3000)
    assert leaving_bytes_of_step(model, both) == (3300, 3300)
    assert leaving_bytes_of_step(model, ()) == (0, 0)


@st.composite
def topologies(draw: st.DrawFn) -> tuple[CollectiveModel, tuple[int, ...]]:
    """A cluster of two or three levels, a mesh on it, and some of its axes."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=3))
    levels = tuple(
        Level(name=f"l{i}", size=size, kind="switch", bandwidth_bytes_per_s=10**12 if i == 0 else 10**9, latency_ns=1)
        for i, size in enumerate(sizes)
    )
    library = draw(st.sampled_from(["nccl", "gloo"]))
    cluster = Cluster(name="c", library=library, device=catalogue_device("l4"), levels=levels)
    rest, axes_sizes = math.prod(sizes), list[int]()
    while rest > 1 and len(axes_sizes) < 2:
        axes_sizes.append(draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0])))
        rest //= axes_sizes[-1]
    mesh = Mesh(axes=tuple(MeshAxis(name=f"a{i}", size=size) for i, size in enumerate([*axes_sizes, rest])))
    axes = draw(st.sets(st.integers(0, len(mesh.axes) - 1), min_size=1))
    return CollectiveModel(cluster, draw(laid(mesh))), tuple(sorted(axes))


@given(topologies(), st.sampled_from(["all_reduce", "all_gather", "all_to_all", "ring_exchange", "halo_exchange"]))
def test_messages_one_by_one(topology: tuple[CollectiveModel, tuple[int, ...]], kind: str) -> None:
    """What plays every message of a ring, of pairs or of neighbours from rank to rank counts as many bytes per node."""
    model, axes = topology
    groups = counted_groups(model.mesh, axes)
    if model.cluster.library == "nccl" and kind in ("all_reduce", "all_gather"):
        groups = list(map(sorted, groups))  # its rings go by links
    ranks, per_node = len(groups[0]), model.cluster.levels[0].size
    payload = 2 * math.lcm(*range(1, 5)) ** 3 * 1000
    if model.cost(kind, axes, payload).algorithm not in ("ring", "pairwise", "direct"):
        return
    sent = [Fraction(0)] * (model.mesh.num_devices // per_node)

    def send(source: int, target: int, size: Fraction) -> None:
        if source // per_node != target // per_node:
            sent[source // per_node] += size

    for group in groups:
        if kind in ("all_reduce", "all_gather"):  # chunk by chunk, round by round
            for _ in range((2 if kind == "all_reduce" else 1) * (ranks - 1)):
                for source, target in zip(group, [*group[1:], group[0]], strict=True):
                    send(source, target, Fraction(payload, ranks))
        elif kind == "all_to_all":
            for source, target in itertools.permutations(group, 2):
                send(source, target, Fraction(payload, ranks))
        elif kind == "ring_exchange" and ranks > 1:
            for source, target in zip(group, [*group[1:], group[0]], strict=True):
                send(source, target, Fraction(payload))
        elif kind == "halo_exchange":
            for pair in itertools.pairwise(group):
                for source, target in (pair, pair[::-1]):
                    send(source, target, Fraction(payload, 2 if ranks > 2 else 1))
    assert leaving_bytes(model, kind, axes, payload) == tuple(math.ceil(size) for size in sent)


@given(topologies(), st.sampled_from(COLLECTIVE_KINDS))
def test_no_collective_is_priced_faster_than_its_links(
    topology: tuple[CollectiveModel, tuple[int, ...]], kind: str
) -> None:
    """No node sends more than its NIC can in the time that the collective is said to take."""
    model, axes = topology
    payload = 10**9
    taken_ns = model.cost(kind, axes, payload).ns
    assert max(leaving_bytes(model, kind, axes, payload)) <= taken_ns + 1  # the NIC carries a byte per ns


def test_unlike_nodes() -> None:
    """A node of 2 and one of 4 in one ring: each passes on 5/6 of the payload, all_reduce twice."""
    text = (
        "name: unlike\nlibrary: gloo\nnode_groups:\n"
        "  - {name: small, nodes: 1, devices_per_node: 2, device: cpu-core}\n"
        "  - {name: large, nodes: 1, devices_per_node: 4, device: cpu-core}\n"
    )
    cluster = parse_cluster(text, file="unlike.yaml")
    model = CollectiveModel(cluster, parse_mesh("dp=6", cluster))
    assert leaving_bytes(model, "all_reduce", (0,), 600) == (1000, 1000)
    assert leaving_bytes(model, "all_to_all", (0,), 600) == (2 * 4 * 100, 4 * 2 * 100)
