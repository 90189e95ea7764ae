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


def earliest_finish(problem: Problem, order: Sequence[int]) -> Placement:
    """Place all groups in an order; of devices where a group finishes at the same time, the smallest.

    Args:
        problem: what is placed.
        order: all groups.

    Returns:
        The placement; it may exceed the memory of devices (see :meth:`Problem.overshoot_bytes`).
    """
    greedy = _Greedy(problem)
    for group in order:
        greedy.place(group)
    return tuple(greedy.device_of)


class _Greedy:
    """What is placed so far, and until when devices and channels are taken."""

    def __init__(self, problem: Problem) -> None:
        self.index = problem.index
        self.devices = range(problem.num_devices)
        self.device_of = [-1] * problem.num_groups
        self.group_ns: list[list[int]] = problem.group_ns().tolist()
        self.passes = 2 if problem.is_backward.any() else 1
        self.inputs, self.outputs = _forward_tensors(problem)
        self.finish = [0] * problem.num_groups
        self.device_free = [0] * problem.num_devices
        self.channel_free = [0] * problem.index.links.num_channels
        self.arrived: list[dict[int, int]] = [{} for _ in problem.index.tasks.readers]  # by tensor and device
        self.room: list[int] = problem.capacity_bytes.tolist()
        self.fixed: list[int] = problem.fixed_bytes.tolist()
        self.shared_bytes = [shared.num_bytes for shared in problem.shared]
        self.holders: list[set[int]] = [set() for _ in problem.shared]
        allowed = problem.allowed.tolist()
        self.allowed = [[device for device in self.devices if row[device]] for row in allowed]

    def place(self, group: int) -> None:
        """Put a group on the best device, and send it what it reads."""
        needs = [self._need(group, device) for device in self.devices]
        open_devices = [device for device in self.allowed[group] if needs[device] <= self.room[device]]
        if open_devices:
            chosen = self._soonest(group, open_devices)
        else:
            chosen = min(self.allowed[group], key=lambda device: (needs[device] - self.room[device], device))
        self.finish[group] = self._finish(group, chosen, kept=True)
        self.device_of[group] = chosen
        self.device_free[chosen] = self.finish[group]
        self.room[chosen] -= needs[chosen]
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
        outputs = [tensor for tensor in self.outputs[group] if any(self.device_of[r] >= 0 for r in tensor[1])]
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
        for tensor, producer in self.inputs[group]:
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


def _forward_tensors(
    problem: Problem,
) -> tuple[list[list[tuple[int, int]]], list[list[tuple[int, tuple[int, ...]]]]]:
    """Of forward tasks, by group: (tensor, its maker) that it reads, and (tensor, its readers) that it makes."""
    tasks, backward = problem.index.tasks, problem.is_backward.tolist()
    inputs: list[list[tuple[int, int]]] = [[] for _ in tasks.members]
    outputs: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in tasks.members]
    for tensor, (maker, readers) in enumerate(zip(tasks.producer, tasks.readers, strict=True)):
        if backward[maker]:
            continue
        producer = tasks.group_of[maker]
        groups = tuple(sorted({tasks.group_of[r] for r in readers if not backward[r]} - {producer}))
        if groups:
            outputs[producer].append((tensor, groups))
        for group in groups:
            inputs[group].append((tensor, producer))
    return inputs, outputs
