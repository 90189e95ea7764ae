"""Fewer devices than there are: which parts of a cluster are worth a look, and a cluster of only those devices.

A part holds equally many devices of each node of a kind that it touches: so many devices of the first node, or so many
whole nodes (racks, ...) from the first on. Of unlike nodes the slowest kind is left out first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tap_planner.cluster.types import Cluster, Level, NodeGroup, slowest_device
from tap_planner.errors import ClusterError

Devices = tuple[int, ...]
"""Ranks of devices in the whole cluster, ascending."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First and last place, both included, outermost level first: all places between them in every coordinate."""

_PACE_DTYPES = ("bfloat16", "float16", "float32", "float64")


def friendly_counts(size: int) -> tuple[int, ...]:
    """Counts up to ``size`` by which batches and dims usually divide: its divisors, powers of two, thrice those."""
    powers = [1 << exponent for exponent in range(size.bit_length())]
    counts = {count for power in powers for count in (power, 3 * power) if count <= size}
    for divisor in range(1, math.isqrt(size) + 1):
        if size % divisor == 0:
            counts |= {divisor, size // divisor}
    return tuple(sorted(counts))


def device_parts(cluster: Cluster) -> tuple[Devices, ...]:
    """The parts of a cluster that ``--allow-idle`` adds to the space, without the whole; most devices first.

    Counts of devices in one node and of whole nodes are ``friendly_counts``. Parts of several nodes use whole nodes;
    where a node's own count is unfriendly (7), also the nearest friendly ones below it (6 and 4).
    """
    parts = _unlike_parts(cluster) if cluster.node_groups else _equal_parts(cluster)
    found = dict.fromkeys(part for part in parts if len(part) < cluster.num_devices)
    return tuple(sorted(found, key=lambda part: (-len(part), part)))


def first_part(cluster: Cluster, count: int) -> Devices | None:
    """A part of ``count`` devices on as few nodes as can be; None where nodes cannot hold equally many."""
    if cluster.node_groups:
        return _first_unlike(cluster, count)
    sizes = [level.size for level in cluster.levels]
    for inner in range(min(sizes[0], count), 0, -1):
        outer = _outer_sizes(count // inner, sizes[1:]) if count % inner == 0 else None
        if outer is not None:
            return _box_devices(cluster, (inner, *outer))
    return None


def restricted(cluster: Cluster, devices: Sequence[int]) -> Cluster:
    """The cluster as some of its devices see it: links of a node serve those of its devices that are used.

    Args:
        cluster: the whole.
        devices: ranks in the cluster, ascending; all nodes of a kind must hold equally many.

    Raises:
        ClusterError: the devices are not such a part.
    """
    if not devices or any(second <= first for first, second in itertools.pairwise(devices)):
        raise ClusterError("the devices of a mesh are not listed in ascending order, each once")
    if devices[-1] >= cluster.num_devices:
        raise ClusterError(f"device {devices[-1]} of a mesh, but the cluster has {cluster.num_devices}")
    if len(devices) == cluster.num_devices:
        return cluster
    if cluster.node_groups:
        return _restricted_unlike(cluster, devices)
    ranks, stride, sizes = np.array(devices, dtype=np.int64), 1, []
    for level in cluster.levels:
        sizes.append(len(np.unique(ranks // stride % level.size)))
        stride *= level.size
    if math.prod(sizes) != len(devices):
        raise ClusterError(f"{len(devices)} devices of a mesh do not lie evenly on the nodes of {cluster.name}")
    levels = tuple(_smaller(level, size) for level, size in zip(cluster.levels, sizes, strict=True))
    return replace(cluster, levels=levels)


def unused_boxes(cluster: Cluster, devices: Sequence[int]) -> tuple[Box, ...]:
    """The places of the devices that are not listed, as few boxes."""
    used = set(devices)
    boxes: list[Box] = [(place, place) for rank, place in enumerate(cluster.places()) if rank not in used]
    for dim in range(len(cluster.levels) - 1, -1, -1):
        boxes = _merged(boxes, dim)
    return tuple(boxes)


def _merged(boxes: list[Box], dim: int) -> list[Box]:
    """Neighbours along a coordinate that are alike in all others become one box."""
    result: list[Box] = []
    for first, last in boxes:
        if result:
            (before_first, before_last) = result[-1]
            alike = all(
                before_first[other] == first[other] and before_last[other] == last[other]
                for other in range(len(first))
                if other != dim
            )
            if alike and before_last[dim] + 1 == first[dim]:
                result[-1] = (before_first, last)
                continue
        result.append((first, last))
    return result


# -- equal nodes -------------------------------------------------------------------------------------------------


def _equal_parts(cluster: Cluster) -> Iterator[Devices]:
    sizes = tuple(level.size for level in cluster.levels)
    outside = (1,) * (len(sizes) - 1)
    for count in friendly_counts(sizes[0]):
        yield _box_devices(cluster, (count, *outside))
    for inner in (sizes[0], *_trimmed(sizes[0])):
        for level in range(1, len(sizes)):
            for count in friendly_counts(sizes[level])[1:]:
                yield _box_devices(cluster, (inner, *sizes[1:level], count, *outside[level:]))


def _trimmed(size: int) -> tuple[int, ...]:
    """The nearest friendly counts below an unfriendly one."""
    odd = size // (size & -size)
    return () if odd in (1, 3) else (1 << (size.bit_length() - 1), 3 << ((size // 3).bit_length() - 1))


def _box_devices(cluster: Cluster, sizes: Sequence[int]) -> Devices:
    """The first ``sizes`` (inner to outer) children at every level."""
    ranks = np.zeros(1, dtype=np.int64)
    stride = 1
    for level, size in zip(cluster.levels, sizes, strict=True):
        ranks = (np.arange(size, dtype=np.int64)[:, None] * stride + ranks).ravel()
        stride *= level.size
    return tuple(ranks.tolist())


def _outer_sizes(count: int, sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Nodes as a box of whole domains; None where they do not fill domains evenly."""
    if not sizes:
        return () if count == 1 else None
    if count <= sizes[0]:
        return (count, *(1 for _ in sizes[1:]))
    outer = _outer_sizes(count // sizes[0], sizes[1:]) if count % sizes[0] == 0 else None
    return None if outer is None else (sizes[0], *outer)


def _smaller(level: Level, size: int) -> Level:
    """A level of fewer children; on a mesh each keeps its links to those that are left."""
    bandwidth = level.bandwidth_bytes_per_s
    if level.kind == "mesh" and 1 < size < level.size:
        bandwidth = bandwidth * (size - 1) // (level.size - 1)
    return replace(level, size=size, bandwidth_bytes_per_s=bandwidth)


# -- unlike nodes ------------------------------------------------------------------------------------------------


def _pace(group: NodeGroup) -> tuple[int, int]:
    """What orders the kinds: matrix products, then memory."""
    device = group.device
    return (
        next((rate for dtype in _PACE_DTYPES if (rate := device.matrix_rate(dtype)) is not None), 0),
        device.memory_bandwidth_bytes_per_s * device.memory_efficiency_permille,
    )


def _fastest_first(cluster: Cluster) -> list[int]:
    groups = cluster.node_groups
    return sorted(range(len(groups)), key=lambda index: (*(-pace for pace in _pace(groups[index])), index))


def _group_devices(cluster: Cluster, used: dict[int, tuple[int, int]]) -> Devices:
    """The first nodes of some groups; ``used`` holds (nodes, devices of each) by group."""
    ranks: list[int] = []
    start = 0
    for index, group in enumerate(cluster.node_groups):
        nodes, per_node = used.get(index, (0, 0))
        ranks.extend(start + node * group.devices_per_node + d for node in range(nodes) for d in range(per_node))
        start += group.num_devices
    return tuple(ranks)


def _unlike_parts(cluster: Cluster) -> Iterator[Devices]:
    groups = cluster.node_groups
    order = _fastest_first(cluster)
    fastest = groups[order[0]]
    for count in friendly_counts(fastest.devices_per_node):
        yield _group_devices(cluster, {order[0]: (1, count)})
    whole: dict[int, tuple[int, int]] = {}
    for index in order:
        for count in friendly_counts(groups[index].nodes):
            yield _group_devices(cluster, {**whole, index: (count, groups[index].devices_per_node)})
        whole[index] = (groups[index].nodes, groups[index].devices_per_node)
    for trimmed in _trimmed(fastest.devices_per_node):
        for count in friendly_counts(fastest.nodes)[1:]:
            yield _group_devices(cluster, {order[0]: (count, trimmed)})


def _first_unlike(cluster: Cluster, count: int) -> Devices | None:
    groups = cluster.node_groups
    order = _fastest_first(cluster)
    if count <= groups[order[0]].devices_per_node:
        return _group_devices(cluster, {order[0]: (1, count)})
    used: dict[int, tuple[int, int]] = {}
    left = count
    for index in order:
        group = groups[index]
        nodes = min(left // group.devices_per_node, group.nodes)
        if nodes:
            used[index] = (nodes, group.devices_per_node)
        left -= nodes * group.devices_per_node
        if nodes < group.nodes:
            break
    return None if left else _group_devices(cluster, used)


def _restricted_unlike(cluster: Cluster, devices: Sequence[int]) -> Cluster:
    node = cluster.node_of_ranks()[np.array(devices, dtype=np.int64)]
    used_of_node = np.bincount(node, minlength=sum(group.nodes for group in cluster.node_groups))
    groups: list[NodeGroup] = []
    start = 0
    for group in cluster.node_groups:
        used = used_of_node[start : start + group.nodes]
        start += group.nodes
        sizes = set(used[used > 0].tolist())
        if len(sizes) > 1:
            raise ClusterError(f"the devices of a mesh do not lie evenly on the nodes of {group.name}")
        for size in sizes:
            intra = _smaller(group.intra_node, size)
            groups.append(replace(group, nodes=int((used > 0).sum()), devices_per_node=size, intra_node=intra))
    nodes = sum(group.nodes for group in groups)
    network = replace(cluster.levels[1], size=nodes, nics=min(group.nics_per_node for group in groups))
    device = slowest_device([group.device for group in groups])
    if len(groups) == 1:
        return replace(cluster, device=device, levels=(groups[0].intra_node, network), node_groups=())
    inside = replace(cluster.levels[0], size=max(group.devices_per_node for group in groups))
    return replace(cluster, device=device, levels=(inside, network), node_groups=tuple(groups))
