"""Collectives: closed forms of the algorithms, contention on NICs, vectorised = scalar, monotonicity."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.cluster import Cluster, Level, Mesh, MeshAxis, catalogue_device
from tap_planner.cost import COLLECTIVE_KINDS, CollectiveModel, group_shape
from tap_planner.errors import ClusterError
from tests.cost.counting import counted_groups, laid

GB = 10**9


def mesh_of(*sizes: int) -> Mesh:
    """A mesh with axes a0, a1, ..."""
    return Mesh(axes=tuple(MeshAxis(name=f"a{index}", size=size) for index, size in enumerate(sizes)))


def cluster_of(
    *sizes: int, nics: int = 1, kind: str = "switch", library: str = "nccl", intra: int = 300, inter: int = 25
) -> Cluster:
    """Levels inner to outer: 300 GB/s and 3 us in the node, 25 GB/s a NIC and 10 us outside."""
    node = Level(name="node", size=sizes[0], kind=kind, bandwidth_bytes_per_s=intra * GB, latency_ns=3000)
    outer = tuple(
        Level(name=f"l{i}", size=size, kind="switch", bandwidth_bytes_per_s=inter * GB, latency_ns=10_000, nics=nics)
        for i, size in enumerate(sizes[1:])
    )
    return Cluster(name="c", library=library, device=catalogue_device("l4"), levels=(node, *outer))


def times(model: CollectiveModel, kind: str, axes: tuple[int, ...], num_bytes: int) -> dict[str, float]:
    """Time of each algorithm in ns."""
    return {line.name: line.alpha_ns + num_bytes * line.ns_per_byte for line in model.algorithms(kind, axes)}


def test_ring_and_tree_in_a_node() -> None:
    """8 ranks on one switch: the textbook forms."""
    model = CollectiveModel(cluster_of(8, 1), mesh_of(8))
    size = 3 * GB
    all_reduce = times(model, "all_reduce", (0,), size)
    assert all_reduce == pytest.approx(
        {"ring": 2 * 7 * 3000 + 2 * 7 / 8 * size / 300, "tree": 2 * 3 * 3000 + 2 * size / 300}
    )
    for kind in ("all_gather", "reduce_scatter"):
        assert times(model, kind, (0,), size) == pytest.approx({"ring": 7 * 3000 + 7 / 8 * size / 300})
    assert times(model, "all_to_all", (0,), size) == pytest.approx({"pairwise": 7 * 3000 + 7 / 8 * size / 300})
    assert times(model, "broadcast", (0,), size) == pytest.approx({"ring": 7 * 3000 + size / 300})
    assert times(model, "send_recv", (0,), size) == pytest.approx({"direct": 3000 + size / 300})


def test_cheapest_algorithm_is_named() -> None:
    """Small payloads take the tree, large ones the ring."""
    model = CollectiveModel(cluster_of(8, 1), mesh_of(8))
    assert model.cost("all_reduce", (0,), 8).algorithm == "tree"
    assert model.cost("all_reduce", (0,), GB).algorithm == "ring"


def test_one_rank_per_node_pays_the_network() -> None:
    """2 nodes x 8 with one NIC of 25 GB/s: the outer axis shares it among 8 groups, the inner one sees NVLink only."""
    model = CollectiveModel(cluster_of(8, 2), mesh_of(2, 8))
    size = GB
    assert times(model, "all_reduce", (0,), size)["ring"] == pytest.approx(2 * 10_000 + 2 / 2 * size * 8 / 25)
    assert times(model, "all_reduce", (1,), size)["ring"] == pytest.approx(2 * 7 * 3000 + 2 * 7 / 8 * size / 300)
    assert model.cost("all_reduce", (0,), size).ns > 50 * model.cost("all_reduce", (1,), size).ns


def test_nics_add_up() -> None:
    """With a NIC per device each of the 8 groups has one to itself."""
    model = CollectiveModel(cluster_of(8, 2, nics=8), mesh_of(2, 8))
    assert times(model, "all_reduce", (0,), GB)["ring"] == pytest.approx(2 * 10_000 + GB / 25)


def test_hierarchical() -> None:
    """4 nodes x 8 as one group: reduce-scatter inside, all-reduce of S/8 by 8 lanes across, all-gather inside."""
    model = CollectiveModel(cluster_of(8, 4), mesh_of(32))
    size = GB
    inside = 2 * 7 * 3000 + 2 * 7 / 8 * size / 300
    across = 2 * 3 * 10_000 + 2 * 3 / 4 * (size / 8) * 8 / 25
    found = times(model, "all_reduce", (0,), size)
    assert found["hierarchical"] == pytest.approx(inside + across)
    assert found["ring"] == pytest.approx(2 * (28 * 3000 + 3 * 10_000) + 2 * 31 / 32 * size / 25)
    assert found["tree"] == pytest.approx(2 * (3 * 3000 + 2 * 10_000) + 2 * 3 / 4 * size / 25)
    for kind in ("all_gather", "reduce_scatter"):
        assert times(model, kind, (0,), size)["hierarchical"] == pytest.approx((inside + across) / 2)


def test_hierarchical_over_a_level_that_is_only_passed() -> None:
    """Groups of 2 in a node and 2 racks pass the nodes' links on the way, which 4 groups share; or 16 the rack's."""
    mesh = mesh_of(2, 4, 4, 2)
    narrow = cluster_of(8, 4, 2)
    fast = dataclasses.replace(narrow.levels[2], nics=64)
    wide = dataclasses.replace(narrow, levels=(*narrow.levels[:2], fast))
    for cluster, sharing in ((narrow, 16), (wide, 4)):
        found = times(CollectiveModel(cluster, mesh), "all_gather", (0, 3), GB)["hierarchical"]
        assert found == pytest.approx(3000 + GB / 2 / 300 + 10_000 + GB / 2 * sharing / 25)


def test_all_to_all_across_nodes() -> None:
    """Of 16 ranks each sends 8/16 of its buffer to the other node; 8 ranks share the NIC."""
    model = CollectiveModel(cluster_of(8, 2), mesh_of(16))
    assert times(model, "all_to_all", (0,), GB) == pytest.approx({"pairwise": 7 * 3000 + 8 * 10_000 + 8 * GB / 2 / 25})


def test_mesh_links() -> None:
    """On a full mesh of 8 a pair has one link of seven."""
    model = CollectiveModel(cluster_of(8, 1, kind="mesh"), mesh_of(4, 2))
    assert times(model, "all_gather", (1,), GB) == pytest.approx({"ring": 3000 + GB / 2 * 7 / 300})
    whole = CollectiveModel(cluster_of(8, 1, kind="mesh"), mesh_of(8))
    assert times(whole, "all_gather", (0,), GB) == pytest.approx({"ring": 7 * 3000 + 7 / 8 * GB / 300})


def test_gloo_reduces_in_rings() -> None:
    """gloo's reduce_scatter costs as much as its all_reduce."""
    model = CollectiveModel(cluster_of(2, 2, library="gloo"), mesh_of(4))
    assert [line.name for line in model.algorithms("all_reduce", (0,))] == ["ring"]
    assert model.cost("reduce_scatter", (0,), 12345) == model.cost("all_reduce", (0,), 12345)
    assert model.cost("all_gather", (0,), 12345).ns < model.cost("all_reduce", (0,), 12345).ns


