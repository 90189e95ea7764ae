"""Where collectives run on two nodes of two ranks, and what is said of them there."""

from __future__ import annotations

from tap_planner.cluster import load_cluster, parse_mesh
from tap_planner.cost import CollectiveModel

CLUSTER = "2x2:cpu-core"
"""Two nodes of two cores, joined by the link."""
LINK_BITS_PER_S = 100_000_000
"""As the catalogue has it for these devices; at ten times as much processors are the limit, not links."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "halo_exchange", "ring_exchange")
"""The collectives that the communicator of tap-apply has."""

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes of a mesh, and the axes of a group."""

PLACES: dict[str, Place] = {
    "two groups across": ((2, 2), (0,)),
    "two groups inside": ((2, 2), (1,)),
    "one group of all, two axes": ((2, 2), (0, 1)),
    "one group of all, one axis": ((4,), (0,)),
}


LAID = (0, 2, 1, 3)
"""Ranks of a 2x2 mesh whose second axis lies outermost, node by node."""


def costs_on(mesh_shape: tuple[int, ...], laid: str = "") -> CollectiveModel:
    """Costs of collectives on a mesh.

    Args:
        mesh_shape: sizes of the axes a0, a1, ...
        laid: the axes as they lie on the devices, outermost first; empty: as listed.
    """
    cluster = load_cluster(CLUSTER)
    sizes = {f"a{i}": n for i, n in enumerate(mesh_shape)}
    text = ",".join(f"{name}={sizes[name]}" for name in (laid.split(",") if laid else sizes))
    text += f"/{','.join(sizes)}" if laid else ""
    return CollectiveModel(cluster, parse_mesh(text, cluster))
