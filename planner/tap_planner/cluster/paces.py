"""How near the algorithms of a communication library usually come to the links: the packaged table, with sources."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from importlib import resources

from tap_planner.cluster.types import Cluster, Level, Pace

NETWORK = "network"
"""Kind of link of all levels but the first, where their transport is not known."""
USUAL_COLLECTIVE_LAUNCH_NS: Mapping[str, int] = {"nccl": 20_000, "rccl": 20_000, "gloo": 0}
"""What a collective takes before anything is sent, by library. nccl: what small collectives of the V100 profile take
(17 us; tests/data/measurements, v100_collectives_grid.csv), rounded up; rccl taken for the same. gloo runs on the host,
where links have their latency only."""


@functools.cache
def _table() -> dict[tuple[str, str], tuple[tuple[str, Pace], ...]]:
    text = resources.files("tap_planner.cluster").joinpath("paces.csv").read_text(encoding="utf-8")
    found: dict[tuple[str, str], dict[str, Pace]] = {}
    for row in csv.DictReader(text.splitlines()):
        pace = Pace(
            efficiency_permille=round(Fraction(row["efficiency"]) * 1000),
            latency_ns=round(Fraction(row["latency_us"]) * 1000),
        )
        found.setdefault((row["library"], row["kind"]), {})[row["algorithm"]] = pace
    return {key: tuple(sorted(paces.items())) for key, paces in found.items()}


def usual_paces(library: str, kind: str) -> tuple[tuple[str, Pace], ...]:
    """Paces by algorithm, sorted; none where nothing is known.

    Args:
        library: ``nccl``, ``rccl`` or ``gloo``.
        kind: see ``kind_of_link``.
    """
    return _table().get((library, kind), ())


def kind_of_link(index: int, level: Level) -> str:
    """What links are of one kind in the table: inside nodes the level's kind, between them its transport."""
    return (level.transport or NETWORK) if index else level.kind


def with_usual_paces(cluster: Cluster) -> Cluster:
    """The cluster with the usual pace of each algorithm that a level says nothing about."""
    levels = tuple(_paced(level, cluster.library, index) for index, level in enumerate(cluster.levels))
    groups = tuple(
        replace(group, intra_node=_paced(group.intra_node, cluster.library, 0)) for group in cluster.node_groups
    )
    return replace(cluster, levels=levels, node_groups=groups)


def _paced(level: Level, library: str, index: int) -> Level:
    general = dict(usual_paces(library, NETWORK)) if index else {}
    usual = general | dict(usual_paces(library, kind_of_link(index, level)))
    return level.paced(usual | dict(level.paces))
