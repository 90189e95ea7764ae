"""Measured figures of a cluster, and what they replace in its description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tap_planner.cluster.json_form import by_dtype_to_json, paces_to_json
from tap_planner.cluster.types import Cluster, Device, Level, Pace
from tap_planner.errors import ClusterError

FORMAT_VERSION = "1.0"
_MEASURED = "measured by tap-calibrate"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedDevice:
    """Figures of a device as ``Device`` has them; None where nothing was measured."""

    name: str
    launch_ns: int | None = None
    backward_launch_ns: int | None = None
    peak_flops: Mapping[str, int] = field(default_factory=dict, hash=False)
    """FLOP/s by element type, of those that were measured."""
    matrix_efficiency_permille: int | None = None
    memory_bandwidth_bytes_per_s: int | None = None
    memory_efficiency_permille: int | None = None
    matrix_padding: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedLevel:
    """Figures of a level of the topology as ``Level`` has them; None where nothing was measured."""

    name: str
    bandwidth_bytes_per_s: int | None = None
    latency_ns: int | None = None
    paces: tuple[tuple[str, Pace], ...] = ()
    """By algorithm, sorted; of those that were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRow:
    """How well the figures explain one kind of measurement."""

    kind: str
    rows: int
    """Measurements."""
    median_permille: int
    """Median of abs(model / measured - 1)."""
    worst_permille: int
    """The largest of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a calibration file holds."""

    device: CalibratedDevice
    library: str
    """That the collectives were measured with."""
    collective_launch_ns: int | None = None
    levels: tuple[CalibratedLevel, ...] = ()
    """Those that were measured, inner to outer."""
    fit: tuple[FitRow, ...] = ()


def calibrated(cluster: Cluster, calibration: Calibration, place: str) -> Cluster:
    """The cluster at measured figures; what was not measured stays.

    Args:
        cluster: all nodes alike.
        calibration: measured on such a cluster.
        place: of the calibration file's mention, for errors.

    Raises:
        ClusterError: it was measured on another device, with another library, on levels of other names, or nodes are
            unlike.
    """
    if cluster.node_groups:
        raise ClusterError(
            f"{place}: a calibration is of one kind of device, but the nodes are unlike (node_groups)",
            hint="Give each group's device its measured figures as a mapping, see docs/calibration.md.",
        )
    device = calibration.device
    if device.name != cluster.device.name:
        raise ClusterError(
            f"{place}: measured on the device {device.name!r}, the cluster has {cluster.device.name!r}",
            hint="Measure this cluster with tap-calibrate, or name the file of this device.",
        )
    if calibration.library != cluster.library and calibration.levels:
        raise ClusterError(
            f"{place}: measured with the library {calibration.library}, the cluster uses {cluster.library}",
            hint="Measure with the cluster's library, or set library in the cluster file.",
        )
    found = {level.name: level for level in calibration.levels}
    names = [level.name for level in cluster.levels]
    unknown = [name for name in found if name not in names]
    if unknown:
        raise ClusterError(
            f"{place}: measured on the level {unknown[0]!r}, the cluster has {', '.join(names)}",
            hint="Measure this cluster with tap-calibrate, or give its levels the names that were measured.",
        )
    launch_ns = calibration.collective_launch_ns
    return replace(
        cluster,
        device=_device(cluster.device, device),
        levels=tuple(_level(level, found[level.name]) if level.name in found else level for level in cluster.levels),
        collective_launch_ns=cluster.collective_launch_ns if launch_ns is None else launch_ns,
    )


def _device(device: Device, measured: CalibratedDevice) -> Device:
    given = {
        name: getattr(measured, name)
        for name in (
            *("launch_ns", "backward_launch_ns", "matrix_efficiency_permille", "memory_bandwidth_bytes_per_s"),
            *("memory_efficiency_permille", "matrix_padding"),
        )
        if getattr(measured, name) is not None
    }
    if measured.peak_flops:  # of products and attention together
        given["attention_efficiency_permille"] = None
    own = {name: share for name, share in device.own_efficiency_permille.items() if name not in measured.peak_flops}
    source = f"{_MEASURED}; the rest: {device.source}" if device.source else _MEASURED
    peaks = {**device.peak_flops, **measured.peak_flops}
    return replace(device, **given, peak_flops=peaks, own_efficiency_permille=own, source=source)


def _level(level: Level, measured: CalibratedLevel) -> Level:
    """Tables by group size and limits of hosts describe links by data sheet: a measured bandwidth replaces them."""
    level = level.paced(dict(measured.paces))
    if measured.latency_ns is not None:
        level = replace(level, latency_ns=measured.latency_ns)
    if measured.bandwidth_bytes_per_s is not None:
        level = level.at(measured.bandwidth_bytes_per_s)
    return level


def calibration_text(calibration: Calibration) -> str:
    """The canonical text of a calibration file: JSON, the same figures give the same bytes."""
    device: dict[str, object] = {"name": calibration.device.name}
    for name in ("launch_ns", "backward_launch_ns"):
        _put(device, name, getattr(calibration.device, name))
    if calibration.device.peak_flops:
        device["peak_flops"] = by_dtype_to_json(calibration.device.peak_flops)
    for name in ("matrix_efficiency_permille", "memory_bandwidth_bytes_per_s"):
        _put(device, name, getattr(calibration.device, name))
    for name in ("memory_efficiency_permille", "matrix_padding"):
        _put(device, name, getattr(calibration.device, name))
    document: dict[str, object] = {"format_version": FORMAT_VERSION, "device": device, "library": calibration.library}
    _put(document, "collective_launch_ns", calibration.collective_launch_ns)
    document["levels"] = [_level_json(level) for level in calibration.levels]
    document["fit"] = [
        {
            "kind": row.kind,
            "rows": row.rows,
            "median_permille": row.median_permille,
            "worst_permille": row.worst_permille,
        }
        for row in calibration.fit
    ]
    return json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _put(document: dict[str, object], name: str, value: int | None) -> None:
    if value is not None:
        document[name] = value


def _level_json(level: CalibratedLevel) -> dict[str, object]:
    document: dict[str, object] = {"name": level.name}
    _put(document, "bandwidth_bytes_per_s", level.bandwidth_bytes_per_s)
    _put(document, "latency_ns", level.latency_ns)
    document["paces"] = paces_to_json(level.paces)
    return document
