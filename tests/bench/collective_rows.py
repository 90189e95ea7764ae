"""Published times of collectives as measured clusters: rows of ``collectives.csv`` and ``v100_collectives_grid.csv``.

A system's cluster is read off its own columns: the device and its node from the catalogue, the network as the column
``interconnect`` has it (``32x100Gb``: 32 NICs a node; ``25Gb Ethernet per node``: one).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tap_planner.calibration import MeasuredCluster, MeasuredCollective
from tap_planner.cluster import (
    TRANSPORTS,
    Cluster,
    Mesh,
    MeshAxis,
    catalogue_entry,
    cluster_to_json,
    load_cluster,
    with_usual_paces,
)

DATA = Path(__file__).parent.parent / "data" / "measurements"
"""Copies of the rows, with their sources."""
LEAST_BYTES = 1 << 20
GRID_SYSTEM = "Alpa V100 profile"
"""Its rows are in both files; they count once, from the grid."""
_NICS = re.compile(r"(?:([0-9]+)x)?([0-9]+)Gb")
_DEVICES = {
    "h100": "h100-sxm5-80gb",
    "h200": "h200-sxm-141gb",
    "a100-40gb": "a100-sxm4-40gb",
    "a100": "a100-sxm4-80gb",
    "v100-32gb": "v100-sxm2-32gb",
    "v100": "v100-sxm2-16gb",
    "mi200": "mi250x-128gb",
    "unstated (nvlink box)": "a100-sxm4-80gb",  # 230 GB/s of bus bandwidth in a node: that of A100
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured collective, with the cluster that its columns describe."""

    system: str
    cluster: Cluster
    collective: MeasuredCollective


def read_rows(folder: Path) -> tuple[Row, ...]:
    """All rows of at least 1 MiB between two ranks or more."""
    rows = [*_listed(folder / "collectives.csv"), *_grid(folder / "v100_collectives_grid.csv")]
    return tuple(row for row in rows if row.collective.ns > 0)


def by_system(rows: Sequence[Row]) -> dict[str, tuple[MeasuredCluster, ...]]:
    """Per system its clusters (subsets of nodes are clusters of their own), each with its rows by size."""
    grouped: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        grouped.setdefault(row.system, {}).setdefault(str(cluster_to_json(row.cluster)), []).append(row)
    return {
        system: tuple(
            MeasuredCluster(
                cluster=same[0].cluster,
                rows=tuple(sorted((row.collective for row in same), key=_order)),
            )
            for same in clusters.values()
        )
        for system, clusters in grouped.items()
    }


def _order(row: MeasuredCollective) -> tuple[object, ...]:
    return (row.kind, row.mesh.shape, row.axes, row.num_bytes, row.ns)


def bare(cluster: Cluster) -> Cluster:
    """The cluster without any pace: links as the data sheets have them."""
    return replace(cluster, levels=tuple(replace(level, paces=()) for level in cluster.levels))


def _listed(path: Path) -> Iterator[Row]:
    for row in _read(path):
        num_bytes, ranks = round(float(row["bytes"] or 0)), int(row["n_ranks"])
        if num_bytes < LEAST_BYTES or ranks < 2 or row["system"].startswith(GRID_SYSTEM):
            continue
        nodes, per_node = int(row["nodes"]), int(row["gpus_per_node"])
        inside = ranks if nodes == 1 else per_node
        size = per_node if per_node % inside == 0 else inside
        cluster = _cluster(row["gpu"], nodes, size, row["interconnect"])
        mesh = _mesh_of(size // inside, ranks)
        yield Row(
            system=row["system"],
            cluster=cluster,
            collective=MeasuredCollective(
                kind=row["collective"], mesh=mesh, axes=(1,), num_bytes=num_bytes, ns=1000 * float(row["time_us"])
            ),
        )


def _grid(path: Path) -> Iterator[Row]:
    for row in _read(path):
        num_bytes, ranks = round(float(row["bytes"])), int(row["group_size"])
        if num_bytes < LEAST_BYTES or ranks < 2:
            continue
        hosts, per_host, spanned = (
            int(row["mesh_hosts"]),
            int(row["mesh_gpus_per_host"]),
            int(row["nodes_spanned_per_group"]),
        )
        mesh, axes = grid_groups(hosts, per_host, ranks, spanned, int(row["rank_stride"]))
        payload = num_bytes // ranks if row["collective"] == "all_to_all" else num_bytes
        yield Row(
            system=GRID_SYSTEM,
            cluster=_cluster("V100", hosts, per_host, "25Gb Ethernet per node"),
            collective=MeasuredCollective(
                kind=row["collective"], mesh=mesh, axes=axes, num_bytes=payload, ns=1000 * float(row["time_us"])
            ),
        )


def grid_groups(hosts: int, per_host: int, ranks: int, spanned: int, stride: int) -> tuple[Mesh, tuple[int, ...]]:
    """Mesh and axes whose groups are those of a row of the grid.

    Groups of one node are runs of ranks, or ranks ``stride`` apart; groups that span both nodes hold ranks ``stride``
    apart of the whole cluster.
    """
    if spanned > 1:
        return _mesh_of(ranks, hosts * per_host // ranks), (0,)
    if stride > 1:
        return _mesh_of(hosts * per_host // (ranks * stride), ranks, stride), (1,)
    return _mesh_of(hosts * per_host // ranks, ranks), (1,)


def _mesh_of(*sizes: int) -> Mesh:
    return Mesh(axes=tuple(MeshAxis(name=f"a{index}", size=size) for index, size in enumerate(sizes)))


def _cluster(gpu: str, nodes: int, per_node: int, interconnect: str) -> Cluster:
    name = _device(gpu)
    cluster = load_cluster(f"{nodes}x{per_node}:{name}")
    network = cluster.levels[1]
    found = _NICS.search(interconnect)
    if found is not None:
        nics, gigabits = int(found[1] or 1), int(found[2])
        network = replace(network, nics=nics, bandwidth_bytes_per_s=gigabits * 10**9 // 8)
    for transport in TRANSPORTS:
        if transport in interconnect.lower():
            network = replace(network, transport=transport)
    return with_usual_paces(bare(replace(cluster, levels=(cluster.levels[0], network))))


def _device(gpu: str) -> str:
    wanted = gpu.lower()
    near = [key for key in _DEVICES if wanted.startswith(key)]
    if near:
        return _DEVICES[max(near, key=len)]
    return catalogue_entry(wanted).device.name


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
