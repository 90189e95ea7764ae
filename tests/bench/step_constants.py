"""The constants of a device that measured steps determine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tap_planner.cluster import Cluster, Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What is fitted of a device."""

    backward_launch_ns: int
    matrix_efficiency_permille: int
    memory_efficiency_permille: int
    attention_efficiency_permille: int | None = None
    """None: as products."""

    def of(self, device: Device) -> Device:
        """The device with these constants."""
        return replace(
            device,
            backward_launch_ns=self.backward_launch_ns,
            matrix_efficiency_permille=self.matrix_efficiency_permille,
            attention_efficiency_permille=self.attention_efficiency_permille,
            memory_efficiency_permille=self.memory_efficiency_permille,
        )


Fitted = Mapping[str, Constants]
"""By the beginning of a device's name."""


def with_constants(cluster: Cluster, fitted: Fitted) -> Cluster:
    """The cluster on devices with fitted constants; as it is, where there are none for its device.

    Args:
        cluster: the cluster.
        fitted: constants.
    """
    for name, constants in fitted.items():
        if cluster.device.name.startswith(name):
            return replace(cluster, device=constants.of(cluster.device))
    return cluster
