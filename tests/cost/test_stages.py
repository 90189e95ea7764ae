"""Prices between pipeline stages: those of the links that part them."""

from __future__ import annotations

import pytest

from tap_planner.cluster import Cluster, Mesh, MeshAxis, load_cluster, parse_cluster
from tap_planner.cost import COLLECTIVE_KINDS, CollectiveModel, FlatModel, VolumeModel

CLUSTER = load_cluster("2x8:a100-sxm4-80gb")
BYTES = 64 * 2**20


def staged(stages: int, *sizes: int, cluster: Cluster = CLUSTER) -> CollectiveModel:
    """Stages with a mesh of these sizes each."""
    axes = tuple(MeshAxis(name=f"a{index}", size=size) for index, size in enumerate(sizes))
    return CollectiveModel(cluster, Mesh(axes=axes, num_stages=stages))


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
@pytest.mark.parametrize(("stages", "ranks"), [(2, 8), (2, 4), (4, 4), (8, 2), (16, 1)])
def test_all_stages_together_are_an_axis(kind: str, stages: int, ranks: int) -> None:
    """Between all stages a collective costs what it costs along an outermost axis of that many ranks."""
    cluster = CLUSTER if stages * ranks == 16 else load_cluster("1x8:a100-sxm4-80gb")
    along = CollectiveModel(cluster, Mesh(axes=(MeshAxis(name="pp", size=stages), MeshAxis(name="a", size=ranks))))
    model = staged(stages, ranks, cluster=cluster)
    assert model.among(kind, tuple(range(stages)), BYTES) == along.cost(kind, (0,), BYTES)


def test_stages_in_one_node_do_not_pay_the_network() -> None:
    """Of four stages of four ranks two lie in each node: between those the links of the node count, else the NICs."""
    model = staged(4, 4)
    inside, across = (model.among("send_recv", pair, BYTES).ns for pair in ((0, 1), (1, 2)))
    node, network = CLUSTER.levels
    assert inside >= BYTES * 10**9 // node.bandwidth_bytes_per_s
    assert across >= 4 * BYTES * 10**9 // (network.nics * network.bandwidth_bytes_per_s)
    assert across > inside
    assert model.among("send_recv", (2, 3), BYTES).ns == inside
    assert model.among("send_recv", (0, 3), BYTES).ns == across


def test_the_order_of_stages_says_nothing() -> None:
    """There and back takes as long."""
    model = staged(4, 4)
    assert model.among("send_recv", (2, 1), BYTES) == model.among("send_recv", (1, 2), BYTES)
    assert model.among("all_reduce", (3, 0), BYTES) == model.among("all_reduce", (0, 3), BYTES)


def test_other_links_are_other_prices() -> None:
    """Prices that were asked for are forgotten where the links change."""
    model = staged(2, 8)
    before = model.among("send_recv", (0, 1), BYTES)
    node, network = CLUSTER.levels
    slower = type(CLUSTER)(
        name=CLUSTER.name,
        library=CLUSTER.library,
        device=CLUSTER.device,
        levels=(node, network.at(network.bandwidth_bytes_per_s // 4)),
        collective_launch_ns=CLUSTER.collective_launch_ns,
    )
    assert model.on_links(slower).among("send_recv", (0, 1), BYTES).ns > 3 * before.ns
    assert model.among("send_recv", (0, 1), BYTES) == before


def test_unlike_nodes_are_priced_by_their_own_links() -> None:
    """Two stages in each node: those on PCIe send slower to each other, and the two in the middle over the network."""
    text = """\
node_groups:
  - {name: fast, nodes: 1, devices_per_node: 4, device: a100-sxm4-80gb}
  - {name: slow, nodes: 1, devices_per_node: 4, device: a100-sxm4-80gb, intra_node: {kind: pcie, bandwidth: 20 GB/s}}
inter_node: {bandwidth: 10 GB/s, nics_per_node: 1}
"""
    model = staged(4, 2, cluster=parse_cluster(text, file="cluster.yaml"))
    fast, across, slow = (model.among("send_recv", (stage, stage + 1), BYTES).ns for stage in range(3))
    assert fast < slow < across
    assert slow >= BYTES // 20
    assert across >= 2 * BYTES // 10


def test_by_volume_a_transfer_is_its_bytes() -> None:
    """One rank sends the payload, wherever the stages lie."""
    volume, flat = VolumeModel((4,)), FlatModel(CLUSTER, (4,))
    assert volume.among("send_recv", (0, 3), BYTES).ns == BYTES
    assert volume.among("all_reduce", (0, 3), BYTES).ns == BYTES
    assert flat.among("send_recv", (0, 3), BYTES) == flat.among("send_recv", (0, 1), BYTES)
    assert flat.among("send_recv", (0, 3), 0).algorithm == "none"
