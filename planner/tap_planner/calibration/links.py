"""Measured collectives -> paces of the algorithms on each kind of link.

The library chooses its algorithm by itself and does not say which: a measured time is taken for that of the cheapest
algorithm, as the cost model takes it, and all constants are fitted together to the least mean of |log(model/measured)|.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tap_planner.calibration.descent import Constant, descend
from tap_planner.cluster import Cluster, Level, Mesh, Pace, kind_of_link
from tap_planner.cost import CollectiveModel

__all__ = ["MeasuredCluster", "MeasuredCollective", "fit_paces", "log_errors", "with_paces"]

LEAST_EFFICIENCY = 0.05
"""A link that reaches less is not what the cluster file says."""
_START_EFFICIENCY = 0.8
_START_LATENCIES_NS = (4_000.0, 40_000.0)
"""The better of what is found from these is taken: along single constants the way from one to the other is barred."""
_PULL = 1e-3
"""What a constant's distance from its start weighs beside the mean error, both in logarithms."""
_LEAST_LATENCY_NS = 100.0
MOST_LATENCY_NS = 1_000_000.0
"""Of one step of an algorithm between accelerators."""
_LAUNCH = Constant(name="launch", start=20_000.0, least=100.0, most=1e6)
PaceTable = Mapping[tuple[str, str], Pace]
"""(kind of link, algorithm) -> pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """A collective that ran on all groups of some axes at once."""

    kind: str
    mesh: Mesh
    axes: tuple[int, ...]
    num_bytes: int
    """Logical payload, see ``CollectiveModel``."""
    ns: float


@dataclass(frozen=True, kw_only=True)
class MeasuredCluster:
    """A cluster, its links as its file or the catalogue has them, with collectives that ran there."""

    cluster: Cluster
    rows: tuple[MeasuredCollective, ...]


def with_paces(
    cluster: Cluster, table: PaceTable, key_of: Callable[[int, Level], str] = kind_of_link, launch_ns: int | None = None
) -> Cluster:
    """The cluster at the paces of a table, in place of its own where the table has some."""

    def paced(index: int, level: Level) -> Level:
        key = key_of(index, level)
        return level.paced({algorithm: pace for (kind, algorithm), pace in table.items() if kind == key})

    levels = tuple(paced(index, level) for index, level in enumerate(cluster.levels))
    groups = tuple(replace(group, intra_node=paced(0, group.intra_node)) for group in cluster.node_groups)
    launch_ns = cluster.collective_launch_ns if launch_ns is None else launch_ns
    return replace(cluster, levels=levels, node_groups=groups, collective_launch_ns=launch_ns)


class _Rows:
    """The rows of one cluster, those of the same groups together; prices them at any paces."""

    def __init__(self, measured: MeasuredCluster) -> None:
        self.cluster = measured.cluster
        grouped: dict[tuple[Mesh, str, tuple[int, ...]], list[int]] = {}
        for number, row in enumerate(measured.rows):
            grouped.setdefault((row.mesh, row.kind, row.axes), []).append(number)
        num_bytes = np.array([row.num_bytes for row in measured.rows], dtype=np.int64)
        self._parts = [(key, np.array(numbers), num_bytes[numbers]) for key, numbers in grouped.items()]
        self._log_ns = np.log([row.ns for row in measured.rows])
        self._models = {mesh: CollectiveModel(self.cluster, mesh) for mesh, _, _ in grouped}

    def used(self, key_of: Callable[[int, Level], str]) -> Iterable[tuple[str, str]]:
        """(kind of link, algorithm) that the rows can tell something about."""
        for (mesh, kind, axes), _, _ in self._parts:
            model = self._models[mesh]
            levels = {share.level for shape in model.shapes(axes) for share in shape.shares if share.is_used}
            for algorithms in model.choices(kind, axes):
                for algorithm in algorithms:
                    yield from ((key_of(level, self.cluster.levels[level]), algorithm.name) for level in levels)

    def log_errors(self, cluster: Cluster) -> np.ndarray:
        """[rows] log(model / measured) with the links of ``cluster``."""
        models = {mesh: model.on_links(cluster) for mesh, model in self._models.items()}
        found = np.empty(len(self._log_ns))
        for (mesh, kind, axes), numbers, num_bytes in self._parts:
            found[numbers] = np.log(np.maximum(models[mesh].costs_ns(kind, axes, num_bytes), 1))
        return found - self._log_ns


def log_errors(measured: MeasuredCluster) -> np.ndarray:
    """[rows] log(model / measured), the cluster as it is."""
    return _Rows(measured).log_errors(measured.cluster)


def fit_paces(
    measured: Sequence[MeasuredCluster],
    key_of: Callable[[int, Level], str] = kind_of_link,
    launch_ns: int | None = None,
    most_latency_ns: float = MOST_LATENCY_NS,
) -> tuple[dict[tuple[str, str], Pace], int]:
    """One efficiency and one latency for each kind of link and algorithm, common to all clusters.

    Args:
        measured: clusters; each has the same weight, however many rows it has.
        key_of: (number of the level, level) -> what links are of one kind.
        launch_ns: what every call takes before anything is sent; None: fitted as well.
        most_latency_ns: up to where latencies of one step are looked for.

    Returns:
        The paces that the rows tell something about, and the launch.
    """
    clusters = [_Rows(one) for one in measured]
    relevant = [frozenset(rows.used(key_of)) for rows in clusters]
    used = sorted(frozenset[tuple[str, str]]().union(*relevant))

    def constants(latency_ns: float) -> list[Constant]:
        found = [
            Constant(name=f"e {k} {a}", start=_START_EFFICIENCY, least=LEAST_EFFICIENCY, most=1.0) for k, a in used
        ]
        found += [
            Constant(name=f"l {k} {a}", start=latency_ns, least=_LEAST_LATENCY_NS, most=most_latency_ns)
            for k, a in used
        ]
        return found if launch_ns is not None else [*found, _LAUNCH]

    def paces(values: Mapping[str, float]) -> dict[tuple[str, str], Pace]:
        return {
            (kind, algorithm): Pace(
                efficiency_permille=max(round(1000 * values[f"e {kind} {algorithm}"]), 1),
                latency_ns=round(values[f"l {kind} {algorithm}"]),
            )
            for kind, algorithm in used
        }

    known: list[dict[object, float]] = [{} for _ in clusters]

    def mean_error(number: int, table: PaceTable, launch: int) -> float:
        """Of one cluster; most steps of the descent change nothing that concerns it."""
        own = {key: pace for key, pace in table.items() if key in relevant[number]}
        at = (tuple(own.values()), launch)
        if at not in known[number]:
            cluster = with_paces(clusters[number].cluster, own, key_of, launch)
            known[number][at] = float(np.abs(clusters[number].log_errors(cluster)).mean())
        return known[number][at]

    def loss(values: Mapping[str, float]) -> float:
        table, launch = paces(values), round(values["launch"]) if launch_ns is None else launch_ns
        return sum(mean_error(number, table, launch) for number in range(len(clusters))) / len(clusters) + _pull(values)

    usual = {constant.name: constant.start for constant in constants(_START_LATENCIES_NS[0])}

    def _pull(values: Mapping[str, float]) -> float:
        """Keeps what the rows tell nothing about (algorithms that are never the cheapest) where it began."""
        return _PULL * sum(abs(math.log(value / usual[name])) for name, value in values.items())

    pairs = [(f"e {kind} {algorithm}", f"l {kind} {algorithm}") for kind, algorithm in used]
    values = min((descend(constants(start), loss, pairs) for start in _START_LATENCIES_NS), key=loss)
    return paces(values), round(values["launch"]) if launch_ns is None else launch_ns