def test_gloo_broadcasts_in_a_tree() -> None:
    """2 nodes of 2: the root sends to its neighbour, then both send everything over the NIC of their node at once."""
    model = CollectiveModel(cluster_of(2, 2, library="gloo"), mesh_of(4))
    assert times(model, "broadcast", (0,), GB) == pytest.approx({"tree": 3000 + GB / 300 + 10_000 + 2 * GB / 25})
    alone = CollectiveModel(cluster_of(1, 8, library="gloo"), mesh_of(8))
    assert times(alone, "broadcast", (0,), GB) == pytest.approx({"tree": 3 * (10_000 + GB / 25)})


def test_halo_exchange() -> None:
    """Neighbours speak at once: the slowest link's latency once, the rows of both sides over the slowest link; NICs are
    shared by the groups that leave a node, and inside a node nobody pays the network."""
    model = CollectiveModel(cluster_of(8, 2), mesh_of(2, 8))
    assert times(model, "halo_exchange", (1,), GB) == pytest.approx({"direct": 3000 + GB / 300})
    assert times(model, "halo_exchange", (0,), GB) == pytest.approx({"direct": 10_000 + 8 * GB / 25})
    whole = CollectiveModel(cluster_of(8, 2), mesh_of(16))
    assert times(whole, "halo_exchange", (0,), GB) == pytest.approx({"direct": 10_000 + GB / 25})
    assert times(model, "halo_exchange", (0, 1), GB) == times(whole, "halo_exchange", (0,), GB)
    assert whole.cost("halo_exchange", (0,), 0).ns == 0


