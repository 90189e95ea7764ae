"""What algorithms reach of links: paces, launches, switches that sum, links that depend on the group."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from tap_planner.cluster import (
    Cluster,
    Level,
    Pace,
    catalogue_device,
    cluster_from_json,
    cluster_to_json,
    load_cluster,
    part_of,
)
from tap_planner.cost import COLLECTIVE_KINDS, CollectiveModel
from tests.cost.test_collectives import GB, cluster_of, mesh_of, times


def with_node(cluster: Cluster, **given: object) -> Cluster:
    """The cluster with other links inside its nodes."""
    node = dataclasses.replace(cluster.levels[0], **given)  # pyright: ignore[reportArgumentType]
    return replace(cluster, levels=(node, *cluster.levels[1:]))


def test_a_pace_slows_its_algorithm_only() -> None:
    """Half the bandwidth and 2 us a step more on the ring of 8: the tree is as it was."""
    usual = times(CollectiveModel(cluster_of(8, 1), mesh_of(8)), "all_reduce", (0,), GB)
    slow = with_node(cluster_of(8, 1), paces=(("ring", Pace(efficiency_permille=500, latency_ns=2000)),))
    found = times(CollectiveModel(slow, mesh_of(8)), "all_reduce", (0,), GB)
    assert found["ring"] == pytest.approx(2 * 7 * 5000 + 2 * 7 / 8 * GB / 150)
    assert found["tree"] == usual["tree"]


def test_paces_of_levels_are_their_own() -> None:
    """A ring over two nodes at half the network's pace: the slowest level counts, each step at its level's latency."""
    cluster = cluster_of(8, 2)
    pace = (("ring", Pace(efficiency_permille=500, latency_ns=7000)),)
    slow = replace(cluster, levels=(cluster.levels[0], replace(cluster.levels[1], paces=pace)))
    found = times(CollectiveModel(slow, mesh_of(16)), "all_gather", (0,), GB)["ring"]
    assert found == pytest.approx(14 * 3000 + 17_000 + 15 / 16 * GB / 12.5)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_every_call_is_launched(kind: str) -> None:
    """A launch of 20 us is in every algorithm's latency once, and in no rate."""
    cluster = cluster_of(4, 2)
    before = CollectiveModel(cluster, mesh_of(8)).algorithms(kind, (0,))
    after = CollectiveModel(replace(cluster, collective_launch_ns=20_000), mesh_of(8)).algorithms(kind, (0,))
    assert [line.alpha_ns - 20_000 for line in after] == pytest.approx([line.alpha_ns for line in before])
    assert [line.ns_per_byte for line in after] == [line.ns_per_byte for line in before]


def test_trees_send_less_than_rings_between_two_nodes() -> None:
    """Each of two nodes is the root of one half: the tensor crosses once, in a ring of 16 almost twice; NCCL's double
    trees reach 4.2 GB/s of bus bandwidth where a ring cannot pass 3.1 (Alpa's V100 profile, 25 Gbit/s)."""
    found = times(CollectiveModel(cluster_of(8, 2), mesh_of(16)), "all_reduce", (0,), 100 * GB)
    assert found["tree"] == pytest.approx(100 * GB / 25, rel=1e-3)
    assert found["ring"] == pytest.approx(2 * 15 / 16 * 100 * GB / 25, rel=1e-3)


def test_trees_inside_a_node_are_chains() -> None:
    """Inner members send up and down; of two members each sends once."""
    eight = times(CollectiveModel(cluster_of(8, 1), mesh_of(8)), "all_reduce", (0,), 300 * GB)["tree"]
    pair = times(CollectiveModel(cluster_of(8, 1), mesh_of(4, 2)), "all_reduce", (1,), 300 * GB)["tree"]
    assert (eight, pair) == (pytest.approx(2e9, rel=1e-3), pytest.approx(1e9, rel=1e-3))


def test_switches_that_sum() -> None:
    """Each device sends its tensor once; across 4 nodes the network's trees, 8 devices sharing its NIC, or the switch:
    whatever takes longer. Only all_reduce has it, and only where whole groups lie on such nodes."""
    plain, summing = cluster_of(8, 4), with_node(cluster_of(8, 4), reduces=True)
    inside = times(CollectiveModel(summing, mesh_of(4, 8)), "all_reduce", (1,), GB)
    assert inside["nvls"] == pytest.approx(2 * 3000 + GB / 300)
    across = times(CollectiveModel(summing, mesh_of(32)), "all_reduce", (0,), GB)
    assert across["nvls"] == pytest.approx(2 * 3000 + 2 * 2 * 10_000 + 2 * 3 / 4 * GB / 25)
    wide = replace(summing, levels=(summing.levels[0], replace(summing.levels[1], nics=64)))
    assert times(CollectiveModel(wide, mesh_of(32)), "all_reduce", (0,), GB)["nvls"] == pytest.approx(
        2 * 3000 + 4 * 10_000 + GB / 300
    )
    for cluster, sizes, axes, kind in (
        (plain, (4, 8), (1,), "all_reduce"),
        (summing, (4, 8), (0,), "all_reduce"),
        (summing, (4, 8), (1,), "all_gather"),
        (replace(summing, library="gloo"), (4, 8), (1,), "all_reduce"),
    ):
        assert "nvls" not in times(CollectiveModel(cluster, mesh_of(*sizes)), kind, axes, GB)


