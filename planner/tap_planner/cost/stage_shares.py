"""Prices of all stages of a pipeline together, where stages have unlike devices.

What is cut in stages is searched as one plan for all of them (docs/pipelines.md), before it is known which operator
lies on which stage. A step takes at least the weighted mean of what its stages take, whatever the weights; so each
operator, collective and update is charged what it takes on the stage on which it weighs least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from tap_planner.cluster import Cluster, Device, Mesh, slowest_device
from tap_planner.cost.collectives import CollectiveCost
from tap_planner.cost.compute import ComputeModel
from tap_planner.cost.prices import CollectivePrices, PriceList, Prices, prices_of
from tap_planner.operators import ComputeKind

__all__ = ["StageCompute", "StageShare", "stage_prices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """What the times of a stage count in the time of all stages together; 1 where stages are alike."""

    stage: int
    devices: tuple[Device, ...]
    """Its kinds of device."""
    repeated: Fraction
    """Of what it does for every microbatch."""
    backward: Fraction
    """Of operators' backwards; no less than ``repeated``."""
    once: Fraction
    """Of what it does at the end of the step, and of what hides in buckets."""


class StageCompute(ComputeModel):
    """Times of operators on the stage on which they weigh least, weighed; rounded down.

    Args:
        device: the slowest of each figure of all devices, for sizes.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.
        shares: of the stages.
    """

    def __init__(self, device: Device, precision: str, shares: Sequence[StageShare]) -> None:
        padding = min(kind.matrix_padding for share in shares for kind in share.devices)
        super().__init__(replace(device, matrix_padding=padding), precision)
        models = {s.devices: ComputeModel(slowest_device(s.devices), precision, s.devices) for s in shares}
        forward = dict.fromkeys((share.devices, share.repeated) for share in shares)
        backward = dict.fromkeys((share.devices, share.backward) for share in shares)
        self._weighed = [[(models[devices], share) for devices, share in pairs] for pairs in (forward, backward)]

    def floor_ns(self, *, backward: bool = False) -> int:
        """What any operator counts at least."""
        return min(_part(share, compute.floor_ns(backward=backward)) for compute, share in self._weighed[backward])

    def time_ns(
        self, flops: int, num_bytes: int, kind: ComputeKind, *, backward: bool = False, attention: bool = False
    ) -> int:
        """See ``ComputeModel.time_ns``."""
        return min(
            _part(share, compute.time_ns(flops, num_bytes, kind, backward=backward, attention=attention))
            for compute, share in self._weighed[backward]
        )

    def times_ns(
        self,
        flops: np.ndarray,
        num_bytes: np.ndarray,
        kind: ComputeKind,
        *,
        backward: bool = False,
        attention: bool = False,
    ) -> np.ndarray:
        """See ``ComputeModel.times_ns``."""
        found = [
            compute.times_ns(flops, num_bytes, kind, backward=backward, attention=attention)
            * share.numerator
            // share.denominator
            for compute, share in self._weighed[backward]
        ]
        return np.minimum.reduce(found)


class _StageCollectives:
    """Costs of collectives on the stage on which they weigh least, weighed; rounded down.

    Args:
        inner: costs of each stage.
        shares: of the stages.
    """

    def __init__(self, inner: CollectivePrices, shares: Sequence[StageShare]) -> None:
        self._inner = inner
        self._shares = shares

    def cost(self, kind: str, axes: tuple[int, ...], num_bytes: int, stage: int | None = None) -> CollectiveCost:
        """Cost of one call that every microbatch makes, whatever the stage."""
        found = [(share.repeated, self._inner.cost(kind, axes, num_bytes, share.stage)) for share in self._shares]
        return min((replace(cost, ns=_part(weight, cost.ns)) for weight, cost in found), key=lambda cost: cost.ns)

    def rate_ns(self, kind: str, axes: tuple[int, ...], num_bytes: int, stage: int | None = None) -> int:
        """Cost of what is part of a larger call, whatever the stage."""
        return min(_part(share.once, self._inner.rate_ns(kind, axes, num_bytes, share.stage)) for share in self._shares)

    def among(self, kind: str, stages: tuple[int, ...], num_bytes: int) -> CollectiveCost:
        """Cost of one call between stages."""
        return self._inner.among(kind, stages, num_bytes)


def stage_prices(
    which: PriceList, cluster: Cluster, mesh: Mesh, precision: str, shares: Sequence[StageShare]
) -> Prices:
    """A price list for all stages together.

    Args:
        which: what is added up; operators are not free in it.
        cluster: the devices that the mesh uses.
        mesh: of a stage.
        precision: what floats are cast to.
        shares: of the stages; those with the same devices, links and weights need only one.
    """
    plain = prices_of(which, cluster, mesh, precision)
    compute = StageCompute(cluster.device, precision, shares)
    updates = dict.fromkeys((slowest_device(share.devices), share.once) for share in shares)
    return Prices(
        compute, _StageCollectives(plain.collectives, shares), _least_update(plain.optimizer_ns, tuple(updates))
    )


def _least_update(optimizer_ns: Callable[..., int], updates: Sequence[tuple[Device, Fraction]]) -> Callable[..., int]:
    def least_ns(num_elements_local: int, *, device: Device, **given: object) -> int:
        """The optimizer's step where it weighs least; ``device`` makes no difference."""
        times = (_part(share, optimizer_ns(num_elements_local, device=kind, **given)) for kind, share in updates)
        return min(times)

    return least_ns


def _part(share: Fraction, ns: int) -> int:
    return ns * share.numerator // share.denominator
