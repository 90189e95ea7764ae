"""Collectives on unlike nodes against brute force over every group, and compute at the pace of the slowest."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from tap_planner.cluster import Cluster, Device, Level, Mesh, MeshAxis, NodeGroup, slowest_device
from tap_planner.cost import COLLECTIVE_KINDS, CollectiveModel, ComputeModel
from tap_planner.operators import ComputeKind

GB = 10**9
FAST = Device(
    name="fast",
    memory_bytes=80 << 30,
    memory_bandwidth_bytes_per_s=2000 * GB,
    peak_flops={"float32": 20 * 10**12, "bfloat16": 312 * 10**12},
    launch_ns=4000,
)
SLOW = Device(
    name="slow",
    memory_bytes=24 << 30,
    memory_bandwidth_bytes_per_s=600 * GB,
    peak_flops={"float32": 71 * 10**12},
    launch_ns=6000,
    matrix_efficiency_permille=500,
)


def node(size: int, bandwidth: int, latency_ns: int, kind: str = "switch") -> Level:
    """Level 0 of a node."""
    return Level(name="node", size=size, kind=kind, bandwidth_bytes_per_s=bandwidth * GB, latency_ns=latency_ns)


def unlike(*groups: NodeGroup, library: str = "nccl") -> Cluster:
    """A cluster of unlike nodes with NICs of 25 GB/s and 10 us."""
    nodes = sum(group.nodes for group in groups)
    network = Level(name="network", size=nodes, kind="switch", bandwidth_bytes_per_s=25 * GB, latency_ns=10_000)
    return Cluster(
        name="c",
        library=library,
        device=slowest_device([group.device for group in groups]),
        levels=(groups[0].intra_node, network),
        node_groups=groups,
    )


def group(name: str, nodes: int, intra: Level, device: Device = FAST, nics: int = 1) -> NodeGroup:
    """A node group whose nodes have as many devices as the level says."""
    return NodeGroup(
        name=name, nodes=nodes, devices_per_node=intra.size, device=device, intra_node=intra, nics_per_node=nics
    )


def mesh_of(*sizes: int) -> Mesh:
    """A mesh with axes a0, a1, ..."""
    return Mesh(axes=tuple(MeshAxis(name=f"a{index}", size=size) for index, size in enumerate(sizes)))


TWO_KINDS = unlike(group("a", 1, node(4, 300, 3000)), group("b", 1, node(2, 16, 5000), SLOW))
THREE_KINDS = unlike(
    group("a", 2, node(4, 300, 3000), nics=4),
    group("b", 3, node(2, 16, 5000), SLOW),
    group("c", 1, node(10, 100, 2000, kind="mesh"), nics=2),
    library="gloo",
)


def node_of_rank(cluster: Cluster) -> list[tuple[int, NodeGroup]]:
    """(node, its group) of every rank, by walking through the groups."""
    found: list[tuple[int, NodeGroup]] = []
    number = 0
    for kind in cluster.node_groups:
        for _ in range(kind.nodes):
            found.extend([(number, kind)] * kind.devices_per_node)
            number += 1
    return found


def ring_ns(cluster: Cluster, mesh: Mesh, axes: tuple[int, ...], passes: int, num_bytes: int) -> int:
    """Time of a ring all_reduce (2 passes) or all_gather (1), for the slowest group, group by group."""
    places = node_of_rank(cluster)
    groups = [[places[rank] for rank in ranks] for ranks in mesh.groups(axes).tolist()]
    network = cluster.levels[1]
    leaving: dict[int, int] = {}
    for members in groups:
        nodes = {number for number, _ in members}
        if len(nodes) > 1:
            for number in nodes:
                leaving[number] = leaving.get(number, 0) + 1
    slowest = Fraction(0)
    for members in groups:
        by_node: dict[int, list[NodeGroup]] = {}
        for number, kind in members:
            by_node.setdefault(number, []).append(kind)
        latency, rate = (len(by_node) - 1) * network.latency_ns, Fraction(0)
        for number, kinds in by_node.items():
            inside = kinds[0].intra_node
            latency += (len(kinds) - 1) * inside.latency_ns
            if len(kinds) > 1:
                usable = Fraction(len(kinds) - 1, inside.size - 1) if inside.kind == "mesh" else 1
                rate = max(rate, 1 / (inside.bandwidth_bytes_per_s * usable))
            if len(by_node) > 1:
                rate = max(rate, Fraction(leaving[number], kinds[0].nics_per_node * network.bandwidth_bytes_per_s))
        share = Fraction(len(members) - 1, len(members))
        slowest = max(slowest, passes * (latency + share * num_bytes * rate * 10**9))
    return math.ceil(slowest)


MESHES = [
    (TWO_KINDS, (6,), (0,)),
    (TWO_KINDS, (2, 3), (0,)),
    (TWO_KINDS, (2, 3), (1,)),
    (TWO_KINDS, (3, 2), (0,)),
    (TWO_KINDS, (3, 2), (1,)),
    (TWO_KINDS, (3, 2), (0, 1)),
    *((THREE_KINDS, (3, 4, 2), axes) for axes in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))),
    *((THREE_KINDS, (2, 12), axes) for axes in ((0,), (1,))),
    *((THREE_KINDS, (8, 3), axes) for axes in ((0,), (1,))),
]


@pytest.mark.parametrize(("cluster", "sizes", "axes"), MESHES, ids=str)
def test_rings_are_as_slow_as_the_slowest_group(
    cluster: Cluster, sizes: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    """A ring has the latency of its own hops and the rate of its slowest link, NICs shared by all that leave a node."""
    model = CollectiveModel(replace(cluster, library="gloo"), mesh_of(*sizes))
    for num_bytes in (1, 10**4, 10**7, 3 * 10**9):
        for kind, passes in (("all_gather", 1), ("all_reduce", 2), ("reduce_scatter", 2)):
            expected = ring_ns(cluster, mesh_of(*sizes), axes, passes, num_bytes)
            assert model.cost(kind, axes, num_bytes).ns == pytest.approx(expected, abs=1, rel=1e-12), (kind, num_bytes)


def test_a_group_inside_a_node_sees_its_own_links_only() -> None:
    """tp=2 on 4 + 2 devices: two pairs on fast links, one on slow ones, which all wait for; no network."""
    model = CollectiveModel(TWO_KINDS, mesh_of(3, 2))
    assert model.cost("all_gather", (1,), GB).ns == pytest.approx(5000 + GB / 2 / 16, abs=1)
    fast = CollectiveModel(unlike(group("a", 1, node(4, 300, 3000)), group("b", 1, node(2, 300, 3000))), mesh_of(3, 2))
    assert fast.cost("all_gather", (1,), GB).ns == pytest.approx(3000 + GB / 2 / 300, abs=1)


def test_pairwise_counts_the_pairs_that_leave_a_node() -> None:
    """All six ranks: 8 of the pairs (rank in a, rank in b) pass each NIC; a rank of b has 1 near and 4 far peers."""
    model = CollectiveModel(TWO_KINDS, mesh_of(6))
    expected = (1 * 5000 + 4 * 10_000) + 8 * (GB / 6) / 25
    assert model.cost("all_to_all", (0,), GB).ns == pytest.approx(expected, abs=1)


def test_equal_groups_cost_what_equal_nodes_cost() -> None:
    """Two groups that differ in nothing cost the same as one cluster of equal nodes, for every kind and axes."""
    intra = node(4, 300, 3000)
    split = unlike(group("a", 1, intra, nics=2), group("b", 3, intra, nics=2))
    network = replace(split.levels[1], nics=2)
    equal = Cluster(name="c", library="nccl", device=FAST, levels=(intra, network))
    for sizes in ((16,), (4, 4), (2, 8), (8, 2), (2, 2, 4)):
        mesh = mesh_of(*sizes)
        first, second = CollectiveModel(split, mesh), CollectiveModel(equal, mesh)
        for kind in COLLECTIVE_KINDS:
            for axes in ((0,), *(((1,), (0, 1)) if len(sizes) > 1 else ())):
                payload = np.array([0, 1, 10**5, 10**8])
                assert (first.costs_ns(kind, axes, payload) == second.costs_ns(kind, axes, payload)).all(), (
                    sizes,
                    kind,
                )
                assert (first.rates_ns(kind, axes, payload) == second.rates_ns(kind, axes, payload)).all()
                for num_bytes in payload.tolist():
                    assert first.cost(kind, axes, num_bytes) == second.cost(kind, axes, num_bytes)


def test_vectorised_costs_are_the_scalar_ones() -> None:
    """Arrays and single payloads give the same numbers where groups are of several kinds."""
    model = CollectiveModel(replace(THREE_KINDS, library="nccl"), mesh_of(3, 4, 2))
    payload = np.array([0, 1, 4096, 10**6, 10**9])
    for kind in COLLECTIVE_KINDS:
        for axes in ((0,), (1,), (2,), (0, 1, 2)):
            assert model.costs_ns(kind, axes, payload).tolist() == [
                model.cost(kind, axes, n).ns for n in payload.tolist()
            ]
            assert model.rates_ns(kind, axes, payload).tolist() == [
                model.rate_ns(kind, axes, n) for n in payload.tolist()
            ]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize(("flops", "num_bytes"), [(10**12, 10**6), (10**6, 10**9), (10**10, 10**8), (10, 10)])
def test_compute_takes_as_long_as_on_the_slowest_device(precision: str, flops: int, num_bytes: int) -> None:
    """Equal parts end with the device that takes longest for them: of unlike ones not always the same device."""
    together = ComputeModel(slowest_device([FAST, SLOW]), precision, [FAST, SLOW])
    alone = [ComputeModel(device, precision) for device in (FAST, SLOW)]
    for kind in (ComputeKind.CONTRACTION, ComputeKind.MEMORY):
        bound = max(model.time_ns(flops, num_bytes, kind) for model in alone)
        assert together.time_ns(flops, num_bytes, kind) == bound
        assert together.times_ns(np.array([flops]), np.array([num_bytes]), kind).tolist() == [bound]


def test_room_is_that_of_the_smallest_device() -> None:
    """Every rank holds an equal part, so that the smallest memory is the limit; one device is taken as it is."""
    assert slowest_device([FAST, SLOW]).memory_bytes == 24 << 30
    assert slowest_device([FAST]) is FAST
