"""What is placed: tasks in groups, the tensors between them, and the devices with their memory and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tap_planner.device_placement.checking import check_before, check_least, check_range, check_shapes, check_total
from tap_planner.device_placement.index import Index, index_links, index_tasks
from tap_planner.errors import UsageError

__all__ = ["MOST", "Links", "Placement", "Problem", "Shared"]

Placement = tuple[int, ...]
"""The device of every group."""

MOST = 1 << 56
"""All tasks and transfers together take less (ns), and so does all memory (bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Links:
    """What a transfer from one device to another takes, and what it occupies meanwhile."""

    latency_ns: np.ndarray
    """int64 [num_devices, num_devices], from and to; the diagonal does not matter."""
    bytes_per_s: np.ndarray
    """int64 [num_devices, num_devices], at least 1 off the diagonal."""
    channels: np.ndarray
    """int64 [num_devices, num_devices, any]: what carries one transfer at a time (a device's way out, another's way in,
    a node's NIC), as numbers from 0; negative: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Parameters that several groups read: a device that holds any of these groups holds them once."""

    num_bytes: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Groups of tasks that are to be put on devices.

    Tasks are numbered in a topological order of all dependencies. The tasks of a group lie on one device: in training
    an operator's forward and backward task are one group. Groups are numbered in the order of the forward graph.

    Raises:
        UsageError: something does not fit together; the message names the field, the place and the value.
    """

    task_ns: np.ndarray
    """int64 [num_tasks, num_devices]."""
    group_of: np.ndarray
    """int64 [num_tasks]; every group has a task."""
    is_backward: np.ndarray
    """bool [num_tasks]."""
    tensor_producer: np.ndarray
    """int64 [num_tensors]: the task that makes it."""
    tensor_bytes: np.ndarray
    """int64 [num_tensors]; a tensor goes once to every other device that reads it."""
    edge_tensor: np.ndarray
    """int64 [num_edges]."""
    edge_consumer: np.ndarray
    """int64 [num_edges]: the task that reads it."""
    fixed_bytes: np.ndarray
    """int64 [num_groups]: what a group takes on its device all the time."""
    capacity_bytes: np.ndarray
    """int64 [num_devices]."""
    allowed: np.ndarray
    """bool [num_groups, num_devices]."""
    links: Links
    shared: tuple[Shared, ...] = ()
    group_names: tuple[str, ...] = ()
    """By group, for messages and for the order ``lexico-topo``; empty: their numbers."""
    index: Index = field(init=False, repr=False)
    """The same as lists."""

    def __post_init__(self) -> None:
        _check(self)
        edges = sorted(set(zip(self.edge_tensor.tolist(), self.edge_consumer.tolist(), strict=True)))
        tasks = index_tasks(self.task_ns, self.group_of, self.is_backward, self.tensor_producer, edges, self.num_groups)
        links = index_links(self.links.latency_ns, self.links.bytes_per_s, self.links.channels, self.tensor_bytes)
        shared_of: list[list[int]] = [[] for _ in range(self.num_groups)]
        for entry, shared in enumerate(self.shared):
            for group in sorted(set(shared.groups)):
                shared_of[group].append(entry)
        index = Index(tasks=tasks, links=links, shared_of=[tuple(found) for found in shared_of])
        object.__setattr__(self, "index", index)

    @property
    def num_tasks(self) -> int:
        """Of all groups, forward and backward."""
        return len(self.group_of)

    @property
    def num_groups(self) -> int:
        """What is placed one by one."""
        return len(self.fixed_bytes)

    @property
    def num_devices(self) -> int:
        """Also those that stay empty."""
        return len(self.capacity_bytes)

    def transfer_ns(self, tensor: int, source: int, target: int) -> int:
        """What a tensor takes from one device to another: latency and, rounded up, its bytes; 0 on the same device."""
        links = self.index.links
        return 0 if source == target else links.durations_ns[links.kind_of[source][target]][tensor]

    def group_ns(self) -> np.ndarray:
        """What all tasks of each group take on each device, int64 [num_groups, num_devices]."""
        total = np.zeros((self.num_groups, self.num_devices), dtype=np.int64)
        np.add.at(total, self.group_of, self.task_ns)
        return total

    def memory_bytes(self, placement: Sequence[int]) -> tuple[int, ...]:
        """What each device holds."""
        held = [0] * self.num_devices
        for device, fixed in zip(placement, self.fixed_bytes.tolist(), strict=True):
            held[device] += fixed
        for shared in self.shared:
            for device in {placement[group] for group in shared.groups}:
                held[device] += shared.num_bytes
        return tuple(held)

    def overshoot_bytes(self, placement: Sequence[int]) -> tuple[int, ...]:
        """What each device holds beyond its memory; 0 everywhere where the placement fits."""
        memory = self.memory_bytes(placement)
        return tuple(max(0, held - limit) for held, limit in zip(memory, self.capacity_bytes.tolist(), strict=True))

    def is_allowed(self, placement: Sequence[int]) -> bool:
        """Whether every group lies on a device where it may."""
        return bool(self.allowed[np.arange(self.num_groups), np.asarray(placement, dtype=np.int64)].all())


def _check(problem: Problem) -> None:
    _check_arrays(problem)
    tasks, tensors, groups = problem.num_tasks, len(problem.tensor_bytes), problem.num_groups
    check_range("tensor_producer", problem.tensor_producer, tasks)
    check_range("edge_consumer", problem.edge_consumer, tasks)
    check_range("edge_tensor", problem.edge_tensor, tensors)
    check_range("group_of", problem.group_of, groups)
    check_before(problem.tensor_producer[problem.edge_tensor], problem.edge_consumer, problem.edge_tensor)
    for entry, shared in enumerate(problem.shared):
        check_range(f"shared[{entry}].groups", np.asarray(shared.groups, dtype=np.int64), groups)
        check_least(f"shared[{entry}].num_bytes", np.asarray([shared.num_bytes]), 0)
    _check_groups(problem)
    _check_totals(problem)


def _check_arrays(problem: Problem) -> None:
    tasks, devices = len(problem.group_of), len(problem.capacity_bytes)
    groups, tensors, edges = len(problem.fixed_bytes), len(problem.tensor_bytes), len(problem.edge_tensor)
    whole, links = np.integer, problem.links
    check_shapes(
        {
            "task_ns": (problem.task_ns, (tasks, devices), whole),
            "group_of": (problem.group_of, (tasks,), whole),
            "is_backward": (problem.is_backward, (tasks,), np.bool_),
            "tensor_producer": (problem.tensor_producer, (tensors,), whole),
            "tensor_bytes": (problem.tensor_bytes, (tensors,), whole),
            "edge_tensor": (problem.edge_tensor, (edges,), whole),
            "edge_consumer": (problem.edge_consumer, (edges,), whole),
            "fixed_bytes": (problem.fixed_bytes, (groups,), whole),
            "capacity_bytes": (problem.capacity_bytes, (devices,), whole),
            "allowed": (problem.allowed, (groups, devices), np.bool_),
            "links.latency_ns": (links.latency_ns, (devices, devices), whole),
            "links.bytes_per_s": (links.bytes_per_s, (devices, devices), whole),
            "links.channels": (links.channels, (devices, devices, (*links.channels.shape, 0, 0, 0)[2]), whole),
        }
    )
    if not devices or not groups:
        raise UsageError(f"{groups} groups on {devices} devices", hint="Give at least one of each.")
    apart = ~np.eye(devices, dtype=bool)
    for name in ("task_ns", "tensor_bytes", "fixed_bytes", "capacity_bytes"):
        check_least(name, getattr(problem, name), 0)
    check_least("links.latency_ns", np.where(apart, links.latency_ns, 0), 0)
    check_least("links.bytes_per_s", np.where(apart, links.bytes_per_s, 1), 1)


def _check_groups(problem: Problem) -> None:
    groups, names = problem.num_groups, problem.group_names
    if names and len(names) != groups:
        raise UsageError(f"{len(names)} group_names for {groups} groups", hint="Name all groups or none.")
    empty = np.flatnonzero(np.bincount(problem.group_of, minlength=groups) == 0)
    if len(empty):
        raise UsageError(f"group {empty[0]} has no task", hint="Number the groups without holes.")
    homeless = np.flatnonzero(~problem.allowed.any(axis=1))
    if len(homeless):
        name = f" ({names[homeless[0]]})" if names else ""
        raise UsageError(f"group {homeless[0]}{name} is allowed on no device", hint="Loosen what constrains it.")


def _check_totals(problem: Problem) -> None:
    """The worst that could happen: every task on its slowest device, every tensor over the slowest link to all."""
    devices = problem.num_devices
    apart = ~np.eye(devices, dtype=bool)
    times = [int(slowest) for slowest in problem.task_ns.max(axis=1)]
    if apart.any():
        latency, pace = int(problem.links.latency_ns[apart].max()), int(problem.links.bytes_per_s[apart].min())
        times += [devices * (latency + 1 + size * 1_000_000_000 // pace) for size in problem.tensor_bytes.tolist()]
    check_total("ns", times, MOST)
    check_total("bytes", [*problem.fixed_bytes.tolist(), *(shared.num_bytes for shared in problem.shared)], MOST)
