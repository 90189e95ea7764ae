"""Control flow and sequences whose course is known: replaced by plain nodes while the graph is bound.

Form in: nodes as the file has them. Form out: nodes without sequences and without control flow, but for branches and
loops that depend on data, which stay whole. An If whose condition is a constant becomes its branch, a Loop or Scan of
a constant, small number of rounds its rounds one after the other, a sequence the list of its items.

What a condition is worth is known only when everything before it is bound, so nodes are replaced one at a time while
the binder walks over them; ``Unfolding.visited`` holds the plain nodes in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tap_planner.errors import UnsupportedGraphError
from tap_planner.graph.nodes import Node, decode_nodes, sort_nodes
from tap_planner.graph.subgraphs import captured_names, local_names, renamed, subgraphs
from tap_planner.graph.values import Value

MAX_NODES = 20_000
"""Nodes that the rounds of one loop, or the parts of one sequence, may add up to."""


DAMAGE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NotImplementedError),
    *(StopIteration, TypeError, ValueError),
)
"""What reading a damaged node can lead to where no check of its own says it better; fuzzing counts these."""


def with_captures(nodes: Sequence[Node]) -> list[Node]:
    """Nodes with subgraphs also list the outer values these read, after their own inputs."""
    for node in nodes:
        if any(True for _ in subgraphs(node.proto)):
            node.inputs = (*node.inputs, *(name for name in captured_names(node.proto) if name not in node.inputs))
        if not node.origin:
            node.origin = next((name for name in node.outputs if name), "")
    return list(nodes)


class Step(Protocol):
    """What is still to be put in, once everything before it is bound."""

    @property
    def where(self) -> str:
        """Words that name the node it stands for."""
        ...

    def advance(self, walk: Unfolding) -> None:
        """Push what comes next."""
        ...


Work = Node | Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Inlined:
    """The nodes of a subgraph under fresh names."""

    nodes: list[Node]
    results: list[str]
    """Names of the subgraph's outputs."""


@dataclass(slots=True, kw_only=True, eq=False)
class Kept:
    """What the passes over a graph learn of its loops."""

    origins: set[str] = field(default_factory=set)
    """Those that stay whole."""
    made: int = 0
    """Nodes that the rounds of all loops added, in all passes."""


