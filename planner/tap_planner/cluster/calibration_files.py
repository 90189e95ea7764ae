"""Calibration files, read strictly: every key and value is checked, with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tap_planner.cluster.calibration import FORMAT_VERSION, CalibratedDevice, CalibratedLevel, Calibration, FitRow
from tap_planner.cluster.document import Entry, read_document
from tap_planner.cluster.types import ALGORITHMS, LIBRARIES, MAX_PADDING, PEAK_DTYPES, Pace
from tap_planner.errors import ClusterError
from tap_planner.files import read_text

_MOST = 10**17
_KEYS = ("format_version", "device", "library", "collective_launch_ns", "levels", "fit")
_DEVICE_RANGES = {
    "launch_ns": (0, _MOST),
    "backward_launch_ns": (0, _MOST),
    "matrix_efficiency_permille": (1, 1000),
    "memory_bandwidth_bytes_per_s": (1, _MOST),
    "memory_efficiency_permille": (1, 1000),
    "matrix_padding": (1, MAX_PADDING),
}
_MOST_PERMILLE = 10**9
"""Of residuals; no fit is worse."""


def load_calibration(path: Path) -> Calibration:
    """Read a calibration file.

    Args:
        path: the file.

    Raises:
        ClusterError: it cannot be read or understood; the message names file, line, key path and value.
    """
    text = read_text(path, "the calibration file", ClusterError, "Write one with tap-calibrate -o FILE.")
    return parse_calibration(text, file=str(path))


def parse_calibration(text: str, *, file: str) -> Calibration:
    """Read the text of a calibration file (JSON).

    Args:
        text: of the file.
        file: how errors call it.

    Raises:
        ClusterError: as ``load_calibration``.
    """
    document = read_document(text, file)
    keys = document.mapping(_KEYS)
    version = _required(document, keys, "format_version").text()
    if version.partition(".")[0] != FORMAT_VERSION.partition(".")[0]:
        keys["format_version"].fail(
            f"{version!r} found, expected {FORMAT_VERSION}", "Measure again with this version of tap-calibrate."
        )
    return Calibration(
        device=_device(_required(document, keys, "device")),
        library=_required(document, keys, "library").text(LIBRARIES),
        collective_launch_ns=keys["collective_launch_ns"].whole(0, _MOST) if "collective_launch_ns" in keys else None,
        levels=_levels(keys["levels"]) if "levels" in keys else (),
        fit=tuple(_fit_row(entry) for entry in keys["fit"].sequence(empty=True)) if "fit" in keys else (),
    )


def _required(document: Entry, keys: dict[str, Entry], key: str) -> Entry:
    if key not in keys:
        document.fail(f"the key {key!r} is missing", "Write the file with tap-calibrate -o FILE.")
    return keys[key]


def _device(entry: Entry) -> CalibratedDevice:
    keys = entry.mapping(("name", "peak_flops", *_DEVICE_RANGES))
    given: dict[str, Any] = {
        name: keys[name].whole(least, most) for name, (least, most) in _DEVICE_RANGES.items() if name in keys
    }
    if "peak_flops" in keys:
        peaks = keys["peak_flops"].mapping(PEAK_DTYPES)
        given["peak_flops"] = {dtype: peaks[dtype].count(_MOST) for dtype in PEAK_DTYPES if dtype in peaks}
    return CalibratedDevice(name=_required(entry, keys, "name").text(), **given)


def _levels(entry: Entry) -> tuple[CalibratedLevel, ...]:
    levels = tuple(_level(item) for item in entry.sequence(empty=True))
    names = [level.name for level in levels]
    if len(set(names)) != len(names):
        entry.fail(f"the level names {', '.join(names)} are not unique")
    return levels


def _level(entry: Entry) -> CalibratedLevel:
    keys = entry.mapping(("name", "bandwidth_bytes_per_s", "latency_ns", "paces"))
    paces = keys["paces"].mapping(ALGORITHMS) if "paces" in keys else {}
    return CalibratedLevel(
        name=_required(entry, keys, "name").text(),
        bandwidth_bytes_per_s=keys["bandwidth_bytes_per_s"].count(_MOST) if "bandwidth_bytes_per_s" in keys else None,
        latency_ns=keys["latency_ns"].whole(0, _MOST) if "latency_ns" in keys else None,
        paces=tuple((name, _pace(paces[name])) for name in sorted(paces)),
    )


def _pace(entry: Entry) -> Pace:
    keys = entry.mapping(("efficiency_permille", "latency_ns"))
    return Pace(
        efficiency_permille=_required(entry, keys, "efficiency_permille").count(1000),
        latency_ns=_required(entry, keys, "latency_ns").whole(0, _MOST),
    )


def _fit_row(entry: Entry) -> FitRow:
    keys = entry.mapping(("kind", "rows", "median_permille", "worst_permille"))
    return FitRow(
        kind=_required(entry, keys, "kind").text(),
        rows=_required(entry, keys, "rows").count(_MOST),
        median_permille=_required(entry, keys, "median_permille").whole(0, _MOST_PERMILLE),
        worst_permille=_required(entry, keys, "worst_permille").whole(0, _MOST_PERMILLE),
    )
