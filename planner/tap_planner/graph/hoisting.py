"""Constants of subgraphs, moved to the main graph.

A branch or a loop body may hold weights of its own. As initializers of the main graph they are parameters like all
others: counted, placed and read in one place, whether the subgraph is unfolded or stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import AttributeProto, TensorProto, helper

from tap_planner.graph.subgraphs import local_names, nested_graphs, rename_in


def hoist_constants(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Move initializers and Constant nodes of all subgraphs to the main graph, in place.

    A moved tensor keeps its name unless another of the main graph has it.
    """
    graphs = list(nested_graphs(proto.graph.node))
    if not graphs:
        return proto
    used = local_names(proto.graph)
    for graph in graphs:
        moved: dict[str, str] = {}
        inside = local_names(graph)
        outputs = {value.name for value in graph.output}
        for name, tensor in _take_constants(graph):
            fresh, number = name, 0
            while fresh in used or fresh in outputs or (number and fresh in inside):
                number += 1
                fresh = f"{name}_{number}"
            used.add(fresh)
            moved[name] = fresh
            stored = proto.graph.initializer.add()
            stored.CopyFrom(tensor)
            stored.name = fresh
        rename_in(graph.node, {name: fresh for name, fresh in moved.items() if name != fresh})
        # The result of a graph must be made inside it.
        for name in sorted(outputs & moved.keys()):
            graph.node.append(helper.make_node("Identity", [moved[name]], [name]))
    return proto


def _take_constants(graph: onnx.GraphProto) -> Iterator[tuple[str, TensorProto]]:
    formal = {value.name for value in graph.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in formal]
    for tensor in graph.initializer:
        if tensor.name not in formal:
            yield tensor.name, tensor
    if len(kept) < len(graph.initializer):
        copies = [_copy(tensor) for tensor in kept]
        del graph.initializer[:]
        graph.initializer.extend(copies)
    taken: list[int] = []
    for index, node in enumerate(graph.node):
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and node.output and node.attribute:
            attribute = node.attribute[0]
            if attribute.name == "value" and attribute.type == AttributeProto.TENSOR:
                taken.append(index)
                yield node.output[0], attribute.t
    for index in reversed(taken):
        del graph.node[index]


def _copy(tensor: TensorProto) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(tensor)
    return copy
