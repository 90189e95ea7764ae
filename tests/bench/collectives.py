"""How true the times of collectives are: fitted on alternate sizes, and on all systems but one.

    python -m tests.bench.collectives [--data DIR] [--json] [--refit] [--write]

*Alternate sizes*: per system one efficiency and one latency for each kind of link and algorithm (and the launch of a
call) are fitted on every second size; errors are those on the others. *As shipped*: with the paces of the catalogue.
*Left out* (``--refit``): the paces fitted on all systems but the one that they are then tested on.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from tap_planner.calibration import MeasuredCluster, fit_paces, log_errors, with_paces
from tap_planner.cluster import NETWORK, USUAL_COLLECTIVE_LAUNCH_NS, Cluster, Pace, kind_of_link
from tests.bench.collective_rows import DATA, bare, by_system, read_rows

ENOUGH_ROWS = 10
"""Systems with fewer cannot be fitted and tested; they are tested only."""
DIRECT_LATENCY_NS = 4_000
"""Of transfers between two devices, of which no rows are public: where the fit of all others begins."""
TAKEN_FOR = {
    ("nccl", "pcie"): ("nccl", "switch"),
    ("nccl", "ring"): ("nccl", "switch"),
    ("rccl", "mesh"): ("nccl", "switch"),
    ("rccl", "switch"): ("nccl", "switch"),
    ("rccl", "pcie"): ("nccl", "switch"),
    ("rccl", "network"): ("nccl", "network"),
}
"""(library, kind of link) of which no rows are public -> what they are taken for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemErrors:
    """Median errors of a system, as shares of the measured time; None where there was nothing to fit or test."""

    system: str
    rows: int
    alternate: float | None
    shipped: float
    left_out: float | None = None


def median_error(errors: np.ndarray) -> float:
    """Median of |model / measured - 1|, of logarithms of the ratio."""
    return float(np.median(np.abs(np.expm1(errors))))


def alternate_sizes(clusters: Sequence[MeasuredCluster]) -> float | None:
    """Median error on every second size, the others fitted."""
    if sum(len(cluster.rows) for cluster in clusters) < ENOUGH_ROWS:
        return None
    fitted = [replace(one, cluster=bare(one.cluster), rows=_half(one, 0)) for one in clusters]
    tested = [replace(one, cluster=bare(one.cluster), rows=_half(one, 1)) for one in clusters]
    table, launch_ns = fit_paces([one for one in fitted if one.rows])
    return median_error(_errors(tested, table, launch_ns))


def _half(measured: MeasuredCluster, parity: int) -> tuple:
    """Every second size of each group of rows that differ in size only."""
    numbers: dict[tuple[object, ...], int] = {}
    kept = []
    for row in measured.rows:
        key = (row.kind, row.mesh, row.axes)
        numbers[key] = numbers.get(key, -1) + 1
        if numbers[key] % 2 == parity:
            kept.append(row)
    return tuple(kept)


def _errors(clusters: Sequence[MeasuredCluster], table: Mapping[tuple[str, str], Pace], launch_ns: int) -> np.ndarray:
    found = [log_errors(replace(one, cluster=_at(one.cluster, table, launch_ns))) for one in clusters if one.rows]
    return np.concatenate(found)


def _at(cluster: Cluster, table: Mapping[tuple[str, str], Pace], launch_ns: int) -> Cluster:
    """At the paces of the kinds of link, those of any network where a transport is not in the table."""
    general = with_paces(cluster, table, lambda index, level: NETWORK if index else level.kind, launch_ns)
    return with_paces(general, table, launch_ns=launch_ns)


def pooled(systems: Mapping[str, Sequence[MeasuredCluster]], library: str) -> dict[tuple[str, str], Pace]:
    """The paces of a library common to several systems, at the launch that it usually has."""
    clusters = [
        MeasuredCluster(cluster=bare(one.cluster), rows=one.rows)
        for system in systems.values()
        for one in system
        if one.cluster.library == library
    ]
    if not clusters:
        return {}
    launch_ns = USUAL_COLLECTIVE_LAUNCH_NS[library]
    any_network, _ = fit_paces(clusters, lambda index, level: NETWORK if index else level.kind, launch_ns)
    by_transport, _ = fit_paces(clusters, kind_of_link, launch_ns)
    return any_network | by_transport | {key: pace for key, pace in any_network.items() if key[0] == NETWORK}


def measure(folder: Path, *, refit: bool) -> tuple[SystemErrors, ...]:
    """Errors of all systems of a folder."""
    systems = by_system(read_rows(folder))
    found: list[SystemErrors] = []
    for name, clusters in systems.items():
        left_out = None
        if refit:
            library = clusters[0].cluster.library
            others = {other: rows for other, rows in systems.items() if other != name}
            table = pooled(others, library)
            bares = [replace(one, cluster=bare(one.cluster)) for one in clusters]
            left_out = median_error(_errors(bares, table, USUAL_COLLECTIVE_LAUNCH_NS[library]))
        found.append(
            SystemErrors(
                system=name,
                rows=sum(len(one.rows) for one in clusters),
                alternate=alternate_sizes(clusters),
                shipped=median_error(np.concatenate([log_errors(one) for one in clusters])),
                left_out=left_out,
            )
        )
        print(found[-1], file=sys.stderr)
    return tuple(found)


def write_paces(folder: Path, path: Path) -> None:
    """Fit the packaged table on all systems of a folder; links that no system has are taken for others."""
    systems = by_system(read_rows(folder))
    libraries = sorted({one.cluster.library for clusters in systems.values() for one in clusters})
    fitted = {library: pooled(systems, library) for library in libraries}
    rows = {
        (library, *key): (pace, "fitted: tests/bench/collectives.py")
        for library in libraries
        for key, pace in fitted[library].items()
    }
    for (library, kind), (like_library, like_kind) in TAKEN_FOR.items():
        for (other, algorithm), pace in fitted[like_library].items():
            if other == like_kind:
                rows.setdefault((library, kind, algorithm), (pace, f"taken for {like_library} on {like_kind}"))
    for (library, kind, algorithm), (pace, _) in list(rows.items()):
        if algorithm == "ring":
            direct = replace(pace, latency_ns=DIRECT_LATENCY_NS)
            rows[library, kind, "direct"] = (direct, "bandwidth taken for the ring's, latency assumed")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("library", "kind", "algorithm", "efficiency", "latency_us", "source"))
        for key, (pace, source) in sorted(rows.items()):
            writer.writerow((*key, f"{pace.efficiency_permille / 1000:g}", f"{pace.latency_ns / 1000:g}", source))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--refit", action="store_true", help="also fit on all systems but each")
    parser.add_argument("--write", type=Path, metavar="PACES", help="fit the packaged table and write it")
    given = parser.parse_args()
    if given.write is not None:
        write_paces(given.data, given.write)
        return
    found = measure(given.data, refit=given.refit)
    if given.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return
    print("| system | rows | alternate sizes | as shipped | left out |\n|---|---:|---:|---:|---:|")
    for one in found:
        errors = " | ".join(_percent(error) for error in (one.alternate, one.shipped, one.left_out))
        print(f"| {one.system} | {one.rows} | {errors} |")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    main()