@dataclass(slots=True, kw_only=True, eq=False)
class Unfolding:
    """Walks over nodes and replaces those that can be."""

    opset: int
    values: Mapping[str, Value]
    """Values bound so far."""
    fetch: Callable[[str], np.ndarray]
    """Value of a constant by name."""
    wanted: set[str]
    """Names that somebody reads; grows with what is put in."""
    kept: Kept = field(default_factory=Kept)
    visited: list[Node] = field(default_factory=list)
    """Plain nodes, and control flow that stays, in the order of the walk."""
    changed: bool = False
    """Whether some node was replaced."""
    sequences: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the items of each sequence."""
    absent: set[str] = field(default_factory=set)
    """Optionals that hold nothing."""
    _pending: list[Work] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    _taken: dict[str, int] = field(default_factory=dict)
    """How many names were made of each."""

    def walk(self, nodes: Sequence[Node]) -> Iterator[Node]:
        """Nodes to bind, in order; those that ``replace`` puts in come next."""
        self._pending = list(reversed(nodes))
        self.names = {name for node in nodes for name in (*node.inputs, *node.outputs)}
        while self._pending:
            item = self._pending.pop()
            if isinstance(item, Node):
                self.visited.append(item)
                yield item
            else:
                try:
                    item.advance(self)
                except DAMAGE as error:
                    text = f"{item.where}: not a valid node ({type(error).__name__}: {error})"
                    raise UnsupportedGraphError(text, hint="check the file with onnx.checker") from error

    def inherit(self, other: Unfolding) -> None:
        """Take over the sequences of an earlier walk, whose nodes are left out of this one."""
        for name, items in other.sequences.items():
            self.sequences[name] = items
            self.wanted.update(items)
        self.absent.update(other.absent)

    def rest(self) -> list[Node] | None:
        """Nodes that the walk has not reached, None while a loop is being unfolded."""
        nodes = [item for item in reversed(self._pending) if isinstance(item, Node)]
        return nodes if len(nodes) == len(self._pending) else None

    def replace(self, items: Sequence[Work]) -> None:
        """Put ``items`` in place of the node that the walk gave last."""
        self.visited.pop()
        self.push(items)

    def push(self, items: Sequence[Work]) -> None:
        """Put ``items`` next."""
        self.changed = True
        for item in items:
            if isinstance(item, Node):
                self.wanted.update(item.inputs)
        self._pending.extend(reversed(items))

    # Making nodes -----------------------------------------------------------------------------------------------

    def fresh(self, name: str) -> str:
        made, count = name, self._taken.get(name, 0)
        while made in self.names:
            count += 1
            made = f"{name}_{count}"
        self._taken[name] = count
        self.names.add(made)
        return made

    def node(self, like: Node, kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: object) -> Node:
        made = decode_nodes([helper.make_node(kind, inputs, outputs, like.name, **attributes)])[0]  # type: ignore[arg-type]
        made.origin = f"{like.origin}/{outputs[0]}"
        return made

    def integers(self, like: Node, value: int | Sequence[int], name: str) -> tuple[Node, str]:
        made = self.fresh(name)
        tensor = numpy_helper.from_array(np.array(value, np.int64), made)
        return self.node(like, "Constant", [], [made], value=tensor), made

    def axes(self, like: Node, kind: str, source: str, axis: int, output: str) -> list[Node]:
        """Squeeze or Unsqueeze, whose axes are an operand since operator set 13."""
        if self.opset < 13:
            return [self.node(like, kind, [source], [output], axes=[axis])]
        constant, name = self.integers(like, [axis], f"{output}__axes")
        return [constant, self.node(like, kind, [source, name], [output])]

    def stacked(self, like: Node, items: Sequence[str], axis: int, output: str) -> list[Node]:
        """Items as slices of a new dim."""
        nodes: list[Node] = []
        rows = [self.fresh(f"{output}__{index}") for index in range(len(items))]
        for item, row in zip(items, rows, strict=True):
            nodes.extend(self.axes(like, "Unsqueeze", item, axis, row))
        return [*nodes, self.node(like, "Concat", rows, [output], axis=axis)]

    def inline(self, owner: Node, graph: onnx.GraphProto, formal: Mapping[str, str], suffix: str) -> Inlined:
        """The nodes of a subgraph with fresh names."""
        names = {name: formal[name] if name in formal else self.fresh(name + suffix) for name in _defined(graph)}
        protos = [helper.make_node("Constant", [], [names[t.name]], value=t) for t in graph.initializer]
        protos.extend(renamed(proto, names) for proto in graph.node)
        nodes = decode_nodes(protos)
        for index, node in enumerate(nodes):
            node.origin = f"{owner.origin}/{index}"
        nodes = with_captures(nodes)
        made = {name for node in nodes for name in node.outputs}
        given = {name for node in nodes for name in node.inputs} - made
        results = [names.get(value.name, value.name) for value in graph.output]
        return Inlined(nodes=sort_nodes(nodes, given), results=results)

    def identities(self, like: Node, sources: Sequence[str], names: Sequence[str]) -> list[Node]:
        pairs = zip(sources, names, strict=False)
        return [self.node(like, "Identity", [source], [name]) for source, name in pairs if name]

    # Values and sequences ----------------------------------------------------------------------------------------

    def constant(self, name: str) -> np.ndarray | None:
        value = self.values.get(name)
        return self.fetch(value.name).reshape(-1) if value is not None and value.is_constant else None

    def items(self, node: Node, name: str) -> tuple[str, ...]:
        if name not in self.sequences:
            raise UnsupportedGraphError(
                f"{node.where}: reads {name!r}, which is no sequence of known length",
                hint="sequences are planned where they are made from tensors inside the model",
            )
        return self.sequences[name]

    def define(self, name: str, items: Sequence[str]) -> None:
        self.sequences[name] = tuple(items)
        self.names.add(name)
        self.wanted.update(items)


def graph_of(node: Node, attribute: str) -> onnx.GraphProto:
    """A subgraph of a node.

    Raises:
        UnsupportedGraphError: the attribute is absent or no graph.
    """
    found = node.attributes.get(attribute)
    if not isinstance(found, onnx.GraphProto):
        raise UnsupportedGraphError(
            f"{node.where}: has no graph {attribute!r}", hint="check the file with onnx.checker"
        )
    return found


def integer_of(node: Node, attribute: str, default: int | None = None) -> int:
    """An integer attribute of a node.

    Raises:
        UnsupportedGraphError: the attribute is absent or no integer.
    """
    found = node.attributes.get(attribute, default)
    if not isinstance(found, int):
        raise UnsupportedGraphError(f"{node.where}: attribute {attribute!r} is {found!r}, expected an integer")
    return found


def scanned_of(node: Node) -> int:
    """How many of a Scan's operands are taken apart, one slice a round.

    Raises:
        UnsupportedGraphError: the attribute is absent, or more than the operands that are there.
    """
    count, given = integer_of(node, "num_scan_inputs"), len(node.proto.input)
    if not 0 < count <= given:
        raise UnsupportedGraphError(f"{node.where}: scans {count} of its {given} operands")
    return count


def _defined(graph: onnx.GraphProto) -> list[str]:
    return sorted(name for name in local_names(graph) if name)
