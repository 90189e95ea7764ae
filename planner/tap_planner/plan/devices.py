"""What a plan says of its devices: the kinds that must hold it, and those that have nothing to do."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tap_planner.plan.decisions import Decisions, ParameterDecision
from tap_planner.plan.document import IdleDevices, PlanDocument
from tap_planner.sharding import Placements, dim_segments


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Devices that are alike."""

    group: str
    """Node group; empty where all nodes are alike."""
    device: str
    num_devices: int
    memory_bytes: int
    limit_bytes: int
    """What a plan may use: the memory without what is reserved, or less where ``--max-memory`` says so."""


def device_kinds(document: PlanDocument) -> tuple[DeviceKind, ...]:
    """The kinds of device that a plan uses, in rank order.

    Without pipeline stages every device holds equal parts (uneven ones at most as much), so that the memory of a plan
    must fit each kind.
    """
    cluster = document.cluster
    groups = cluster.get("node_groups")
    if isinstance(groups, Sequence) and not isinstance(groups, str):
        records = [group for group in groups if isinstance(group, Mapping)]
        used = _used_of_groups(document, records)
        return tuple(
            _kind(document, group, str(group.get("name", "")), count)
            for group, count in zip(records, used, strict=True)
            if count
        )
    return (_kind(document, cluster, "", len(document.mesh.ranks)),)


def kinds_of_stages(document: PlanDocument) -> tuple[DeviceKind, ...]:
    """Per pipeline stage its kind of device; of several the one with the least memory."""
    groups = document.cluster.get("node_groups")
    stages = document.pipeline.num_stages
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        return device_kinds(document) * stages
    records = [group for group in groups if isinstance(group, Mapping)]
    kinds = [_kind(document, group, str(group.get("name", "")), 0) for group in records]
    of_rank, each = _groups_of_ranks(document, records), len(document.mesh.ranks) // stages
    return tuple(
        min((kinds[group] for group in of_rank[stage * each : (stage + 1) * each]), key=lambda kind: kind.limit_bytes)
        for stage in range(stages)
    )


def _groups_of_ranks(document: PlanDocument, groups: Sequence[Mapping[str, object]]) -> list[int]:
    """The node group of each rank; ranks say on which node they lie, nodes count through groups."""
    ends = list(itertools.accumulate(_count(group, "nodes") for group in groups))
    return [bisect.bisect_right(ends, place[0]) for place in document.mesh.ranks]


def _used_of_groups(document: PlanDocument, groups: Sequence[Mapping[str, object]]) -> list[int]:
    """Devices of each node group that the mesh uses."""
    of_ranks = Counter(_groups_of_ranks(document, groups))
    return [of_ranks[group] for group in range(len(groups))]


def _kind(document: PlanDocument, owner: Mapping[str, object], group: str, num_devices: int) -> DeviceKind:
    device = owner.get("device")
    record: Mapping[str, object] = device if isinstance(device, Mapping) else {}
    memory = _count(record, "memory_bytes")
    usable = memory - _count(document.cluster, "reserved_memory_bytes")
    chosen = document.options.max_memory_bytes
    return DeviceKind(
        group=group,
        device=str(record.get("name", "")),
        num_devices=num_devices,
        memory_bytes=memory,
        limit_bytes=min(usable, chosen) if isinstance(chosen, int) else usable,
    )


def _count(record: Mapping[str, object], key: str) -> int:
    value = record.get(key)
    return value if isinstance(value, int) else 0


def idle_devices(decisions: Decisions, shapes: Mapping[str, tuple[int, ...]]) -> tuple[IdleDevices, ...]:
    """Devices that do nothing which another one does not do as well.

    Along an axis the parts of a dim of n over m ranks are ``ceil(n / m)`` long, so that the last ranks may get none.
    Ranks beyond the last part of whatever is split along an axis hold empty parts or repeat the work of others.

    Args:
        decisions: the plan.
        shapes: tensor name to global shape (of one microbatch).
    """
    mesh_shape = decisions.mesh_shape
    parts = [1] * len(mesh_shape)
    for shape, placements in _split(decisions, shapes):
        for axis in range(len(mesh_shape)):
            parts[axis] = max(parts[axis], _parts(shape, placements, mesh_shape, axis))
    for parameter in decisions.parameters:
        _count_shards(parameter, mesh_shape, parts)
    return tuple(
        IdleDevices(axis=axis.name, first=used, end=axis.size)
        for axis, used in zip(decisions.axes, parts, strict=True)
        if used < axis.size
    )


def _split(decisions: Decisions, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], Placements]]:
    """(shape, placements) of everything that is held."""
    seen: set[tuple[tuple[int, ...], Placements]] = set()
    for operator in decisions.operators:
        operands = ((operand.tensor, operand.placement) for operand in operator.inputs if operand is not None)
        outputs = ((output.tensor, output.placement) for output in operator.outputs)
        for tensor, placements in (*operands, *outputs):
            item = (shapes[tensor], placements)
            if item not in seen:
                seen.add(item)
                yield item
    for parameter in decisions.parameters:
        yield parameter.shape, parameter.placement


def _parts(shape: tuple[int, ...], placements: Placements, mesh_shape: tuple[int, ...], axis: int) -> int:
    """Number of coordinates along an axis that hold something of a tensor."""
    placement = placements[axis]
    if not placement.is_shard:
        return 1
    for segment in dim_segments(shape[placement.dim], placements, placement.dim, mesh_shape) or ():
        if axis in segment.axes:
            length = segment.size
            for outer in segment.axes[: segment.axes.index(axis)]:
                length = -(-length // mesh_shape[outer])
            return _used(length, mesh_shape[axis])
    return 1


def _used(length: int, ranks: int) -> int:
    """Ranks that get a part of ``length``."""
    return -(-length // -(-length // ranks)) if length else 1


def _count_shards(parameter: ParameterDecision, mesh_shape: tuple[int, ...], parts: list[int]) -> None:
    """ZeRO shards of a parameter's elements are held by ranks that may have nothing else."""
    if not parameter.zero_level:
        return
    shards = math.prod(mesh_shape[axis] for axis in parameter.zero_axes)
    if math.prod(parameter.shape) >= shards:
        for axis in parameter.zero_axes:
            parts[axis] = mesh_shape[axis]
