"""Which collectives are measured on a cluster, and what their times say of its levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tap_planner.calibration.links import MeasuredCluster, MeasuredCollective, fit_paces, log_errors, with_paces
from tap_planner.calibration.residuals import fit_rows
from tap_planner.cluster import CalibratedLevel, Cluster, FitRow, Level, Mesh, MeshAxis, Pace

__all__ = ["collectives_to_measure", "fit_links"]

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring_exchange")
_SIZES = {"gloo": (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)}
_USUAL_SIZES = (1 << 14, 1 << 18, 1 << 22, 1 << 24, 1 << 27)
_ELEMENT_BYTES = 4
_ROOM = 4
"""Bandwidths are looked for up to that many times the largest rate that was seen."""
_MOST_LATENCY_NS = 1e7


def collectives_to_measure(cluster: Cluster) -> tuple[MeasuredCollective, ...]:
    """Collectives of all kinds on groups of every level, and on groups of all devices; small ones first. Their times
    are 0.
    """
    groups = _groups(cluster)
    return tuple(
        MeasuredCollective(
            kind=kind,
            mesh=mesh,
            axes=axes,
            num_bytes=_filled(size, math.prod(mesh.shape[axis] for axis in axes)),
            ns=0.0,
        )
        for size in _SIZES.get(cluster.library, _USUAL_SIZES)
        for mesh, axes in groups
        for kind in KINDS
    )


def _filled(size: int, group: int) -> int:
    """Bytes of whole elements on each rank of a group."""
    whole = _ELEMENT_BYTES * group
    return -(-size // whole) * whole


def _groups(cluster: Cluster) -> list[tuple[Mesh, tuple[int, ...]]]:
    """(mesh of all devices, axes): per level groups of two, four, ... and of all its children, then all devices."""
    sizes = [level.size for level in cluster.levels]
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
    for index, size in enumerate(sizes):
        inner, outer = math.prod(sizes[:index]), math.prod(sizes[index + 1 :])
        counts = [count for count in (2, 4, 8, 16, 32) if count < size and size % count == 0]
        for count in [*counts, size] if size > 1 else []:
            found[(outer * (size // count), count, inner), (1,)] = None
    if sum(size > 1 for size in sizes) > 1:
        found[(1, math.prod(sizes), 1), (1,)] = None
    return [_mesh(shape, axes) for shape, axes in found]


def _mesh(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[Mesh, tuple[int, ...]]:
    """Without axes of one rank."""
    kept = [axis for axis, size in enumerate(shape) if size > 1]
    mesh = Mesh(axes=tuple(MeshAxis(name=f"a{axis}", size=shape[axis]) for axis in kept))
    return mesh, tuple(kept.index(axis) for axis in axes)


def fit_links(
    cluster: Cluster, rows: Sequence[MeasuredCollective]
) -> tuple[tuple[CalibratedLevel, ...], int, tuple[FitRow, ...]]:
    """Bandwidth, latency and paces of the levels that collectives used.

    A level's bandwidth is what its best algorithm reaches, its latency that of the quickest: the others' paces say how
    much less they reach and how much longer their steps take.

    Args:
        cluster: on which they ran.
        rows: with their times.

    Returns:
        The levels, what every call takes before anything is sent, and per kind how well that explains the times.
    """
    most = max(row.num_bytes / row.ns for row in rows) * 1e9 * _ROOM
    bare = replace(cluster, levels=tuple(_bare(level, most) for level in cluster.levels), collective_launch_ns=0)
    measured = MeasuredCluster(cluster=bare, rows=tuple(rows))
    names = {level.name for level in cluster.levels}
    table, launch_ns = fit_paces([measured], _name, most_latency_ns=_MOST_LATENCY_NS)
    found: list[CalibratedLevel] = []
    for level in bare.levels:
        paces = {algorithm: pace for (name, algorithm), pace in table.items() if name == level.name}
        if paces:
            found.append(_calibrated(level, paces))
    assert {name for name, _ in table} <= names
    fitted = replace(measured, cluster=with_paces(bare, table, _name, launch_ns))
    return tuple(found), launch_ns, fit_rows([row.kind for row in rows], log_errors(fitted))


def _name(index: int, level: Level) -> str:
    return level.name


def _bare(level: Level, bandwidth: float) -> Level:
    """The level without any figure of its own: links as fast as anything seen, shared by its NICs."""
    each = max(round(bandwidth * level.oversubscription_permille / (1000 * level.nics)), 1)
    return replace(level.at(each), latency_ns=0, paces=())


def _calibrated(level: Level, paces: dict[str, Pace]) -> CalibratedLevel:
    best = max(pace.efficiency_permille for pace in paces.values())
    least_ns = min(pace.latency_ns for pace in paces.values())
    return CalibratedLevel(
        name=level.name,
        bandwidth_bytes_per_s=max(level.bandwidth_bytes_per_s * best // 1000, 1),
        latency_ns=least_ns,
        paces=tuple(
            (
                algorithm,
                Pace(
                    efficiency_permille=max(round(1000 * pace.efficiency_permille / best), 1),
                    latency_ns=pace.latency_ns - least_ns,
                ),
            )
            for algorithm, pace in sorted(paces.items())
        ),
    )
