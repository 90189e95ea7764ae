"""Greedy placement: each group in turn goes where it would finish first.

After the list scheduling of HEFT (Topcuoglu, Hariri, Wu, "Performance-Effective and Low-Complexity Task Scheduling for
Heterogeneous Computing", 2002), section 5, without insertion into gaps, and with links that carry one transfer at a
time. Groups are taken in any order; what is not placed yet does not count:

- A tensor of a group that is not placed yet is there from the beginning.
- What a group makes for groups that are placed on other devices already (in orders that are not topological) is sent
  from it after it has finished, one after the other, and the last of it counts as its end.

In training, backward is taken for forward's mirror image: a group takes the time of all of its tasks, and what a
forward task reads from another device takes twice its time, as a gradient comes back. So the estimate of a step is one
pass over the forward graph.

A device is open to a group if it is allowed there and has memory left for it, parameters that it shares with the
device's groups counted once. If no device is open, the group goes to the allowed device that would lack least, ties to
the smallest: the placement then does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from tap_planner.device_placement.problem import Placement, Problem

__all__ = ["earliest_finish"]


def earliest_finish(problem: Problem, order: Sequence[int], *, devices: Sequence[int] | None = None) -> Placement:
    """Place all groups in an order; of devices where a group finishes at the same time, the smallest.

    Args:
        problem: what is placed.
        order: all groups.
        devices: where groups go, but for those that are allowed on none of them; None: on all.

    Returns:
        The placement; it may exceed the memory of devices (see :meth:`Problem.overshoot_bytes`).
    """
    greedy = _Greedy(problem, range(problem.num_devices) if devices is None else devices)
    for group in order:
        greedy.place(group)
    return tuple(greedy.device_of)


class _Greedy:
    """What is placed so far, and until when devices and channels are taken."""

    def __init__(self, problem: Problem, devices: Sequence[int]) -> None:
        self.index = problem.index
        self.device_of = [-1] * problem.num_groups
        self.group_ns: list[list[int]] = problem.group_ns().tolist()
        self.passes = 2 if problem.is_backward.any() else 1
        self.finish = [0] * problem.num_groups
        self.device_free = [0] * problem.num_devices
        self.channel_free = [0] * problem.index.links.num_channels
        self.arrived: list[dict[int, int]] = [{} for _ in problem.index.tasks.readers]  # by tensor and device
        self.room: list[int] = problem.capacity_bytes.tolist()
        self.fixed: list[int] = problem.fixed_bytes.tolist()
        self.shared_bytes = [shared.num_bytes for shared in problem.shared]
        self.holders: list[set[int]] = [set() for _ in problem.shared]
        self.allowed = _allowed_among(problem, devices)

    def place(self, group: int) -> None:
        """Put a group on the best device, and send it what it reads."""
        lacks = [self._need(group, device) - self.room[device] for device in self.allowed[group]]
        open_devices = [device for device, lack in zip(self.allowed[group], lacks, strict=True) if lack <= 0]
        if open_devices:
            chosen = self._soonest(group, open_devices)
        else:
            chosen = self.allowed[group][lacks.index(min(lacks))]
        self.finish[group] = self._finish(group, chosen, kept=True)
        self.device_of[group] = chosen
        self.device_free[chosen] = self.finish[group]
        self.room[chosen] -= self._need(group, chosen)
        for entry in self.index.shared_of[group]:
            self.holders[entry].add(chosen)

    def _need(self, group: int, device: int) -> int:
        shared = self.index.shared_of[group]
        if not shared:
            return self.fixed[group]
        return self.fixed[group] + sum(
            self.shared_bytes[entry] for entry in shared if device not in self.holders[entry]
        )

    def _soonest(self, group: int, devices: Sequence[int]) -> int:
        best, chosen = -1, devices[0]
        outputs = [tensor for tensor in self.index.tasks.sent[group] if any(self.device_of[r] >= 0 for r in tensor[1])]
        for device in devices:
            least = self.device_free[device] + self.group_ns[group][device]
            if 0 <= best <= least:
                continue
            end = self._finish(group, device)
            if outputs:
                end += self._sends(outputs, device)
            if best < 0 or end < best:
                best, chosen = end, device
        return chosen

    def _finish(self, group: int, device: int, *, kept: bool = False) -> int:
        """When a group would finish on a device; with ``kept``, what is sent for it occupies its channels."""
        begin = self.device_free[device]
        links = self.index.links
        free: dict[int, int] = {}
        for tensor, producer in self.index.tasks.received[group]:
            source = self.device_of[producer]
            if source == device or source < 0:
                continue  # on the same device the producer is done before the device is free
            known = self.arrived[tensor].get(device)
            if known is None:
                known = self.finish[producer]
                used = links.channels[source][device]
                for channel in used:
                    known = max(known, free.get(channel, self.channel_free[channel]))
                known += self.passes * links.durations_ns[links.kind_of[source][device]][tensor]
                for channel in used:
                    free[channel] = known
                if kept:
                    self.arrived[tensor][device] = known
            if known > begin:
                begin = known
        if kept:
            for channel, until in free.items():
                self.channel_free[channel] = until
        return begin + self.group_ns[group][device]

    def _sends(self, outputs: Sequence[tuple[int, tuple[int, ...]]], device: int) -> int:
        """What goes to groups that are placed on other devices already."""
        links, total = self.index.links, 0
        for tensor, readers in outputs:
            targets = {self.device_of[reader] for reader in readers} - {device, -1}
            total += sum(links.durations_ns[links.kind_of[device][target]][tensor] for target in targets)
        return self.passes * total


def _allowed_among(problem: Problem, devices: Sequence[int]) -> list[list[int]]:
    """By group, those of the devices on which it may lie, ascending; if there are none, all where it may."""
    wanted = set(devices)
    found: list[list[int]] = []
    for row in problem.allowed.tolist():
        possible = [device for device, is_allowed in enumerate(row) if is_allowed]
        found.append([device for device in possible if device in wanted] or possible)
    return found
