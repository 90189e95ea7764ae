"""The stages of a device placement, each on one device of the cluster: kinds of devices, and channels between them."""

from __future__ import annotations

from collections.abc import Sequence

from tap_planner.cluster import Cluster
from tap_planner.errors import UsageError
from tap_planner.plan import Decisions

__all__ = ["Channels", "check_devices", "kinds_of"]

_HINT = "Give the devices of the placed plan that the program was lowered from, and its whole cluster."


def kinds_of(cluster: Cluster, ranks: Sequence[int]) -> tuple[int, ...]:
    """Per rank its kind of device, index into ``Cluster.devices``."""
    kinds = cluster.kind_of_ranks()
    return tuple(int(kinds[rank]) for rank in ranks)


class Channels:
    """What a transfer between two stages occupies, numbered.

    It is the way out of the source's device and the way in of the target's; between nodes also all that leaves the
    source's node and all that enters the target's (its NICs together, at which the transfer is priced); with more
    levels those of each domain that it leaves and enters. The placement library plays placements by the same rule.

    Args:
        cluster: all of it.
        devices: by stage, the rank in the cluster of its device.
    """

    def __init__(self, cluster: Cluster, devices: Sequence[int]) -> None:
        places = cluster.places()
        self.devices: tuple[int, ...] = tuple(devices)
        """By stage."""
        self._places = [places[rank] for rank in devices]
        self._numbers: dict[tuple[bool, tuple[int, ...]], int] = {}
        """Of what is left (False) or entered: a device, a node and so on."""
        self._known: dict[tuple[int, int], tuple[int, ...]] = {}

    def between(self, source: int, target: int) -> tuple[int, ...]:
        """The channels of a transfer from one stage to another; none inside a stage."""
        if (source, target) not in self._known:
            self._known[source, target] = self._between(source, target)
        return self._known[source, target]

    def _between(self, source: int, target: int) -> tuple[int, ...]:
        a, b = self._places[source], self._places[target]
        if a == b:
            return ()
        parts = next(depth for depth in range(len(a)) if a[depth] != b[depth])
        ways = [way for depth in range(len(a), parts, -1) for way in ((False, a[:depth]), (True, b[:depth]))]
        return tuple(self._numbers.setdefault(way, len(self._numbers)) for way in ways)


def check_devices(decisions: Decisions, cluster: Cluster, devices: Sequence[int]) -> None:
    """Whether stages have one device each, and these are different ones of a cluster.

    Args:
        decisions: the plan.
        cluster: all of it.
        devices: by stage, the rank in the cluster of its device.

    Raises:
        UsageError: they are not.
    """
    axes = [f"{axis.name}={axis.size}" for axis in decisions.axes if axis.size > 1]
    if axes:
        raise UsageError(
            f"devices: the plan has the mesh {','.join(axes)} in every stage, expected one device", hint=_HINT
        )
    if len(devices) != decisions.num_stages:
        raise UsageError(
            f"devices: {len(devices)} ranks, expected {decisions.num_stages}, one for each stage", hint=_HINT
        )
    for stage, rank in enumerate(devices):
        if not 0 <= rank < cluster.num_devices:
            raise UsageError(
                f"devices[{stage}]: rank {rank}, expected 0 to {cluster.num_devices - 1} in the cluster {cluster.name}",
                hint=_HINT,
            )
        if rank in devices[:stage]:
            raise UsageError(
                f"devices[{stage}]: rank {rank}, expected another one, as it is the device of stage "
                f"{devices.index(rank)}",
                hint=_HINT,
            )
