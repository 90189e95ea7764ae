"""tap-calibrate on real processes, and planning with what it wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tap_planner import api, calibrating
from tap_planner.api import CalibrateRequest, Progress
from tap_planner.calibration import Sample, elementwise, layer, product
from tap_planner.cluster import Cluster, calibration_text, cluster_from_json, load_cluster, parse_calibration
from tap_planner.errors import ClusterError, UsageError
from tap_planner.plan import PlanOptions, PlanRequest

MODEL = Path(__file__).parent / "data" / "hm_gpt_tiny.onnx"
GROUPS = """
node_groups:
  - {name: a, nodes: 1, devices_per_node: 4, device: a100-sxm4-80gb}
  - {name: b, nodes: 1, devices_per_node: 1, device: l4}
inter_node: {bandwidth: 25 GB/s, nics_per_node: 1, latency: 10 us}
"""


def _few(cluster: Cluster) -> tuple[Sample, ...]:
    """Less than a calibration usually measures."""
    return (layer(1, 8, 32, 2, "fp32"), product(64, 64, 64, "fp32"), elementwise(64, 256, "fp32"))


@pytest.mark.full
def test_two_processes_are_measured_and_planned_for(tmp_path: Path) -> None:
    """Device and links of two gloo processes are measured within a budget; the file serves plans."""
    told: list[Progress] = []
    calibration = api.calibrate_cluster(CalibrateRequest(cluster="1x2:cpu-core", nproc=2, budget_s=6.0), told.append)
    assert calibration is not None
    assert parse_calibration(calibration_text(calibration), file="c.json") == calibration
    assert calibration.device.launch_ns and calibration.device.backward_launch_ns
    assert [level.name for level in calibration.levels] == ["node"]
    assert {"launch forward", "all_reduce"} <= {row.kind for row in calibration.fit}
    assert {progress.stage for progress in told} == {"device", "collectives"}
    (tmp_path / "c.json").write_text(calibration_text(calibration))
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("device: cpu-core\nnodes: 1\ndevices_per_node: 2\ncalibration: c.json\n")
    options = PlanOptions(batch=4, dims={"seq": 16}, precision="fp32", loss="mean")
    document = api.make_plan(PlanRequest(model=MODEL, cluster=str(cluster), options=options))
    assert cluster_from_json(document.cluster) == load_cluster(cluster)


def test_a_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one process the device is measured, and no links."""
    monkeypatch.setattr(calibrating, "samples_for", _few)
    measuring = calibrating._Measuring(cluster=load_cluster("1x1:cpu-core"), budget_s=0.5, links=False)
    times = measuring.in_process(1, lambda value: None)
    assert times.collectives == ()
    calibration = calibrating._fitted(measuring, times)
    assert calibration.levels == () and calibration.collective_launch_ns is None
    assert calibration.device.launch_ns


def test_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that ends before the first measurement is an error, not an empty file."""
    monkeypatch.setattr(calibrating, "samples_for", _few)
    measuring = calibrating._Measuring(cluster=load_cluster("1x1:cpu-core"), budget_s=1e-9, links=False)
    with pytest.raises(UsageError, match="no time was left"):
        calibrating._fitted(measuring, measuring.in_process(1, lambda value: None))


@pytest.mark.parametrize(
    ("cluster", "nproc", "words"),
    [
        ("2x2:cpu-core", 4, "2 nodes"),
        ("1x4:cpu-core", 3, "--nproc 3: the cluster has 4 devices"),
        ("1x8:a100-sxm4-80gb", None, "8 GPUs"),
        ("1x8:a100-sxm4-80gb", 8, "8 GPUs"),
    ],
)
def test_processes_that_do_not_fit(cluster: str, nproc: int | None, words: str) -> None:
    """What cannot be measured from here is refused before anything starts."""
    with pytest.raises(UsageError) as caught:
        api.calibrate_cluster(CalibrateRequest(cluster=cluster, nproc=nproc))
    assert words in caught.value.message
    assert caught.value.hint


def test_a_launcher_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher starts one process for each device."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="2 processes, the cluster has 4 devices"):
        api.calibrate_cluster(CalibrateRequest(cluster="1x4:cpu-core"))


def test_unlike_nodes(tmp_path: Path) -> None:
    """One file is of one kind of device."""
    (tmp_path / "c.yaml").write_text(GROUPS)
    with pytest.raises(ClusterError, match="node_groups"):
        api.calibrate_cluster(replace(CalibrateRequest(cluster="x"), cluster=str(tmp_path / "c.yaml")))
