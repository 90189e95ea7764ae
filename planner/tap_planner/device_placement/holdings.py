"""What devices hold of a graph whose operators lie on them: memory model M (docs/cost-model.md), group by group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from tap_planner.cost import ComputeModel, parameter_memory
from tap_planner.device_placement.grouping import Groups, parameters_read
from tap_planner.device_placement.problem import Shared
from tap_planner.graph import Graph, TensorKind
from tap_planner.operators import kept_for_backward, record_of
from tap_planner.schedule import made_gradients

__all__ = ["KINDS", "KINDS_OF_INFERENCE", "Holding", "fixed_and_shared", "holdings_of", "memory_by_kind"]

KINDS: tuple[str, ...] = ("parameters", "gradients", "optimizer", "activations")
"""Kinds of a device's memory in training, as plans name them."""
KINDS_OF_INFERENCE: tuple[str, ...] = ("parameters", "caches", "inputs", "outputs")
"""The same in inference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a device holds once if it has any of some groups."""

    kind: str
    """Of :data:`KINDS` or :data:`KINDS_OF_INFERENCE`."""
    num_bytes: int
    groups: tuple[int, ...]
    """Ascending, at least one."""


def holdings_of(
    graph: Graph, groups: Groups, compute: ComputeModel, *, optimizer: str, optimizer_states: str, training: bool
) -> tuple[Holding, ...]:
    """Parameters with gradients and optimizer states; in training what is kept for backward, in inference graph inputs,
    outputs and caches.

    Each counts with the groups that need it: a parameter with those that read it, a tensor that is kept for backward
    with those whose backward reads it. So on one device all together are memory model M without what communication
    takes, and a device that keeps a copy of what another one made holds that copy. Of one kind, things that the same
    groups need are one.
    """
    entries = chain(
        _of_parameters(graph, compute.precision, optimizer, optimizer_states, training=training),
        _kept(graph, compute) if training else _stored(graph, compute),
    )
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for kind, num_bytes, operators in entries:
        key = kind, tuple(sorted({groups.of[index] for index in operators}))
        found[key] = found.get(key, 0) + num_bytes
    return tuple(Holding(kind=kind, num_bytes=size, groups=holders) for (kind, holders), size in found.items() if size)


def fixed_and_shared(holdings: Sequence[Holding], num_groups: int) -> tuple[np.ndarray, tuple[Shared, ...]]:
    """What single groups take, int64 [num_groups], and what several groups need, once on each device; of all kinds."""
    fixed = np.zeros(num_groups, dtype=np.int64)
    together: dict[tuple[int, ...], int] = {}
    for holding in holdings:
        if len(holding.groups) == 1:
            fixed[holding.groups[0]] += holding.num_bytes
        else:
            together[holding.groups] = together.get(holding.groups, 0) + holding.num_bytes
    return fixed, tuple(Shared(num_bytes=size, groups=holders) for holders, size in together.items())


def memory_by_kind(
    holdings: Sequence[Holding], placement: Sequence[int], num_devices: int, *, training: bool
) -> tuple[dict[str, int], ...]:
    """What each device holds of each kind, also where that is nothing."""
    kinds = KINDS if training else KINDS_OF_INFERENCE
    found = tuple(dict.fromkeys(kinds, 0) for _ in range(num_devices))
    for holding in holdings:
        for device in {placement[group] for group in holding.groups}:
            found[device][holding.kind] += holding.num_bytes
    return found


_Entry = tuple[str, int, Sequence[int]]
"""Kind, bytes, and the operators that need them."""


def _of_parameters(
    graph: Graph, precision: str, optimizer: str, optimizer_states: str, *, training: bool
) -> Iterator[_Entry]:
    """Parameters that operators read, with what training adds."""
    readers: dict[str, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        for name in parameters_read(graph, operator):
            readers.setdefault(name, []).append(index)
    for parameter in graph.parameters:
        if parameter.name not in readers:
            continue
        sizes = parameter_memory(
            parameter.type.num_elements,
            dtype=parameter.type.dtype,
            shards=1,
            zero_level=0,
            precision=precision,
            optimizer=optimizer,
            optimizer_states=optimizer_states,
            trainable=training and parameter.trainable,
        )
        for kind, size in sizes._asdict().items():
            yield kind, size, readers[parameter.name]


def _kept(graph: Graph, compute: ComputeModel) -> Iterator[_Entry]:
    """Activations and graph inputs, with the operators whose backward reads them."""
    found: dict[str, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        inputs, outputs = kept_for_backward(record_of(operator.signature), made_gradients(graph, operator))
        names = [operator.inputs[position] for position in inputs] + [
            operator.outputs[position] for position in outputs
        ]
        for name in names:
            if name is not None and graph.tensors[name].kind in (TensorKind.ACTIVATION, TensorKind.INPUT):
                found.setdefault(name, []).append(index)
    for name, holders in found.items():
        yield "activations", _tensor_bytes(graph, compute, name), holders


def _stored(graph: Graph, compute: ComputeModel) -> Iterator[_Entry]:
    """Graph inputs with their readers, graph outputs with their maker; a cache lies where the step leaves it."""
    caches, found = graph.caches, dict[tuple[str, str], list[int]]()
    outputs, left = frozenset(graph.outputs), frozenset(caches.values())
    for index, operator in enumerate(graph.operators):
        for name in operator.inputs:
            if name is not None and graph.tensors[name].kind is TensorKind.INPUT and name not in caches:
                found.setdefault(("inputs", name), []).append(index)
        for name in operator.outputs:
            if name in outputs:
                found.setdefault(("caches" if index in left else "outputs", name), []).append(index)
    for (kind, name), holders in found.items():
        yield kind, _tensor_bytes(graph, compute, name), holders


def _tensor_bytes(graph: Graph, compute: ComputeModel, name: str) -> int:
    tensor = graph.tensors[name].type
    return compute.tensor_bytes(tensor.dtype, tensor.num_elements)
