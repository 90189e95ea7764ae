"""What devices hold of a graph whose operators lie on them: memory model M (docs/cost-model.md), group by group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tap_planner.cost import ComputeModel, parameter_memory
from tap_planner.device_placement.grouping import Groups, parameters_read
from tap_planner.device_placement.problem import Shared
from tap_planner.graph import Graph, TensorKind
from tap_planner.operators import kept_for_backward, record_of
from tap_planner.schedule import made_gradients

__all__ = ["Holdings", "holdings_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holdings:
    """Memory of groups."""

    fixed_bytes: np.ndarray
    """int64 [num_groups]."""
    shared: tuple[Shared, ...]
    """What several groups need, once on each device."""


def holdings_of(
    graph: Graph, groups: Groups, compute: ComputeModel, *, optimizer: str, optimizer_states: str, training: bool
) -> Holdings:
    """Parameters with gradients and optimizer states; in training what is kept for backward, in inference graph inputs,
    outputs and caches.

    Each counts with the groups that need it: a parameter with those that read it, a tensor that is kept for backward
    with those whose backward reads it. So on one device all together are memory model M without what communication
    takes, and a device that keeps a copy of what another one made holds that copy.
    """
    held = _Holdings(graph, groups)
    readers: dict[str, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        for name in parameters_read(graph, operator):
            readers.setdefault(name, []).append(groups.of[index])
    for parameter in graph.parameters:
        if parameter.name in readers:
            sizes = parameter_memory(
                parameter.type.num_elements,
                dtype=parameter.type.dtype,
                shards=1,
                zero_level=0,
                precision=compute.precision,
                optimizer=optimizer,
                optimizer_states=optimizer_states,
                trainable=training and parameter.trainable,
            )
            held.add(sum(sizes), readers[parameter.name])
    for name, holders in (_kept(graph, groups) if training else _stored(graph, groups)).items():
        tensor = graph.tensors[name].type
        held.add(compute.tensor_bytes(tensor.dtype, tensor.num_elements), holders)
    return Holdings(fixed_bytes=held.fixed_bytes, shared=tuple(held.shared))


class _Holdings:
    def __init__(self, graph: Graph, groups: Groups) -> None:
        self.fixed_bytes = np.zeros(len(groups.members), dtype=np.int64)
        self.together: dict[tuple[int, ...], int] = {}

    @property
    def shared(self) -> list[Shared]:
        return [Shared(num_bytes=size, groups=holders) for holders, size in self.together.items()]

    def add(self, num_bytes: int, holders: Iterable[int]) -> None:
        """What some groups need; things that the same groups need are one."""
        distinct = tuple(sorted(set(holders)))
        if len(distinct) == 1:
            self.fixed_bytes[distinct[0]] += num_bytes
        elif num_bytes:
            self.together[distinct] = self.together.get(distinct, 0) + num_bytes


def _kept(graph: Graph, groups: Groups) -> dict[str, list[int]]:
    """Per activation or graph input the groups whose backward reads it."""
    found: dict[str, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        inputs, outputs = kept_for_backward(record_of(operator.signature), made_gradients(graph, operator))
        names = [operator.inputs[position] for position in inputs] + [
            operator.outputs[position] for position in outputs
        ]
        for name in names:
            if name is not None and graph.tensors[name].kind in (TensorKind.ACTIVATION, TensorKind.INPUT):
                found.setdefault(name, []).append(groups.of[index])
    return found


def _stored(graph: Graph, groups: Groups) -> dict[str, list[int]]:
    """Per graph input its readers, per graph output its maker; a cache lies where the step leaves it."""
    caches, found = graph.caches, dict[str, list[int]]()
    outputs = frozenset(graph.outputs)
    for index, operator in enumerate(graph.operators):
        for name in operator.inputs:
            if name is not None and graph.tensors[name].kind is TensorKind.INPUT and name not in caches:
                found.setdefault(name, []).append(groups.of[index])
        for name in outputs.intersection(operator.outputs):
            found.setdefault(name, []).append(groups.of[index])
    return found
