"""cluster.yaml, or the ``NxM:device`` shorthand, to a Cluster."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tap_planner.cluster.calibration import calibrated
from tap_planner.cluster.calibration_files import load_calibration
from tap_planner.cluster.catalogue import catalogue_entry
from tap_planner.cluster.document import Entry, read_document
from tap_planner.cluster.node_groups import read_groups
from tap_planner.cluster.paces import USUAL_COLLECTIVE_LAUNCH_NS, with_usual_paces
from tap_planner.cluster.parts import (
    MAX_PER_NODE,
    inter_level,
    intra_level,
    read_device,
    read_levels,
    required,
    usual_library,
)
from tap_planner.cluster.reserves import USUAL_COLLECTIVE_BUFFERS_BYTES, is_catalogued, usual_reserve
from tap_planner.cluster.types import LIBRARIES, MAX_DEVICES, Cluster, Device, Level, NodeGroup
from tap_planner.cluster.units import MEMORY, TIME
from tap_planner.errors import ClusterError
from tap_planner.files import read_text

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
    "collective_buffers",
    "collective_launch",
    "calibration",
)


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
    hint = "Give a cluster.yaml, or NODESxDEVICES:DEVICE as 4x8:h100-sxm5-80gb."
    text = read_text(source, "the cluster file", ClusterError, hint)
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
    described = _described(document, keys)
    if described.num_devices > MAX_DEVICES:
        document.fail(f"the cluster has {described.num_devices} devices, expected at most {MAX_DEVICES}")
    name = keys["name"].text() if "name" in keys else _name_of(described)
    library = keys["library"].text(LIBRARIES) if "library" in keys else described.library
    if not library:
        document.fail("no library serves all these devices by default", f"Add library: {' or '.join(LIBRARIES)}.")
    launch_ns = keys["collective_launch"].quantity(TIME) if "collective_launch" in keys else None
    cluster = with_usual_paces(
        Cluster(
            name=name,
            library=library,
            device=described.device,
            levels=described.levels,
            reserved_memory_bytes=_reserved(keys, described, library),
            collective_buffers_bytes=_buffers(keys, described, library),
            collective_launch_ns=USUAL_COLLECTIVE_LAUNCH_NS[library] if launch_ns is None else launch_ns,
            node_groups=described.groups,
        )
    )
    return _measured(cluster, keys["calibration"]) if "calibration" in keys else cluster


def _measured(cluster: Cluster, entry: Entry) -> Cluster:
    """At the figures of a calibration file, whose path is relative to the cluster file."""
    calibration = load_calibration(Path(entry.file).parent / entry.text())
    return calibrated(cluster, calibration, f"{entry.place}: {entry.path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """What a document says of devices and links."""

    device: Device
    library: str
    """The usual one; empty where the kinds of device have no common one."""
    levels: tuple[Level, ...]
    catalogued: bool
    """Whether all devices have the memory of the catalogue."""
    groups: tuple[NodeGroup, ...] = ()
    """Where nodes are unlike."""

    @property
    def num_devices(self) -> int:
        """Of all nodes."""
        if self.groups:
            return sum(group.num_devices for group in self.groups)
        return math.prod(level.size for level in self.levels)


def _from_shorthand(source: str, match: re.Match[str]) -> Cluster:
    nodes, per_node, name = match.groups()
    if not name:
        raise ClusterError(
            f"{source!r} names no device", hint=f"Write {nodes}x{per_node}:DEVICE, as 4x8:h100-sxm5-80gb."
        )
    in_range = len(nodes) <= 7 and len(per_node) <= 4 and 1 <= int(per_node) <= MAX_PER_NODE and int(nodes) >= 1
    if not in_range or int(nodes) * int(per_node) > MAX_DEVICES:
        raise ClusterError(
            f"{source!r}: expected at least one node, 1 to {MAX_PER_NODE} devices per node "
            f"and at most {MAX_DEVICES} devices"
        )
    entry = catalogue_entry(name)
    levels = (
        intra_level(None, int(per_node), entry, source),
        inter_level(None, int(nodes), int(per_node), entry, source),
    )
    return with_usual_paces(
        Cluster(
            name=_default_name(levels, name),
            library=entry.library,
            device=entry.device,
            levels=levels,
            reserved_memory_bytes=usual_reserve(entry.library, entry.device.memory_bytes),
            collective_buffers_bytes=USUAL_COLLECTIVE_BUFFERS_BYTES[entry.library],
            collective_launch_ns=USUAL_COLLECTIVE_LAUNCH_NS[entry.library],
        )
    )


def _described(document: Entry, keys: Mapping[str, Entry]) -> _Described:
    if "node_groups" in keys:
        groups = read_groups(document, keys)
        return _Described(
            device=groups.device,
            library=groups.library,
            levels=groups.levels,
            catalogued=groups.catalogued,
            groups=groups.unlike,
        )
    device, entry = read_device(required(document, keys, "device"))
    library, catalogued = usual_library(device, entry), is_catalogued(device, entry)
    if "levels" in keys:
        return _Described(device=device, library=library, levels=read_levels(document, keys), catalogued=catalogued)
    nodes = required(document, keys, "nodes").count(MAX_DEVICES)
    per_node = required(document, keys, "devices_per_node").count(MAX_PER_NODE)
    intra = intra_level(keys.get("intra_node"), per_node, entry, document.file)
    inter = inter_level(keys.get("inter_node"), nodes, per_node, entry, document.file)
    return _Described(device=device, library=library, levels=(intra, inter), catalogued=catalogued)


def _default_name(levels: tuple[Level, ...], device: str) -> str:
    return "x".join(str(level.size) for level in reversed(levels)) + f"-{device}"


def _name_of(described: _Described) -> str:
    groups = described.groups
    if not groups:
        return _default_name(described.levels, described.device.name)
    return "+".join(f"{group.nodes}x{group.devices_per_node}-{group.device.name}" for group in groups)


def _reserved(keys: Mapping[str, Entry], described: _Described, library: str) -> int:
    """What is said; else the usual reserve of devices of the catalogue (of the smallest, where they are unlike)."""
    memory = described.device.memory_bytes
    if "reserved_memory" not in keys:
        return usual_reserve(library, memory) if described.catalogued else 0
    reserved = keys["reserved_memory"].quantity(MEMORY, zero=True)
    if reserved >= memory:
        keys["reserved_memory"].fail(f"{reserved} bytes found, expected less than the device's {memory}")
    return reserved


def _buffers(keys: Mapping[str, Entry], described: _Described, library: str) -> int:
    """What is said of one communicator; else what is usual for the library, on devices of the catalogue."""
    if "collective_buffers" in keys:
        return keys["collective_buffers"].quantity(MEMORY, zero=True)
    return USUAL_COLLECTIVE_BUFFERS_BYTES[library] if described.catalogued else 0
