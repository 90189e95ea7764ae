"""A lower bound of every placement's makespan that needs no search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tap_planner.device_placement.problem import Problem
from tap_planner.device_placement.sequences import kinds_of_devices

__all__ = ["critical_path_ns", "lower_bound_ns", "shared_work_ns"]

_MOVES = 160
"""Of weights, for unlike devices."""
_FIRST_STEP = 300
"""Thousandths of a weight by which it changes at most."""
_SHORTER = 965
"""Thousandths of a step that the next one has."""
_ONE = 1 << 20
"""Weights are integers about this size."""


def lower_bound_ns(problem: Problem) -> int:
    """No schedule of any placement is shorter than this: the larger of two bounds.

    Memory and transfers do not count.
    """
    return max(critical_path_ns(problem), shared_work_ns(problem))


def critical_path_ns(problem: Problem) -> int:
    """The longest way through the tasks, each on the fastest device that its group is allowed on."""
    usable = np.where(problem.allowed[problem.group_of], problem.task_ns, np.iinfo(np.int64).max)
    fastest, tasks = usable.min(axis=1).tolist(), problem.index.tasks
    end = [0] * problem.num_tasks
    for task in range(problem.num_tasks):
        end[task] = fastest[task] + max((end[tasks.producer[tensor]] for tensor in tasks.inputs[task]), default=0)
    return max(end)


def shared_work_ns(problem: Problem) -> int:
    """All work shared out over the devices as if groups could be divided.

    For any weights of devices, the makespan times the sum of weights is at least the sum over groups of the least
    weighted time on a device that it is allowed on: a bound whatever the weights, and with the best weights that of the
    linear program. Weights are moved toward the devices that get most, a fixed number of times, in whole numbers.
    """
    group_ns = problem.group_ns()
    loads = [max(1, int(load)) for load in group_ns.sum(axis=0)]
    fastest = min(loads)
    best, _ = _weighted(problem, group_ns, [_ONE] * len(loads))
    if len(set(kinds_of_devices(problem))) == 1:
        return best  # equal weights are the best ones
    weights = [max(1, _ONE * fastest // load) for load in loads]
    step = _FIRST_STEP
    for _ in range(_MOVES):
        bound, got = _weighted(problem, group_ns, weights)
        best = max(best, bound)
        weights = _moved(weights, got, step)
        step = step * _SHORTER // 1000
    return best


def _weighted(problem: Problem, group_ns: np.ndarray, weights: Sequence[int]) -> tuple[int, list[int]]:
    """The bound of weights, and what each device gets where ties go to the smallest.

    Weights are at most 2 ** 24 and sums of ns below 2 ** 56; single groups are multiplied as Python's numbers if large.
    """
    large = int(group_ns.max(initial=0)) >= 1 << 38
    times = group_ns.astype(object) if large else group_ns
    weighted = times * np.asarray(weights, dtype=object if large else np.int64)
    weighted = np.where(problem.allowed, weighted, (1 << 90) if large else (1 << 62))
    where = weighted.argmin(axis=1)
    rows = np.arange(len(where))
    total = sum(weighted[rows, where].tolist())
    got = np.zeros(len(weights), dtype=np.int64)
    np.add.at(got, where, group_ns[rows, where])
    return -(-total // sum(weights)), got.tolist()


def _moved(weights: Sequence[int], got: Sequence[int], step: int) -> list[int]:
    """More weight on devices that get more than the mean: up to ``step`` thousandths of it, or as much less."""
    mean = max(1, sum(got) // len(got))
    shares = [max(-1000, min(1000, 1000 * (load - mean) // mean)) for load in got]
    return [
        max(1, min(_ONE << 4, weight + weight * share * step // 1_000_000))
        for weight, share in zip(weights, shares, strict=True)
    ]
