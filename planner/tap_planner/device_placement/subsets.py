"""Fewer devices than there are: sets on which placements are tried as well.

A placer that may use every device does not always place better than one that may not: earliest-finish scatters groups
over devices, each of which finishes them early, and pays with transfers later. A placement on some of the devices is a
placement of the whole problem.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tap_planner.device_placement.problem import Problem

__all__ = ["device_subsets"]


def device_subsets(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Sets of some of the devices, at least two of them, each a part of the one before it.

    Where devices are not equally fast, first without the slowest, then without the next slowest and so on; then of the
    fastest ones half (rounded up), a quarter and so on, those that are nearest to each other: of a node before those of
    several nodes, among equals those with the smallest numbers. Devices are as fast as all tasks together are on them.
    Sets whose devices have not the memory for all groups are left out.

    So of 2, 4 or 8 devices that are alike the sets of fewer devices are among those of more.
    """
    totals = problem.task_ns.sum(axis=0).tolist()
    devices = tuple(range(problem.num_devices))
    found: list[tuple[int, ...]] = []
    for slowest in sorted(set(totals), reverse=True)[:-1]:
        devices = tuple(device for device in devices if totals[device] < slowest)
        found.append(devices)
    while len(devices) > 2:
        devices = _nearest(problem, devices, -(-len(devices) // 2))
        found.append(devices)
    return tuple(devices for devices in found if len(devices) > 1 and _have_room(problem, devices))


def _nearest(problem: Problem, devices: Sequence[int], count: int) -> tuple[int, ...]:
    """One of the devices and those to which all tensors go fastest, there and back."""
    links = problem.index.links
    total_ns = [sum(durations) for durations in links.durations_ns]

    def way_ns(one: int, other: int) -> int:
        if one == other:
            return 0
        return total_ns[links.kind_of[one][other]] + total_ns[links.kind_of[other][one]]

    best: tuple[int, list[int]] | None = None
    for centre in devices:
        near = sorted(devices, key=lambda device, centre=centre: (way_ns(centre, device), device != centre, device))
        ways_ns = sum(way_ns(centre, device) for device in near[:count])
        if best is None or ways_ns < best[0]:
            best = ways_ns, near[:count]
    assert best is not None
    return tuple(sorted(best[1]))


def _have_room(problem: Problem, devices: Sequence[int]) -> bool:
    """Whether devices have together the memory for all groups that may lie on any of them."""
    inside = np.flatnonzero(problem.allowed[:, list(devices)].any(axis=1))
    needed = int(problem.fixed_bytes[inside].sum())
    known = frozenset(inside.tolist())
    needed += sum(shared.num_bytes for shared in problem.shared if shared.groups and known.issuperset(shared.groups))
    return needed <= sum(problem.capacity_bytes[list(devices)].tolist())
