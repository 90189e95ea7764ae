"""Nodes that are not alike: the key ``node_groups`` of a cluster.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tap_planner.cluster.catalogue import CatalogueEntry
from tap_planner.cluster.document import Entry
from tap_planner.cluster.parts import (
    INTER_KEYS,
    MAX_PER_NODE,
    inter_level,
    intra_level,
    nics_per_node,
    read_device,
    required,
    usual_library,
)
from tap_planner.cluster.reserves import is_catalogued
from tap_planner.cluster.types import MAX_DEVICES, Device, Level, NodeGroup, slowest_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Node groups as the rest of a cluster sees them."""

    device: Device
    """The device, or the pace of equal parts where they are unlike."""
    library: str
    """The usual one; empty where the kinds have no common one."""
    levels: tuple[Level, ...]
    unlike: tuple[NodeGroup, ...]
    """The groups in order; empty where all nodes are alike."""
    catalogued: bool
    """Whether all devices have the memory of the catalogue."""


def read_groups(document: Entry, keys: Mapping[str, Entry]) -> Groups:
    """Read ``node_groups``: groups that are all alike are one cluster of equal nodes."""
    for other in ("device", "nodes", "devices_per_node", "intra_node", "levels"):
        if other in keys:
            keys[other].fail("given together with 'node_groups', whose entries hold it")
    read = [_group(entry, index, keys, document.file) for index, entry in enumerate(keys["node_groups"].sequence())]
    groups = _merged([group for group, _ in read], keys["node_groups"])
    nodes = sum(group.nodes for group in groups)
    network = [
        inter_level(keys.get("inter_node"), nodes, group.devices_per_node, known, document.file)
        for group, known in read
    ]
    libraries = {usual_library(group.device, known) for group, known in read}
    library = libraries.pop() if len(libraries) == 1 else ""
    catalogued = all(is_catalogued(group.device, known) for group, known in read)
    if len(groups) == 1:
        levels = (groups[0].intra_node, network[0])
        return Groups(device=groups[0].device, library=library, levels=levels, unlike=(), catalogued=catalogued)
    return Groups(
        device=slowest_device([group.device for group in groups]),
        library=library,
        levels=(_node_summary(groups), _slowest_link(network)),
        unlike=groups,
        catalogued=catalogued,
    )


def _group(entry: Entry, index: int, keys: Mapping[str, Entry], file: str) -> tuple[NodeGroup, CatalogueEntry | None]:
    group = entry.mapping(("name", "nodes", "devices_per_node", "device", "intra_node"))
    device, known = read_device(required(entry, group, "device"))
    per_node = required(entry, group, "devices_per_node").count(MAX_PER_NODE)
    inter = keys["inter_node"].mapping(INTER_KEYS) if "inter_node" in keys else {}
    return NodeGroup(
        name=group["name"].text() if "name" in group else f"group{index}",
        nodes=required(entry, group, "nodes").count(MAX_DEVICES),
        devices_per_node=per_node,
        device=device,
        intra_node=intra_level(group.get("intra_node"), per_node, known, file),
        nics_per_node=nics_per_node(inter, per_node, known),
    ), known


def _merged(groups: list[NodeGroup], entry: Entry) -> tuple[NodeGroup, ...]:
    """Neighbours that differ in name and number of nodes only are one group; names must be unique."""
    names = [group.name for group in groups]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        entry.fail(f"the group name {doubled!r} occurs twice, expected unique names")
    merged: list[NodeGroup] = []
    for group in groups:
        if merged and replace(group, name=merged[-1].name, nodes=merged[-1].nodes) == merged[-1]:
            merged[-1] = replace(
                merged[-1], name=f"{merged[-1].name}+{group.name}", nodes=merged[-1].nodes + group.nodes
            )
        else:
            merged.append(group)
    return tuple(merged)


def _node_summary(groups: tuple[NodeGroup, ...]) -> Level:
    """Level 0 of unlike nodes in one line: the most devices, the slowest links."""
    return replace(
        _slowest_link([group.intra_node for group in groups]),
        size=max(group.devices_per_node for group in groups),
    )


def _slowest_link(levels: Sequence[Level]) -> Level:
    """The least of each figure."""
    slowest = min(levels, key=lambda level: level.bandwidth_bytes_per_s)
    return replace(
        slowest,
        latency_ns=max(level.latency_ns for level in levels),
        nics=min(level.nics for level in levels),
    )
