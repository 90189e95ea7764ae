"""cluster.yaml and the shorthand: what is read, and how what is wrong is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tap_planner.cluster import cluster_from_json, cluster_to_json, lint, load_cluster, parse_cluster
from tap_planner.errors import ClusterError

GOOD = """\
name: case
device: {name: generic, memory: 80 GiB, peak_flops: {float32: 312 TFLOP/s}, memory_bandwidth: 2.0 TB/s}
nodes: 2
devices_per_node: 8
intra_node: {kind: nvswitch, bandwidth: 300 GB/s, latency: 3 us}
inter_node: {bandwidth: 200 Gbit/s, nics_per_node: 1, latency: 10 us}
"""


def test_file_is_read() -> None:
    """Every figure of a full file arrives in base units."""
    cluster = parse_cluster(GOOD, file="c.yaml")
    assert (cluster.name, cluster.library, cluster.num_devices) == ("case", "nccl", 16)
    assert cluster.device.memory_bytes == 80 * 2**30
    assert cluster.device.memory_bandwidth_bytes_per_s == 2 * 10**12
    assert cluster.device.peak_flops == {"float32": 312 * 10**12}
    node, network = cluster.levels
    assert (node.size, node.kind, node.bandwidth_bytes_per_s, node.latency_ns) == (8, "switch", 300 * 10**9, 3000)
    assert (network.size, network.nics, network.bandwidth_bytes_per_s, network.latency_ns) == (2, 1, 25 * 10**9, 10000)


def test_shorthand_equals_file() -> None:
    """``NxM:device`` means the same as the three required keys."""
    text = "device: a100-sxm4-80gb\nnodes: 2\ndevices_per_node: 8\n"
    cluster = load_cluster("2x8:a100-sxm4-80gb")
    assert cluster == parse_cluster(text, file="c.yaml")
    assert cluster.levels[0].bandwidth_bytes_per_s == 300 * 10**9
    assert (cluster.levels[1].bandwidth_bytes_per_s, cluster.levels[1].nics) == (25 * 10**9, 8)


def test_library_follows_the_vendor() -> None:
    """AMD devices speak rccl, CPUs gloo."""
    assert load_cluster("1x8:mi300x-192gb").library == "rccl"
    assert load_cluster("2x2:cpu-core").library == "gloo"


WRONG_LINES = [
    ("intra_node: {kind: nvswitch, bandwidth: .inf, latency: 3 us}", 5, "intra_node.bandwidth", ".inf", "finite"),
    ("intra_node: {kind: nvswitch, bandwidth: .nan, latency: 3 us}", 5, "intra_node.bandwidth", ".nan", "finite"),
    ("inter_node: {bandwidth: -25 GB/s}", 6, "inter_node.bandwidth", "-25 GB/s", "greater than zero"),
    ("intra_node: {bandwidth: 300, latency: 3 us}", 5, "intra_node.bandwidth", "'300'", "no unit"),
    ('intra_node: {bandwidth: "300 Gbqs"}', 5, "intra_node.bandwidth", "Gbqs", "GB/s"),
    ("intra_node: {bandwidth: 300 gb/s}", 5, "intra_node.bandwidth", "gb/s", "did you mean 'GB/s'"),
    ("intra_node: {bandwidth: 0 GB/s}", 5, "intra_node.bandwidth", "0 GB/s", "greater than zero"),
    ("intra_node: {bandwidth: 300 GiB}", 5, "intra_node.bandwidth", "GiB", "a bandwidth"),
    ("devices_per_node: 2.5", 4, "devices_per_node", "2.5", "whole number"),
    ("devices_per_node: 1000000000", 4, "devices_per_node", "1000000000", "1024"),
    ("devices_per_node: 0", 4, "devices_per_node", "'0'", "whole number"),
    ("devices_per_node: 010", 4, "devices_per_node", "010", "whole number"),
    ("intra_node: {bandwidth: 300 GB/s, latency: -1 us}", 5, "intra_node.latency", "-1 us", "greater than zero"),
    ("intra_node: {bandwidth: 300 GB/s, latency: 0:03}", 5, "intra_node.latency", "0:03", "a time"),
    (
        "device: {name: g, memory: 80, memory_bandwidth: 2 TB/s, peak_flops: {float32: 1 TFLOP/s}}",
        2,
        "device.memory",
        "'80'",
        "80 GiB",
    ),
    (
        "device: {name: g, memory: eighty, memory_bandwidth: 2 TB/s, peak_flops: {float32: 1 TFLOP/s}}",
        2,
        "device.memory",
        "eighty",
        "80 GiB",
    ),
    (
        "device: {name: g, memory: 80 GiB, memory_bandwidth: 2 TB/s, peak_flops: {fp32: 1 TFLOP/s}}",
        2,
        "device.peak_flops.fp32",
        "fp32",
        "unknown key",
    ),
    ("intra_node: {kind: swich, bandwidth: 300 GB/s}", 5, "intra_node.kind", "swich", "did you mean 'switch'"),
    ("inter_node: {bandwith: 25 GB/s}", 6, "inter_node.bandwith", "bandwith", "did you mean 'bandwidth'"),
]


@pytest.mark.parametrize(("line", "number", "path", "found", "wanted"), WRONG_LINES)
def test_wrong_value(line: str, number: int, path: str, found: str, wanted: str) -> None:
    """A wrong value is refused with file and line, key path, what was found and what is wanted."""
    key = line.split(":")[0]
    text = "".join(line + "\n" if good.startswith(key + ":") else good for good in GOOD.splitlines(keepends=True))
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text, file="c.yaml")
    message = caught.value.message
    assert message.startswith(f"c.yaml:{number}: {path}: ")
    assert found in message
    assert wanted in message
    assert "\n" not in message


BOMB = "a: &a [x,x,x]\nb: &b [*a,*a,*a]\nnodes: *b\n"


@pytest.mark.parametrize(
    ("text", "place", "wanted"),
    [
        (BOMB, "c.yaml:1", "aliases"),
        ("nodes: !!python/object/apply:os.getcwd []\n", "c.yaml:1", "tag"),
        ("device:\n\tname: a\n", "c.yaml:2", "not valid YAML"),
        ("", "c.yaml:1", "empty"),
        ("- a\n", "c.yaml:1", "expected a mapping"),
        ("inter_node: {bandwidth: 25 GB/s}\n", "c.yaml:1", "'device' is missing"),
        (GOOD + "nodes: 3\n", "c.yaml:7", "occurs twice, first in line 3"),
        (GOOD + "inter_nodes: {bandwith: 1}\n", "c.yaml:7", "did you mean 'inter_node'"),
        (GOOD + "calibration: a.json\n", "a.json", "the calibration file cannot be read"),
        (GOOD + "reserved_memory: 80 GiB\n", "c.yaml:7", "less than"),
        ("[" * 100_000, "c.yaml:1", "nested deeper"),
        ("a: 1\n---\nb: 2\n", "c.yaml", "not valid YAML"),
        (GOOD.replace("intra_node", "#"), "c.yaml", "intra_node.bandwidth: missing"),
        (GOOD.replace("nodes: 2", "nodes: 1048576", 1), "c.yaml", "at most 1048576"),
    ],
)
def test_wrong_document(text: str, place: str, wanted: str) -> None:
    """What is wrong with a document as a whole is refused at its place, fast and without running anything."""
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text, file="c.yaml")
    assert caught.value.message.startswith(place)
    assert wanted in caught.value.message


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("2x8:a100-sxm4-80g", "did you mean 'a100-sxm4-80gb'"),
        ("2x8", "names no device"),
        ("0x8:a100-sxm4-80gb", "at least one node"),
        ("2x99999:a100-sxm4-80gb", "1024"),
        ("4x4:tpu-v4", "inter_node.bandwidth"),
        ("no-such-file.yaml", "cannot be read"),
    ],
)
def test_wrong_source(source: str, wanted: str) -> None:
    """A wrong shorthand or a missing file is refused."""
    with pytest.raises(ClusterError, match=wanted):
        load_cluster(source)


def test_file_that_is_no_text(tmp_path: Path) -> None:
    """A binary file is refused, not decoded by guess."""
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="not UTF-8"):
        load_cluster(path)


GROUP = "{name: %s, nodes: %d, devices_per_node: 4, device: %s}"


def test_equal_node_groups_are_one_cluster() -> None:
    """Groups that differ in name and count only are added up."""
    groups = [GROUP % ("a", 1, "a100-sxm4-80gb"), GROUP % ("b", 2, "a100-sxm4-80gb")]
    cluster = parse_cluster(f"node_groups: [{', '.join(groups)}]\n", file="c.yaml")
    assert [level.size for level in cluster.levels] == [4, 3]


LEVELS = """\
device: h100-sxm5-80gb
levels:
  - {size: 8, kind: switch, bandwidth: 450 GB/s, latency: 3 us}
  - {name: rack, size: 4, bandwidth: 50 GB/s, latency: 5 us, nics: 8}
  - {name: spine, size: 2, bandwidth: 400 Gbit/s, latency: 9 us, nics: 32, oversubscription: 2.5}
