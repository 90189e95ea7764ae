"""The canonical JSON form of clusters: what plans hold under ``inputs.cluster``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tap_planner.cluster.types import (
    DEFAULT_LAUNCH_NS,
    DEFAULT_MATRIX_EFFICIENCY_PERMILLE,
    DEFAULT_MEMORY_EFFICIENCY_PERMILLE,
    LEVEL_KINDS,
    LIBRARIES,
    MAX_DEVICES,
    MAX_PADDING,
    PEAK_DTYPES,
    TRANSPORTS,
    Cluster,
    Device,
    Level,
    NodeGroup,
    Pace,
)
from tap_planner.errors import ClusterError

__all__ = ["cluster_from_json", "cluster_to_json", "paces_to_json"]


def cluster_to_json(cluster: Cluster) -> dict[str, object]:
    """The complete record, as a plan holds it under ``inputs.cluster``."""
    document: dict[str, object] = {
        "name": cluster.name,
        "library": cluster.library,
        "device": _device_to_json(cluster.device),
        "levels": [_level_to_json(level, index) for index, level in enumerate(cluster.levels)],
    }
    if cluster.reserved_memory_bytes:
        document["reserved_memory_bytes"] = cluster.reserved_memory_bytes
    if cluster.collective_buffers_bytes:
        document["collective_buffers_bytes"] = cluster.collective_buffers_bytes
    if cluster.collective_launch_ns:
        document["collective_launch_ns"] = cluster.collective_launch_ns
    if cluster.node_groups:
        document["node_groups"] = [_group_to_json(group) for group in cluster.node_groups]
    return document


def cluster_from_json(document: Mapping[str, object]) -> Cluster:
    """Read what ``cluster_to_json`` wrote; keys that are not known are ignored, as minor versions may add some.

    Raises:
        ClusterError: if a key is missing or a value is out of range; the message names the key.
    """
    record = _Record(document, "inputs.cluster")
    levels = record.records("levels")
    cluster = Cluster(
        name=record.text("name"),
        library=record.text("library", LIBRARIES),
        device=_device_from_json(record.record("device")),
        levels=tuple(_level_from_json(level) for level in levels),
        reserved_memory_bytes=record.integer("reserved_memory_bytes", default=0, least=0),
        collective_buffers_bytes=record.integer("collective_buffers_bytes", default=0, least=0),
        collective_launch_ns=record.integer("collective_launch_ns", default=0, least=0),
        node_groups=tuple(_group_from_json(group) for group in record.records("node_groups"))
        if "node_groups" in record.values
        else (),
    )
    if cluster.node_groups and len(levels) != 2:
        raise ClusterError(f"inputs.cluster.levels: {len(levels)} levels, expected node and network")
    if not levels or cluster.num_devices > MAX_DEVICES:
        raise ClusterError(f"inputs.cluster.levels: {cluster.num_devices} devices, expected 1 to {MAX_DEVICES}")
    if cluster.usable_memory_bytes <= 0:
        raise ClusterError("inputs.cluster.reserved_memory_bytes: nothing of the device's memory is left")
    return cluster


def _group_to_json(group: NodeGroup) -> dict[str, object]:
    return {
        "name": group.name,
        "nodes": group.nodes,
        "devices_per_node": group.devices_per_node,
        "nics_per_node": group.nics_per_node,
        "device": _device_to_json(group.device),
        "intra_node": _level_to_json(group.intra_node, 0),
    }


def _group_from_json(record: _Record) -> NodeGroup:
    return NodeGroup(
        name=record.text("name"),
        nodes=record.integer("nodes", most=MAX_DEVICES),
        devices_per_node=record.integer("devices_per_node", most=MAX_DEVICES),
        nics_per_node=record.integer("nics_per_node"),
        device=_device_from_json(record.record("device")),
        intra_node=_level_from_json(record.record("intra_node")),
    )


def _device_to_json(device: Device) -> dict[str, object]:
    document: dict[str, object] = {
        "name": device.name,
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
        "peak_flops": by_dtype_to_json(device.peak_flops),
        "launch_ns": device.launch_ns,
    }
    if device.backward_launch_ns is not None:
        document["backward_launch_ns"] = device.backward_launch_ns
    document |= {
        "matrix_efficiency_permille": device.matrix_efficiency_permille,
        "memory_efficiency_permille": device.memory_efficiency_permille,
    }
    if device.attention_efficiency_permille is not None:
        document["attention_efficiency_permille"] = device.attention_efficiency_permille
    if device.own_efficiency_permille:
        document["own_efficiency_permille"] = by_dtype_to_json(device.own_efficiency_permille)
    if device.matrix_padding != 1:
        document["matrix_padding"] = device.matrix_padding
    return {**document, "source": device.source}


def _level_to_json(level: Level, index: int) -> dict[str, object]:
    document: dict[str, object] = {"name": level.name, "size": level.size, "kind": level.kind}
    if index > 0:
        document["nics"] = level.nics
    document |= {"bandwidth_bytes_per_s": level.bandwidth_bytes_per_s, "latency_ns": level.latency_ns}
    if level.oversubscription_permille != 1000:
        document["oversubscription_permille"] = level.oversubscription_permille
    if level.transport:
        document["transport"] = level.transport
    if level.reduces:
        document["reduces"] = True
    if level.host_bandwidth_bytes_per_s is not None:
        document["host_bandwidth_bytes_per_s"] = level.host_bandwidth_bytes_per_s
    for key, table in (("group", level.group_bandwidths), ("exchange", level.exchange_bandwidths)):
        if table:
            document[f"{key}_bandwidths_bytes_per_s"] = {str(size): bandwidth for size, bandwidth in table}
    if level.paces:
        document["paces"] = paces_to_json(level.paces)
    return document


def by_dtype_to_json(figures: Mapping[str, int]) -> dict[str, int]:
    """Figures by element type, in the order in which plans and calibration files hold them."""
    return {dtype: figures[dtype] for dtype in PEAK_DTYPES if dtype in figures}


def paces_to_json(paces: Iterable[tuple[str, Pace]]) -> dict[str, object]:
    """Paces by algorithm, as plans and calibration files hold them."""
    return {
        name: {"efficiency_permille": pace.efficiency_permille, "latency_ns": pace.latency_ns} for name, pace in paces
    }


def _device_from_json(record: _Record) -> Device:
    peaks = record.record("peak_flops")
    own = record.record("own_efficiency_permille") if "own_efficiency_permille" in record.values else None
    return Device(
        name=record.text("name"),
        memory_bytes=record.integer("memory_bytes"),
        memory_bandwidth_bytes_per_s=record.integer("memory_bandwidth_bytes_per_s"),
        peak_flops={dtype: peaks.integer(dtype) for dtype in PEAK_DTYPES if dtype in peaks.values},
        launch_ns=record.integer("launch_ns", default=DEFAULT_LAUNCH_NS, least=0),
        backward_launch_ns=record.integer("backward_launch_ns", least=0)
        if "backward_launch_ns" in record.values
        else None,
        matrix_padding=record.integer("matrix_padding", default=1, most=MAX_PADDING),
        matrix_efficiency_permille=record.integer(
            "matrix_efficiency_permille", default=DEFAULT_MATRIX_EFFICIENCY_PERMILLE, most=1000
        ),
        own_efficiency_permille={}
        if own is None
        else {dtype: own.integer(dtype, most=1000) for dtype in PEAK_DTYPES if dtype in own.values},
        attention_efficiency_permille=record.integer("attention_efficiency_permille", most=1000)
        if "attention_efficiency_permille" in record.values
        else None,
        memory_efficiency_permille=record.integer(
            "memory_efficiency_permille", default=DEFAULT_MEMORY_EFFICIENCY_PERMILLE, most=1000
        ),
        source=record.text("source") if "source" in record.values else "",
    )


def _level_from_json(record: _Record) -> Level:
    return Level(
        name=record.text("name"),
        size=record.integer("size"),
        kind=record.text("kind", LEVEL_KINDS),
        bandwidth_bytes_per_s=record.integer("bandwidth_bytes_per_s"),
        latency_ns=record.integer("latency_ns", least=0),
        nics=record.integer("nics", default=1),
        oversubscription_permille=record.integer("oversubscription_permille", default=1000, least=1000),
        transport=record.text("transport", TRANSPORTS) if "transport" in record.values else "",
        reduces=record.values.get("reduces") is True,
        host_bandwidth_bytes_per_s=record.integer("host_bandwidth_bytes_per_s")
        if "host_bandwidth_bytes_per_s" in record.values
        else None,
        group_bandwidths=record.table("group_bandwidths_bytes_per_s"),
        exchange_bandwidths=record.table("exchange_bandwidths_bytes_per_s"),
        paces=_paces_from_json(record.record("paces")) if "paces" in record.values else (),
    )


def _paces_from_json(record: _Record) -> tuple[tuple[str, Pace], ...]:
    found = {name: record.record(name) for name in record.values if isinstance(name, str)}
    return tuple(
        (
            name,
            Pace(
                efficiency_permille=found[name].integer("efficiency_permille", default=1000, most=1000),
                latency_ns=found[name].integer("latency_ns", default=0, least=0),
            ),
        )
        for name in sorted(found)
    )


class _Record:
    """A JSON object whose values are checked as they are read."""

    def __init__(self, values: object, path: str) -> None:
        if not isinstance(values, Mapping):
            raise ClusterError(f"{path}: {values!r}, expected an object")
        self.values: Mapping[object, object] = values
        self.path = path

    def _get(self, key: str) -> object:
        if key not in self.values:
            raise ClusterError(f"{self.path}: the key {key!r} is missing")
        return self.values[key]

    def text(self, key: str, allowed: tuple[str, ...] = ()) -> str:
        value = self._get(key)
        if not isinstance(value, str) or (allowed and value not in allowed):
            wanted = " or ".join(allowed) if allowed else "a string"
            raise ClusterError(f"{self.path}.{key}: {value!r}, expected {wanted}")
        return value

    def integer(self, key: str, *, default: int | None = None, least: int = 1, most: int = 10**18) -> int:
        if default is not None and key not in self.values:
            return default
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ClusterError(f"{self.path}.{key}: {value!r}, expected an integer from {least} to {most}")
        return value

    def record(self, key: str) -> _Record:
        return _Record(self._get(key), f"{self.path}.{key}")

    def records(self, key: str) -> tuple[_Record, ...]:
        value = self._get(key)
        if not isinstance(value, list | tuple):
            raise ClusterError(f"{self.path}.{key}: {value!r}, expected a list")
        return tuple(_Record(item, f"{self.path}.{key}[{index}]") for index, item in enumerate(value))

    def table(self, key: str) -> tuple[tuple[int, int], ...]:
        """Values by whole numbers, ascending; none where the key is missing."""
        if key not in self.values:
            return ()
        record = self.record(key)
        sizes = {int(name): name for name in record.values if isinstance(name, str) and name.isdecimal()}
        return tuple((size, record.integer(sizes[size])) for size in sorted(sizes))
