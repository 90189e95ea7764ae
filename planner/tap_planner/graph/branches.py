"""If nodes whose condition is known: the taken branch takes the place of the node."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import onnx
from onnx import AttributeProto, helper

from tap_planner.graph.nodes import Node, decode_nodes


class BranchTakenError(Exception):
    """Raised while binding when the condition of an If turns out to be a constant; never leaves this package.

    Args:
        node: the If.
        taken: the value of its condition.
    """

    def __init__(self, node: Node, taken: bool) -> None:
        super().__init__(node.where)
        self.node = node
        self.taken = taken


def _subgraphs(proto: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in proto.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _local_names(graph: onnx.GraphProto) -> set[str]:
    names = {tensor.name for tensor in graph.initializer}
    names.update(value.name for value in graph.input)
    names.update(name for node in graph.node for name in node.output)
    return names


def captured_names(proto: onnx.NodeProto) -> list[str]:
    """Outer values that the subgraphs of a node read, in order."""
    found: dict[str, None] = {}
    pending = [(graph, _local_names(graph)) for graph in _subgraphs(proto)]
    while pending:
        graph, local = pending.pop()
        reads = [name for node in graph.node for name in node.input]
        reads.extend(value.name for value in graph.output)
        found.update((name, None) for name in reads if name and name not in local)
        for node in graph.node:
            pending.extend((inner, local | _local_names(inner)) for inner in _subgraphs(node))
    return list(found)


def with_captures(nodes: Sequence[Node]) -> list[Node]:
    """Nodes with subgraphs also list the outer values these read, after their own inputs."""
    for node in nodes:
        if any(True for _ in _subgraphs(node.proto)):
            node.inputs = (*node.inputs, *(name for name in captured_names(node.proto) if name not in node.inputs))
    return list(nodes)


def _rename(proto: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(proto)
    pending: list[tuple[onnx.NodeProto, Mapping[str, str]]] = [(copy, names)]
    while pending:
        node, mapping = pending.pop()
        for items in (node.input, node.output):
            for index, name in enumerate(items):
                items[index] = mapping.get(name, name)
        for graph in _subgraphs(node):
            local = _local_names(graph)
            inner = {name: new for name, new in mapping.items() if name not in local}
            for value in graph.output:
                value.name = inner.get(value.name, value.name)
            pending.extend((item, inner) for item in graph.node)
    return copy


def splice(nodes: Sequence[Node], taken: BranchTakenError, given: Collection[str]) -> list[Node]:
    """The nodes with the taken branch in place of its If.

    Args:
        nodes: all nodes.
        taken: which If, and which branch.
        given: names of inputs and initializers.
    """
    branch = taken.node.attributes["then_branch" if taken.taken else "else_branch"]
    assert isinstance(branch, onnx.GraphProto)
    used = set(given)
    for node in nodes:
        used.update(node.outputs)
    names: dict[str, str] = {}
    for name in sorted(_local_names(branch)):
        fresh = name
        while fresh in used:
            fresh += "_"
        used.add(fresh)
        names[name] = fresh
    protos = [helper.make_node("Constant", [], [names[tensor.name]], value=tensor) for tensor in branch.initializer]
    protos.extend(_rename(proto, names) for proto in branch.node)
    for value, output in zip(branch.output, taken.node.outputs, strict=False):
        protos.append(helper.make_node("Identity", [names.get(value.name, value.name)], [output]))
    at = next(index for index, node in enumerate(nodes) if node is taken.node)
    return [*nodes[:at], *with_captures(decode_nodes(protos)), *nodes[at + 1 :]]
