"""A GPT over tokens in two levels of windows: more dims, so more strategies an operator than the usual GPT has.

Tokens lie in [batch, segment, window, position]; attention stays inside a window, as in the local layers of Sparse
Transformers (Child et al. 2019) and the axial ones of Ho et al. (2019). Widths are those of GPT-3 175B.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from tests.search.models import OPSET, Nodes

WIDTH, HEADS, FEED_FORWARD, VOCABULARY = 12288, 96, 49152, 50304
TOKENS = ("batch", "segments", "windows", "positions")


def windowed_gpt(layers: int) -> onnx.ModelProto:
    """The model with as many layers as asked for; all share one mask."""
    graph = Nodes()
    hidden = graph.add("Gather", [graph.weight("embed.weight", VOCABULARY, WIDTH), "ids"], "embedded")
    for layer in range(layers):
        hidden = _attention(graph, f"layers.{layer}.attention", hidden)
        hidden = _mlp(graph, f"layers.{layer}.mlp", hidden)
    graph.add("MatMul", [_norm(graph, "last", hidden), graph.weight("head.weight", WIDTH, VOCABULARY)], "logits")
    value = helper.make_tensor_value_info
    inputs = [
        value("ids", TensorProto.INT64, list(TOKENS)),
        value("mask", TensorProto.FLOAT, ["positions", "positions"]),
    ]
    outputs = [value("logits", TensorProto.FLOAT, [*TOKENS, VOCABULARY])]
    proto = helper.make_graph(graph.nodes, "windowed_gpt", inputs, outputs, graph.initializers)
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def _norm(graph: Nodes, name: str, x: str) -> str:
    weights = [graph.weight(f"{name}.norm.{part}", WIDTH) for part in ("weight", "bias")]
    return graph.add("LayerNormalization", [x, *weights], f"{name}/norm", axis=-1)


def _linear(graph: Nodes, name: str, x: str, rows: int, columns: int) -> str:
    y = graph.add("MatMul", [x, graph.weight(f"{name}.weight", rows, columns)], f"{name}/product")
    return graph.add("Add", [y, graph.weight(f"{name}.bias", columns)], f"{name}/biased")


def _attention(graph: Nodes, name: str, x: str) -> str:
    """Attention of each position to those of its window."""
    y = _norm(graph, name, x)
    parts = graph.integers(0, 0, 0, 0, HEADS, WIDTH // HEADS)
    orders = {"q": (0, 1, 2, 4, 3, 5), "k": (0, 1, 2, 4, 5, 3), "v": (0, 1, 2, 4, 3, 5)}
    heads: dict[str, str] = {}
    for which, order in orders.items():
        projected = _linear(graph, f"{name}.{which}_proj", y, WIDTH, WIDTH)
        apart = graph.add("Reshape", [projected, parts], f"{name}.{which}/heads")
        heads[which] = graph.add("Transpose", [apart], f"{name}.{which}/turned", perm=list(order))
    scores = graph.add("MatMul", [heads["q"], heads["k"]], f"{name}/scores")
    scores = graph.add("Mul", [scores, graph.scalar((WIDTH // HEADS) ** -0.5)], f"{name}/scaled")
    weights = graph.add("Softmax", [graph.add("Add", [scores, "mask"], f"{name}/masked")], f"{name}/softmax", axis=-1)
    mixed = graph.add("MatMul", [weights, heads["v"]], f"{name}/mixed")
    mixed = graph.add("Transpose", [mixed], f"{name}/back", perm=[0, 1, 2, 4, 3, 5])
    mixed = graph.add("Reshape", [mixed, graph.integers(0, 0, 0, 0, WIDTH)], f"{name}/merged")
    return graph.add("Add", [x, _linear(graph, f"{name}.o_proj", mixed, WIDTH, WIDTH)], f"{name}/sum")


def _mlp(graph: Nodes, name: str, x: str) -> str:
    up = _linear(graph, f"{name}.up_proj", _norm(graph, name, x), WIDTH, FEED_FORWARD)
    down = _linear(graph, f"{name}.down_proj", graph.add("Gelu", [up], f"{name}/gelu"), FEED_FORWARD, WIDTH)
    return graph.add("Add", [x, down], f"{name}/sum")
