"""A bound graph and a cluster -> what is placed: every operator a forward task, and a backward task in training."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tap_planner.cluster import Cluster
from tap_planner.cost import ComputeModel, num_communicators, optimizer_ns, whole_operator_ns
from tap_planner.device_placement.graph_tasks import Tasks
from tap_planner.device_placement.grouping import Groups, group_operators, parameters_read
from tap_planner.device_placement.holdings import Holding, fixed_and_shared, holdings_of, memory_by_kind
from tap_planner.device_placement.problem import Problem
from tap_planner.device_placement.topology import DevicePlace, device_places, links_of
from tap_planner.errors import UsageError
from tap_planner.graph import Graph
from tap_planner.operators import OperatorSignature
from tap_planner.yaml_entries import near_miss

__all__ = ["Built", "problem_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Built:
    """A problem, and what its numbers mean in graph and cluster."""

    problem: Problem
    operators: tuple[tuple[int, ...], ...]
    """By group: indices into ``Graph.operators``, ascending."""
    task_operator: tuple[int, ...]
    """By task: index into ``Graph.operators``. Forward tasks have the operator's number; backward tasks follow."""
    devices: tuple[DevicePlace, ...]
    """By device; devices are the ranks of the cluster."""
    holdings: tuple[Holding, ...]
    """What groups hold, by kind."""
    training: bool
    """Whether a training step was asked for."""

    def memory_by_kind(self, placement: Sequence[int]) -> tuple[dict[str, int], ...]:
        """What each device holds: in training of ``parameters``, ``gradients``, ``optimizer`` and ``activations``, in
        inference of ``parameters``, ``caches``, ``inputs`` and ``outputs``, in bytes.

        All kinds together are :meth:`Problem.memory_bytes`.

        Args:
            placement: the device of every group.
        """
        return memory_by_kind(self.holdings, placement, len(self.devices), training=self.training)


def problem_of(
    graph: Graph,
    cluster: Cluster,
    *,
    precision: str,
    training: bool,
    optimizer: str = "adamw",
    optimizer_states: str = "fp32",
    allowed: Mapping[str, Collection[int]] | None = None,
    together: Sequence[Collection[str]] = (),
    limit_bytes: int | None = None,
) -> Built:
    """What is placed of a graph on a cluster; docs/traversal-order.md, "From a graph and a cluster", says it in words.

    Args:
        graph: bound with the whole batch; for training with ``BindOptions.training``, for inference with ``ends`` if
            caches shall be known.
        cluster: every device of it.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.
        training: whether there is a backward, and an optimizer.
        optimizer: ``adamw`` or ``sgd``; in training.
        optimizer_states: of AdamW's moments, ``fp32`` or ``bf16``.
        allowed: by operator (its id) the devices (ranks) on which it may lie; what is kept with it lies there too.
        together: sets of operators (their ids) that are kept on one device, with all that is kept with any of them.
        limit_bytes: what each device may hold, on unlike devices at most what it has; None: its memory less what is
            reserved.

    Raises:
        UsageError: training of a graph that was bound for inference, an unknown operator or device in ``allowed`` or
            ``together``, or nowhere to put operators that are kept together.
        ClusterError: a device has no peak that serves the precision.
    """
    if training and graph.loss is None:
        raise UsageError(
            f"{graph.name} was bound without a loss, so it has no backward",
            hint="Bind it with BindOptions(training=True).",
        )
    places = device_places(cluster)
    numbers = {operator.id: index for index, operator in enumerate(graph.operators)}
    kept = [[_number(numbers, name) for name in names] for names in together]
    groups = group_operators(graph, training=training, together=kept)
    computes = tuple(ComputeModel(device, precision) for device in cluster.devices)
    tasks = Tasks(graph, groups, computes[0], training=training)
    times = np.stack([_times(tasks, compute, optimizer, optimizer_states) for compute in computes], axis=1)
    holdings = holdings_of(
        graph, groups, computes[0], optimizer=optimizer, optimizer_states=optimizer_states, training=training
    )
    fixed_bytes, shared = fixed_and_shared(holdings, len(groups.members))
    problem = Problem(
        task_ns=times[:, [place.node_group for place in places]],
        group_of=np.asarray([groups.of[index] for index in tasks.operator], dtype=np.int64),
        is_backward=np.arange(len(tasks.operator)) >= len(graph.operators),
        tensor_producer=np.asarray(tasks.producer, dtype=np.int64),
        tensor_bytes=np.asarray(tasks.num_bytes, dtype=np.int64),
        edge_tensor=np.asarray([tensor for tensor, _ in tasks.edges], dtype=np.int64),
        edge_consumer=np.asarray([reader for _, reader in tasks.edges], dtype=np.int64),
        fixed_bytes=fixed_bytes,
        capacity_bytes=_capacity(cluster, places, limit_bytes),
        allowed=_allowed(groups, len(places), numbers, allowed or {}),
        links=links_of(cluster),
        shared=shared,
        group_names=tuple(graph.operators[members[0]].id for members in groups.members),
    )
    return Built(
        problem=problem,
        operators=groups.members,
        task_operator=tuple(tasks.operator),
        devices=places,
        holdings=holdings,
        training=training,
    )


