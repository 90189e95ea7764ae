"""Models of any depth, made from the small ones by repeating a layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx

LAYER = "model.layers.{}"
"""Names of what belongs to a layer begin so in the models that are written node by node."""


def deepened(source: Path, layers: int) -> onnx.ModelProto:
    """A model of two layers made deeper: copies of its last layer follow each other.

    Args:
        source: a model written node by node, with names that begin with ``model.layers.N``.
        layers: how many layers it shall have.
    """
    model = onnx.ModelProto()
    model.ParseFromString(source.read_bytes())
    return deepened_model(model, layers)


def deepened_model(model: onnx.ModelProto, layers: int) -> onnx.ModelProto:
    """The same for a model in memory, which is changed."""
    first, second = LAYER.format(0), LAYER.format(1)
    nodes = list(model.graph.node)
    layer = [node for node in nodes if _belongs(node.output[0], second)]
    entry = next(node.output[0] for node in reversed(nodes) if _belongs(node.output[0], first))
    leave = layer[-1].output[0]
    at = max(index for index, node in enumerate(nodes) if _belongs(node.output[0], second)) + 1
    weights = [tensor for tensor in model.graph.initializer if _belongs(tensor.name, second)]
    made: list[onnx.NodeProto] = []
    before = leave
    for number in range(2, layers):
        rename = _renaming(second, LAYER.format(number), {entry: before})
        made.extend(_copy(node, rename) for node in layer)
        for tensor in weights:
            copy = model.graph.initializer.add()
            copy.CopyFrom(tensor)
            copy.name = rename(tensor.name)
        before = made[-1].output[0]
    tail = [_copy(node, lambda name: before if name == leave else name) for node in nodes[at:]]
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:at], *made, *tail])
    return model


def resized(source: Path, layers: int) -> onnx.ModelProto:
    """A model of at least two layers with as many as asked for: copies of its second layer follow each other.

    Args:
        source: a model written node by node, with names that begin with ``model.layers.N``.
        layers: how many layers it shall have, at least 2.
    """
    return deepened_model(_of_two_layers(source), layers)


def _of_two_layers(source: Path) -> onnx.ModelProto:
    """The model with all layers after the second left out."""
    model = onnx.ModelProto()
    model.ParseFromString(source.read_bytes())
    kept = (LAYER.format(0), LAYER.format(1))

    def surplus(name: str) -> bool:
        return name.startswith(LAYER.format("")) and not any(_belongs(name, layer) for layer in kept)

    nodes = list(model.graph.node)
    leave = next(node.output[0] for node in reversed(nodes) if _belongs(node.output[0], kept[1]))
    last = next((node.output[0] for node in reversed(nodes) if surplus(node.output[0])), leave)
    rest = [node for node in nodes if not surplus(node.output[0])]
    weights = [tensor for tensor in model.graph.initializer if not surplus(tensor.name)]
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(_copy(node, lambda name: leave if name == last else name) for node in rest)
    model.graph.initializer.extend(weights)
    return model


def residual_chain(blocks: int) -> onnx.ModelProto:
    """Blocks of four operators (MatMul, Add, Relu, Add) that share one weight, one after the other."""
    helper = onnx.helper
    nodes: list[onnx.NodeProto] = []
    for index in range(blocks):
        nodes.append(helper.make_node("MatMul", [f"h{index}", "w"], [f"m{index}"]))
        nodes.append(helper.make_node("Add", [f"m{index}", "b"], [f"a{index}"]))
        nodes.append(helper.make_node("Relu", [f"a{index}"], [f"r{index}"]))
        nodes.append(helper.make_node("Add", [f"r{index}", f"h{index}"], [f"h{index + 1}"]))
    value = helper.make_tensor_value_info
    float32 = onnx.TensorProto.FLOAT
    weights = [
        helper.make_tensor("w", float32, [4, 4], [0.1] * 16),
        helper.make_tensor("b", float32, [4], [0.0] * 4),
    ]
    graph = helper.make_graph(
        nodes, "chain", [value("h0", float32, ["batch", 4])], [value(f"h{blocks}", float32, ["batch", 4])], weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)


def _belongs(name: str, layer: str) -> bool:
    return name.startswith((f"{layer}.", f"{layer}/"))


def _renaming(old: str, new: str, others: dict[str, str]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        return new + name[len(old) :] if _belongs(name, old) else others.get(name, name)

    return rename


def _copy(node: onnx.NodeProto, rename: Callable[[str], str]) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = rename(node.name)
    copy.input[:] = [rename(name) for name in node.input]
    copy.output[:] = [rename(name) for name in node.output]
    return copy
