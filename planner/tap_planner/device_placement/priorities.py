"""Which ready task a device runs first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tap_planner.device_placement.problem import Problem

__all__ = ["order_priority", "rank_priority", "upward_rank"]


def order_priority(problem: Problem, order: Sequence[int]) -> list[int]:
    """Forward tasks as their groups are listed; then backward tasks, as their groups are listed backwards.

    Args:
        problem: what is placed.
        order: all groups.

    Returns:
        By task, smaller first.
    """
    position = np.empty(problem.num_groups, dtype=np.int64)
    position[np.asarray(order, dtype=np.int64)] = np.arange(problem.num_groups)
    place = position[problem.group_of]
    return np.where(problem.is_backward, 2 * problem.num_groups - place, place).tolist()


def rank_priority(
    problem: Problem, placement: Sequence[int] | None = None, devices: Sequence[int] | None = None
) -> list[int]:
    """Tasks by descending upward rank: what is longest from the end comes first.

    Args:
        problem: what is placed.
        placement: with it, times are those of the placement; without, means over devices and links.
        devices: of which means are taken; None: of all.

    Returns:
        By task, smaller first.
    """
    return [-rank for rank in upward_rank(problem, placement, devices)]


def upward_rank(
    problem: Problem, placement: Sequence[int] | None = None, devices: Sequence[int] | None = None
) -> list[int]:
    """The longest way from the start of each task to the end of the step, with transfers, without waiting.

    Topcuoglu et al. 2002, equation 6, with means rounded down.
    """
    tasks = problem.index.tasks
    if placement is None:
        among = list(range(problem.num_devices) if devices is None else devices)
        duration_ns, device_of = (problem.task_ns[:, among].sum(axis=1) // len(among)).tolist(), None
        mean = _mean_transfers(problem, among)
    else:
        device_of = [placement[group] for group in tasks.group_of]
        duration_ns = problem.task_ns[np.arange(problem.num_tasks), device_of].tolist()
        mean = []
    kind_of, durations = problem.index.links.kind_of, problem.index.links.durations_ns
    rank = [0] * problem.num_tasks
    for task in range(problem.num_tasks - 1, -1, -1):
        longest = 0
        for tensor in tasks.outputs[task]:
            for reader in tasks.readers[tensor]:
                way = rank[reader]
                if device_of is None:
                    way += mean[tensor]
                elif device_of[task] != device_of[reader]:
                    way += durations[kind_of[device_of[task]][device_of[reader]]][tensor]
                if way > longest:
                    longest = way
        rank[task] = duration_ns[task] + longest
    return rank


def _mean_transfers(problem: Problem, devices: Sequence[int]) -> list[int]:
    """By tensor, the mean over all pairs of two of the devices, rounded down."""
    links = problem.index.links
    pairs = [links.kind_of[source][target] for source in devices for target in devices if source != target]
    total = np.zeros(len(problem.tensor_bytes), dtype=np.int64)
    for kind in range(len(links.kinds)):
        total += pairs.count(kind) * np.asarray(links.durations_ns[kind], dtype=np.int64)
    return (total // max(len(pairs), 1)).tolist()
