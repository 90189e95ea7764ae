"""What devices hold beside a plan: reserve and buffers of communicators, as usual or as said."""

from __future__ import annotations

import pytest

from tap_planner.cluster import (
    Cluster,
    cluster_from_json,
    cluster_to_json,
    device_names,
    load_cluster,
    parse_cluster,
    usual_reserve,
)
from tap_planner.errors import ClusterError

MIB, GIB = 1 << 20, 1 << 30
DESCRIBED = "{name: g, memory: 80 GiB, memory_bandwidth: 2 TB/s, peak_flops: {float32: 1 TFLOP/s}}"


def parsed(device: str, more: str = "") -> Cluster:
    """Two devices in a node."""
    links = "intra_node: {bandwidth: 25 GB/s}\n"
    return parse_cluster(f"device: {device}\nnodes: 1\ndevices_per_node: 2\n{links}{more}", file="c.yaml")


def held(cluster: Cluster) -> tuple[int, int]:
    """Reserve, and buffers of a communicator."""
    return cluster.reserved_memory_bytes, cluster.collective_buffers_bytes


@pytest.mark.parametrize(
    ("device", "reserve", "buffers"),
    [
        ("a100-sxm4-80gb", 3 * GIB, 688 * MIB),
        ("v100-sxm2-16gb", GIB, 688 * MIB),
        ("mi300x-192gb", 6 * GIB + GIB // 2, 666 * MIB),
        ("cpu-core", 0, 0),
    ],
)
def test_usual(device: str, reserve: int, buffers: int) -> None:
    """Half a GiB and a thirty-second of the memory; buffers by library; nothing on CPUs. Shorthand and file agree."""
    assert held(load_cluster(f"1x2:{device}")) == held(parsed(device)) == (reserve, buffers)


def test_what_is_left_is_most_of_it() -> None:
    """Of every device of the catalogue over nine tenths are left."""
    for name in device_names():
        cluster = load_cluster(f"1x1:{name}")
        assert 10 * cluster.usable_memory_bytes > 9 * cluster.device.memory_bytes, name


@pytest.mark.parametrize(
    ("device", "more", "expected"),
    [
        (DESCRIBED, "", (0, 0)),
        ("{like: a100-sxm4-80gb, memory: 40 GiB}", "", (0, 0)),
        ("{like: a100-sxm4-80gb, launch: 1 us}", "", (3 * GIB, 688 * MIB)),
        ("a100-sxm4-80gb", "library: gloo\n", (0, 0)),
        ("a100-sxm4-80gb", "library: rccl\n", (3 * GIB, 666 * MIB)),
    ],
)
def test_only_where_the_catalogue_says_the_memory(device: str, more: str, expected: tuple[int, int]) -> None:
    """Who describes a device's memory describes all that plans may use; gloo runs on the host."""
    assert held(parsed(device, more)) == expected


@pytest.mark.parametrize("device", ["a100-sxm4-80gb", DESCRIBED])
@pytest.mark.parametrize(("text", "expected"), [("0 B", 0), ("1 B", 1), ("2 GiB", 2 * GIB)])
def test_what_is_said_counts(device: str, text: str, expected: int) -> None:
    """Nothing at all can be said, too."""
    assert parsed(device, f"reserved_memory: {text}\n").reserved_memory_bytes == expected
    assert parsed(device, f"collective_buffers: {text}\n").collective_buffers_bytes == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-1 B", "is negative, expected a memory size, finite and zero or more, with its unit"),
        ("0", "has no unit"),
        ("0.1 B", "is out of range"),
    ],
)
def test_what_is_no_size(text: str, message: str) -> None:
    """Units are as strict as elsewhere."""
    for key in ("reserved_memory", "collective_buffers"):
        with pytest.raises(ClusterError, match=f"{key}: .*{message}"):
            parsed("l4", f"{key}: {text}\n")


def test_nothing_may_be_zero_elsewhere() -> None:
    """A device without memory is none."""
    with pytest.raises(ClusterError, match="is not greater than zero"):
        parsed("{like: l4, memory: 0 B}")


@pytest.mark.parametrize("other", ["l4", "{like: l4, memory: 30 GiB}"])
def test_unlike_nodes(other: str) -> None:
    """The smallest device bounds what plans take: the reserve is its own, if all are of the catalogue."""
    groups = "".join(
        f"  - {{name: {name}, nodes: 1, devices_per_node: 1, device: {device}}}\n"
        for name, device in (("a", "a100-sxm4-80gb"), ("b", other))
    )
    cluster = parse_cluster(f"node_groups:\n{groups}", file="c.yaml")
    expected = (usual_reserve("nccl", 24 * GIB), 688 * MIB) if other == "l4" else (0, 0)
    assert held(cluster) == expected
    assert cluster.usable_memory_bytes == cluster.device.memory_bytes - expected[0]


def test_as_plans_write_it() -> None:
    """Both are in the record; an older plan without them holds nothing back."""
    cluster = load_cluster("1x2:a100-sxm4-80gb")
    document = cluster_to_json(cluster)
    assert (document["reserved_memory_bytes"], document["collective_buffers_bytes"]) == held(cluster)
    assert cluster_from_json(document) == cluster
    later = ("reserved_memory_bytes", "collective_buffers_bytes")
    older = {key: value for key, value in document.items() if key not in later}
    assert held(cluster_from_json(older)) == (0, 0)
