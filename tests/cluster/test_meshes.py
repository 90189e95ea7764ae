"""Meshes: order of ranks, enumeration, parsing, levels that an axis spans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tap_planner.cluster import (
    Mesh,
    MeshAxis,
    axis_levels,
    enumerate_meshes,
    laid_otherwise,
    load_cluster,
    mesh_places,
    parse_cluster,
    parse_mesh,
)
from tap_planner.errors import UsageError


def mesh_of(*sizes: int) -> Mesh:
    """A mesh with axes a0, a1, ..."""
    return Mesh(axes=tuple(MeshAxis(name=f"a{index}", size=size) for index, size in enumerate(sizes)))


@st.composite
def laid_meshes(draw: st.DrawFn) -> Mesh:
    """A mesh whose axes lie in any order, of one stage or more."""
    mesh = mesh_of(*draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    order = tuple(draw(st.permutations(range(len(mesh.axes)))))
    listed = order == tuple(range(len(order)))
    return replace(mesh, order=() if listed else order, num_stages=draw(st.integers(1, 3)))


def position(mesh: Mesh, coordinates: Sequence[int]) -> int:
    """Where the rank of the first stage at some coordinates lies: digit by digit, the outermost axis first."""
    found = 0
    for axis in mesh.order or range(len(mesh.axes)):
        found = found * mesh.axes[axis].size + coordinates[axis]
    return found


@given(laid_meshes())
def test_ranks_count_through_coordinates_and_lie_as_the_axes_do(mesh: Mesh) -> None:
    """The innermost listed axis is fastest in rank; the innermost laid one in place; stages lie one after the other."""
    expected = [
        stage * mesh.stage_devices + position(mesh, coordinates)
        for stage in range(mesh.num_stages)
        for coordinates in itertools.product(*map(range, mesh.shape))
    ]
    assert mesh.positions().tolist() == expected
    assert sorted(expected) == list(range(mesh.num_devices))


@given(laid_meshes(), st.data())
def test_groups_agree_with_coordinates(mesh: Mesh, data: st.DataObject) -> None:
    """A group holds exactly those that differ on its axes only, in the order of their coordinates."""
    axes = data.draw(st.sets(st.integers(0, len(mesh.axes) - 1)))
    expected: dict[tuple[int, ...], list[int]] = {}
    for stage in range(mesh.num_stages):
        for coordinates in itertools.product(*map(range, mesh.shape)):
            rest = tuple(c for i, c in enumerate(coordinates) if i not in axes)
            lies = stage * mesh.stage_devices + position(mesh, coordinates)
            expected.setdefault((stage, *rest), []).append(lies)
    assert sorted(map(list, mesh.groups(tuple(axes)).tolist())) == sorted(expected.values())


@given(laid_meshes())
def test_text_is_read_back(mesh: Mesh) -> None:
    """What a mesh is called is what ``--mesh`` takes."""
    assume(mesh.num_stages * mesh.stage_devices > 1)
    assert parse_mesh(str(mesh), load_cluster(f"{mesh.num_devices}x1:l4")) == mesh


def test_enumeration_is_complete() -> None:
    """All ordered factorisations of 12, with the usual names."""
    shapes = {mesh.shape for mesh in enumerate_meshes(load_cluster("3x4:l4"))}
    assert shapes == {(12,), (2, 6), (3, 4), (4, 3), (6, 2)}
    triples = {mesh.shape for mesh in enumerate_meshes(load_cluster("3x4:l4"), 3)} - shapes
    assert triples == {(2, 2, 3), (2, 3, 2), (3, 2, 2)}
    assert [mesh.names for mesh in enumerate_meshes(load_cluster("1x8:l4"), 3)][-1] == ("dp", "fsdp", "tp")


@pytest.mark.parametrize(("cluster", "expected"), [("1x1:l4", ["dp=1"]), ("1x7:l4", ["dp=7"])])
def test_enumeration_of_one_and_of_a_prime(cluster: str, expected: list[str]) -> None:
    """One device has one mesh; a prime number of devices has one axis."""
    assert [str(mesh) for mesh in enumerate_meshes(load_cluster(cluster))] == expected


def test_parse() -> None:
    """Names and sizes, outermost first."""
    mesh = parse_mesh("data=128, model=8", load_cluster("128x8:l4"))
    assert mesh.names == ("data", "model")
    assert mesh.shape == (128, 8)
    assert mesh.axis_index("model") == 1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("dp=4,tp=8", r"32 devices.*has 16"),
        ("dp=2,dp=8", "'dp' occurs twice"),
        ("dp:16", "expected NAME=SIZE"),
        ("dp=0,tp=16", "expected NAME=SIZE"),
        ("", "expected NAME=SIZE"),
        ("dp=2,tp=8/tp", "'tp' after the slash, expected each of the axes dp, tp once"),
        ("dp=2,tp=8/tp,tp", "after the slash"),
        ("dp=2,tp=8/tp,ep", "after the slash"),
        ("dp=2,tp=8/", "after the slash"),
    ],
)
def test_parse_refuses(text: str, wanted: str) -> None:
    """Wrong syntax, doubled names, a wrong product and a wrong order are named."""
    with pytest.raises(UsageError, match=wanted):
        parse_mesh(text, load_cluster("2x8:l4"))


def test_unknown_axis() -> None:
    """The axes that exist are named."""
    with pytest.raises(UsageError, match="a0, a1"):
        mesh_of(2, 2).axis_index("tp")


@pytest.mark.parametrize(
    ("sizes", "levels"),
    [
        ((3, 4), [("network",), ("node",)]),
        ((12,), [("node", "network")]),
        ((6, 2), [("node", "network"), ("node",)]),
        ((2, 6), [("node", "network"), ("node", "network")]),
    ],
)
def test_axis_levels(sizes: tuple[int, ...], levels: list[tuple[str, ...]]) -> None:
    """Along an axis the node changes, or the place in the node, or both (3 nodes of 4)."""
    cluster = load_cluster("3x4:l4")
    mesh = mesh_of(*sizes)
    assert [axis_levels(mesh, cluster, axis) for axis in range(len(sizes))] == levels


def test_axes_that_lie_otherwise() -> None:
    """dp lies outside and splits last: ranks count through it first, and places say so rank by rank."""
    cluster = load_cluster("2x2:l4")
    mesh = parse_mesh("dp=2,tp=2/tp,dp", cluster)
    assert (mesh.names, mesh.order) == (("tp", "dp"), (1, 0))
    assert mesh_places(cluster, mesh) == ((0, 0), (1, 0), (0, 1), (1, 1))
    assert [axis_levels(mesh, cluster, axis) for axis in (0, 1)] == [("node",), ("network",)]
    assert parse_mesh("dp=2,tp=2/dp,tp", cluster) == parse_mesh("dp=2,tp=2", cluster)


def test_places_on_a_part() -> None:
    """On some devices of a cluster it is these that the axes are laid on."""
    cluster = load_cluster("2x3:l4")
    mesh = parse_mesh("dp=2,tp=2/tp,dp", cluster, allow_idle=True)
    assert mesh.devices == (0, 1, 3, 4)
    assert mesh_places(cluster, mesh) == ((0, 0), (1, 0), (0, 1), (1, 1))


def test_unlike_nodes_are_refused() -> None:
    """There axes split in the order in which they lie."""
    text = "node_groups:\n" + "".join(
        f"  - {{name: {name}, nodes: 1, devices_per_node: 2, device: {name}}}\n" for name in ("l4", "a100-sxm4-80gb")
    )
    cluster = parse_cluster(text + "inter_node: {bandwidth: 1 GB/s, nics_per_node: 1, latency: 10 us}\n", file="c.yaml")
    with pytest.raises(UsageError, match="on unlike nodes axes split in the order in which they lie"):
        parse_mesh("dp=2,tp=2/tp,dp", cluster)
    assert laid_otherwise(cluster, enumerate_meshes(cluster)) == ()


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ("1x8:l4", []),
        ("8x1:l4", []),
        ("2x4:cpu-core", []),
        ("2x4:l4", ["dp=2,tp=4/tp,dp", "dp=4,tp=2/tp,dp"]),
    ],
)
def test_which_meshes_are_laid_otherwise(cluster: str, expected: list[str]) -> None:
    """Those of two axes, where links differ and the library goes by links, not by rank (as gloo does)."""
    found = load_cluster(cluster)
    assert [str(mesh) for mesh in laid_otherwise(found, enumerate_meshes(found, 3))] == expected
    assert laid_otherwise(found, enumerate_meshes(found, num_stages=2)) == ()
