"""Control flow of known course: a branch that is taken, loops of a constant, small number of rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from tap_planner.errors import UnsupportedGraphError
from tap_planner.graph.nodes import Node
from tap_planner.graph.unfolding import MAX_NODES, Unfolding, Work, graph_of, scanned_of

MAX_ROUNDS = 128
"""Loops of more rounds stay whole."""
_MAX_ALL = 3 * MAX_NODES // 2
"""Nodes that all loops may add up to, with what was unfolded in vain; from there on loops stay whole."""


class KeptWholeError(Exception):
    """Raised while a loop is being unfolded when it turns out that it cannot be; never leaves this package.

    Args:
        origin: of the node, which is to stay whole.
    """

    def __init__(self, origin: str) -> None:
        super().__init__(origin)
        self.origin = origin


@dataclass(slots=True, kw_only=True, eq=False)
class _Rounds:
    """A loop that is being unfolded; ``index`` rounds are done."""

    node: Node
    body: onnx.GraphProto
    trip: int | None
    """Number of rounds, None where only the condition ends the loop."""
    condition: str
    """Name of the value that says whether there is another round; empty: there is."""
    carried: list[str]
    collected: list[list[str]]
    """Per scan output the values of the rounds so far."""
    begin: Callable[[int], tuple[list[Node], list[str]]]
    """Nodes that make what a round reads besides the carried values, and their names."""
    finish: Callable[[_Rounds], list[Node]]
    has_condition: bool
    """Whether the body's first result is the condition."""
    index: int = 0

    @property
    def where(self) -> str:
        """Words that name the loop."""
        return self.node.where

    def advance(self, walk: Unfolding) -> None:
        """Put in one more round, or what comes after the last one."""
        more = self.trip is None or self.index < self.trip
        if more and self.condition:
            condition = walk.constant(self.condition)
            if condition is None:
                raise KeptWholeError(self.node.origin)
            more = bool(condition[0])
        if not more:
            if self.index == 0 and self.collected:
                # What zero rounds stack up has a shape all the same, which only the body's types tell.
                raise KeptWholeError(self.node.origin)
            walk.push(self.finish(self))
            return
        size = len(self.body.node)
        walk.kept.made += size
        if self.index >= MAX_ROUNDS or size * (self.index + 1) > MAX_NODES or walk.kept.made > _MAX_ALL:
            raise KeptWholeError(self.node.origin)
        nodes, given = self.begin(self.index)
        if self.has_condition:
            condition_in = self.condition or walk.fresh(f"{self.node.outputs[0]}__condition_{self.index}")
            if not self.condition:
                tensor = numpy_helper.from_array(np.array(True), condition_in)
                nodes.append(walk.node(self.node, "Constant", [], [condition_in], value=tensor))
            actual = [*given, condition_in, *self.carried]
        else:
            actual = [*self.carried, *given]
        formal = dict(zip((value.name for value in self.body.input), actual, strict=True))
        made = walk.inline(self.node, self.body, formal, f"__{self.index}")
        results = list(made.results)
        if self.has_condition:
            self.condition = results.pop(0)
            walk.wanted.add(self.condition)
        num_carried = len(self.carried)
        self.carried = results[:num_carried]
        for items, name in zip(self.collected, results[num_carried:], strict=True):
            items.append(name)
        walk.wanted.update(results)
        self.index += 1
        walk.push([*nodes, *made.nodes, self])


def _if(walk: Unfolding, node: Node) -> list[Work] | None:
    condition = walk.constant(node.inputs[0])
    if condition is None:
        return None
    branch = graph_of(node, "then_branch" if condition[0] else "else_branch")
    made = walk.inline(node, branch, {}, "")
    return [*made.nodes, *walk.identities(node, made.results, node.outputs)]


def _stays(walk: Unfolding, node: Node) -> bool:
    return node.origin in walk.kept.origins or walk.kept.made > _MAX_ALL


