"""Meshes of odd counts and of fewer devices than there are, against enumeration by brute force."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.cluster import (
    Cluster,
    Mesh,
    MeshAxis,
    axis_levels,
    device_parts,
    enumerate_meshes,
    friendly_counts,
    idle_boxes,
    load_cluster,
    mesh_places,
    parse_cluster,
    parse_mesh,
    part_of,
    restricted,
)
from tap_planner.errors import ClusterError, UsageError

RACKS = """\
device: l4
levels:
  - {name: node, size: 4, bandwidth: 100 GB/s, latency: 1 us}
  - {name: rack, size: 3, bandwidth: 25 GB/s, latency: 2 us}
  - {name: pod, size: 2, bandwidth: 10 GB/s, latency: 5 us}
"""
UNLIKE = """\
node_groups:
  - {name: slow, nodes: 2, devices_per_node: 2, device: l4}
  - {name: fast, nodes: 3, devices_per_node: 4, device: a100-sxm4-80gb}
inter_node: {bandwidth: 25 GB/s, nics_per_node: 1, latency: 10 us}
"""
ODD = ["1x6:l4", "1x7:l4", "3x4:l4", "2x6:l4", "3x8:l4", "6x8:l4", "12x8:l4", RACKS]


def cluster_of(source: str) -> Cluster:
    """A cluster by its shorthand or its text."""
    return parse_cluster(source, file="c.yaml") if "\n" in source else load_cluster(source)


def primes(number: int) -> list[int]:
    """Prime factors, ascending."""
    found: list[int] = []
    for prime in range(2, number + 1):
        while number % prime == 0:
            found.append(prime)
            number //= prime
    return found


def level_factorisations(cluster: Cluster, num_axes: int) -> set[tuple[int, ...]]:
    """Shapes whose axes are made of neighbouring factors of the levels, each level cut into primes in every order."""
    orders = [set(itertools.permutations(primes(level.size))) for level in reversed(cluster.levels)]
    shapes: set[tuple[int, ...]] = set()
    for chosen in itertools.product(*orders):
        factors = [factor for order in chosen for factor in order]
        for cuts in itertools.combinations(range(1, len(factors)), num_axes - 1):
            ends = (0, *cuts, len(factors))
            shapes.add(tuple(math.prod(factors[a:b]) for a, b in itertools.pairwise(ends)))
    return shapes


@pytest.mark.parametrize("source", ODD, ids=lambda source: source.partition("\n")[0])
def test_every_factorisation_is_there(source: str) -> None:
    """All ordered products of one to three axes, and with them every factorisation of the topology's levels."""
    cluster = cluster_of(source)
    count = cluster.num_devices
    found = [mesh.shape for mesh in enumerate_meshes(cluster, 3)]
    assert len(set(found)) == len(found)
    divisors = [size for size in range(2, count + 1) if count % size == 0]
    for axes in (1, 2, 3):
        products = {sizes for sizes in itertools.product(divisors, repeat=axes) if math.prod(sizes) == count}
        assert {shape for shape in found if len(shape) == axes} == products
        assert level_factorisations(cluster, axes) <= products


@pytest.mark.parametrize("size", [1, 2, 5, 7, 8, 12, 24, 96, 100, 128])
def test_friendly_counts(size: int) -> None:
    """Divisors, powers of two and thrice those, ascending."""
    wanted = [
        count
        for count in range(1, size + 1)
        if size % count == 0 or any(count in (1 << power, 3 << power) for power in range(8))
    ]
    assert list(friendly_counts(size)) == wanted


@pytest.mark.parametrize("source", [*ODD, "1x1:l4", "128x8:l4", "5x7:l4", UNLIKE], ids=lambda source: source[:12])
def test_parts_lie_evenly(source: str) -> None:
    """Each part is smaller than the whole and occurs once; the nodes of a kind that it touches hold equally many."""
    cluster = cluster_of(source)
    places = cluster.places()
    parts = device_parts(cluster)
    assert len(set(parts)) == len(parts) <= 2 * sum(len(friendly_counts(level.size)) + 8 for level in cluster.levels)
    for part in parts:
        assert list(part) == sorted(set(part)) and 0 < len(part) < cluster.num_devices
        held = Counter(places[device][:-1] for device in part)
        kinds: dict[int, set[int]] = {}
        for node, count in held.items():
            kind = int(node[0] >= cluster.node_groups[0].nodes) if cluster.node_groups else 0
            kinds.setdefault(kind, set()).add(count)
        assert all(len(counts) == 1 for counts in kinds.values())
        assert restricted(cluster, part).num_devices == len(part)
    if cluster.num_devices > 1:
        assert parts[-1] == ((4,) if cluster.node_groups else (0,))


def test_parts_of_seven() -> None:
    """Of 7 devices a node 6, 4, 3, 2 or 1; of several such nodes all, or 6 or 4 of each."""
    assert [len(part) for part in device_parts(load_cluster("1x7:l4"))] == [6, 4, 3, 2, 1]
    assert [len(part) for part in device_parts(load_cluster("2x7:l4"))] == [12, 8, 7, 6, 4, 3, 2, 1]


