"""Calibration files: read strictly, and put in place of a cluster's figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tap_planner.cluster import (
    CalibratedDevice,
    CalibratedLevel,
    Calibration,
    Cluster,
    FitRow,
    Pace,
    calibrated,
    calibration_text,
    cluster_from_json,
    cluster_to_json,
    load_cluster,
    parse_calibration,
    parse_cluster,
)
from tap_planner.errors import ClusterError

MEASURED = Calibration(
    device=CalibratedDevice(
        name="cpu-core",
        launch_ns=11_000,
        backward_launch_ns=22_000,
        peak_flops={"float32": 40_000_000_000, "float64": 20_000_000_000},
        matrix_efficiency_permille=800,
        memory_bandwidth_bytes_per_s=12_000_000_000,
        memory_efficiency_permille=1000,
    ),
    library="gloo",
    collective_launch_ns=5_000,
    levels=(
        CalibratedLevel(
            name="node",
            bandwidth_bytes_per_s=1_500_000_000,
            latency_ns=70_000,
            paces=(("ring", Pace(efficiency_permille=900, latency_ns=3_000)),),
        ),
    ),
    fit=(FitRow(kind="matrix forward", rows=7, median_permille=31, worst_permille=120),),
)
CLUSTER = "device: cpu-core\nnodes: 1\ndevices_per_node: 4\ncalibration: measured/cpu.json\n"


def _cluster(folder: Path, calibration: Calibration, text: str = CLUSTER) -> Cluster:
    """A cluster file with its calibration, read."""
    (folder / "measured").mkdir()
    (folder / "measured" / "cpu.json").write_text(calibration_text(calibration))
    (folder / "cluster.yaml").write_text(text)
    return load_cluster(folder / "cluster.yaml")


def test_a_file_holds_everything() -> None:
    """What is written is read again."""
    assert parse_calibration(calibration_text(MEASURED), file="a.json") == MEASURED


def test_what_was_not_measured_is_not_written() -> None:
    """A file of a device alone has no other keys."""
    alone = Calibration(device=CalibratedDevice(name="x", launch_ns=1), library="nccl")
    written = json.loads(calibration_text(alone))
    assert written["device"] == {"name": "x", "launch_ns": 1}
    assert "collective_launch_ns" not in written
    assert parse_calibration(calibration_text(alone), file="a.json") == alone


def test_measured_figures_replace_those_of_the_cluster(tmp_path: Path) -> None:
    """The key ``calibration`` names a file beside the cluster file; what was not measured stays."""
    found = _cluster(tmp_path, MEASURED)
    plain = load_cluster("1x4:cpu-core")
    assert (found.device.launch_ns, found.device.backward_launch_ns) == (11_000, 22_000)
    assert found.device.peak_flops == {"float32": 40_000_000_000, "float64": 20_000_000_000}
    assert found.device.matrix_efficiency_permille == 800
    assert found.device.memory_bytes == plain.device.memory_bytes
    assert found.collective_launch_ns == 5_000
    node, network = found.levels
    assert (node.bandwidth_bytes_per_s, node.latency_ns) == (1_500_000_000, 70_000)
    assert node.pace("ring") == Pace(efficiency_permille=900, latency_ns=3_000)
    assert node.pace("pairwise") == plain.levels[0].pace("pairwise")
    assert network == plain.levels[1]


def test_a_plan_holds_measured_figures(tmp_path: Path) -> None:
    """The cluster's record for plans is complete: reading it again needs no calibration file."""
    found = _cluster(tmp_path, MEASURED)
    again = cluster_from_json(json.loads(json.dumps(cluster_to_json(found))))
    assert again == found


def test_tables_by_group_size_give_way() -> None:
    """A measured bandwidth is that of the links in use, whatever a data sheet says of groups of each size."""
    v100 = load_cluster("1x8:v100-sxm2-16gb")
    assert v100.levels[0].group_bandwidths
    measured = replace(MEASURED, device=CalibratedDevice(name="v100-sxm2-16gb"), library="nccl")
    node = calibrated(v100, measured, "here").levels[0]
    assert node.device_bandwidth(4) == node.device_bandwidth(4, exchange=True) == 1_500_000_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": CalibratedDevice(name="l4")}, ("'l4'", "'cpu-core'")),
        ({"library": "nccl"}, ("nccl", "gloo")),
        ({"levels": (CalibratedLevel(name="rack"),)}, ("'rack'", "node, network")),
    ],
)
def test_a_calibration_of_another_cluster(tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]) -> None:
    """Device, library and levels must be those that were measured; the error names both and the line."""
    with pytest.raises(ClusterError) as caught:
        _cluster(tmp_path, replace(MEASURED, **change))
    assert "cluster.yaml:4: calibration" in caught.value.message
    assert all(word in caught.value.message for word in words)
    assert caught.value.hint


def test_unlike_nodes_have_no_calibration(tmp_path: Path) -> None:
    """One file is of one kind of device."""
    groups = "\n".join(
        f"  - {{name: {name}, nodes: 1, devices_per_node: 4, device: {device}}}"
        for name, device in (("a", "a100-sxm4-80gb"), ("b", "l4"))
    )
    text = f"node_groups:\n{groups}\ninter_node: {{bandwidth: 25 GB/s}}\ncalibration: measured/cpu.json\n"
    with pytest.raises(ClusterError, match="node_groups"):
        _cluster(tmp_path, MEASURED, text)


def test_no_such_file() -> None:
    """A calibration file that is absent is named."""
    with pytest.raises(ClusterError, match=r"absent/cpu\.json: the calibration file cannot be read"):
        parse_cluster(CLUSTER.replace("measured", "absent"), file="cluster.yaml")


def _edited(change: dict[str, Any]) -> str:
    return json.dumps(json.loads(calibration_text(MEASURED)) | change, indent=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a.json:1: the file is empty"),
        ("[1, 2", "not valid YAML"),
        ("{}", "the key 'format_version' is missing"),
        (_edited({"format_version": "2.0"}), "a.json:2: format_version: '2.0' found, expected 1.0"),
        (_edited({"devise": {}}), "unknown key 'devise' (did you mean 'device'?)"),
        (_edited({"device": {"name": "x", "launch_ns": -1}}), "device.launch_ns: '-1' found"),
        (_edited({"device": {"name": "x", "launch_ns": 1.5}}), "device.launch_ns: '1.5' found"),
        (_edited({"device": {"name": "x", "matrix_efficiency_permille": 1001}}), "from 1 to 1000"),
        (_edited({"device": {"launch_ns": 1}}), "the key 'name' is missing"),
        (_edited({"device": {"name": "x", "peak_flops": {"float33": 1}}}), "did you mean 'float32'"),
        (_edited({"library": "mpi"}), "library: 'mpi' found, expected nccl or rccl or gloo"),
        (_edited({"levels": [{"name": "node", "paces": {"star": {}}}]}), "unknown key 'star'"),
        (_edited({"levels": [{"name": "node"}, {"name": "node"}]}), "not unique"),
        (_edited({"fit": [{"kind": "matrix"}]}), "the key 'rows' is missing"),
    ],
)
def test_a_damaged_file(text: str, words: str) -> None:
    """What is wrong is said with file, line, key and value."""
    with pytest.raises(ClusterError) as caught:
        parse_calibration(text, file="a.json")
    assert words in caught.value.message
    assert caught.value.message.startswith("a.json")
