"""Price lists: what the parts of a step cost under an objective, all in one unit.

The search and the evaluator ask a price list for everything that they add up. With ``PriceList.TIME`` the unit is the
nanosecond. With ``PriceList.FLAT`` it is the nanosecond as well, but collectives cost what a device sends in them over
one bandwidth, whichever links they use: what planners do that know volumes only (TAP; Alpa inside a mesh axis). With
``PriceList.VOLUME`` it is the byte that a device sends: operators and the optimizer are free, and what is called ``ns``
wherever prices are added up is a number of bytes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tap_planner.cluster import Cluster, Device, Mesh
from tap_planner.cost.collectives import CollectiveCost, CollectiveModel
from tap_planner.cost.compute import ComputeModel
from tap_planner.cost.memory import optimizer_ns
from tap_planner.sharding import sent_bytes

_NS_PER_S = 10**9


class PriceList(enum.Enum):
    """What is added up."""

    TIME = "time"
    """Nanoseconds of objective A."""
    FLAT = "flat"
    """Nanoseconds, with collectives priced by their volume."""
    VOLUME = "volume"
    """Bytes that one device sends in a step."""


class CollectivePrices(Protocol):
    """What collectives over axes of a mesh cost; ``num_bytes`` is the logical payload (see ``CollectiveModel``)."""

    def cost(self, kind: str, axes: tuple[int, ...], num_bytes: int, stage: int | None = None) -> CollectiveCost:
        """Cost of one call; of a pipeline stage, or of the slowest group of all stages."""
        ...

    def rate_ns(self, kind: str, axes: tuple[int, ...], num_bytes: int, stage: int | None = None) -> int:
        """Cost of what is part of a larger call."""
        ...

    def among(self, kind: str, stages: tuple[int, ...], num_bytes: int) -> CollectiveCost:
        """Cost of one call between pipeline stages."""
        ...


@dataclass(frozen=True, slots=True)
class Prices:
    """One price list on one mesh."""

    compute: ComputeModel
    """Sizes of tensors, and costs of operators."""
    collectives: CollectivePrices
    optimizer_ns: Callable[..., int]
    """Cost of the optimizer's step for one parameter, see ``cost.optimizer_ns``."""


def prices_of(which: PriceList, cluster: Cluster, mesh: Mesh, precision: str) -> Prices:
    """A price list.

    Args:
        which: what is added up.
        cluster: the devices that the mesh uses.
        mesh: the mesh.
        precision: what floats are cast to.
    """
    compute = ComputeModel(cluster.device, precision, cluster.devices)
    if which is PriceList.TIME:
        return Prices(compute, CollectiveModel(cluster, mesh), optimizer_ns)
    if which is PriceList.FLAT:
        return Prices(compute, FlatModel(cluster, mesh.shape), optimizer_ns)
    return Prices(FreeCompute(cluster.device, precision), VolumeModel(mesh.shape), _free_update)


class FreeCompute(ComputeModel):
    """Sizes of tensors as ever; operators cost nothing."""

    def __init__(self, device: Device, precision: str) -> None:
        super().__init__(device, precision)
        self._paces = self._attention_paces = ((0.0, 0.0),)

    def floor_ns(self, *, backward: bool = False) -> int:
        """0"""
        return 0


class VolumeModel:
    """The bytes that one rank sends in collectives: the least, whatever algorithm runs them (``sharding.sent_bytes``).

    Args:
        mesh_shape: sizes of the mesh axes.
    """

    def __init__(self, mesh_shape: Sequence[int]) -> None:
        self._mesh_shape = tuple(mesh_shape)

    def cost(self, kind: str, axes: tuple[int, ...], num_bytes: int, stage: int | None = None) -> CollectiveCost:
        """``ns`` of the cost is the number of bytes sent.

        Args:
            kind: one of ``COLLECTIVE_KINDS``.
            axes: indices of the mesh axes that make up the group.
            num_bytes: logical payload.
            stage: makes no difference.
        """
        sent = self.rate_ns(kind, axes, num_bytes)
        return CollectiveCost(ns=sent, algorithm="volume" if sent else "none")

    def rate_ns(self, kind: str, axes: tuple[int, ...], num_bytes: int, stage: int | None = None) -> int:
        """The bytes sent: there is no latency to leave out."""
        return sent_bytes(kind, math.prod(self._mesh_shape[axis] for axis in axes), num_bytes)

    def among(self, kind: str, stages: tuple[int, ...], num_bytes: int) -> CollectiveCost:
        """``cost`` between pipeline stages."""
        sent = sent_bytes(kind, len(stages), num_bytes)
        return CollectiveCost(ns=sent, algorithm="volume" if sent else "none")


class FlatModel:
    """The time of what one rank sends, over the one bandwidth that all devices have when all speak to all.

    That is the least share of a device in any level's links. There is no latency and no algorithm.

    Args:
        cluster: the devices that the mesh uses.
        mesh_shape: sizes of the mesh axes.
    """

    def __init__(self, cluster: Cluster, mesh_shape: Sequence[int]) -> None:
        self._volume = VolumeModel(mesh_shape)
        self._bandwidth = _share_of_device(cluster)

    def cost(self, kind: str, axes: tuple[int, ...], num_bytes: int, stage: int | None = None) -> CollectiveCost:
        """Cost of one call.

        Args:
            kind: one of ``COLLECTIVE_KINDS``.
            axes: indices of the mesh axes that make up the group.
            num_bytes: logical payload.
            stage: makes no difference.
        """
        return self._timed(self.rate_ns(kind, axes, num_bytes))

    def rate_ns(self, kind: str, axes: tuple[int, ...], num_bytes: int, stage: int | None = None) -> int:
        """The same: there is no latency to leave out."""
        return self._ns(self._volume.rate_ns(kind, axes, num_bytes))

    def among(self, kind: str, stages: tuple[int, ...], num_bytes: int) -> CollectiveCost:
        """``cost`` between pipeline stages."""
        return self._timed(self._ns(self._volume.among(kind, stages, num_bytes).ns))

    def _ns(self, num_bytes: int) -> int:
        return -(-num_bytes * _NS_PER_S // self._bandwidth)

    @staticmethod
    def _timed(ns: int) -> CollectiveCost:
        return CollectiveCost(ns=ns, algorithm="volume" if ns else "none")


def _share_of_device(cluster: Cluster) -> int:
    """Bytes per second."""
    kinds = range(max(len(cluster.node_groups), 1))
    found: list[int] = []
    for kind in kinds:
        devices = cluster.node_groups[kind].devices_per_node if cluster.node_groups else cluster.levels[0].size
        found.append(cluster.link(0, kind).child_bandwidth_bytes_per_s)
        for index in range(1, len(cluster.levels)):
            level = cluster.link(index, kind)
            if level.size > 1:
                found.append(level.child_bandwidth_bytes_per_s // devices)
            devices *= level.size
    return max(min(found), 1)


def _free_update(num_elements_local: int, **given: object) -> int:
    return 0
