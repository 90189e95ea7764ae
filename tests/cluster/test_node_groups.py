"""Clusters of unlike nodes: reading, places of ranks, levels of axes, JSON form and findings."""

from __future__ import annotations

import pytest

from tap_planner.cluster import (
    axis_levels,
    cluster_from_json,
    cluster_to_json,
    enumerate_meshes,
    lint,
    parse_cluster,
    parse_mesh,
)
from tap_planner.errors import ClusterError

UNLIKE = """\
name: two kinds
node_groups:
  - {name: a, nodes: 1, devices_per_node: 4, device: a100-sxm4-80gb}
  - {name: b, nodes: 2, devices_per_node: 1, device: l4}
inter_node: {bandwidth: 25 GB/s, nics_per_node: 1, latency: 10 us}
"""


def test_unlike_groups_are_one_cluster() -> None:
    """All devices count; equal parts go at the pace of the L4 and must fit into what it offers."""
    cluster = parse_cluster(UNLIKE, file="c.yaml")
    assert cluster.num_devices == 6
    assert [(g.name, g.nodes, g.devices_per_node, g.device.name) for g in cluster.node_groups] == [
        ("a", 1, 4, "a100-sxm4-80gb"),
        ("b", 2, 1, "l4"),
    ]
    assert cluster.usable_memory_bytes == (24 << 30) - (512 << 20) - (24 << 30) // 32
    slower = cluster.node_groups[1].device.matrix_rate("bfloat16")
    assert slower is not None and cluster.device.matrix_rate("bfloat16") == pytest.approx(slower, rel=1e-9)
    assert [level.size for level in cluster.levels] == [4, 3]


def test_ranks_run_through_the_groups() -> None:
    """Rank 0 to 3 lie on node 0, the others on nodes of their own."""
    places = parse_cluster(UNLIKE, file="c.yaml").places()
    assert places == ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0))


def test_places_of_equal_nodes() -> None:
    """On equal nodes places count through the levels, outermost first."""
    text = "device: l4\nnodes: 2\ndevices_per_node: 3\n"
    assert parse_cluster(text, file="c.yaml").places() == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))


@pytest.mark.parametrize(
    ("mesh", "levels"),
    [
        ("dp=6", [("node", "network")]),
        ("dp=3,tp=2", [("node", "network"), ("node", "network")]),
        ("dp=2,tp=3", [("node", "network"), ("node", "network")]),
    ],
)
def test_levels_of_axes(mesh: str, levels: list[tuple[str, ...]]) -> None:
    """An axis spans the node if two of a group share one, and the network if two do not."""
    cluster = parse_cluster(UNLIKE, file="c.yaml")
    parsed = parse_mesh(mesh, cluster)
    assert [axis_levels(parsed, cluster, axis) for axis in range(len(parsed.axes))] == levels


def test_an_axis_inside_the_nodes() -> None:
    """On 4 + 2 devices pairs of neighbours never leave a node."""
    cluster = parse_cluster(UNLIKE.replace("nodes: 2, devices_per_node: 1", "nodes: 1, devices_per_node: 2"), file="c")
    mesh = parse_mesh("dp=3,tp=2", cluster)
    assert axis_levels(mesh, cluster, 1) == ("node",)
    assert axis_levels(mesh, cluster, 0) == ("node", "network")


def test_meshes_hold_all_devices() -> None:
    """Meshes are made of the number of devices, not of nodes times devices."""
    assert {str(mesh) for mesh in enumerate_meshes(parse_cluster(UNLIKE, file="c.yaml"))} == {
        "dp=6",
        "dp=2,tp=3",
        "dp=3,tp=2",
    }


def test_json_round_trip() -> None:
    """A cluster of unlike nodes is whole in its JSON form, and one of equal nodes says nothing of groups."""
    cluster = parse_cluster(UNLIKE + "reserved_memory: 1 GiB\n", file="c.yaml")
    assert cluster_from_json(cluster_to_json(cluster)) == cluster
    assert "node_groups" not in cluster_to_json(parse_cluster("device: l4\nnodes: 2\ndevices_per_node: 3\n", file="c"))


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("name: b", "name: a", r"c\.yaml:3: node_groups: the group name 'a' occurs twice"),
        ("device: l4", "device: l5", r"c\.yaml:4: node_groups\[1\]\.device: .*'l5'"),
        ("nodes: 2", "nodes: 0", r"c\.yaml:4: node_groups\[1\]\.nodes: '0' found"),
        ("device: l4", "device: cpu-core", r"no library serves all these devices"),
        ("inter_node", "reserved_memory: 24 GiB\ninter_node", r"reserved_memory: .* less than the device's"),
        ("name: two kinds", "name: x\ndevice: l4", r"c\.yaml:2: device: given together with 'node_groups'"),
    ],
)
def test_wrong_groups(old: str, new: str, wanted: str) -> None:
    """Errors name the group's place and key."""
    with pytest.raises(ClusterError, match=wanted):
        parse_cluster(UNLIKE.replace(old, new, 1), file="c.yaml")


def test_groups_that_slow_the_others_down_are_a_finding() -> None:
    """4 A100 alone outdo 4 A100 and 2 L4 at the pace of an L4; a half-sized gap would not be worth a word."""
    findings = lint(parse_cluster(UNLIKE, file="c.yaml"))
    assert any("on a alone" in finding and "leave the slower nodes out" in finding for finding in findings)
    close = UNLIKE.replace("device: l4", "device: a100-sxm4-40gb")
    assert not any("leave" in finding for finding in lint(parse_cluster(close, file="c.yaml")))
