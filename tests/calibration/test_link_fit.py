"""Figures of links are found again from times that they made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tap_planner.calibration import MeasuredCollective, collectives_to_measure, fit_links
from tap_planner.cluster import CalibratedDevice, Calibration, Cluster, Pace, calibrated, load_cluster
from tap_planner.cost import CollectiveModel


def _timed(cluster: Cluster) -> list[MeasuredCollective]:
    """All collectives that are measured, at the times of the cost model."""
    return [
        replace(row, ns=CollectiveModel(cluster, row.mesh).cost(row.kind, row.axes, row.num_bytes).ns)
        for row in collectives_to_measure(cluster)
    ]


def _at(cluster: Cluster, *, bandwidth: int, latency_ns: int, launch_ns: int) -> Cluster:
    """The cluster with other links inside the node, each algorithm at its own pace."""
    paces = (
        ("direct", Pace(efficiency_permille=1000, latency_ns=0)),
        ("pairwise", Pace(efficiency_permille=700, latency_ns=20_000)),
        ("ring", Pace(efficiency_permille=500, latency_ns=50_000)),
    )
    node = replace(cluster.levels[0], bandwidth_bytes_per_s=bandwidth, latency_ns=latency_ns, paces=paces)
    return replace(cluster, levels=(node, *cluster.levels[1:]), collective_launch_ns=launch_ns)


@pytest.mark.parametrize("bandwidth", [300_000_000, 20_000_000_000])
def test_links_of_a_node_are_found_again(bandwidth: int) -> None:
    """The fitted links explain the times that others made, though nothing of these was known."""
    known = load_cluster("1x4:cpu-core")
    true = _at(known, bandwidth=bandwidth, latency_ns=40_000, launch_ns=15_000)
    rows = _timed(true)
    levels, launch_ns, fit = fit_links(known, rows)
    assert [level.name for level in levels] == ["node"]
    assert all(row.median_permille <= 50 for row in fit)
    calibration = Calibration(
        device=CalibratedDevice(name="cpu-core"), library="gloo", collective_launch_ns=launch_ns, levels=levels
    )
    found = calibrated(known, calibration, "here")
    errors = [CollectiveModel(found, row.mesh).cost(row.kind, row.axes, row.num_bytes).ns / row.ns - 1 for row in rows]
    assert float(np.median(np.abs(errors))) <= 0.05
    assert max(pace.efficiency_permille for _, pace in levels[0].paces) == 1000


def test_what_is_measured_on_two_levels() -> None:
    """Groups inside the node, groups of nodes, and all devices; every collective, small ones first."""
    cases = collectives_to_measure(load_cluster("2x4:cpu-core"))
    groups = {(case.mesh.shape, case.axes) for case in cases}
    assert groups == {((4, 2), (1,)), ((2, 4), (1,)), ((2, 4), (0,)), ((8,), (0,))}
    sizes = [case.num_bytes for case in cases]
    assert sizes == sorted(sizes)
    assert len(cases) == len(groups) * 5 * 5


def test_groups_of_three_get_whole_elements() -> None:
    """Payloads divide by the group."""
    for case in collectives_to_measure(load_cluster("1x3:cpu-core")):
        assert case.num_bytes % (4 * 3) == 0
