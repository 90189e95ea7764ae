"""Rings of all groups at once on odd shapes and on parts of a cluster, against counting what every link carries."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest

from tap_planner.cluster import Cluster, Mesh, MeshAxis, enumerate_meshes, load_cluster, mesh_places, parse_cluster
from tap_planner.cost import CollectiveModel

RACKS = """\
device: cpu-core
library: gloo
levels:
  - {name: node, size: 3, bandwidth: 100 GB/s, latency: 1 us}
  - {name: rack, size: 2, bandwidth: 25 GB/s, latency: 2 us, nics: 3}
  - {name: pod, size: 5, bandwidth: 10 GB/s, latency: 5 us}
"""
UNLIKE = """\
library: gloo
node_groups:
  - {name: slow, nodes: 3, devices_per_node: 2, device: l4}
  - {name: fast, nodes: 2, devices_per_node: 7, device: a100-sxm4-80gb}
inter_node: {bandwidth: 25 GB/s, nics_per_node: 2, latency: 10 us}
"""
PAYLOAD = 123_456_789


def cluster_of(source: str) -> Cluster:
    """A cluster whose library has rings only."""
    if "\n" in source:
        return parse_cluster(source, file="c.yaml")
    text = (
        f"device: l4\nlibrary: gloo\nnodes: {source.partition('x')[0]}\ndevices_per_node: {source.partition('x')[2]}\n"
    )
    return parse_cluster(text + "inter_node: {bandwidth: 25 GB/s, nics_per_node: 2, latency: 10 us}\n", file="c.yaml")


def level_between(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """The level whose links join two places: that of the outermost coordinate in which they differ."""
    outermost = next(index for index, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return len(first) - 1 - outermost


def ring_ns(cluster: Cluster, mesh: Mesh, axes: tuple[int, ...]) -> int:
    """One pass of a ring through each group: the latencies of n - 1 steps, and over each edge (n - 1)/n of the payload;
    what leaves a node goes by its NICs, what leaves a rack also by the links of the rack."""
    places = mesh_places(cluster, mesh)
    carried: Counter[tuple[int, tuple[int, ...]]] = Counter()
    hops = Counter[int]()
    groups = mesh.groups(axes).tolist()
    for ranks in groups:
        ring = [places[rank] for rank in ranks]
        for level, count in Counter(level_between(a, b) for a, b in itertools.pairwise(ring)).items():
            hops[level] = max(hops[level], count)
        for a, b in zip(ring, (*ring[1:], ring[0]), strict=True):
            outermost = level_between(a, b)
            for level in range(1, outermost + 1) if outermost else (0,):
                carried[level, a[: len(a) - level]] += 1
    latency_ns = sum(count * cluster.levels[level].latency_ns for level, count in hops.items())
    slowest = max(
        count * Fraction(10**9, cluster.levels[level].nics * cluster.levels[level].bandwidth_bytes_per_s)
        for (level, _), count in carried.items()
    )
    size = len(groups[0])
    return math.ceil(latency_ns + PAYLOAD * Fraction(size - 1, size) * slowest)


def axes_of(mesh: Mesh) -> list[tuple[int, ...]]:
    """Every set of axes whose groups have several ranks."""
    numbers = range(len(mesh.axes))
    chosen = itertools.chain.from_iterable(itertools.combinations(numbers, k) for k in range(1, len(numbers) + 1))
    return [axes for axes in chosen if mesh.groups(axes).shape[1] > 1]


@pytest.mark.parametrize("source", ["1x6", "1x7", "3x4", "2x6", "3x8", "6x8", "2x7", "5x3", RACKS], ids=lambda s: s[:6])
def test_rings_on_odd_shapes(source: str) -> None:
    """On every mesh of up to three axes, of all devices or of a part: also where axes do not end with the nodes."""
    cluster = cluster_of(source)
    for mesh in enumerate_meshes(cluster, 3, allow_idle=True):
        model = CollectiveModel(cluster, mesh)
        for axes in axes_of(mesh):
            found = model.cost("all_gather", axes, PAYLOAD).ns
            assert abs(found - ring_ns(cluster, mesh, axes)) <= 1, (str(mesh), axes)


def test_parts_of_unlike_nodes() -> None:
    """A part of one kind costs what the same nodes cost as a cluster of their own."""
    cluster = cluster_of(UNLIKE)
    for mesh in enumerate_meshes(cluster, 2, allow_idle=True):
        if not mesh.devices or min(mesh.devices) < 6:
            continue
        nodes = {mesh_places(cluster, mesh)[rank][0] for rank in range(mesh.num_devices)}
        alone = parse_cluster(
            f"device: a100-sxm4-80gb\nlibrary: gloo\nnodes: {len(nodes)}\n"
            f"devices_per_node: {mesh.num_devices // len(nodes)}\n"
            "inter_node: {bandwidth: 25 GB/s, nics_per_node: 2, latency: 10 us}\n",
            file="c.yaml",
        )
        found, wanted = CollectiveModel(cluster, mesh), CollectiveModel(alone, Mesh(axes=mesh.axes))
        for axes in axes_of(mesh):
            for kind in ("all_reduce", "all_to_all"):
                assert found.cost(kind, axes, PAYLOAD) == wanted.cost(kind, axes, PAYLOAD)


def test_a_part_of_directly_wired_devices() -> None:
    """Of 8 devices with a link between each pair, 4 use three of the seven links that each has."""
    text = (
        "device: l4\nlibrary: gloo\nnodes: 1\ndevices_per_node: 8\n"
        "intra_node: {kind: mesh, bandwidth: 70 GB/s, latency: 1 us}\n"
    )
    cluster = parse_cluster(text, file="c.yaml")
    mesh = Mesh(axes=(MeshAxis(name="dp", size=4),), devices=(0, 1, 2, 3))
    (ring,) = (a for a in CollectiveModel(cluster, mesh).algorithms("all_gather", (0,)) if a.name == "ring")
    assert ring.alpha_ns + 30e9 * ring.ns_per_byte == pytest.approx(3 * 1000 + 3 / 4 * 1e9)


def test_a_part_shares_all_nics_of_its_nodes() -> None:
    """Four of eight devices of a node have its NICs for themselves: half the groups, half the time over the network."""
    cluster = load_cluster("2x8:a100-sxm4-80gb")
    whole, part = parse(cluster, 2, 8), parse(cluster, 2, 4, tuple(range(4)) + tuple(range(8, 12)))
    half, full = (CollectiveModel(cluster, mesh).rate_ns("all_gather", (0,), 10**9) for mesh in (part, whole))
    assert full == pytest.approx(2 * half, abs=2)


def parse(cluster: Cluster, nodes: int, each: int, devices: tuple[int, ...] = ()) -> Mesh:
    """Nodes times devices of each."""
    return Mesh(axes=(MeshAxis(name="dp", size=nodes), MeshAxis(name="tp", size=each)), devices=devices)
