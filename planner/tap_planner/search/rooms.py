"""How much memory the devices of pipeline stages have; on unlike nodes each stage has its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tap_planner.cluster import Cluster, slowest_device, stage_kinds

__all__ = ["stage_rooms"]


def stage_rooms(
    cluster: Cluster, num_stages: int, limit_bytes: Callable[[Cluster], int | None]
) -> tuple[int, ...] | None:
    """Per stage the limit on its devices; None where there is none.

    Args:
        cluster: the devices; with more than one stage, all of them are used.
        num_stages: of the pipeline; 1: without one.
        limit_bytes: the limit on the devices of a cluster, of which only ``device`` is that of a stage.
    """
    limit = limit_bytes(cluster)
    if limit is None:
        return None
    if num_stages == 1 or not cluster.node_groups:
        return (limit,) * num_stages
    rooms: list[int] = []
    for kinds in stage_kinds(cluster, num_stages):
        room = limit_bytes(replace(cluster, device=slowest_device([cluster.devices[kind] for kind in kinds])))
        assert room is not None
        rooms.append(room)
    return tuple(rooms)
