"""Walking the graphs that nodes hold (branches and loop bodies), without recursion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx
from onnx import AttributeProto


def subgraphs(proto: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that a node holds itself."""
    for attribute in proto.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def nested_graphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """All graphs inside nodes, at any depth."""
    pending = [iter(nodes)]
    while pending:
        for node in pending.pop():
            for graph in subgraphs(node):
                yield graph
                pending.append(iter(graph.node))


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes and the nodes inside them, at any depth."""
    pending = [iter(nodes)]
    while pending:
        for node in pending.pop():
            yield node
            pending.extend(iter(graph.node) for graph in subgraphs(node))


def local_names(graph: onnx.GraphProto) -> set[str]:
    """Names that a graph defines itself."""
    names = {tensor.name for tensor in graph.initializer}
    names.update(value.name for value in graph.input)
    names.update(name for node in graph.node for name in node.output)
    return names


def captured_names(proto: onnx.NodeProto) -> list[str]:
    """Outer values that the subgraphs of a node read, in order."""
    found: dict[str, None] = {}
    pending = [(graph, local_names(graph)) for graph in subgraphs(proto)]
    while pending:
        graph, local = pending.pop()
        reads = [name for node in graph.node for name in node.input]
        reads.extend(value.name for value in graph.output)
        found.update((name, None) for name in reads if name and name not in local)
        for node in graph.node:
            pending.extend((inner, local | local_names(inner)) for inner in subgraphs(node))
    return list(found)


def rename_in(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Rename values in nodes and in the graphs inside them, except where an inner graph defines the name anew."""
    pending: list[tuple[onnx.NodeProto, Mapping[str, str]]] = [(node, names) for node in nodes]
    while pending:
        node, mapping = pending.pop()
        for items in (node.input, node.output):
            for index, name in enumerate(items):
                if name in mapping:
                    items[index] = mapping[name]
        for graph in subgraphs(node):
            local = local_names(graph)
            inner = {name: new for name, new in mapping.items() if name not in local}
            for value in graph.output:
                value.name = inner.get(value.name, value.name)
            pending.extend((item, inner) for item in graph.node)


def renamed(proto: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A copy of a node with values renamed."""
    copy = onnx.NodeProto()
    copy.CopyFrom(proto)
    rename_in((copy,), names)
    return copy
