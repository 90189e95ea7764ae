"""The shortest schedule of all, by trying every sequence of tasks and transfers on every placement."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tap_planner.device_placement import Problem

Operation = tuple[int, int]
"""(Task, -1), or (tensor, target)."""


def fitting(problem: Problem) -> Iterator[tuple[int, ...]]:
    """All placements that fit and are allowed."""
    for placement in itertools.product(range(problem.num_devices), repeat=problem.num_groups):
        if problem.is_allowed(placement) and not any(problem.overshoot_bytes(placement)):
            yield placement


def shortest_ns(problem: Problem) -> int | None:
    """Over all placements and schedules; None if nothing fits.

    Of schedules in which operations wait for predecessors and for resources that carry one at a time, some shortest one
    comes of scheduling the operations in some sequence, each as early as what was scheduled before it permits.
    """
    best: int | None = None
    for placement in fitting(problem):
        best = _shortest_of(problem, placement, best)
    return best


def _shortest_of(problem: Problem, placement: tuple[int, ...], best: int | None) -> int | None:
    duration, resources, before = _operations(problem, placement)
    ends: dict[Operation, int] = {}
    free: dict[tuple[str, int], int] = {}

    def extend(latest: int) -> None:
        nonlocal best
        if best is not None and latest >= best:
            return
        if len(ends) == len(duration):
            best = latest
            return
        for operation in duration:
            if operation in ends or any(other not in ends for other in before[operation]):
                continue
            start = max((ends[other] for other in before[operation]), default=0)
            start = max([start, *(free.get(resource, 0) for resource in resources[operation])])
            kept = {resource: free.get(resource, 0) for resource in resources[operation]}
            ends[operation] = start + duration[operation]
            free.update(dict.fromkeys(resources[operation], ends[operation]))
            extend(max(latest, ends[operation]))
            free.update(kept)
            del ends[operation]

    extend(0)
    return best


def _operations(
    problem: Problem, placement: tuple[int, ...]
) -> tuple[dict[Operation, int], dict[Operation, list[tuple[str, int]]], dict[Operation, set[Operation]]]:
    duration: dict[Operation, int] = {}
    resources: dict[Operation, list[tuple[str, int]]] = {}
    before: dict[Operation, set[Operation]] = {}
    for task, group in enumerate(problem.group_of.tolist()):
        operation = (task, -1)
        duration[operation] = int(problem.task_ns[task, placement[group]])
        resources[operation] = [("device", placement[group])]
        before[operation] = set()
    for tensor, reader in zip(problem.edge_tensor.tolist(), problem.edge_consumer.tolist(), strict=True):
        maker = int(problem.tensor_producer[tensor])
        source, target = placement[problem.group_of[maker]], placement[problem.group_of[reader]]
        if source == target:
            before[reader, -1].add((maker, -1))
            continue
        send = (tensor, target)
        duration[send] = problem.transfer_ns(tensor, source, target)
        resources[send] = [("channel", channel) for channel in problem.links.channels[source, target].tolist()]
        before[send] = {(maker, -1)}
        before[reader, -1].add(send)
    return duration, resources, before
