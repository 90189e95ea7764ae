"""Meshes: order of ranks, enumeration, parsing, levels that an axis spans."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.cluster import Mesh, MeshAxis, axis_levels, enumerate_meshes, load_cluster, parse_mesh
from tap_planner.errors import UsageError


def mesh_of(*sizes: int) -> Mesh:
    """A mesh with axes a0, a1, ..."""
    return Mesh(axes=tuple(MeshAxis(name=f"a{index}", size=size) for index, size in enumerate(sizes)))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_ranks_are_row_major(sizes: list[int]) -> None:
    """Ranks count through the coordinates with the innermost axis fastest, and back."""
    mesh = mesh_of(*sizes)
    for rank, coordinates in enumerate(itertools.product(*map(range, sizes))):
        assert mesh.coordinates(rank) == coordinates
        assert mesh.rank(coordinates) == rank


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_groups_agree_with_coordinates(sizes: list[int], data: st.DataObject) -> None:
    """A group holds exactly the ranks that differ on its axes only."""
    mesh = mesh_of(*sizes)
    axes = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    expected: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.num_devices):
        coordinates = mesh.coordinates(rank)
        expected.setdefault(tuple(c for i, c in enumerate(coordinates) if i not in axes), []).append(rank)
    assert sorted(map(list, mesh.groups(tuple(axes)).tolist())) == sorted(expected.values())


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
    ],
)
def test_parse_refuses(text: str, wanted: str) -> None:
    """Wrong syntax, doubled names and a wrong product are named."""
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
