"""Plans on fewer devices than there are: a short search whether they would be faster where they are not allowed, and
the search where they are allowed and have more memory than the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from tap_planner.cluster import Cluster, Mesh, device_parts, enumerate_meshes, mesh_on, part_of, restricted
from tap_planner.cost import COLLECTIVE_KINDS, CollectiveModel
from tap_planner.errors import InfeasibleError, LimitReachedError, UsageError
from tap_planner.search.capacity import least_ns
from tap_planner.search.constraints import NoStrategyError
from tap_planner.search.merging import search_parts
from tap_planner.search.planner import search
from tap_planner.search.request import SearchRequest, SearchResult
from tap_planner.search.rooms import stage_rooms

MAX_SEARCHES = 3
"""Parts of the cluster that are searched at most."""
_GAP = Fraction(1, 20)
"""The short search ends when it is this near its optimum: what it finds is a plan all the same."""
_LEAST_GAIN = Fraction(1, 50)
"""Parts that could gain less are not searched."""
_MANY = 10_000
"""Operators x meshes from which the search of a part takes seconds."""
_FAR = Fraction(1, 10)
"""Then parts that are likely to take so much longer are not searched either."""
_AXES = 2
"""Most axes of their meshes."""


class NotOnAllError(NoStrategyError):
    """Rules can be kept on fewer devices than there are, but not on all of them."""

    exit_code = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerDevices:
    """A plan on some of the devices that is proven faster than every plan on all of them."""

    num_devices: int
    objective_ns: int


def fewer_devices(request: SearchRequest, result: SearchResult) -> FewerDevices | None:
    """Look for a plan on fewer devices that is faster than the bound of all plans on all of them.

    Only parts of the cluster that could gain something by ``least_ns`` are looked at, with the ZeRO levels, recompute
    settings and microbatches of the plan. Those come first that are likeliest: what the plan takes beyond ``least_ns``
    is mostly communication, which a part inside one node has at the speed of its links, and a single device not at all.
    Of large models, parts that are far from likely are left out. The effort is limited: None does not prove that there
    is no such plan, nor is the one that is found the fastest.

    Args:
        request: the search on all devices.
        result: what it found.
    """
    graph, cluster, precision = request.folded(1).graph, request.cluster, request.precision
    lost_ns = result.objective_ns - least_ns(graph, cluster, precision)
    likeliest: list[tuple[float, tuple[Mesh, ...]]] = []
    for devices in device_parts(cluster):
        part = restricted(cluster, devices)
        least = least_ns(graph, part, precision)
        if least >= result.bound_ns * (1 - _LEAST_GAIN):
            continue
        shapes = (mesh_on(mesh.shape, devices) for mesh in enumerate_meshes(part, _AXES))
        meshes = useful_meshes(cluster, (*request.meshes, *shapes))[len(request.meshes) :]
        likely_ns = least + lost_ns * _share_sent(cluster, part)
        is_far = len(graph.operators) * len(meshes) > _MANY and likely_ns > result.bound_ns * (1 + _FAR)
        if meshes and not is_far:
            likeliest.append((likely_ns, meshes))
    likeliest.sort(key=lambda item: item[0])
    settled = _settled(request, result)
    best: FewerDevices | None = None
    for _, meshes in likeliest[:MAX_SEARCHES]:
        ceiling_ns = result.bound_ns if best is None else best.objective_ns
        try:
            found = search(replace(settled, meshes=meshes, ceiling_ns=ceiling_ns))
        except (InfeasibleError, LimitReachedError, UsageError):
            continue
        if found.objective_ns < ceiling_ns:
            best = FewerDevices(num_devices=found.mesh.num_devices, objective_ns=found.objective_ns)
    return best


def useful_meshes(cluster: Cluster, meshes: Sequence[Mesh]) -> tuple[Mesh, ...]:
    """Meshes without those on parts of the cluster whose plans all devices can follow just as well.

    A plan on the mesh (a, b) is one on (n, a, b) that replicates everything along the first axis. Where that mesh is
    among them and its groups cost the same, the part cannot be faster.

    Args:
        cluster: the whole.
        meshes: those of the whole, and on parts of it.
    """
    whole = {mesh.shape: mesh for mesh in meshes if not mesh.devices and not mesh.order}
    models: dict[tuple[int, ...], CollectiveModel] = {}

    def is_followed(mesh: Mesh) -> bool:
        copies, rest = divmod(cluster.num_devices, mesh.num_devices)
        around = whole.get((copies, *mesh.shape) if mesh.num_devices > 1 else (copies,))
        if rest or around is None or part_of(cluster, mesh).device != cluster.device:
            return False
        if around.shape not in models:
            models[around.shape] = CollectiveModel(cluster, around)
        return mesh.num_devices == 1 or _cost_alike(CollectiveModel(cluster, mesh), models[around.shape])

    return tuple(mesh for mesh in meshes if not mesh.devices or not is_followed(mesh))


def _cost_alike(part: CollectiveModel, around: CollectiveModel) -> bool:
    """Whether all groups of a mesh cost what those of one with a further axis outside do."""
    axes = range(len(part.mesh.axes))
    chosen = itertools.chain.from_iterable(itertools.combinations(axes, size) for size in range(1, len(axes) + 1))
    return all(
        part.choices(kind, group) == around.choices(kind, tuple(axis + 1 for axis in group))
        for group in chosen
        for kind in COLLECTIVE_KINDS
    )


def _settled(request: SearchRequest, result: SearchResult) -> SearchRequest:
    """The request with the settings of the plan that it gave."""
    decisions = result.decisions
    used = {region.recompute for region in decisions.regions}
    levels = {parameter.zero_level for parameter in decisions.parameters}
    return replace(
        request,
        zero_levels=tuple(level for level in request.zero_levels if level in levels) or request.zero_levels,
        recomputes=tuple(setting for setting in request.recomputes if setting in used) or request.recomputes,
        microbatches=decisions.microbatches,
        gap=max(request.gap, _GAP),
    )


def _share_sent(cluster: Cluster, part: Cluster) -> float:
    """What of the communication on all devices is left on a part, roughly."""
    if part.num_devices == 1:
        return 0.0
    if all(level.size == 1 for level in part.levels[1:]) and any(level.size > 1 for level in cluster.levels[1:]):
        network = cluster.levels[1].child_bandwidth_bytes_per_s / cluster.levels[0].size
        return min(1.0, network / part.levels[0].bandwidth_bytes_per_s)
    return 1.0


def search_by_room(request: SearchRequest, limit_bytes: Callable[[Cluster], int | None]) -> SearchResult:
    """Search meshes together whose devices have equal room, where parts of unlike nodes have more than the whole.

    Args:
        request: the search; its own limit is not looked at.
        limit_bytes: the limit on the devices of a cluster.

    Raises:
        InfeasibleError: nothing fits anywhere.
    """
    return search_parts(requests_by_room(request, limit_bytes), search)


def requests_by_room(request: SearchRequest, limit_bytes: Callable[[Cluster], int | None]) -> tuple[SearchRequest, ...]:
    """The parts of a search, each with the meshes whose devices have equal room.

    Args:
        request: the search; its own limit is not looked at.
        limit_bytes: the limit on the devices of a cluster.
    """
    by_room: dict[int, list[Mesh]] = {}
    for mesh in request.meshes:
        by_room.setdefault(part_of(request.cluster, mesh).usable_memory_bytes, []).append(mesh)
    return tuple(
        replace(request_on(request, meshes[0], limit_bytes), meshes=tuple(meshes)) for meshes in by_room.values()
    )


def request_on(request: SearchRequest, mesh: Mesh, limit_bytes: Callable[[Cluster], int | None]) -> SearchRequest:
    """A search on one mesh, with the room that its devices have.

    Args:
        request: the search; its own limit is not looked at.
        mesh: one of its meshes.
        limit_bytes: the limit on the devices of a cluster.
    """
    room = part_of(request.cluster, mesh).usable_memory_bytes
    device = replace(request.cluster.device, memory_bytes=room + request.cluster.reserved_memory_bytes)
    cluster = replace(request.cluster, device=device)
    rooms = stage_rooms(cluster, request.num_stages, limit_bytes)
    return replace(request, cluster=cluster, meshes=(mesh,), limit_bytes=None if rooms is None else sum(rooms))
