"""What a placement takes: all tasks and transfers, played in the order of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from tap_planner.device_placement.problem import Problem

__all__ = ["Timeline", "makespan_ns", "play"]

_Transfer = tuple[int, int, int, int, int]
"""Tensor, source, target, start, end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """When everything happens."""

    makespan_ns: int
    start_ns: np.ndarray
    """int64 [num_tasks]."""
    end_ns: np.ndarray
    """int64 [num_tasks]."""
    busy_ns: tuple[int, ...]
    """By device: what its tasks take."""
    sent_bytes: int
    """Over all links."""
    memory_bytes: tuple[int, ...]
    """By device."""
    transfers: np.ndarray
    """int64 [num_transfers, 5], in the order in which they were asked for: tensor, source, target, start, end."""


def play(problem: Problem, placement: Sequence[int], priority: Sequence[int]) -> Timeline:
    """Play one step by list scheduling.

    A device runs one task at a time; when it is free, that of its ready tasks starts whose priority is least. A task is
    ready when all that it reads lies on its device. When a task ends, each tensor that it made goes at once to every
    other device that reads it, tensors and devices in ascending order: a transfer starts when all of its channels have
    carried what was asked of them before, and keeps all of them until it ends, its latency included. Of tasks that end
    at the same time, those with smaller numbers come first; all that happens at a time is seen by what starts then.

    Args:
        problem: what is placed.
        placement: the device of every group.
        priority: [num_tasks], smaller first; ties: the smaller task first.
    """
    makespan, starts, transfers = _run(problem, placement, priority)
    devices = np.asarray(placement, dtype=np.int64)[problem.group_of]
    durations = problem.task_ns[np.arange(problem.num_tasks), devices]
    start_ns = np.asarray(starts, dtype=np.int64)
    busy = np.zeros(problem.num_devices, dtype=np.int64)
    np.add.at(busy, devices, durations)
    sent = np.asarray(transfers, dtype=np.int64).reshape(-1, 5)
    return Timeline(
        makespan_ns=makespan,
        start_ns=start_ns,
        end_ns=start_ns + durations,
        busy_ns=tuple(busy.tolist()),
        sent_bytes=int(problem.tensor_bytes[sent[:, 0]].sum()),
        memory_bytes=problem.memory_bytes(placement),
        transfers=sent,
    )


def makespan_ns(problem: Problem, placement: Sequence[int], priority: Sequence[int]) -> int:
    """The makespan of :func:`play` alone."""
    return _run(problem, placement, priority)[0]


def _run(problem: Problem, placement: Sequence[int], priority: Sequence[int]) -> tuple[int, list[int], list[_Transfer]]:
    """When the last task ends, the start of every task, and all transfers.

    Events are numbers: the time, and below it a task that ends then or, from ``num_tasks``, a transfer.
    """
    tasks, links = problem.index.tasks, problem.index.links
    num_tasks, num_devices = problem.num_tasks, problem.num_devices
    device_of = [placement[group] for group in tasks.group_of]
    ranked = np.argsort(np.asarray(priority), kind="stable").tolist()
    rank = [0] * num_tasks
    for position, task in enumerate(ranked):
        rank[task] = position
    outputs, readers, duration_ns = tasks.outputs, tasks.readers, tasks.duration_ns
    kind_of, durations, channels = links.kind_of, links.durations_ns, links.channels
    waiting = [len(inputs) for inputs in tasks.inputs]
    free = [0] * links.num_channels
    running = [False] * num_devices
    ready: list[list[int]] = [[] for _ in range(num_devices)]
    starts = [0] * num_tasks
    transfers: list[_Transfer] = []
    awaited: list[list[int]] = []
    shift = (num_tasks + len(readers) * num_devices + 1).bit_length()
    mask = (1 << shift) - 1
    events: list[int] = []
    for task, count in enumerate(waiting):
        if not count:
            heappush(ready[device_of[task]], rank[task])
    wake = [device for device in range(num_devices) if ready[device]]
    now = 0
    while True:
        for device in wake:
            queue = ready[device]
            if queue and not running[device]:
                running[device] = True
                task = ranked[heappop(queue)]
                starts[task] = now
                heappush(events, now + duration_ns[task][device] << shift | task)
        if not events:
            return now, starts, transfers
        wake = []
        now = events[0] >> shift
        while events and events[0] >> shift == now:
            code = heappop(events) & mask
            if code >= num_tasks:
                for reader in awaited[code - num_tasks]:
                    waiting[reader] -= 1
                    if not waiting[reader]:
                        device = device_of[reader]
                        heappush(ready[device], rank[reader])
                        wake.append(device)
                continue
            source = device_of[code]
            running[source] = False
            wake.append(source)
            for tensor in outputs[code]:
                elsewhere: dict[int, list[int]] | None = None
                for reader in readers[tensor]:
                    device = device_of[reader]
                    if device != source:
                        if elsewhere is None:
                            elsewhere = {device: [reader]}
                        elif device in elsewhere:
                            elsewhere[device].append(reader)
                        else:
                            elsewhere[device] = [reader]
                        continue
                    waiting[reader] -= 1
                    if not waiting[reader]:
                        heappush(ready[source], rank[reader])
                if elsewhere is None:
                    continue
                for target in sorted(elsewhere):
                    used = channels[source][target]
                    start = now
                    for channel in used:
                        if free[channel] > start:
                            start = free[channel]
                    end = start + durations[kind_of[source][target]][tensor]
                    for channel in used:
                        free[channel] = end
                    heappush(events, end << shift | num_tasks + len(awaited))
                    awaited.append(elsewhere[target])
                    transfers.append((tensor, source, target, start, end))
