"""Times of collectives looked up in the measured V100 grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tap_planner.cluster import Mesh
from tests.bench.collective_rows import GRID_SYSTEM, read_rows

HOSTS, PER_HOST = 2, 8
_DIRECT = {
    "halo_exchange": "all_gather",
    "ring_exchange": "all_gather",
    "send_recv": "all_gather",
    "broadcast": "all_gather",
}
"""What stands in for collectives that were not measured: an all_gather whose result is what is passed on."""


@dataclass(frozen=True, slots=True)
class GridTimes:
    """Interpolated between measured sizes (in logarithms of both); in proportion to the bytes below and above them.

    Groups that the grid lacks (those over some ranks of each node, in another order than its own) take the time of
    groups of the same size on as many nodes.
    """

    curves: Mapping[tuple[str, int, int], tuple[np.ndarray, np.ndarray]]
    """(kind, ranks, nodes spanned) -> logarithms of payload and of ns, ascending."""

    def __call__(self, kind: str, mesh: Mesh, axes: tuple[int, ...], num_bytes: int) -> float:
        groups = mesh.groups(axes)
        ranks = groups.shape[1]
        if ranks == 1 or num_bytes <= 0:
            return 0.0
        spanned = len(np.unique(groups[0] // PER_HOST))
        curve = self.curves.get((_DIRECT.get(kind, kind), ranks, spanned))
        if curve is None:
            return float("inf")
        sizes, times = curve
        size = float(np.log(num_bytes))
        outside = min(size - sizes[0], 0.0) + max(size - sizes[-1], 0.0)
        return float(np.exp(np.interp(size, sizes, times) + outside))


def read_grid(folder: Path) -> GridTimes:
    """The rows of 2 nodes of 8; of several strides the median."""
    found: dict[tuple[str, int, int], dict[int, list[float]]] = {}
    for row in read_rows(folder):
        one = row.collective
        if row.system != GRID_SYSTEM or row.cluster.num_devices != HOSTS * PER_HOST:
            continue
        groups = one.mesh.groups(one.axes)
        key = (one.kind, groups.shape[1], len(np.unique(groups[0] // PER_HOST)))
        found.setdefault(key, {}).setdefault(one.num_bytes, []).append(one.ns)
    curves = {
        key: (
            np.log(sorted(by_size)),
            np.log([float(np.median(by_size[size])) for size in sorted(by_size)]),
        )
        for key, by_size in found.items()
    }
    return GridTimes(curves)
