"""Meshes with pipeline stages: ranks count stage by stage, and all stages' groups lie on the cluster at once."""

from __future__ import annotations

import numpy as np
import pytest

from tap_planner.cluster import PIPELINE, Mesh, MeshAxis, axis_levels, load_cluster, parse_mesh
from tap_planner.cost import CollectiveModel
from tap_planner.errors import UsageError

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


def test_stages_in_a_mesh() -> None:
    """``pp`` sets the number of stages and is no axis; all devices of all stages count."""
    cluster = load_cluster("4x8:a100-sxm4-80gb")
    mesh = parse_mesh("pp=4,dp=2,tp=4", cluster)
    assert (mesh, str(mesh)) == (MESH, "pp=4,dp=2,tp=4")
    assert parse_mesh("dp=2,pp=4,tp=4", cluster) == MESH
    assert parse_mesh("pp=32", cluster).shape == (1,)
    with pytest.raises(UsageError, match="has 16 devices, but the cluster 4x8-a100-sxm4-80gb has 32"):
        parse_mesh("pp=2,dp=8", cluster)
