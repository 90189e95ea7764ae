"""Which operators are kept on one device."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass

from tap_planner.graph import Graph, Operator, TensorKind
from tap_planner.operators import CACHE_OPERAND, OUTPUT, ComputeKind, record_of

__all__ = ["Groups", "group_operators", "parameters_read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Operators in groups, numbered by their first operator."""

    members: tuple[tuple[int, ...], ...]
    """By group: indices of operators, ascending."""
    of: tuple[int, ...]
    """By operator: its group."""
    everywhere: frozenset[int]
    """Operators whose results every device can make for nothing: views of graph inputs and constants."""


def group_operators(graph: Graph, *, training: bool, together: Sequence[Collection[int]] = ()) -> Groups:
    """Keep together what is better not parted; every other operator is a group by itself.

    - In training, all that read the same trainable parameter: its gradient needs no sum over devices.
    - In inference, a cache (a graph input that a step returns in its next state): what reads it and what leaves it.
    - A view and an ``Output`` operator, which take no time, are with what makes their operands, where all of them are
      made in one group; a view of what is everywhere is with its first reader.
    - What is asked for: sets of operators (indices) in ``together``.

    Whatever has an operator in common is one group.
    """
    return _Grouping(graph, training=training).groups(together)


def parameters_read(graph: Graph, operator: Operator) -> tuple[str, ...]:
    """Names of the stored parameters that an operator reads, each once."""
    reads = (graph.tensors[name].read for name in operator.inputs if name is not None)
    return tuple(dict.fromkeys(read.parameter for read in reads if read is not None))


def _everywhere(graph: Graph, caches: Container[str]) -> frozenset[int]:
    """Views of graph inputs (caches are none) and constants: every device can make their results for nothing."""
    kinds, found = (TensorKind.INPUT, TensorKind.CONSTANT), list[int]()
    there = {name for name, tensor in graph.tensors.items() if tensor.kind in kinds and name not in caches}
    for index, operator in enumerate(graph.operators):
        is_view = record_of(operator.signature).kind is ComputeKind.VIEW and operator.type != OUTPUT
        if is_view and all(name is None or name in there for name in operator.inputs):
            found.append(index)
            there.update(operator.outputs)
    return frozenset(found)


class _Grouping:
    """Union-find over operators; the root is the least index."""

    def __init__(self, graph: Graph, *, training: bool) -> None:
        self.graph = graph
        self.training = training
        self.caches = {} if training else graph.caches
        self.everywhere = _everywhere(graph, self.caches)
        self.parent = list(range(len(graph.operators)))
        self.maker = {name: index for index, operator in enumerate(graph.operators) for name in operator.outputs}
        self.first_reader: dict[str, int] = {}
        for index, operator in enumerate(graph.operators):
            for name in operator.inputs:
                if name is not None:
                    self.first_reader.setdefault(name, index)

    def groups(self, together: Sequence[Collection[int]]) -> Groups:
        self._join_readers()
        if self.caches:
            self._join_caches()
        for operators in filter(None, together):
            self._join(operators)
        self._join_views()
        roots = [self._root(index) for index in range(len(self.parent))]
        number = {root: count for count, root in enumerate(dict.fromkeys(roots))}
        members: list[list[int]] = [[] for _ in number]
        for index, root in enumerate(roots):
            members[number[root]].append(index)
        return Groups(
            members=tuple(map(tuple, members)),
            of=tuple(number[root] for root in roots),
            everywhere=self.everywhere,
        )

    def _join_readers(self) -> None:
        """In training, of each trainable parameter."""
        trained = {parameter.name for parameter in self.graph.parameters if parameter.trainable and self.training}
        first: dict[str, int] = {}
        for index, operator in enumerate(self.graph.operators):
            for name in trained.intersection(parameters_read(self.graph, operator)):
                self._join((index, first.setdefault(name, index)))

    def _join_caches(self) -> None:
        """What leaves a cache and what reads it."""
        caches = self.caches
        for index, operator in enumerate(self.graph.operators):
            for name in operator.inputs[: CACHE_OPERAND if operator.type == OUTPUT else None]:
                if name is not None and name in caches:
                    self._join((index, caches[name]))

    def _join_views(self) -> None:
        """In topological order: a view of a view is with what that is with."""
        for index, operator in enumerate(self.graph.operators):
            if record_of(operator.signature).kind is not ComputeKind.VIEW:
                continue
            if index in self.everywhere:
                readers = [self.first_reader[name] for name in operator.outputs if name in self.first_reader]
                self._join((index, *readers))
                continue
            operands = [name for name in operator.inputs if name is not None]
            makers = {self._root(self.maker[name]) for name in operands if name in self.maker}
            if len(makers) == 1:
                self._join((index, *makers))

    def _root(self, index: int) -> int:
        while self.parent[index] != index:
            self.parent[index] = self.parent[self.parent[index]]
            index = self.parent[index]
        return index

    def _join(self, indices: Iterable[int]) -> None:
        roots = {self._root(index) for index in indices}
        least = min(roots)
        for root in roots:
            self.parent[root] = least
