"""Meshes with pipeline stages: ranks count stage by stage, and all stages' groups lie on the cluster at once."""

from __future__ import annotations

import numpy as np

from tap_planner.cluster import PIPELINE, Mesh, MeshAxis, axis_levels, load_cluster
from tap_planner.cost import CollectiveModel

MESH = Mesh(axes=(MeshAxis(name="dp", size=2), MeshAxis(name="tp", size=4)), num_stages=4)


def test_groups_of_all_stages() -> None:
    """The groups of an axis are those of a mesh whose outermost axis are the stages."""
    axes = (MeshAxis(name="pp", size=4), *MESH.axes)
    whole = Mesh(axes=axes)
    assert MESH.num_devices == whole.num_devices == 32
    assert MESH.stage_devices == 8
    for own, other in (((0,), (1,)), ((1,), (2,)), ((0, 1), (1, 2)), ((PIPELINE,), (0,)), ((PIPELINE, 1), (0, 2))):
        assert np.array_equal(MESH.groups(own), whole.groups(other))


def test_prices_and_levels() -> None:
    """Collectives cost what they cost on that mesh, so groups of several stages share the links of a node."""
    cluster = load_cluster("2x16:a100-sxm4-80gb")
    whole = Mesh(axes=(MeshAxis(name="pp", size=4), *MESH.axes))
    own, other = CollectiveModel(cluster, MESH), CollectiveModel(cluster, whole)
    for kind in ("all_reduce", "all_gather", "all_to_all", "send_recv"):
        assert own.cost(kind, (0,), 1 << 24) == other.cost(kind, (1,), 1 << 24)
        assert own.cost(kind, (PIPELINE,), 1 << 24) == other.cost(kind, (0,), 1 << 24)
    assert axis_levels(MESH, cluster, 1) == axis_levels(whole, cluster, 2) == ("node",)
    assert axis_levels(MESH, cluster, PIPELINE) == ("node", "network")