def _loop(walk: Unfolding, node: Node) -> list[Work] | None:
    body = graph_of(node, "body")
    own = node.proto.input
    count = walk.constant(own[0]) if own[0] else None
    condition = own[1] if len(own) > 1 else ""
    bounded = count is not None or (not own[0] and condition)
    if _stays(walk, node) or not bounded or (condition and walk.constant(condition) is None):
        return None
    if count is not None and count[0] > MAX_ROUNDS:
        return None

    def begin(index: int) -> tuple[list[Node], list[str]]:
        number, name = walk.integers(node, index, f"{node.outputs[0]}__round_{index}")
        return [number], [name]

    def finish(rounds: _Rounds) -> list[Node]:
        nodes = walk.identities(node, rounds.carried, node.outputs)
        for items, name in zip(rounds.collected, node.outputs[len(rounds.carried) :], strict=False):
            nodes.extend(walk.stacked(node, items, 0, name))
        return nodes

    carried = list(own[2:])
    return [
        _Rounds(
            node=node,
            body=body,
            trip=None if count is None else int(count[0]),
            condition=condition,
            carried=carried,
            collected=[[] for _ in range(len(body.output) - 1 - len(carried))],
            begin=begin,
            finish=finish,
            has_condition=True,
        )
    ]


def _scan(walk: Unfolding, node: Node) -> list[Work] | None:
    if walk.opset < 9:
        raise UnsupportedGraphError(
            f"{node.where}: operator set {walk.opset} gives it a batch dim of its own, which is not supported",
            hint="export the model with operator set 9 or newer",
        )
    body = graph_of(node, "body")
    own = list(node.proto.input)
    num_scanned = scanned_of(node)
    split = len(own) - num_scanned
    scanned = [walk.values.get(name) for name in own[split:]]
    if _stays(walk, node) or not scanned or None in scanned:
        return None
    axes = _per_item(node, "scan_input_axes", num_scanned)
    shapes = [value.shape for value in scanned if value is not None]
    lengths = {shape[axis] for shape, axis in zip(shapes, axes, strict=True)}
    if len(lengths) != 1:
        raise UnsupportedGraphError(f"{node.where}: its inputs have {sorted(lengths)} elements, expected the same")
    trip = lengths.pop()
    if not 0 < trip <= MAX_ROUNDS:
        return None
    backwards = _per_item(node, "scan_input_directions", num_scanned)

    def begin(index: int) -> tuple[list[Node], list[str]]:
        nodes: list[Node] = []
        names: list[str] = []
        for source, axis, back in zip(own[split:], axes, backwards, strict=True):
            position, name = walk.integers(node, trip - 1 - index if back else index, f"{source}__at_{index}")
            row = walk.fresh(f"{source}__row_{index}")
            nodes.extend((position, walk.node(node, "Gather", [source, name], [row], axis=axis)))
            names.append(row)
        return nodes, names

    def finish(rounds: _Rounds) -> list[Node]:
        nodes = walk.identities(node, rounds.carried, node.outputs)
        names = node.outputs[split:]
        out_axes = _per_item(node, "scan_output_axes", len(rounds.collected))
        reverse = _per_item(node, "scan_output_directions", len(rounds.collected))
        for items, name, axis, back in zip(rounds.collected, names, out_axes, reverse, strict=False):
            if name:
                nodes.extend(walk.stacked(node, items[::-1] if back else items, axis, name))
        return nodes

    return [
        _Rounds(
            node=node,
            body=body,
            trip=trip,
            condition="",
            carried=own[:split],
            collected=[[] for _ in range(len(body.output) - split)],
            begin=begin,
            finish=finish,
            has_condition=False,
        )
    ]


def _sequence_map(walk: Unfolding, node: Node) -> list[Work] | None:
    body = graph_of(node, "body")
    own = list(node.proto.input)
    items = walk.items(node, own[0])
    walk.kept.made += len(items) * len(body.node)
    if len(items) * len(body.node) > MAX_NODES or walk.kept.made > _MAX_ALL:
        raise UnsupportedGraphError(f"{node.where}: a sequence of {len(items)} items, too many to unfold")
    nodes: list[Work] = []
    results: list[list[str]] = [[] for _ in body.output]
    for index in range(len(items)):
        actual = [walk.sequences[name][index] if name in walk.sequences else name for name in own]
        formal = dict(zip((value.name for value in body.input), actual, strict=True))
        made = walk.inline(node, body, formal, f"__{index}")
        nodes.extend(made.nodes)
        for names, name in zip(results, made.results, strict=True):
            names.append(name)
    for name, names in zip(node.outputs, results, strict=False):
        walk.define(name, names)
    return nodes


def _per_item(node: Node, attribute: str, count: int) -> tuple[int, ...]:
    found = node.attributes.get(attribute)
    return tuple(int(item) for item in found) if isinstance(found, tuple) else (0,) * count


METHODS: dict[str, Callable[[Unfolding, Node], Sequence[Work] | None]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "SequenceMap": _sequence_map,
}
"""What takes the place of a node; None where it must stay."""