def test_the_slowest_kind_is_idle_first() -> None:
    """Parts of unlike nodes take A100s before L4s, although the L4s are listed first; their pace is the A100's."""
    cluster = cluster_of(UNLIKE)
    for part in device_parts(cluster):
        slow, fast = sum(device < 4 for device in part), sum(device >= 4 for device in part)
        assert slow == 0 or fast == 12
    twelve = restricted(cluster, tuple(range(4, 16)))
    assert twelve.device.name == "a100-sxm4-80gb" and not twelve.node_groups
    assert [level.size for level in twelve.levels] == [4, 3]
    assert twelve.usable_memory_bytes > cluster.usable_memory_bytes
    both = restricted(cluster, (0, 1, *range(4, 16)))
    assert [(group.name, group.nodes) for group in both.node_groups] == [("slow", 1), ("fast", 3)]


def test_whole_first_in_the_space() -> None:
    """With idle devices allowed the space begins with the meshes of all devices, and holds none twice."""
    cluster = load_cluster("2x8:l4")
    whole = enumerate_meshes(cluster)
    meshes = enumerate_meshes(cluster, allow_idle=True)
    assert meshes[: len(whole)] == whole
    assert len({(mesh.shape, mesh.devices) for mesh in meshes}) == len(meshes)
    assert {mesh.num_devices for mesh in meshes} == {16, 8, 6, 4, 3, 2, 1}
    for mesh in meshes[len(whole) :]:
        assert len(mesh.devices) == mesh.num_devices


@pytest.mark.parametrize(
    ("source", "text", "places"),
    [
        ("1x7:l4", "dp=2,tp=3", [(0, device) for device in range(6)]),
        ("2x7:l4", "dp=8", [(node, device) for node in range(2) for device in range(4)]),
        ("4x8:l4", "dp=12", [(node, device) for node in range(2) for device in range(6)]),
        ("4x8:l4", "dp=24", [(node, device) for node in range(3) for device in range(8)]),
        (RACKS, "dp=12", [(0, node, device) for node in range(3) for device in range(4)]),
        (UNLIKE, "dp=2,tp=4", [(node, device) for node in (2, 3) for device in range(4)]),
        (UNLIKE, "dp=14", [(0, 0), (0, 1), *((node, device) for node in (2, 3, 4) for device in range(4))]),
    ],
)
def test_a_mesh_that_leaves_devices_idle(source: str, text: str, places: list[tuple[int, ...]]) -> None:
    """It lies on as few nodes as hold it evenly, ranks row-major."""
    cluster = cluster_of(source)
    mesh = parse_mesh(text, cluster, allow_idle=True)
    assert list(mesh_places(cluster, mesh)) == places
    assert part_of(cluster, mesh).num_devices == mesh.num_devices
    with pytest.raises(UsageError, match="but the cluster") as caught:
        parse_mesh(text, cluster)
    assert "--allow-idle" in caught.value.hint


@pytest.mark.parametrize(("source", "text"), [("2x4:l4", "dp=7"), (UNLIKE, "dp=13"), (RACKS, "dp=20")])
def test_counts_that_do_not_lie_evenly(source: str, text: str) -> None:
    """Five devices on one node and two on another are no mesh; more devices than there are neither."""
    with pytest.raises(UsageError, match="cannot lie evenly"):
        parse_mesh(text, cluster_of(source), allow_idle=True)
    with pytest.raises(UsageError, match="64 devices, but the cluster"):
        parse_mesh("dp=64", cluster_of(source), allow_idle=True)


def test_axis_levels_of_a_part() -> None:
    """On 4 of the 7 devices of each node an axis of 4 stays inside the nodes."""
    cluster = load_cluster("2x7:l4")
    mesh = parse_mesh("dp=2,tp=4", cluster, allow_idle=True)
    assert [axis_levels(mesh, cluster, axis) for axis in (0, 1)] == [("network",), ("node",)]


@given(st.sampled_from(["1x7:l4", "2x3:l4", RACKS, UNLIKE]), st.data())
def test_boxes_hold_what_is_idle(source: str, data: st.DataObject) -> None:
    """The boxes hold every place that is not used, once."""
    cluster = cluster_of(source)
    used = data.draw(st.sets(st.integers(0, cluster.num_devices - 1), min_size=1))
    mesh = Mesh(axes=(MeshAxis(name="dp", size=len(used)),), devices=tuple(sorted(used)))
    places = cluster.places()
    held = [
        place
        for first, last in idle_boxes(cluster, mesh)
        for place in itertools.product(*(range(low, high + 1) for low, high in zip(first, last, strict=True)))
    ]
    assert sorted(held) == [place for device, place in enumerate(places) if device not in used]


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [((1, 0), "ascending"), ((0, 8), "device 8"), ((0, 1, 4), "evenly"), ((0, 1, 2), "3 are listed")],
)
def test_wrong_devices(devices: tuple[int, ...], wanted: str) -> None:
    """Devices that are no part of the cluster are refused."""
    size = 2 if wanted == "3 are listed" else len(devices)
    with pytest.raises(ClusterError, match=wanted):
        part_of(
            load_cluster("2x4:l4"),
            replace(parse_mesh("dp=8", load_cluster("2x4:l4")), axes=(MeshAxis(name="a", size=size),), devices=devices),
        )
