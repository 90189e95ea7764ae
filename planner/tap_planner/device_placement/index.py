"""A problem as plain lists and tuples, for loops that numpy's scalars would slow down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Index", "index_links", "index_tasks"]

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkIndex:
    """What transfers take, by kind of link: links of one latency and bandwidth are one kind."""

    kinds: tuple[tuple[int, int], ...]
    """(latency in ns, bytes per second) of each kind."""
    kind_of: list[list[int]]
    """By source and target device; -1 on the same device."""
    durations_ns: list[list[int]]
    """By kind and tensor."""
    channels: list[list[tuple[int, ...]]]
    """By source and target device: what a transfer occupies, from 0, in the order in which it was given."""
    num_channels: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskIndex:
    """Who makes, who reads, who belongs to whom."""

    group_of: list[int]
    duration_ns: list[list[int]]
    """By task and device."""
    outputs: list[tuple[int, ...]]
    """By task: the tensors that it makes and somebody reads, ascending."""
    inputs: list[tuple[int, ...]]
    """By task: the tensors that it reads, ascending."""
    readers: list[tuple[int, ...]]
    """By tensor: the tasks that read it, ascending."""
    producer: list[int]
    """By tensor."""
    members: list[tuple[int, ...]]
    """By group: its tasks, ascending."""
    successors: list[tuple[int, ...]]
    """By group: those after it in the forward graph of groups, ascending."""
    predecessors: list[tuple[int, ...]]
    """By group: those before it in the forward graph of groups, ascending."""
    received: list[list[tuple[int, int]]]
    """By group: (tensor, its maker) of what forward tasks read of other groups."""
    sent: list[list[tuple[int, tuple[int, ...]]]]
    """By group: (tensor, its readers) of what forward tasks make for forward tasks of other groups."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Index:
    """Both."""

    tasks: TaskIndex
    links: LinkIndex
    shared_of: list[tuple[int, ...]]
    """By group: which entries of ``shared`` it reads."""


def index_links(
    latency_ns: np.ndarray, bytes_per_s: np.ndarray, channels: np.ndarray, tensor_bytes: np.ndarray
) -> LinkIndex:
    """Durations of every tensor on every kind of link.

    Args:
        latency_ns: [num_devices, num_devices].
        bytes_per_s: [num_devices, num_devices].
        channels: [num_devices, num_devices, any], negative: none.
        tensor_bytes: [num_tensors].
    """
    count = len(latency_ns)
    apart = [(a, b) for a in range(count) for b in range(count) if a != b]
    kinds = sorted({(int(latency_ns[a, b]), int(bytes_per_s[a, b])) for a, b in apart})
    place = {kind: index for index, kind in enumerate(kinds)}
    kind_of = [[-1] * count for _ in range(count)]
    for a, b in apart:
        kind_of[a][b] = place[int(latency_ns[a, b]), int(bytes_per_s[a, b])]
    used = sorted({int(c) for a, b in apart for c in channels[a, b] if c >= 0})
    dense = {channel: index for index, channel in enumerate(used)}
    occupied: list[list[tuple[int, ...]]] = [[()] * count for _ in range(count)]
    for a, b in apart:
        occupied[a][b] = tuple(dict.fromkeys(dense[int(c)] for c in channels[a, b] if c >= 0))
    sizes, which = np.unique(tensor_bytes, return_inverse=True)
    durations = [
        np.asarray([link_ns(kind, int(size)) for size in sizes], dtype=np.int64)[which].tolist() for kind in kinds
    ]
    return LinkIndex(
        kinds=tuple(kinds), kind_of=kind_of, durations_ns=durations, channels=occupied, num_channels=len(used)
    )


def link_ns(kind: tuple[int, int], num_bytes: int) -> int:
    """Latency and, rounded up, the time of the bytes."""
    latency_ns, bytes_per_s = kind
    return latency_ns + -(-num_bytes * _NS_PER_S // bytes_per_s)


def index_tasks(
    task_ns: np.ndarray,
    group_of: np.ndarray,
    is_backward: np.ndarray,
    producer: np.ndarray,
    edges: Sequence[tuple[int, int]],
    num_groups: int,
) -> TaskIndex:
    """Adjacency of tasks and of groups.

    Args:
        task_ns: [num_tasks, num_devices].
        group_of: [num_tasks].
        is_backward: [num_tasks].
        producer: [num_tensors].
        edges: distinct (tensor, task that reads it), ascending.
        num_groups: how many.
    """
    groups, backward, makers = group_of.tolist(), is_backward.tolist(), producer.tolist()
    outputs: list[list[int]] = [[] for _ in groups]
    inputs: list[list[int]] = [[] for _ in groups]
    readers: list[list[int]] = [[] for _ in makers]
    members: list[list[int]] = [[] for _ in range(num_groups)]
    after: list[set[int]] = [set() for _ in range(num_groups)]
    before: list[set[int]] = [set() for _ in range(num_groups)]
    for task, group in enumerate(groups):
        members[group].append(task)
    for tensor, reader in edges:
        inputs[reader].append(tensor)
        readers[tensor].append(reader)
        maker = makers[tensor]
        a, b = groups[maker], groups[reader]
        if a < b and not backward[maker] and not backward[reader]:
            after[a].add(b)
            before[b].add(a)
    for tensor, maker in enumerate(makers):
        if readers[tensor]:
            outputs[maker].append(tensor)
    received: list[list[tuple[int, int]]] = [[] for _ in range(num_groups)]
    sent: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(num_groups)]
    for tensor, maker in enumerate(makers):
        if backward[maker]:
            continue
        others = {groups[reader] for reader in readers[tensor] if not backward[reader]}
        others.discard(groups[maker])
        if others:
            sent[groups[maker]].append((tensor, tuple(sorted(others))))
        for other in others:
            received[other].append((tensor, groups[maker]))
    return TaskIndex(
        group_of=groups,
        duration_ns=task_ns.tolist(),
        outputs=[tuple(found) for found in outputs],
        inputs=[tuple(found) for found in inputs],
        readers=[tuple(found) for found in readers],
        producer=makers,
        members=[tuple(found) for found in members],
        successors=[tuple(sorted(found)) for found in after],
        predecessors=[tuple(sorted(found)) for found in before],
        received=received,
        sent=sent,
    )