def test_ring_exchange() -> None:
    """One step of a ring: one latency of the slowest level that the group crosses, all bytes over its slowest link;
    all groups leave a node at once, and two devices of a full mesh have one link."""
    model = CollectiveModel(cluster_of(8, 2), mesh_of(2, 8))
    assert times(model, "ring_exchange", (1,), GB) == pytest.approx({"direct": 3000 + GB / 300})
    assert times(model, "ring_exchange", (0,), GB) == pytest.approx({"direct": 10_000 + 8 * GB / 25})
    assert times(model, "ring_exchange", (0, 1), GB) == pytest.approx({"direct": 10_000 + GB / 25})
    linked = CollectiveModel(cluster_of(8, 1, kind="mesh"), mesh_of(8))
    assert times(linked, "ring_exchange", (0,), GB) == pytest.approx({"direct": 3000 + 7 * GB / 300})


def test_an_axis_that_straddles_nodes() -> None:
    """3 nodes of 4 as 2 x 6: both groups meet in the middle node and share its NIC; no hierarchy exists."""
    cluster = cluster_of(4, 3)
    shape = group_shape(cluster, mesh_of(2, 6), (1,))
    assert not shape.uniform
    network = shape.shares[1]
    assert (network.sharing, network.hops, network.members) == (2, 1, 6)
    model = CollectiveModel(cluster, mesh_of(2, 6))
    assert {line.name for line in model.algorithms("all_reduce", (1,))} == {"ring", "tree"}
    assert times(model, "all_gather", (1,), GB)["ring"] == pytest.approx(4 * 3000 + 10_000 + 5 / 6 * GB * 2 / 25)


