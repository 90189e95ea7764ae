"""Price lists: what the parts of a step cost under an objective, all in one unit.

The search and the evaluator ask a price list for everything that they add up. With ``PriceList.TIME`` the unit is the
nanosecond. With ``PriceList.VOLUME`` it is the byte that a device sends: operators and the optimizer are free, and what
is called ``ns`` wherever prices are added up is a number of bytes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tap_planner.cluster import Cluster, Mesh
from tap_planner.cost.collectives import CollectiveCost, CollectiveModel
from tap_planner.cost.compute import ComputeModel
from tap_planner.cost.memory import optimizer_ns
from tap_planner.operators import ComputeKind
from tap_planner.sharding import sent_bytes


class PriceList(enum.Enum):
    """What is added up."""

    TIME = "time"
    """Nanoseconds of objective A."""
    VOLUME = "volume"
    """Bytes that one device sends in a step."""


class CollectivePrices(Protocol):
    """What collectives over axes of a mesh cost; ``num_bytes`` is the logical payload (see ``CollectiveModel``)."""

    def cost(self, kind: str, axes: tuple[int, ...], num_bytes: int) -> CollectiveCost:
        """Cost of one call."""
        ...

    def rate_ns(self, kind: str, axes: tuple[int, ...], num_bytes: int) -> int:
        """Cost of what is part of a larger call."""
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
    if which is PriceList.TIME:
        return Prices(ComputeModel(cluster.device, precision), CollectiveModel(cluster, mesh), optimizer_ns)
    return Prices(FreeCompute(cluster.device, precision), VolumeModel(mesh.shape), _free_update)


class FreeCompute(ComputeModel):
    """Sizes of tensors as ever; operators cost nothing."""

    def time_ns(self, flops: int, num_bytes: int, kind: ComputeKind) -> int:
        """0"""
        return 0

    def times_ns(self, flops: np.ndarray, num_bytes: np.ndarray, kind: ComputeKind) -> np.ndarray:
        """Zeros."""
        return np.zeros(np.broadcast_shapes(np.shape(flops), np.shape(num_bytes)), dtype=np.int64)


class VolumeModel:
    """The bytes that one rank sends in collectives: the least, whatever algorithm runs them (``sharding.sent_bytes``).

    Args:
        mesh_shape: sizes of the mesh axes.
    """

    def __init__(self, mesh_shape: Sequence[int]) -> None:
        self._mesh_shape = tuple(mesh_shape)

    def cost(self, kind: str, axes: tuple[int, ...], num_bytes: int) -> CollectiveCost:
        """``ns`` of the cost is the number of bytes sent.

        Args:
            kind: one of ``COLLECTIVE_KINDS``.
            axes: indices of the mesh axes that make up the group.
            num_bytes: logical payload.
        """
        sent = self.rate_ns(kind, axes, num_bytes)
        return CollectiveCost(ns=sent, algorithm="volume" if sent else "none")

    def rate_ns(self, kind: str, axes: tuple[int, ...], num_bytes: int) -> int:
        """The bytes sent: there is no latency to leave out."""
        return sent_bytes(kind, math.prod(self._mesh_shape[axis] for axis in axes), num_bytes)


def _free_update(num_elements_local: int, **given: object) -> int:
    return 0