def test_links_that_depend_on_the_group() -> None:
    """A hybrid cube mesh: one link of 25 GB/s for two devices, four for four, six for eight; three have what two have
    where nothing is said. All-to-all has figures of its own, a transfer between two those of two."""
    cube = with_node(
        cluster_of(8, 1, kind="mesh"),
        group_bandwidths=((2, 25 * GB), (4, 100 * GB), (8, 150 * GB)),
        exchange_bandwidths=((2, 20 * GB), (8, 10 * GB)),
    )
    for sizes, bandwidth, exchange in (((4, 2), 25, 20), ((2, 4), 100, 20), ((1, 8), 150, 10)):
        model, share = CollectiveModel(cube, mesh_of(*sizes)), (sizes[1] - 1) / sizes[1]
        hops = sizes[1] - 1
        assert times(model, "all_gather", (1,), GB)["ring"] == pytest.approx(hops * 3000 + share * GB / bandwidth)
        assert times(model, "all_to_all", (1,), GB) == {"pairwise": pytest.approx(hops * 3000 + share * GB / exchange)}
        assert times(model, "send_recv", (1,), GB) == {"direct": pytest.approx(3000 + GB / 25)}
    three = part_of(with_node(cube, size=3), mesh_of(3))
    assert times(CollectiveModel(three, mesh_of(3)), "all_gather", (0,), GB)["ring"] == pytest.approx(
        2 * 3000 + 2 / 3 * GB / 25
    )


def test_all_that_passes_a_host_shares_it() -> None:
    """Eight devices on PCIe of 32 GB/s each, whose host passes 64 GB/s: 8 GB/s each, however they are grouped."""
    box = with_node(cluster_of(8, 1, kind="pcie", intra=32), host_bandwidth_bytes_per_s=64 * GB)
    for sizes in ((4, 2), (1, 8)):
        found = times(CollectiveModel(box, mesh_of(*sizes)), "all_gather", (1,), GB)["ring"]
        assert found == pytest.approx((sizes[1] - 1) * 3000 + (sizes[1] - 1) / sizes[1] * GB / 8)
    wide = with_node(box, host_bandwidth_bytes_per_s=1000 * GB)
    assert times(CollectiveModel(wide, mesh_of(8)), "all_gather", (0,), GB)["ring"] == pytest.approx(
        7 * 3000 + 7 / 8 * GB / 32
    )


def test_the_same_groups_on_other_links() -> None:
    """A model moved to other links answers as one made for them."""
    cluster, mesh = cluster_of(4, 2), mesh_of(2, 4)
    slow = with_node(cluster, paces=(("ring", Pace(efficiency_permille=100, latency_ns=1)),))
    moved, made = CollectiveModel(cluster, mesh).on_links(slow), CollectiveModel(slow, mesh)
    for kind in COLLECTIVE_KINDS:
        for axes in ((0,), (1,), (0, 1)):
            assert moved.cost(kind, axes, GB) == made.cost(kind, axes, GB)


def test_the_catalogue_knows_nodes() -> None:
    """V100 nodes are cube meshes, H100 switches sum, A100's do not; nccl has paces, gloo none."""
    v100, h100, a100 = (
        load_cluster(f"2x8:{name}").levels[0] for name in ("v100-sxm2-32gb", "h100-sxm5-80gb", "a100-sxm4-80gb")
    )
    assert v100.device_bandwidth(2) < v100.device_bandwidth(4) < v100.device_bandwidth(8)
    assert (h100.reduces, a100.reduces) == (True, False)
    assert a100.pace("ring").efficiency_permille < 1000
    assert load_cluster("2x2:cpu-core").levels[0].paces == ()
    assert catalogue_device("a100-sxm4-80gb").backward_floor_ns > catalogue_device("a100-sxm4-80gb").launch_ns


def test_a_cluster_record_keeps_its_links() -> None:
    """What a plan holds of a cluster reads back equal, with every key that links can have."""
    level = Level(name="node", size=8, kind="mesh", bandwidth_bytes_per_s=GB, latency_ns=1)
    node = replace(
        level,
        reduces=True,
        host_bandwidth_bytes_per_s=5 * GB,
        group_bandwidths=((2, GB), (10, 2 * GB)),
        exchange_bandwidths=((3, GB),),
        paces=(("ring", Pace(efficiency_permille=900, latency_ns=5)), ("tree", Pace())),
    )
    network = replace(level, name="network", kind="switch", transport="efa", nics=4)
    device = replace(catalogue_device("l4"), matrix_padding=64, backward_launch_ns=7)
    cluster = replace(cluster_of(8, 8), levels=(node, network), device=device, collective_launch_ns=3)
    assert cluster_from_json(cluster_to_json(cluster)) == cluster
