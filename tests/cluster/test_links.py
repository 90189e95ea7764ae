"""What a cluster.yaml says of links and launches beside bandwidth and latency."""

from __future__ import annotations

import pytest

from tap_planner.cluster import Pace, catalogue_device, load_cluster, parse_cluster
from tap_planner.errors import ClusterError

HEAD = "device: a100-sxm4-80gb\nnodes: 2\ndevices_per_node: 8\n"


def test_every_key_is_read() -> None:
    """Figures arrive in base units; an algorithm that is named has its pace, the others the usual ones."""
    cluster = parse_cluster(
        HEAD
        + "intra_node: {reduces: true, host_bandwidth: 100 GB/s, group_bandwidths: {4: 100 GB/s, 2: 25 GB/s},"
        + " exchange_bandwidths: {2: 10 GB/s}, paces: {ring: {efficiency: 0.9, latency: 2 us}}}\n"
        + "inter_node: {transport: efa, paces: {tree: {efficiency: 0.5}}}\ncollective_launch: 7 us\n",
        file="c.yaml",
    )
    node, network = cluster.levels
    assert node.reduces and node.host_bandwidth_bytes_per_s == 100 * 10**9
    assert node.group_bandwidths == ((2, 25 * 10**9), (4, 100 * 10**9))
    assert node.exchange_bandwidths == ((2, 10 * 10**9),)
    assert node.pace("ring") == Pace(efficiency_permille=900, latency_ns=2000)
    assert node.pace("tree") == load_cluster("2x8:a100-sxm4-80gb").levels[0].pace("tree")
    assert (network.transport, network.pace("tree")) == ("efa", Pace(efficiency_permille=500))
    assert cluster.collective_launch_ns == 7000


def test_a_device_like_another() -> None:
    """Only what is given differs from the catalogue's device, whose usual links and library stay."""
    text = "device: {like: h100-sxm5-80gb, launch: 4 us, peak_flops: {bfloat16: 800 TFLOP/s}}\n"
    cluster = parse_cluster(text + HEAD.split("\n", 1)[1], file="c.yaml")
    known = catalogue_device("h100-sxm5-80gb")
    assert cluster.device.launch_ns == 4000
    assert cluster.device.peak_flops == {**known.peak_flops, "bfloat16": 800 * 10**12}
    assert cluster.device.memory_bytes == known.memory_bytes
    assert cluster.levels == load_cluster("2x8:h100-sxm5-80gb").levels


def test_links_of_ones_own_are_no_cube_mesh() -> None:
    """Whoever gives a kind or a bandwidth does not get the catalogue's figures by group."""
    own = parse_cluster(
        "device: v100-sxm2-32gb\nnodes: 1\ndevices_per_node: 8\nintra_node: {kind: switch, bandwidth: 100 GB/s}\n",
        file="c.yaml",
    )
    assert own.levels[0].group_bandwidths == () and own.levels[0].device_bandwidth(2) == 100 * 10**9


WRONG = [
    ("intra_node: {paces: {rings: {efficiency: 0.9}}}", "unknown key 'rings' (did you mean 'ring'?)"),
    ("intra_node: {paces: {ring: {efficiency: 1.5}}}", "'1.5' found, expected a number from 0.001 to 1"),
    ("intra_node: {group_bandwidths: {1: 25 GB/s}}", "'1' found, expected a group size from 2"),
    ("intra_node: {group_bandwidths: 25 GB/s}", "expected a mapping from group size to bandwidth"),
    ("intra_node: {reduces: maybe}", "'maybe' found, expected true or false"),
    ("intra_node: {transport: efa}", "unknown key 'transport'"),
    ("inter_node: {transport: carrier pigeon}", "expected infiniband or ethernet or efa"),
    ("inter_node: {host_bandwidth: 1 GB/s}", "unknown key 'host_bandwidth'"),
    ("collective_launch: 20", "no unit"),
]


@pytest.mark.parametrize(("line", "said"), WRONG)
def test_what_is_wrong_is_named(line: str, said: str) -> None:
    """File, line and what is wanted."""
    with pytest.raises(ClusterError) as found:
        parse_cluster(HEAD + line + "\n", file="c.yaml")
    assert "c.yaml:4" in found.value.message and said in found.value.message


@pytest.mark.parametrize(
    ("level", "key"), [(0, "transport: efa"), (1, "reduces: true"), (1, "group_bandwidths: {2: 1 GB/s}")]
)
def test_keys_have_their_level(level: int, key: str) -> None:
    """What only devices' links have is refused further out, and the transport of a network inside a node."""
    rows = [
        f"  - {{size: 2, bandwidth: 10 GB/s, latency: 1 us{', ' + key if index == level else ''}}}" for index in (0, 1)
    ]
    text = "device: a100-sxm4-80gb\nlevels:\n" + "\n".join(rows) + "\n"
    with pytest.raises(ClusterError, match="expected no such key"):
        parse_cluster(text, file="c.yaml")


def test_a_device_like_none() -> None:
    """A name that is not in the catalogue is named with the near miss."""
    with pytest.raises(ClusterError, match="h100-sxm5-80gb"):
        parse_cluster("device: {like: h100-sxm5-80g}\nnodes: 1\ndevices_per_node: 8\n", file="c.yaml")