"""


def test_levels() -> None:
    """Any number of levels, with links and oversubscription of their own."""
    cluster = parse_cluster(LEVELS, file="c.yaml")
    assert [(level.name, level.size) for level in cluster.levels] == [("node", 8), ("rack", 4), ("spine", 2)]
    assert cluster.levels[2].child_bandwidth_bytes_per_s == 32 * 50 * 10**9 * 10 // 25
    with pytest.raises(ClusterError, match=r"c\.yaml:6: nodes: 3 found, but the levels have 8"):
        parse_cluster(LEVELS + "nodes: 3\n", file="c.yaml")


@pytest.mark.parametrize("text", [GOOD, GOOD + "reserved_memory: 3 GiB\n", LEVELS])
def test_json_round_trip(text: str) -> None:
    """A cluster is whole in its JSON form."""
    cluster = parse_cluster(text, file="c.yaml")
    assert cluster_from_json(cluster_to_json(cluster)) == cluster


def test_json_of_the_plan_format() -> None:
    """The cluster of a minimal plan is read, and what it says is written again."""
    document = {
        "name": "2x2-cpu",
        "library": "gloo",
        "device": {
            "name": "cpu-core",
            "memory_bytes": 4294967296,
            "memory_bandwidth_bytes_per_s": 10000000000,
            "peak_flops": {"float32": 50000000000},
        },
        "levels": [
            {"name": "node", "size": 2, "kind": "pcie", "bandwidth_bytes_per_s": 2000000000, "latency_ns": 50000},
            {
                "name": "network",
                "size": 2,
                "kind": "switch",
                "nics": 1,
                "bandwidth_bytes_per_s": 12500000,
                "latency_ns": 200000,
            },
        ],
    }
    cluster = cluster_from_json(document)
    written = cluster_to_json(cluster)
    assert written["levels"] == document["levels"]
    assert document["device"].items() <= written["device"].items()  # type: ignore[union-attr]
    assert load_cluster("2x2:cpu-core").levels == cluster.levels


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"library": "mpi"}, "inputs.cluster.library: 'mpi'"),
        ({"levels": []}, "levels"),
        ({"levels": [{"name": "node", "size": 0}]}, r"levels\[0\].size: 0"),
        ({"device": 3}, "device: 3"),
        ({"name": None}, "name: None"),
        ({"reserved_memory_bytes": 2**60}, "reserved_memory_bytes"),
    ],
)
def test_json_out_of_range(change: dict[str, object], wanted: str) -> None:
    """A damaged plan is refused with the key that is wrong."""
    document = cluster_to_json(load_cluster("1x2:cpu-core")) | change
    with pytest.raises(ClusterError, match=wanted):
        cluster_from_json(document)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("device: h100-sxm5-80gb\nnodes: 2\ndevices_per_node: 8\ninter_node: {bandwidth: 500 GB/s}\n", "NIC"),
        (
            GOOD.replace("generic", "h200-sxm-141gb").replace("float32: 312", "bfloat16: 1979"),
            "sparsity",
        ),
        (GOOD.replace("generic", "l4"), "more than twice"),
    ],
)
def test_lint_finds_slips(text: str, wanted: str) -> None:
    """The slips of public tables are found: NIC over NVLink, sparse peaks, terabytes on GDDR."""
    assert any(wanted in finding for finding in lint(parse_cluster(text, file="c.yaml")))


def test_lint_is_quiet_on_the_catalogue() -> None:
    """What the catalogue itself says is no finding."""
    assert lint(load_cluster("4x8:h100-sxm5-80gb")) == ()
