"""The devices of a cluster one by one, and the links between them as pipelines' sends are priced."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tap_planner.cluster import Cluster, Device, Mesh
from tap_planner.cost import CollectiveModel
from tap_planner.device_placement.problem import Links
from tap_planner.simulate import Channels, kinds_of

__all__ = ["DevicePlace", "device_places", "links_of"]

_MANY_BYTES = 1 << 52
"""So large that latency and rounding say nothing beside it."""
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlace:
    """One device and where it is."""

    name: str
    """``fast, node 0, device 3``: node group (if there are several), node in the whole cluster, device in the node."""
    place: tuple[int, ...]
    """As ``Cluster.places`` says: index per level, outermost first."""
    node_group: int
    """0 where all nodes are alike."""
    device: Device


def device_places(cluster: Cluster) -> tuple[DevicePlace, ...]:
    """By rank."""
    kinds = kinds_of(cluster, range(cluster.num_devices))
    words = [level.name for level in cluster.levels[:0:-1]]
    found: list[DevicePlace] = []
    for place, kind in zip(cluster.places(), kinds, strict=True):
        parts = [cluster.node_groups[kind].name] if cluster.node_groups else []
        outer = [f"{word} {index}" for word, index in zip(_child_words(words), place[:-1], strict=True)]
        found.append(
            DevicePlace(
                name=", ".join([*parts, *outer, f"device {place[-1]}"]),
                place=place,
                node_group=kind,
                device=cluster.devices[kind],
            )
        )
    return tuple(found)


def _child_words(levels: list[str]) -> list[str]:
    """What the children of each level are called, outermost first: of the innermost network they are nodes."""
    return [*levels[1:], "node"] if levels else []


def links_of(cluster: Cluster) -> Links:
    """Latency and bandwidth of a transfer between any two devices, and the channels that it occupies.

    Both are those of a ``send_recv`` between two pipeline stages of one device each (``CollectiveModel.among``) while
    nothing else is sent: launch and latency, and the bandwidth of the slowest link on the way, a node's NICs together.

    A transfer occupies the channels that the simulator has it occupy (``simulate.Channels``).
    """
    places, count = device_places(cluster), cluster.num_devices
    latency_ns, bytes_per_s = np.zeros((count, count), dtype=np.int64), np.ones((count, count), dtype=np.int64)
    channels = np.full((count, count, 2 * len(cluster.levels)), -1, dtype=np.int64)
    lines = _Lines(cluster)
    numbers = Channels(cluster, range(count))
    for source in range(count):
        for target in range(count):
            if source == target:
                continue
            latency_ns[source, target], bytes_per_s[source, target] = lines.of(places, source, target)
            way = numbers.between(source, target)
            channels[source, target, : len(way)] = way
    return Links(latency_ns=latency_ns, bytes_per_s=bytes_per_s, channels=channels)


class _Lines:
    """Latency in ns and bytes per second of pairs, each kind of pair once."""

    def __init__(self, cluster: Cluster) -> None:
        self.model = CollectiveModel(cluster, Mesh(axes=(), num_stages=cluster.num_devices))
        self.known: dict[tuple[int, ...], tuple[int, int]] = {}

    def of(self, places: tuple[DevicePlace, ...], source: int, target: int) -> tuple[int, int]:
        """Of two devices, either way."""
        one, other = sorted((source, target))
        a, b = places[one].place, places[other].place
        key = (places[one].node_group, places[other].node_group, next(k for k in range(len(a)) if a[k] != b[k]))
        if key not in self.known:
            self.known[key] = self._line(one, other)
        return self.known[key]

    def _line(self, one: int, other: int) -> tuple[int, int]:
        """The line through what a byte takes and what very many take; a latency is a whole number."""
        first, many = (self.model.among("send_recv", (one, other), size).ns for size in (1, _MANY_BYTES))
        ns_per_byte = (many - first) / (_MANY_BYTES - 1)
        latency = int(first - ns_per_byte + 1e-6)
        return max(latency, 0), max(round(_NS_PER_S / ns_per_byte), 1)
