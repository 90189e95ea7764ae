"""A cluster with more nodes of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from tap_planner.errors import ClusterError
from tap_planner.plan import PlanOptions
from tap_planner.requests import PreparedSearch

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster

__all__ = ["Grown", "enlarged", "fewest_nodes"]

T = TypeVar("T")
MOST_NODES = 16_384
"""Clusters of more nodes are not thought of: whoever needs them has a wrong size in the model."""
MOST_TIMES = 64
"""More than so many times the nodes that seem needed are not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """A larger cluster, with the options for it."""

    cluster: Cluster
    options: PlanOptions
    """With a mesh that was asked for, its outermost axis longer."""
    text: str
    """What to do."""
    given: tuple[str, ...]
    """The same as options; without a shorthand for the cluster they lack it."""


def enlarged(prepared: PreparedSearch, nodes: int) -> Grown | None:
    """The cluster with ``nodes`` of what its outermost level joins; None where there is no such cluster.

    Only multiples of the nodes that there are can hold a mesh that was asked for.
    """
    from tap_planner.cluster import parse_mesh
    from tap_planner.cluster.types import MAX_DEVICES

    cluster, options = prepared.cluster, prepared.options
    old = cluster.levels[-1].size
    if cluster.node_groups or len(cluster.levels) < 2 or cluster.num_devices // old * nodes > MAX_DEVICES:
        return None
    mesh: tuple[str, ...] = ()
    if options.mesh is not None:
        times, rest = divmod(nodes, old)
        if rest:
            return None
        asked = parse_mesh(options.mesh, cluster, allow_idle=options.allow_idle)
        outermost = asked.axes[asked.order[0] if asked.order else 0]
        longer = tuple(replace(a, size=a.size * times) if a is outermost else a for a in asked.axes)
        options = replace(options, mesh=str(replace(asked, axes=longer, devices=())))
        mesh = ("--mesh", str(options.mesh))
    more = f"{cluster.num_devices // old * (nodes - old)} more devices"
    shorthand = _shorthand(cluster, nodes)
    also = f" {' '.join(mesh)}" if mesh else ""
    if shorthand is not None:
        larger, text = shorthand[1], f"Use --cluster {shorthand[0]}{also} ({more})"
        return Grown(cluster=larger, options=options, text=text, given=("--cluster", shorthand[0], *mesh))
    levels = (*cluster.levels[:-1], replace(cluster.levels[-1], size=nodes))
    what = "nodes" if len(levels) == 2 else f"the size of level {levels[-1].name!r}"
    text = f"Set {what} to {nodes} in the cluster file{also} ({more})"
    return Grown(cluster=replace(cluster, levels=levels), options=options, text=text, given=mesh)


def _shorthand(cluster: Cluster, nodes: int) -> tuple[str, Cluster] | None:
    """The larger cluster as ``NxM:device``, where the present one is what its shorthand gives."""
    from tap_planner.cluster import load_cluster

    if len(cluster.levels) != 2:
        return None
    rest = f"x{cluster.levels[0].size}:{cluster.device.name}"
    try:
        if load_cluster(f"{cluster.levels[1].size}{rest}") != cluster:
            return None
        return f"{nodes}{rest}", load_cluster(f"{nodes}{rest}")
    except ClusterError:
        return None


def fewest_nodes(
    prepared: PreparedSearch, least_bytes: int, limit_bytes: int, plan: Callable[[int], T | None]
) -> tuple[int, T] | None:
    """The fewest nodes with which ``plan`` finds something, by doubling and bisection, and what it finds.

    It begins where the memory of all devices together holds what the devices that there are need; where the batch or
    the devices are a multiple of the other, only such node counts are looked at.

    Args:
        prepared: the request.
        least_bytes: what every plan needs per device.
        limit_bytes: what there is.
        plan: finds a plan with so many nodes.
    """
    nodes = prepared.cluster.levels[-1].size
    start = max(nodes + 1, -(-least_bytes * nodes // max(limit_bytes, 1)))
    most = min(MOST_TIMES * start, MOST_NODES + 1)
    counts = [count for count in range(start, most) if _keeps_batch(prepared, count)]
    if prepared.options.mesh is not None:
        counts = [count for count in counts if count % nodes == 0]
    failed, step = -1, 0
    found: tuple[int, T] | None = None
    while step < len(counts):
        made = plan(counts[step])
        if made is not None:
            found = (step, made)
            break
        failed, step = step, 2 * step + 1
    if found is None:
        return None
    while found[0] - failed > 1:
        middle = (found[0] + failed) // 2
        made = plan(counts[middle])
        if made is None:
            failed = middle
        else:
            found = (middle, made)
    return counts[found[0]], found[1]


def _keeps_batch(prepared: PreparedSearch, nodes: int) -> bool:
    batch, devices = prepared.graph.batch, prepared.cluster.num_devices
    larger = devices // prepared.cluster.levels[-1].size * nodes
    if batch % devices and devices % batch:
        return True
    return batch % larger == 0 or larger % batch == 0
