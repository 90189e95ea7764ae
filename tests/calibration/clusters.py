"""Clusters for tests of fits."""

from __future__ import annotations

from dataclasses import replace

from tap_planner.cluster import Cluster, Device, load_cluster


def on_one_device(device: Device) -> Cluster:
    """A cluster of a single device."""
    return replace(load_cluster("1x1:cpu-core"), device=device)
