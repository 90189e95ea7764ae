"""The segments of an order on a sequence of devices: what they take, hold, receive and send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from tap_planner.device_placement.problem import MOST, Problem
from tap_planner.device_placement.traffic import Steps, Traffic, held_steps, traffic_steps

__all__ = ["FAR", "FAR_ENOUGH", "Cut", "Segments"]

FAR = 1 << 60
FAR_ENOUGH = 1 << 59
"""No sum of ns comes near; sums of a far value with others stay beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A way to cut an order."""

    objective_ns: int
    starts: tuple[tuple[int, int], ...]
    """(Device, first position) of every segment, in the order's sequence."""


class Segments:
    """Segments of one order, dealt out to one sequence of devices.

    Args:
        problem: what is placed.
        traffic: of the problem.
        order: all groups.
        devices: segments go to them in this sequence, any device may get none.
    """

    def __init__(self, problem: Problem, traffic: Traffic, order: Sequence[int], devices: Sequence[int]) -> None:
        self.devices = tuple(devices)
        self.count = len(order)
        self.capacity: list[int] = problem.capacity_bytes[list(devices)].tolist()
        groups = np.asarray(order, dtype=np.int64)
        position = np.empty_like(groups)
        position[groups] = np.arange(self.count)
        own = np.cumsum(problem.group_ns()[groups][:, list(devices)].T, axis=1)
        self.compute_ns = np.concatenate([np.zeros((len(devices), 1), dtype=np.int64), own], axis=1)
        # [num_devices, num_groups + 1]: of all groups before a position
        self.compute_of: list[list[int]] = self.compute_ns.tolist()
        self.rest_ns = _rest(self.compute_ns)
        self.devices_after = np.arange(len(devices), 0, -1)  # [num_devices]: itself and those after it
        self.room_after = _room(self.capacity)  # [num_devices]: the same
        self.held = [0, *np.cumsum(problem.fixed_bytes[groups]).tolist()]
        self.left_bytes = self.held[-1] - np.asarray(self.held)  # [num_groups + 1]: of groups from a position on
        self.shared = held_steps(problem, position) if problem.shared else None
        self.whole_bytes = self.held[-1] + sum(shared.num_bytes for shared in problem.shared if shared.groups)
        allowed = problem.allowed[groups][:, list(devices)]  # [num_groups, num_devices]
        self.refused = [np.flatnonzero(~row).tolist() for row in allowed] if not allowed.all() else None
        self.usable: list[bool] = np.all(allowed, axis=0).tolist()
        self.total_row, self.busy_row, self.steps = _rows(problem, traffic, position, self.devices)

    def single(self) -> Cut | None:
        """Everything on one device, the best one; None where that does not fit."""
        fitting = [
            (self.compute_of[place][-1], place)
            for place, capacity in enumerate(self.capacity)
            if self.whole_bytes <= capacity and self.usable[place]
        ]
        if not fitting:
            return None
        objective_ns, place = min(fitting)
        return Cut(objective_ns=objective_ns, starts=((self.devices[place], 0),))

    def shortest(self) -> int:
        """Below this no longest segment is."""
        least = np.diff(self.compute_ns, axis=1).min(axis=0)
        return max(int(least.max()), int(least.sum()) // len(self.devices))


def _room(capacity: Sequence[int]) -> np.ndarray:
    """[num_devices]: of each device and those after it, together; what is never reached is cut off."""
    together = accumulate(reversed(capacity), lambda sofar, more: min(MOST, sofar + more))
    return np.asarray([min(MOST, room) for room in together], dtype=np.int64)[::-1]


def _rest(compute_ns: np.ndarray) -> np.ndarray:
    """[num_groups + 1]: what groups from a position on take at least."""
    least = np.diff(compute_ns, axis=1).min(axis=0)
    return np.concatenate([np.cumsum(least[::-1])[::-1], [0]])


def _rows(
    problem: Problem, traffic: Traffic, position: np.ndarray, devices: tuple[int, ...]
) -> tuple[list[int], list[int], Steps]:
    """By device, the row of what it receives and that of what it receives and sends; and the rows' steps.

    What a device receives is priced on the link from the device before it in the sequence (the first: from the second),
    what it sends on that to the device after it (the last: to the one before).
    """
    num_kinds = len(problem.index.links.kinds)
    rows: dict[tuple[int, int], int] = {}
    total_row: list[int] = []
    busy_row: list[int] = []
    for place, device in enumerate(devices):
        if len(devices) == 1:
            incoming = outgoing = -1
        else:
            kind_of = problem.index.links.kind_of
            incoming = kind_of[devices[place - 1] if place else devices[1]][device]
            outgoing = kind_of[device][devices[place + 1] if place + 1 < len(devices) else devices[place - 1]]
        total_row.append(rows.setdefault((incoming, -1), len(rows)))
        busy_row.append(rows.setdefault((incoming, outgoing), len(rows)))
    received, sent = np.zeros((2, len(rows), num_kinds), dtype=bool)
    for (incoming, outgoing), row in rows.items():
        if incoming >= 0:
            received[row, incoming] = True
        if outgoing >= 0:
            sent[row, outgoing] = True
    return total_row, busy_row, traffic_steps(traffic, position, received, sent)
