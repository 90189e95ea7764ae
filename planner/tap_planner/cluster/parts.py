"""Checked entries of a cluster.yaml -> devices and levels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tap_planner.cluster.catalogue import CatalogueEntry, catalogue_entry
from tap_planner.cluster.document import Entry
from tap_planner.cluster.types import (
    ALGORITHMS,
    LEVEL_KINDS,
    MAX_DEVICES,
    MAX_PADDING,
    PEAK_DTYPES,
    TRANSPORTS,
    Device,
    Level,
    Pace,
)
from tap_planner.cluster.units import BANDWIDTH, MEMORY, PEAK, TIME
from tap_planner.errors import ClusterError

INTER_KEYS = ("bandwidth", "latency", "nics_per_node", "kind", "oversubscription", "transport", "paces")
"""Keys of ``inter_node``."""
_NODE_KEYS = ("reduces", "host_bandwidth", "group_bandwidths", "exchange_bandwidths")
_LEVEL_KEYS = ("name", "size", "kind", "bandwidth", "latency", "nics", "oversubscription", "transport", "paces")
_DEVICE_KEYS = (
    *("like", "name", "memory", "memory_bandwidth", "peak_flops", "launch", "backward_launch"),
    *("matrix_efficiency", "attention_efficiency", "memory_efficiency", "matrix_padding", "source"),
)
MAX_PER_NODE = 1024
_KINDS = (*LEVEL_KINDS, "nvswitch")
_DEFAULT_INTRA_LATENCY_NS = 3_000
_DEFAULT_INTER_LATENCY_NS = 8_000
_NO_NETWORK_BYTES_PER_S = 1
"""Stands for the network of a single node without a known NIC; nothing is ever sent over it."""


def required(document: Entry, keys: Mapping[str, Entry], key: str) -> Entry:
    """The entry under a key that must be there."""
    if key not in keys:
        document.fail(f"the key {key!r} is missing", "device, nodes and devices_per_node are required.")
    return keys[key]


def usual_library(device: Device, known: CatalogueEntry | None) -> str:
    """The communication library that is usual for a device."""
    if known is not None:
        return known.library
    return "gloo" if device.name.lower().startswith("cpu") else "nccl"


def read_device(entry: Entry) -> tuple[Device, CatalogueEntry | None]:
    """A catalogue name, or a mapping that describes the device."""
    if entry.is_text:
        try:
            found = catalogue_entry(entry.text())
        except ClusterError as error:
            raise ClusterError(f"{entry.place}: {entry.path}: {error.message}", hint=error.hint) from error
        return found.device, found
    keys = entry.mapping(_DEVICE_KEYS)
    if "like" in keys:
        device, known = read_device(keys["like"])
        return replace(device, **_given(entry, keys, device)), known
    for key in ("name", "memory", "memory_bandwidth", "peak_flops"):
        required(entry, keys, key)
    return Device(**_given(entry, keys, None)), None


def _given(entry: Entry, keys: Mapping[str, Entry], like: Device | None) -> dict[str, Any]:
    """The fields of a device that a mapping gives.

    Args:
        entry: the mapping.
        keys: its keys.
        like: the device that it describes otherwise.
    """
    found: dict[str, Any] = {}
    if "name" in keys:
        found["name"] = keys["name"].text()
    if "memory" in keys:
        found["memory_bytes"] = keys["memory"].quantity(MEMORY)
    if "memory_bandwidth" in keys:
        found["memory_bandwidth_bytes_per_s"] = keys["memory_bandwidth"].quantity(BANDWIDTH)
    if "peak_flops" in keys:
        found["peak_flops"] = {**({} if like is None else like.peak_flops), **_peaks(keys["peak_flops"])}
    for key in ("launch", "backward_launch"):
        if key in keys:
            found[f"{key}_ns"] = keys[key].quantity(TIME)
    for key in ("attention_efficiency", "memory_efficiency"):
        if key in keys:
            found[f"{key}_permille"] = keys[key].permille(1, 1000)
    if "matrix_efficiency" in keys:
        found |= _shares(keys["matrix_efficiency"], {} if like is None else like.own_efficiency_permille)
        if like is not None and like.attention_efficiency_permille is not None:
            found = {"attention_efficiency_permille": _attention_share(like, found), **found}
    if "matrix_padding" in keys:
        found["matrix_padding"] = keys["matrix_padding"].count(MAX_PADDING)
    if "source" in keys:
        found["source"] = keys["source"].text()
    return found


def _shares(entry: Entry, before: Mapping[str, int]) -> dict[str, Any]:
    """Shares of the peak: one of all element types, or some by element type, and that of all others as ``all``."""
    if entry.is_text:
        return {"matrix_efficiency_permille": entry.permille(1, 1000), "own_efficiency_permille": {}}
    keys = entry.mapping(("all", *PEAK_DTYPES))
    own = {dtype: keys[dtype].permille(1, 1000) for dtype in PEAK_DTYPES if dtype in keys}
    if "all" not in keys:
        return {"own_efficiency_permille": {**before, **own}}
    return {"matrix_efficiency_permille": keys["all"].permille(1, 1000), "own_efficiency_permille": own}


def _attention_share(like: Device, found: Mapping[str, Any]) -> int:
    """What fused attention reaches where a file says only what products do: as large a part of that as on the device
    that it is like."""
    share, before = like.attention_efficiency_permille, like.matrix_efficiency_permille
    assert share is not None
    return max(share * found.get("matrix_efficiency_permille", before) // before, 1)


def _peaks(entry: Entry) -> dict[str, int]:
    keys = entry.mapping(PEAK_DTYPES)
    if not keys:
        entry.fail("no peak is given, expected at least one, as float32: 19.5 TFLOP/s")
    return {dtype: keys[dtype].quantity(PEAK) for dtype in PEAK_DTYPES if dtype in keys}


def intra_level(entry: Entry | None, size: int, known: CatalogueEntry | None, file: str) -> Level:
    """Level 0, from the key ``intra_node`` and the catalogue."""
    keys = entry.mapping(("kind", "bandwidth", "latency", *_NODE_KEYS, "paces")) if entry is not None else {}
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
        **_node_links(keys, known),
    )


def _node_links(keys: Mapping[str, Entry], known: CatalogueEntry | None) -> dict[str, Any]:
    """What only links inside a node have; the catalogue's, unless another kind or bandwidth is given."""
    found: dict[str, Any] = {}
    if known is not None and "kind" not in keys and "bandwidth" not in keys:
        found["group_bandwidths"] = known.intra_group_bandwidths
        found["exchange_bandwidths"] = known.intra_exchange_bandwidths
    if known is not None and "kind" not in keys:
        found["reduces"] = known.intra_reduces
    for key in ("group_bandwidths", "exchange_bandwidths"):
        if key in keys:
            found[key] = _by_size(keys[key])
    if "reduces" in keys:
        found["reduces"] = keys["reduces"].text(("true", "false")) == "true"
    if "host_bandwidth" in keys:
        found["host_bandwidth_bytes_per_s"] = keys["host_bandwidth"].quantity(BANDWIDTH)
    return {**found, **_own_paces(keys)}


