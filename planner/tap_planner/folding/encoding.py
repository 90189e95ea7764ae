"""A graph as arrays of integers, in which repeats can be compared a column at a time."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
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
    """[e, 2] producer and consumer of each activation, by producer; the loss is operator n."""

    def edges_from(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Producers and consumers of the activations made by operators ``start .. stop``."""
        low, high = np.searchsorted(self.edges[:, 0], (start, stop))
        return self.edges[low:high, 0], self.edges[low:high, 1]

    @property
    def size(self) -> int:
        """Number of operators."""
        return len(self.labels)


_Operand = tuple[int, int, int]
"""What a value is to every operator that reads it: what the label says of it, its entity, its origin."""


class _Encoder:
    def __init__(self, graph: Graph, tags: Mapping[str, Hashable]) -> None:
        self._graph = graph
        self._apart = tags
        self.operators = [operator for operator in graph.operators if operator.type != "Loss"]
        self._count = len(self.operators)
        self._trainable = {parameter.name for parameter in graph.parameters if parameter.trainable}
        self._tags: dict[Hashable, int] = {}
        self._signatures: dict[Hashable, int] = {}
        self._known: dict[int, int] = {}
        """Signature object to number: most operators share theirs with others."""
        self._operands: dict[str, _Operand] = {}
        self._first: dict[str, tuple[int, int, int]] = {}
        """Of what may vary between occurrences: its number, the operator that reads it first, and as which operand."""

    def encode(self) -> Encoding:
        """The arrays; one pass over the operators."""
        widest = max((len(operator.inputs) for operator in self.operators), default=1)
        width = max(1, min(widest, _MAX_OPERANDS))
        labels: list[int] = []
        places: list[int] = []
        entities: list[int] = []
        origins: list[int] = []
        numbers: dict[Hashable, int] = {}
        for index, operator in enumerate(self.operators):
            label: list[Hashable] = [self._signature(operator)]
            if operator.id in self._apart:
                label.append(self._tag(self._apart[operator.id]))
            wide = len(operator.inputs) > _MAX_OPERANDS
            for slot, name in enumerate(operator.inputs):
                if name is None:
                    label.append(-1)
                    continue
                operand = self._operands.get(name) or self._meet(name, index, slot)
                label.append(operand[0])
                if operand[1] >= 0:
                    places.append(index * width + min(slot, width - 1))  # an operator that is too wide is alone anyway
                    entities.append(operand[1])
                    origins.append(operand[2])
            labels.append(numbers.setdefault(("alone", index) if wide else tuple(label), len(numbers)))
            for slot, name in enumerate(operator.outputs):
                self._operands[name] = (self._tag(slot, self._graph.tensors[name].requires_gradient), index, index)
        return _arrays(labels, width, np.array((places, entities, origins), np.int64), self._read_by_loss())

    def _signature(self, operator: Operator) -> int:
        tensors = self._graph.tensors
        needed = tensors[operator.outputs[0]].requires_gradient
        if not needed and len(operator.outputs) > 1:
            needed = any(tensors[name].requires_gradient for name in operator.outputs)
        key = 2 * id(operator.signature) + needed
        number = self._known.get(key)
        if number is None:
            number = self._signatures.setdefault((operator.signature, needed), len(self._signatures))
            self._known[key] = number
        return number

    def _tag(self, *words: Hashable) -> int:
        return self._tags.setdefault(words, len(self._tags))

    def _meet(self, name: str, index: int, slot: int) -> _Operand:
        """Describe a value that no operator makes, where it is read first."""
        tag, key = self._outer(self._graph.tensors[name])
        if key is None:
            operand = (self._tag(tag), -1, -1)
        else:
            number, index, slot = self._first.setdefault(key, (len(self._first), index, slot))
            operand = (self._tag(tag, slot), self._count + number, index)
        self._operands[name] = operand
        return operand

    def _read_by_loss(self) -> list[int]:
        """Operators whose values the loss reads."""
        if self._graph.loss is None:
            return []
        found = (self._operands.get(name or "") for name in self._graph.operators[-1].inputs)
        return [operand[2] for operand in found if operand is not None and 0 <= operand[1] < self._count]

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


def _arrays(labels: list[int], width: int, reads: np.ndarray, read_by_loss: list[int]) -> Encoding:
    """The encoding from labels [n], k, and reads [3, r]: place (operator x k + slot), entity and origin of each."""
    count = len(labels)
    places, found, made = reads
    readers = places // width
    activation = found < count
    edges = np.stack([made[activation], readers[activation]], axis=1)
    edges = np.concatenate([edges, np.array([(maker, count) for maker in read_by_loss], np.int64).reshape(-1, 2)])
    last = np.full(2 * count + len(places) + 1, -1, np.int64)
    np.maximum.at(last, found[~activation], readers[~activation])
    columns = np.full((3, count * width), -1, np.int64)
    columns[:, places] = found, made, np.where(activation, -1, last[found])
    entities, origins, last_use = (column.reshape(count, width) for column in columns)
    return Encoding(
        labels=np.array(labels, np.int64),
        entities=entities,
        origins=origins,
        is_local=entities >= count,
        last_use=last_use,
        edges=edges[np.argsort(edges[:, 0], kind="stable")],
    )


def encode(graph: Graph, tags: Mapping[str, Hashable] | None = None) -> Encoding:
    """Encode a graph; the loss is left out. Operators (by id) with unlike ``tags`` are unlike.

    Parameters, graph inputs (the caches of a decoder), and float tables that are constant, may differ between
    occurrences as long as each is used in one occurrence only. Scalars and integers are compared by value.
    """
    return _Encoder(graph, tags or {}).encode()
