"""A graph as arrays of integers, in which repeats can be compared a column at a time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from tap_planner.graph import Graph, Operator, Tensor, TensorKind

_MAX_OPERANDS = 64
"""Operators with more operands (a Concat of hundreds) are never part of a repeat: the arrays stay narrow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Operators (without the loss) as integers."""

    labels: np.ndarray
    """[n] equal for operators with equal signature, attributes, and kinds of operands, whose gradients are needed
    alike."""
    entities: np.ndarray
    """[n, k] identity of each operand; -1 where there is none or where the label says everything."""
    origins: np.ndarray
    """[n, k] operator that makes the operand; for a parameter or an input the first that reads it."""
    is_local: np.ndarray
    """[n, k] whether the operand is a parameter or a graph input (or a table that is treated as one)."""
    last_use: np.ndarray
    """[n, k] the last operator that reads the same parameter."""
    edges: np.ndarray
    """[e, 2] producer and consumer of each activation; the loss is operator n."""

    @property
    def size(self) -> int:
        """Number of operators."""
        return len(self.labels)


class _Encoder:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.operators = [operator for operator in graph.operators if operator.type != "Loss"]
        self._producers = {
            name: (index, slot)
            for index, operator in enumerate(self.operators)
            for slot, name in enumerate(operator.outputs)
        }
        self._trainable = {parameter.name for parameter in graph.parameters if parameter.trainable}
        self._labels: dict[Hashable, int] = {}
        self._signatures: dict[Hashable, int] = {}
        self._local: dict[str, int] = {}
        self._first: list[tuple[int, int]] = []
        self._last: list[int] = []
        self._edges: list[tuple[int, int]] = []

    def encode(self) -> Encoding:
        count = len(self.operators)
        widest = max((len(operator.inputs) for operator in self.operators), default=1)
        width = max(1, min(widest, _MAX_OPERANDS))
        self._find_uses()
        labels = np.zeros(count, np.int64)
        entities = np.full((count, width), -1, np.int64)
        origins = np.full((count, width), -1, np.int64)
        is_local = np.zeros((count, width), bool)
        last_use = np.full((count, width), -1, np.int64)
        for index, operator in enumerate(self.operators):
            if len(operator.inputs) > _MAX_OPERANDS:
                labels[index] = self._labels.setdefault(("alone", index), len(self._labels))
                self._edges.extend(
                    (self._producers[name][0], index) for name in operator.inputs if name in self._producers
                )
                continue
            tags: list[Hashable] = []
            for slot, name in enumerate(operator.inputs):
                if name is None:
                    tags.append(None)
                    continue
                made = self._producers.get(name)
                if made is not None:
                    tags.append((made[1], self._graph.tensors[name].requires_gradient))
                    entities[index, slot] = origins[index, slot] = made[0]
                    self._edges.append((made[0], index))
                    continue
                tag, key = self._outer(self._graph.tensors[name])
                if key is not None:
                    entity = self._local[key]
                    entities[index, slot] = count + entity
                    origins[index, slot] = self._first[entity][0]
                    tag = (tag, self._first[entity][1])
                    is_local[index, slot] = True
                    last_use[index, slot] = self._last[entity]
                tags.append(tag)
            labels[index] = self._label(operator, tags)
        if self._graph.loss is not None:
            for name in self._graph.operators[-1].inputs:
                if name in self._producers:
                    self._edges.append((self._producers[name][0], count))
        edges = np.array(self._edges, np.int64).reshape(-1, 2)
        return Encoding(
            labels=labels, entities=entities, origins=origins, is_local=is_local, last_use=last_use, edges=edges
        )

    def _label(self, operator: Operator, tags: list[Hashable]) -> int:
        signature = self._signatures.setdefault(operator.signature, len(self._signatures))
        needed = any(self._graph.tensors[name].requires_gradient for name in operator.outputs)
        return self._labels.setdefault((signature, needed, tuple(tags)), len(self._labels))

    def _find_uses(self) -> None:
        for index, operator in enumerate(self.operators):
            for slot, name in enumerate(operator.inputs):
                if name is None or name in self._producers:
                    continue
                _, key = self._outer(self._graph.tensors[name])
                if key is None:
                    continue
                entity = self._local.setdefault(key, len(self._local))
                if entity == len(self._first):
                    self._first.append((index, slot))
                    self._last.append(index)
                self._last[entity] = index

    def _outer(self, tensor: Tensor) -> tuple[Hashable, str | None]:
        """What the label says of an operand that no operator makes, and the identity that it may vary in."""
        if tensor.read is not None:
            tag = ("parameter", tensor.read.dims, tensor.requires_gradient, tensor.read.parameter in self._trainable)
            return tag, f"parameter {tensor.read.parameter}"
        if tensor.kind is not TensorKind.CONSTANT:
            return ("input", self._graph.batch_dims.get(tensor.name)), f"input {tensor.name}"
        key = self._graph.constants.key(tensor.name)
        if tensor.type.is_float and tensor.type.num_elements > 1:
            return ("table",), f"table {key}"
        return ("constant", key), None


def encode(graph: Graph) -> Encoding:
    """Encode a graph; the loss is left out.

    Parameters, graph inputs (the caches of a decoder), and float tables that are constant, may differ between
    occurrences as long as each is used in one occurrence only. Scalars and integers are compared by value.
    """
    return _Encoder(graph).encode()
