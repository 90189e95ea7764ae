"""ONNX nodes decoded once, in a topological order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx
from onnx import AttributeProto

from tap_planner.errors import UnsupportedGraphError

RawAttribute = int | float | str | tuple | onnx.TensorProto | onnx.SparseTensorProto | onnx.GraphProto | None


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One node of the file."""

    type: str
    """Operator type; with the domain in front unless it is the default one."""
    name: str
    inputs: tuple[str, ...]
    """Empty text for an absent operand."""
    outputs: tuple[str, ...]
    attributes: dict[str, RawAttribute]
    proto: onnx.NodeProto
    origin: str = ""
    """Where the node comes from: the first output of a node of the file, with positions in its subgraphs."""

    @property
    def where(self) -> str:
        """Words that name the node in a message."""
        label = self.name or next((name for name in self.outputs if name), "without outputs")
        return f"node {label!r} ({self.type})"


def _decode(attribute: AttributeProto) -> RawAttribute:
    kind = attribute.type
    if kind == AttributeProto.INT:
        return attribute.i
    if kind == AttributeProto.INTS:
        return tuple(attribute.ints)
    if kind == AttributeProto.FLOAT:
        return attribute.f
    if kind == AttributeProto.FLOATS:
        return tuple(attribute.floats)
    if kind == AttributeProto.STRING:
        return attribute.s.decode("utf-8", "replace")
    if kind == AttributeProto.STRINGS:
        return tuple(text.decode("utf-8", "replace") for text in attribute.strings)
    if kind == AttributeProto.TENSOR:
        return attribute.t
    if kind == AttributeProto.SPARSE_TENSOR:
        return attribute.sparse_tensor
    if kind == AttributeProto.GRAPH:
        return attribute.g
    return None


def decode_nodes(protos: Iterable[onnx.NodeProto]) -> list[Node]:
    """Decode nodes in file order."""
    nodes: list[Node] = []
    for proto in protos:
        domain = proto.domain
        attributes = proto.attribute
        nodes.append(
            Node(
                type=f"{domain}::{proto.op_type}" if domain and domain != "ai.onnx" else proto.op_type,
                name=proto.name,
                inputs=tuple(proto.input),
                outputs=tuple(proto.output),
                attributes={item.name: _decode(item) for item in attributes} if attributes else {},
                proto=proto,
            )
        )
    return nodes


def sort_nodes(nodes: Sequence[Node], given: Iterable[str]) -> list[Node]:
    """Order nodes topologically, as close to file order as possible.

    Args:
        nodes: in file order.
        given: names that no node makes (graph inputs, initializers).

    Raises:
        UnsupportedGraphError: a value is made twice, is never made, or depends on itself.
    """
    known = set(given)
    producers: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for output in node.outputs:
            if output in producers or (output and output in known):
                raise UnsupportedGraphError(f"{node.where}: value {output!r} is made twice")
            if output:
                producers[output] = index
    if _is_sorted(nodes, known):
        return list(nodes)
    return _kahn(nodes, known, producers)


def _is_sorted(nodes: Sequence[Node], known: set[str]) -> bool:
    available = set(known)
    available.add("")
    for node in nodes:
        if not available.issuperset(node.inputs):
            return False
        available.update(node.outputs)
    return True


def _kahn(nodes: Sequence[Node], known: set[str], producers: dict[str, int]) -> list[Node]:
    waiting: list[int] = []
    consumers: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        sources = set()
        for name in node.inputs:
            if not name or name in known:
                continue
            if name not in producers:
                raise UnsupportedGraphError(
                    f"{node.where}: reads {name!r}, which no node, input or initializer makes",
                    hint="the file is damaged; check it with onnx.checker",
                )
            sources.add(producers[name])
        waiting.append(len(sources))
        for source in sources:
            consumers.setdefault(source, []).append(index)
    ready = [index for index, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(nodes[index])
        for consumer in consumers.get(index, ()):
            waiting[consumer] -= 1
            if waiting[consumer] == 0:
                heapq.heappush(ready, consumer)
    if len(order) < len(nodes):
        _raise_cycle(nodes, waiting, producers)
    return order


def _raise_cycle(nodes: Sequence[Node], waiting: list[int], producers: dict[str, int]) -> None:
    """Walk backwards over unfinished nodes until one comes again."""
    current = next(index for index, count in enumerate(waiting) if count > 0)
    seen: dict[int, int] = {}
    path: list[int] = []
    while current not in seen:
        seen[current] = len(path)
        path.append(current)
        current = next(
            producers[name] for name in nodes[current].inputs if name in producers and waiting[producers[name]] > 0
        )
    loop = [nodes[index].outputs[0] for index in reversed(path[seen[current] :])]
    shown = " -> ".join([*loop[:8], "..." if len(loop) > 8 else loop[0]])
    raise UnsupportedGraphError(f"{nodes[current].where}: the graph has a cycle: {shown}")