@st.composite
def topologies(draw: st.DrawFn) -> tuple[Cluster, Mesh, tuple[int, ...]]:
    """A cluster, a mesh on it, and some of its axes."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=2, max_size=3))
    rest = math.prod(sizes)
    axes_sizes: list[int] = []
    while rest > 1 and len(axes_sizes) < 2:
        size = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
        axes_sizes.append(size)
        rest //= size
    mesh = mesh_of(*axes_sizes, rest)
    axes = draw(st.sets(st.integers(0, len(mesh.axes) - 1), min_size=1))
    cluster = cluster_of(
        *sizes,
        nics=draw(st.integers(1, 8)),
        kind=draw(st.sampled_from(["switch", "mesh", "pcie", "ring"])),
        library=draw(st.sampled_from(["nccl", "gloo"])),
    )
    return cluster, draw(laid(mesh)), tuple(sorted(axes))


PAYLOADS = st.lists(st.integers(0, 10**13), min_size=1, max_size=8)


@given(topologies(), st.sampled_from(COLLECTIVE_KINDS), PAYLOADS)
def test_vectorised_equals_scalar(
    topology: tuple[Cluster, Mesh, tuple[int, ...]], kind: str, payloads: list[int]
) -> None:
    """Arrays give the same integers as single calls, with and without latency."""
    cluster, mesh, axes = topology
    model = CollectiveModel(cluster, mesh)
    array = np.array(payloads, dtype=np.int64)
    assert model.costs_ns(kind, axes, array).tolist() == [model.cost(kind, axes, size).ns for size in payloads]
    assert model.rates_ns(kind, axes, array).tolist() == [model.rate_ns(kind, axes, size) for size in payloads]


@given(topologies(), st.sampled_from(COLLECTIVE_KINDS), PAYLOADS)
def test_monotone_in_bytes(topology: tuple[Cluster, Mesh, tuple[int, ...]], kind: str, payloads: list[int]) -> None:
    """More bytes never cost less; the rate is never above the cost; nothing sent costs nothing."""
    cluster, mesh, axes = topology
    model = CollectiveModel(cluster, mesh)
    costs = [model.cost(kind, axes, size).ns for size in sorted(payloads)]
    assert costs == sorted(costs)
    assert all(model.rate_ns(kind, axes, size) <= model.cost(kind, axes, size).ns for size in payloads)
    assert (model.cost(kind, axes, 0).ns, model.cost(kind, axes, 0).algorithm) == (0, "none")
    alone = math.prod(mesh.shape[axis] for axis in axes) == 1
    assert (model.cost(kind, axes, 1000).ns == 0) == alone


@given(topologies(), st.booleans())
def test_exchanges_are_no_faster_than_their_busiest_link(
    topology: tuple[Cluster, Mesh, tuple[int, ...]], ring: bool
) -> None:
    """Counted message by message (half of the payload to each neighbour, or all to the next in the ring), no child
    sends more than it can meanwhile."""
    cluster, mesh, axes = topology
    model, half = CollectiveModel(cluster, mesh), 10**9
    groups = counted_groups(mesh, axes)
    if ring:
        messages = [(a, b) for ranks in groups for a, b in itertools.pairwise([*ranks, ranks[0]])]
        taken = model.cost("ring_exchange", axes, half).ns
    else:
        pairs = [pair for ranks in groups for pair in itertools.pairwise(ranks)]
        messages = [*pairs, *((b, a) for a, b in pairs)]
        taken = model.cost("halo_exchange", axes, 2 * half).ns
    stride = 1
    for level in cluster.levels:
        sent: dict[int, int] = {}
        for source, target in messages:
            if source // stride != target // stride:
                sent[source // stride] = sent.get(source // stride, 0) + half
        per_second = level.nics * level.bandwidth_bytes_per_s * Fraction(1000, level.oversubscription_permille)
        assert all(count * 10**9 <= taken * per_second for count in sent.values())
        stride *= level.size


@given(topologies(), st.booleans())
def test_shares_agree_with_counting(topology: tuple[Cluster, Mesh, tuple[int, ...]], by_rank: bool) -> None:
    """Sharing, pairs and hops are what counting rank by rank gives, with rings by rank or by place."""
    cluster, mesh, axes = topology
    shape = group_shape(cluster, mesh, axes, by_rank=by_rank)
    groups = counted_groups(mesh, axes) if by_rank else list(map(sorted, counted_groups(mesh, axes)))
    for share in shape.shares:
        stride = math.prod(level.size for level in cluster.levels[: share.level])
        if share.level > 0:
            leaving: dict[int, list[Fraction]] = {}
            sending = Counter(
                a // stride
                for ranks in groups
                for a, b in itertools.pairwise([*ranks, ranks[0]])
                if a // stride != b // stride
            )
            for ranks in groups:
                for child in {rank // stride for rank in ranks}:
                    inside = sum(rank // stride == child for rank in ranks)
                    if inside < len(ranks):
                        leaving.setdefault(child, []).append(Fraction(inside * (len(ranks) - inside)))
            assert share.sharing == max(sending.values())
            assert share.pairs == max(map(sum, leaving.values()))
        domain = stride * cluster.levels[share.level].size
        assert share.hops == max(
            sum(a // stride != b // stride and a // domain == b // domain for a, b in itertools.pairwise(ranks))
            for ranks in groups
        )


def test_wrong_calls() -> None:
    """An unknown kind and a mesh of another size are our own mistakes."""
    with pytest.raises(ValueError, match="gather_all"):
        CollectiveModel(cluster_of(2, 1), mesh_of(2)).cost("gather_all", (0,), 1)
    with pytest.raises(ClusterError, match="a0=4 has 4 devices, the cluster 2"):
        CollectiveModel(cluster_of(2, 1), mesh_of(4))