def _by_size(entry: Entry) -> tuple[tuple[int, int], ...]:
    """Bandwidths by group size."""
    found: dict[int, int] = {}
    for text, (at_key, value) in entry.entries("a mapping from group size to bandwidth, as {2: 25 GB/s}").items():
        if not text.isdecimal() or not 2 <= int(text) <= MAX_PER_NODE:
            at_key.fail(f"{text!r} found, expected a group size from 2 to {MAX_PER_NODE}")
        found[int(text)] = value.quantity(BANDWIDTH)
    return tuple(sorted(found.items()))


def _own_paces(keys: Mapping[str, Entry]) -> dict[str, Any]:
    """The key ``paces`` of a link."""
    if "paces" not in keys:
        return {}
    found: dict[str, Pace] = {}
    for name, entry in keys["paces"].mapping(ALGORITHMS).items():
        given = entry.mapping(("efficiency", "latency"))
        found[name] = Pace(
            efficiency_permille=given["efficiency"].permille(1, 1000) if "efficiency" in given else 1000,
            latency_ns=given["latency"].quantity(TIME) if "latency" in given else 0,
        )
    return {"paces": tuple(sorted(found.items()))}


def inter_level(entry: Entry | None, size: int, per_node: int, known: CatalogueEntry | None, file: str) -> Level:
    """The network between nodes, from the key ``inter_node`` and the catalogue."""
    keys = entry.mapping(INTER_KEYS) if entry else {}
    default = known.nic_bandwidth_bytes_per_s if known else None
    bandwidth = keys["bandwidth"].quantity(BANDWIDTH) if "bandwidth" in keys else default
    if bandwidth is None:
        if size > 1:
            raise ClusterError(
                f"{entry.place if entry else file}: inter_node.bandwidth: missing, and the catalogue has no usual NIC",
                hint="Add inter_node: {bandwidth: 400 Gbit/s, nics_per_node: 8, latency: 8 us}.",
            )
        bandwidth = _NO_NETWORK_BYTES_PER_S
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
        nics=nics_per_node(keys, per_node, known),
        oversubscription_permille=(
            keys["oversubscription"].permille(1000, 1_000_000) if "oversubscription" in keys else 1000
        ),
        **_network_links(keys),
    )


def _network_links(keys: Mapping[str, Entry]) -> dict[str, Any]:
    """What only links between nodes have, and paces."""
    transport = {"transport": keys["transport"].text(TRANSPORTS)} if "transport" in keys else {}
    return {**transport, **_own_paces(keys)}


def nics_per_node(keys: Mapping[str, Entry], per_node: int, known: CatalogueEntry | None) -> int:
    """NICs of a node: as ``inter_node`` says, else as the device usually has them."""
    if "nics_per_node" in keys:
        return keys["nics_per_node"].count(MAX_PER_NODE)
    return known.nics_per_node(per_node) if known else per_node


def _kind(entry: Entry) -> str:
    kind = entry.text(_KINDS)
    return "switch" if kind == "nvswitch" else kind


def read_levels(document: Entry, keys: Mapping[str, Entry]) -> tuple[Level, ...]:
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
    keys = entry.mapping((*_LEVEL_KEYS, *_NODE_KEYS))
    if index == 0 and "nics" in keys:
        keys["nics"].fail("level 0 joins devices, which have one link each; expected no such key")
    for key in _NODE_KEYS if index > 0 else ("transport",):
        if key in keys:
            keys[key].fail(f"level 0 joins devices, this is level {index}; expected no such key")
    return Level(
        name=keys["name"].text() if "name" in keys else ("node" if index == 0 else f"level{index}"),
        size=required(entry, keys, "size").count(MAX_DEVICES),
        kind=_kind(keys["kind"]) if "kind" in keys else "switch",
        bandwidth_bytes_per_s=required(entry, keys, "bandwidth").quantity(BANDWIDTH),
        latency_ns=required(entry, keys, "latency").quantity(TIME),
        nics=keys["nics"].count(MAX_PER_NODE) if "nics" in keys else 1,
        oversubscription_permille=(
            keys["oversubscription"].permille(1000, 1_000_000) if "oversubscription" in keys else 1000
        ),
        **(_node_links(keys, None) if index == 0 else _network_links(keys)),
    )
