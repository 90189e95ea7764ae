"""A graph cut in pipeline stages: what one stage makes and another reads goes through ``Transfer`` operators."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tap_planner.errors import UsageError
from tap_planner.graph.types import Graph, Operator, Tensor, TensorKind
from tap_planner.operators import TRANSFER, OperatorSignature

__all__ = ["cut_in_stages", "reordered"]


def reordered(graph: Graph, order: Sequence[str]) -> Graph:
    """The same graph with its operators in another order.

    Args:
        graph: the bound graph.
        order: ids of its operators, each once, makers before readers, the loss last.

    Raises:
        UsageError: it is no such order.
    """
    if len(order) == len(graph.operators) and all(o.id == name for o, name in zip(graph.operators, order, strict=True)):
        return graph
    known = {operator.id: operator for operator in graph.operators}
    unknown = next((name for name in order if name not in known), None)
    if unknown is not None:
        raise UsageError(f"an order of operators: no operator is called {unknown!r}")
    if len(order) != len(known) or set(order) != set(known):
        raise UsageError(f"an order of {len(set(order))} operators, expected all {len(known)} of the graph, each once")
    missing = {name for operator in graph.operators for name in operator.outputs}
    for name in order:
        late = next((given for given in known[name].inputs if given in missing), None)
        if late is not None:
            raise UsageError(f"an order of operators: {name!r} comes before what makes {late!r}, which it reads")
        missing.difference_update(known[name].outputs)
    if graph.loss is not None and order[-1] != graph.operators[-1].id:
        raise UsageError(f"an order of operators: {order[-1]!r} comes after the loss")
    return replace(graph, operators=tuple(known[name] for name in order))


def cut_in_stages(
    graph: Graph, starts: Sequence[str], copies_of: Sequence[Sequence[int]] = ()
) -> tuple[Graph, tuple[int, ...]]:
    """Cut a graph where chunks of the model (virtual stages) begin.

    Every chunk that reads an activation of an earlier one gets a ``Transfer`` of its own, among its first operators, in
    the order in which the activations are made. A parameter that several chunks read gets a read of its own in each:
    they share no redistribution. Graph inputs and constants are there wherever they are read.

    Args:
        graph: the bound graph.
        starts: the operators (ids) that begin the chunks, in order; the first is the graph's first.
        copies_of: per chunk, earlier ones on the same stage: what the first of them has got from elsewhere is read from
            there, and not sent again. Empty: every chunk is sent what it reads.

    Returns:
        The graph, and the index of the first operator of every chunk in it.

    Raises:
        UsageError: an operator is not there, or they are not in order.
    """
    firsts = _positions(graph, starts)
    if len(firsts) <= 1:
        return graph, firsts
    return _Cutting(graph, firsts, copies_of or [()] * len(firsts)).result()


def _positions(graph: Graph, starts: Sequence[str]) -> tuple[int, ...]:
    known = {operator.id: index for index, operator in enumerate(graph.operators)}
    missing = next((name for name in starts if name not in known), None)
    if missing is not None:
        raise UsageError(
            f"pipeline stages: no operator is called {missing!r}",
            hint="A stage is named by the first output of its first operator; tap-show lists them.",
        )
    firsts = tuple(known[name] for name in starts)
    if not firsts or firsts[0] != 0:
        raise UsageError(f"pipeline stages: the first stage begins at {graph.operators[0].id!r}, the first operator")
    for before, after in itertools.pairwise(firsts):
        if after <= before:
            raise UsageError(
                f"pipeline stages: {graph.operators[after].id!r} does not come after {graph.operators[before].id!r}"
            )
    return firsts


class _Cutting:
    """Working state of ``cut_in_stages``."""

    def __init__(self, graph: Graph, firsts: tuple[int, ...], copies_of: Sequence[Sequence[int]]) -> None:
        self._graph = graph
        self._firsts = firsts
        self._copies_of = copies_of
        self._copied: dict[tuple[str, int], str] = {}
        """By tensor and chunk what the chunk calls its copy."""
        ends = (*firsts[1:], len(graph.operators))
        self._chunks = [range(first, end) for first, end in zip(firsts, ends, strict=True)]
        self._chunk_of = {
            name: number
            for number, chunk in enumerate(self._chunks)
            for index in chunk
            for name in graph.operators[index].outputs
        }
        self._made = {name: index for index, name in enumerate(self._chunk_of)}
        self._tensors: dict[str, Tensor] = dict(graph.tensors)
        self._operators: list[Operator] = []
        self._read_in: dict[str, int] = {}
        """The first chunk that reads each read of a parameter."""

    def result(self) -> tuple[Graph, tuple[int, ...]]:
        """Every chunk in turn."""
        begins: list[int] = []
        for number, chunk in enumerate(self._chunks):
            begins.append(len(self._operators))
            names = {**self._transfers(number, chunk), **self._reads(number, chunk)}
            self._operators.extend(_renamed(self._graph.operators[index], names) for index in chunk)
        cut = replace(self._graph, operators=tuple(self._operators), tensors=self._tensors)
        return cut, tuple(begins)

    def _read_by(self, chunk: range) -> Sequence[str]:
        """What a chunk reads, in order of reading."""
        inputs = (name for index in chunk for name in self._graph.operators[index].inputs)
        return tuple(dict.fromkeys(name for name in inputs if name is not None))

    def _transfers(self, number: int, chunk: range) -> Mapping[str, str]:
        """Add the transfers of a chunk; returns what its operators read instead."""
        wanted = [name for name in self._read_by(chunk) if self._chunk_of.get(name, number) != number]
        names: dict[str, str] = {}
        for name in sorted(wanted, key=self._made.__getitem__):
            names[name] = made = self._copied[name, number] = self._copy(name, number)
            kind = self._tensors[name].type
            signature = OperatorSignature(type=TRANSFER, attributes=(), inputs=(kind,), outputs=(kind,))
            source = self._nearest(name, number)
            self._operators.append(Operator(id=made, name="", signature=signature, inputs=(source,), outputs=(made,)))
        return names

    def _nearest(self, name: str, number: int) -> str:
        """Where a chunk gets a tensor from: a copy that is on its stage already, or what was made elsewhere."""
        copies = (self._copied.get((name, chunk)) for chunk in self._copies_of[number])
        return next((copy for copy in copies if copy is not None), name)

    def _reads(self, number: int, chunk: range) -> Mapping[str, str]:
        """Make the reads of parameters that an earlier chunk has, too; returns what operators read instead."""
        names: dict[str, str] = {}
        for name in self._read_by(chunk):
            if self._tensors[name].kind is not TensorKind.PARAMETER:
                continue
            if self._read_in.setdefault(name, number) != number:
                names[name] = self._copy(name, number)
        return names

    def _copy(self, name: str, number: int) -> str:
        """A tensor like another one, for a chunk."""
        made = f"{name}@{number}"
        while made in self._tensors:
            made += "'"
        self._tensors[made] = replace(self._tensors[name], name=made)
        return made


def _renamed(operator: Operator, names: Mapping[str, str]) -> Operator:
    if not any(name in names for name in operator.inputs if name is not None):
        return operator
    return replace(operator, inputs=tuple(None if name is None else names.get(name, name) for name in operator.inputs))