_Kind = tuple[OperatorSignature, tuple[bool, ...]]


def _times(tasks: Tasks, compute: ComputeModel, optimizer: str, optimizer_states: str) -> np.ndarray:
    """int64 [num_tasks] on one kind of device; the optimizer's time counts with the last backward that needs it."""
    graph, known = tasks.graph, dict[_Kind, tuple[int, int]]()
    found = np.zeros(len(tasks.operator), dtype=np.int64)
    for index, operator in enumerate(graph.operators):
        needed = tasks.gradients[index] or (False,) * len(operator.inputs)
        key = (operator.signature, needed)
        if key not in known:
            known[key] = whole_operator_ns(compute, operator.signature, needed)
        found[index], backward_ns = known[key]
        if index in tasks.backward:
            found[tasks.backward[index]] = backward_ns
    for num_elements, task in _updates(tasks):
        found[task] += optimizer_ns(
            num_elements,
            shards=1,
            zero_level=0,
            precision=compute.precision,
            optimizer=optimizer,
            optimizer_states=optimizer_states,
            device=compute.device,
        )
    return found


def _updates(tasks: Tasks) -> Iterator[tuple[int, int]]:
    """Per trained parameter its elements and the task that its update is added to.

    That is the backward of its first reader, which comes last; where no reader has one, the forward of the first.
    """
    first: dict[str, int] = {}
    with_backward: dict[str, int] = {}
    for index, operator in enumerate(tasks.graph.operators):
        for name in parameters_read(tasks.graph, operator):
            first.setdefault(name, index)
            if index in tasks.backward:
                with_backward.setdefault(name, tasks.backward[index])
    for parameter in tasks.graph.parameters:
        if parameter.trainable and tasks.training and parameter.name in first:
            yield parameter.type.num_elements, with_backward.get(parameter.name, first[parameter.name])


def _capacity(cluster: Cluster, places: Sequence[DevicePlace], limit_bytes: int | None) -> np.ndarray:
    """int64 [num_devices]: the limit, less the buffers of the communicator through which all is sent; where devices are
    unlike, a limit given for all of them is no more than each has."""
    buffers = num_communicators((), cluster.num_devices) * cluster.collective_buffers_bytes
    own = [place.device.memory_bytes - cluster.reserved_memory_bytes for place in places]
    limits = own
    if limit_bytes is not None:
        limits = [min(limit_bytes, limit) if len(set(own)) > 1 else limit_bytes for limit in own]
    return np.asarray([max(0, limit - buffers) for limit in limits], dtype=np.int64)


def _number(numbers: Mapping[str, int], name: str) -> int:
    """Of an operator, by its id."""
    if name not in numbers:
        raise UsageError(
            f"the graph has no operator {name!r}{near_miss(name, numbers)}",
            hint="Operators are called by their first output.",
        )
    return numbers[name]


def _allowed(
    groups: Groups, count: int, numbers: Mapping[str, int], given: Mapping[str, Collection[int]]
) -> np.ndarray:
    """bool [num_groups, num_devices]: what all of a group's operators allow."""
    found = np.ones((len(groups.members), count), dtype=bool)
    limits: dict[int, dict[str, list[int]]] = {}
    for name, devices in given.items():
        group = groups.of[_number(numbers, name)]
        wrong = next((device for device in devices if not 0 <= device < count), None)
        if wrong is not None:
            raise UsageError(f"operator {name!r}: device {wrong}, expected 0 to {count - 1}", hint="Give ranks.")
        found[group] &= np.isin(np.arange(count), list(devices))
        limits.setdefault(group, {})[name] = sorted(devices)
        if not found[group].any():
            raise _nowhere(name, limits[group])
    return found


def _nowhere(name: str, limits: Mapping[str, Sequence[int]]) -> UsageError:
    """What operators that are kept together are allowed has nothing in common; the last one is ``name``."""
    if not limits[name]:
        return UsageError(f"operator {name!r} is allowed on no device", hint="Name at least one device for it.")
    said = ", ".join(f"{other!r} on {', '.join(map(str, devices))}" for other, devices in limits.items())
    return UsageError(
        f"operator {name!r} is kept on one device with others that are not allowed where it is: {said}",
        hint="Allow them a device in common.",
    )
