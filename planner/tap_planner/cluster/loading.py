"""cluster.yaml, or the ``NxM:device`` shorthand, to a Cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tap_planner.cluster.catalogue import CatalogueEntry, catalogue_entry
from tap_planner.cluster.document import Entry, read_document
from tap_planner.cluster.types import (
    DEFAULT_LAUNCH_NS,
    DEFAULT_MATRIX_EFFICIENCY_PERMILLE,
    DEFAULT_MEMORY_EFFICIENCY_PERMILLE,
    LEVEL_KINDS,
    LIBRARIES,
    MAX_DEVICES,
    PEAK_DTYPES,
    Cluster,
    Device,
    Level,
)
from tap_planner.cluster.units import BANDWIDTH, MEMORY, PEAK, TIME
from tap_planner.errors import ClusterError

_SHORTHAND = re.compile(r"([0-9]+)x([0-9]+)(?::(.*))?")
_KEYS = (
    "name",
    "device",
    "nodes",
    "devices_per_node",
    "intra_node",
    "inter_node",
    "levels",
    "node_groups",
    "reserved_memory",
    "library",
    "calibration",
)
_KINDS = (*LEVEL_KINDS, "nvswitch")
_MAX_PER_NODE = 1024
_DEFAULT_INTRA_LATENCY_NS = 3_000
_DEFAULT_INTER_LATENCY_NS = 8_000
_NO_NETWORK_BYTES_PER_S = 1
"""Stands for the network of a single node without a known NIC; nothing is ever sent over it."""


def load_cluster(source: str | Path) -> Cluster:
    """Read a cluster.

    Args:
        source: path of a cluster.yaml, or ``NODESxDEVICES:DEVICE`` as ``4x8:h100-sxm5-80gb``.

    Raises:
        ClusterError: if it cannot be read or understood; the message names file, line, key path, the value found and
            what is wanted.
    """
    shorthand = _SHORTHAND.fullmatch(source) if isinstance(source, str) else None
    if shorthand is not None:
        return _from_shorthand(str(source), shorthand)
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ClusterError(
            f"{source}: the cluster file cannot be read: {reason}",
            hint="Give a cluster.yaml, or NODESxDEVICES:DEVICE as 4x8:h100-sxm5-80gb.",
        ) from error
    return parse_cluster(text, file=str(source))


def parse_cluster(text: str, *, file: str) -> Cluster:
    """Read the text of a cluster.yaml.

    Args:
        text: the YAML text.
        file: how errors call the file.

    Raises:
        ClusterError: as ``load_cluster``.
    """
    document = read_document(text, file)
    keys = document.mapping(_KEYS)
    if "calibration" in keys:
        keys["calibration"].fail("calibration files are not supported yet, expected no such key")
    described = _described(document, keys)
    levels = described.levels
    num_devices = 1
    for level in levels:
        num_devices *= level.size
    if num_devices > MAX_DEVICES:
        document.fail(f"the cluster has {num_devices} devices, expected at most {MAX_DEVICES}")
    name = keys["name"].text() if "name" in keys else _default_name(levels, described.device.name)
    library = keys["library"].text(LIBRARIES) if "library" in keys else _default_library(described)
    return Cluster(
        name=name,
        library=library,
        device=described.device,
        levels=levels,
        reserved_memory_bytes=_reserved(keys, described.device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """What a document says of devices and links."""

    device: Device
    entry: CatalogueEntry | None
    levels: tuple[Level, ...]


def _from_shorthand(source: str, match: re.Match[str]) -> Cluster:
    nodes, per_node, name = match.groups()
    if not name:
        raise ClusterError(
            f"{source!r} names no device", hint=f"Write {nodes}x{per_node}:DEVICE, as 4x8:h100-sxm5-80gb."
        )
    in_range = len(nodes) <= 7 and len(per_node) <= 4 and 1 <= int(per_node) <= _MAX_PER_NODE and int(nodes) >= 1
    if not in_range or int(nodes) * int(per_node) > MAX_DEVICES:
        raise ClusterError(
            f"{source!r}: expected at least one node, 1 to {_MAX_PER_NODE} devices per node "
            f"and at most {MAX_DEVICES} devices"
        )
    entry = catalogue_entry(name)
    levels = (
        _intra_level(None, int(per_node), entry, source),
        _inter_level(None, int(nodes), int(per_node), entry, source),
    )
    return Cluster(name=_default_name(levels, name), library=entry.library, device=entry.device, levels=levels)


def _described(document: Entry, keys: Mapping[str, Entry]) -> _Described:
    if "node_groups" in keys:
        return _from_groups(document, keys)
    device, entry = _device(_required(document, keys, "device"))
    if "levels" in keys:
        return _Described(device=device, entry=entry, levels=_levels(document, keys))
    nodes = _required(document, keys, "nodes").count(MAX_DEVICES)
    per_node = _required(document, keys, "devices_per_node").count(_MAX_PER_NODE)
    intra = _intra_level(keys.get("intra_node"), per_node, entry, document.file)
    inter = _inter_level(keys.get("inter_node"), nodes, per_node, entry, document.file)
    return _Described(device=device, entry=entry, levels=(intra, inter))


def _required(document: Entry, keys: Mapping[str, Entry], key: str) -> Entry:
    if key not in keys:
        document.fail(f"the key {key!r} is missing", "device, nodes and devices_per_node are required.")
    return keys[key]


def _default_name(levels: tuple[Level, ...], device: str) -> str:
    return "x".join(str(level.size) for level in reversed(levels)) + f"-{device}"


def _default_library(described: _Described) -> str:
    if described.entry is not None:
        return described.entry.library
    return "gloo" if described.device.name.lower().startswith("cpu") else "nccl"


def _reserved(keys: Mapping[str, Entry], device: Device) -> int:
    if "reserved_memory" not in keys:
        return 0
    reserved = keys["reserved_memory"].quantity(MEMORY)
    if reserved >= device.memory_bytes:
        keys["reserved_memory"].fail(f"{reserved} bytes found, expected less than the device's {device.memory_bytes}")
    return reserved


def _device(entry: Entry) -> tuple[Device, CatalogueEntry | None]:
    """A catalogue name, or a mapping that describes the device."""
    if entry.is_text:
        try:
            found = catalogue_entry(entry.text())
        except ClusterError as error:
            raise ClusterError(f"{entry.place}: {entry.path}: {error.message}", hint=error.hint) from error
        return found.device, found
    keys = entry.mapping(
        (
            "name",
            "memory",
            "memory_bandwidth",
            "peak_flops",
            "launch",
            "matrix_efficiency",
            "memory_efficiency",
            "source",
        )
    )
    device = Device(
        name=_required(entry, keys, "name").text(),
        memory_bytes=_required(entry, keys, "memory").quantity(MEMORY),
        memory_bandwidth_bytes_per_s=_required(entry, keys, "memory_bandwidth").quantity(BANDWIDTH),
        peak_flops=_peaks(_required(entry, keys, "peak_flops")),
        launch_ns=keys["launch"].quantity(TIME) if "launch" in keys else DEFAULT_LAUNCH_NS,
        matrix_efficiency_permille=_efficiency(keys, "matrix_efficiency", DEFAULT_MATRIX_EFFICIENCY_PERMILLE),
        memory_efficiency_permille=_efficiency(keys, "memory_efficiency", DEFAULT_MEMORY_EFFICIENCY_PERMILLE),
        source=keys["source"].text() if "source" in keys else "",
    )
    return device, None


def _peaks(entry: Entry) -> dict[str, int]:
    keys = entry.mapping(PEAK_DTYPES)
    if not keys:
        entry.fail("no peak is given, expected at least one, as float32: 19.5 TFLOP/s")
    return {dtype: keys[dtype].quantity(PEAK) for dtype in PEAK_DTYPES if dtype in keys}


def _efficiency(keys: Mapping[str, Entry], key: str, default: int) -> int:
    return keys[key].permille(1, 1000) if key in keys else default


def _intra_level(entry: Entry | None, size: int, known: CatalogueEntry | None, file: str) -> Level:
    """Level 0, from the key ``intra_node`` and the catalogue."""
    keys = entry.mapping(("kind", "bandwidth", "latency")) if entry is not None else {}
    if known is None and "bandwidth" not in keys:
        raise ClusterError(
            f"{entry.place if entry else file}: intra_node.bandwidth: missing, and the device is not in the catalogue",
            hint="Add intra_node: {kind: switch, bandwidth: 300 GB/s, latency: 3 us}.",
        )
    return Level(
        name="node",
        size=size,
        kind=_kind(keys["kind"]) if "kind" in keys else known.intra_kind if known else "switch",
        bandwidth_bytes_per_s=(
            keys["bandwidth"].quantity(BANDWIDTH)
            if "bandwidth" in keys or known is None
            else known.intra_bandwidth_bytes_per_s
        ),
        latency_ns=keys["latency"].quantity(TIME)
        if "latency" in keys
        else known.intra_latency_ns
        if known
        else _DEFAULT_INTRA_LATENCY_NS,
    )


def _inter_level(entry: Entry | None, size: int, per_node: int, known: CatalogueEntry | None, file: str) -> Level:
    """The network between nodes, from the key ``inter_node`` and the catalogue."""
    keys = entry.mapping(("bandwidth", "latency", "nics_per_node", "kind", "oversubscription")) if entry else {}
    default = known.nic_bandwidth_bytes_per_s if known else None
    bandwidth = keys["bandwidth"].quantity(BANDWIDTH) if "bandwidth" in keys else default
    if bandwidth is None:
        if size > 1:
            raise ClusterError(
                f"{entry.place if entry else file}: inter_node.bandwidth: missing, and the catalogue has no usual NIC",
                hint="Add inter_node: {bandwidth: 400 Gbit/s, nics_per_node: 8, latency: 8 us}.",
            )
        bandwidth = _NO_NETWORK_BYTES_PER_S
    nics = known.nics_per_node(per_node) if known else per_node
    return Level(
        name="network",
        size=size,
        kind=_kind(keys["kind"]) if "kind" in keys else "switch",
        bandwidth_bytes_per_s=bandwidth,
        latency_ns=(
            keys["latency"].quantity(TIME)
            if "latency" in keys
            else (known.nic_latency_ns if known else _DEFAULT_INTER_LATENCY_NS)
        ),
        nics=keys["nics_per_node"].count(_MAX_PER_NODE) if "nics_per_node" in keys else nics,
        oversubscription_permille=(
            keys["oversubscription"].permille(1000, 1_000_000) if "oversubscription" in keys else 1000
        ),
    )


def _kind(entry: Entry) -> str:
    kind = entry.text(_KINDS)
    return "switch" if kind == "nvswitch" else kind


def _levels(document: Entry, keys: Mapping[str, Entry]) -> tuple[Level, ...]:
    """The levels as listed; ``nodes`` and ``devices_per_node`` may be left out, but must agree."""
    for other in ("intra_node", "inter_node"):
        if other in keys:
            keys[other].fail("given together with 'levels', expected one or the other")
    levels = tuple(_level(entry, index) for index, entry in enumerate(keys["levels"].sequence()))
    names = [level.name for level in levels]
    if len(set(names)) != len(names):
        keys["levels"].fail(f"the level names {', '.join(names)} are not unique")
    nodes = 1
    for level in levels[1:]:
        nodes *= level.size
    for key, size in (("nodes", nodes), ("devices_per_node", levels[0].size)):
        if key in keys and keys[key].count(MAX_DEVICES) != size:
            keys[key].fail(f"{keys[key].text()} found, but the levels have {size}")
    return levels


def _level(entry: Entry, index: int) -> Level:
    keys = entry.mapping(("name", "size", "kind", "bandwidth", "latency", "nics", "oversubscription"))
    if index == 0 and "nics" in keys:
        keys["nics"].fail("level 0 joins devices, which have one link each; expected no such key")
    return Level(
        name=keys["name"].text() if "name" in keys else ("node" if index == 0 else f"level{index}"),
        size=_required(entry, keys, "size").count(MAX_DEVICES),
        kind=_kind(keys["kind"]) if "kind" in keys else "switch",
        bandwidth_bytes_per_s=_required(entry, keys, "bandwidth").quantity(BANDWIDTH),
        latency_ns=_required(entry, keys, "latency").quantity(TIME),
        nics=keys["nics"].count(_MAX_PER_NODE) if "nics" in keys else 1,
        oversubscription_permille=(
            keys["oversubscription"].permille(1000, 1_000_000) if "oversubscription" in keys else 1000
        ),
    )


def _from_groups(document: Entry, keys: Mapping[str, Entry]) -> _Described:
    """Node groups that are all alike are one cluster; unlike ones are refused."""
    for other in ("device", "nodes", "devices_per_node", "intra_node", "levels"):
        if other in keys:
            keys[other].fail("given together with 'node_groups', whose entries hold it")
    nodes = 0
    first: tuple[Device, CatalogueEntry | None, Level] | None = None
    for group in keys["node_groups"].sequence():
        group_keys = group.mapping(("name", "nodes", "devices_per_node", "device", "intra_node"))
        device, entry = _device(_required(group, group_keys, "device"))
        per_node = _required(group, group_keys, "devices_per_node").count(_MAX_PER_NODE)
        intra = _intra_level(group_keys.get("intra_node"), per_node, entry, document.file)
        nodes += _required(group, group_keys, "nodes").count(MAX_DEVICES)
        if first is None:
            first = (device, entry, intra)
        elif (device, intra) != (first[0], first[2]):
            group.fail("differs from the first group; unlike nodes are not supported yet, expected equal groups")
    assert first is not None, "a list has at least one entry"
    inter = _inter_level(keys.get("inter_node"), nodes, first[2].size, first[1], document.file)
    return _Described(device=first[0], entry=first[1], levels=(first[2], inter))
