"""One step of a LLaMA-like decoder with caches, node by node: the source of `hm_llama3_8b_decode_8l` in tests/data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.search.models import Nodes

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
EIGHT_LAYERS: dict[str, Any] = {
    "layers": 8,
    "d": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ff": 14336,
    "vocabulary": 128256,
}
"""The first eight layers of LLaMA 3 8B."""


def decoder_step(
    *, layers: int, d: int, heads: int, kv_heads: int, ff: int, vocabulary: int, caches: str = "attention"
) -> onnx.ModelProto:
    """A step of one new token: ids [batch, 1], caches [batch, kv_heads, past, width] in, [..., past + 1, ...] out.

    Args:
        layers: how many.
        d: width of the model.
        heads: query heads.
        kv_heads: key heads.
        ff: width between the two halves of the MLP.
        vocabulary: number of tokens.
        caches: ``attention``: the operator Attention appends to them; ``concat``: a Concat does, before Attention.
    """
    graph, width = Nodes(), d // heads
    value = helper.make_tensor_value_info
    inputs = [value("input_ids", INT64, ["batch", 1])]
    inputs.extend(value(name, FLOAT, ["batch", 1, width // 2]) for name in ("cos", "sin"))
    outputs = [value("logits", FLOAT, ["batch", 1, vocabulary])]
    x = graph.add("Gather", [graph.weight("embed_tokens.weight", vocabulary, d), "input_ids"], "embedded")
    for layer in range(layers):
        for kind in ("key", "value"):
            inputs.append(value(f"past.{layer}.{kind}", FLOAT, ["batch", kv_heads, "past", width]))
            outputs.append(value(f"present.{layer}.{kind}", FLOAT, ["batch", kv_heads, "past + 1", width]))
        x = _layer(graph, layer, x, d=d, heads=heads, kv_heads=kv_heads, ff=ff, concat=caches == "concat")
    normed = _norm(graph, "norm", x, d)
    graph.add("MatMul", [normed, graph.weight("lm_head.weight", d, vocabulary)], "logits")
    made = helper.make_graph(graph.nodes, "decoder_step", inputs, outputs, graph.initializers)
    for node in made.node:
        node.name = ""
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def with_values(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """The same model with its weights inside."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.CopyFrom(numpy_helper.from_array(arrays[tensor.name], tensor.name))
    return copy


def _norm(graph: Nodes, name: str, x: str, d: int) -> str:
    scale = graph.weight(f"{name}.weight", d)
    return graph.add("RMSNormalization", [x, scale], f"{name}.out", axis=-1, epsilon=1e-5)


def _linear(graph: Nodes, name: str, x: str, rows: int, columns: int) -> str:
    return graph.add("MatMul", [x, graph.weight(f"{name}.weight", rows, columns)], f"{name}.out")


def _layer(graph: Nodes, layer: int, x: str, *, d: int, heads: int, kv_heads: int, ff: int, concat: bool) -> str:
    name, width = f"layers.{layer}", d // heads
    y = _norm(graph, f"{name}.input_norm", x, d)
    q = _rotated(graph, f"{name}.q", _linear(graph, f"{name}.q", y, d, d), heads)
    k = _rotated(graph, f"{name}.k", _linear(graph, f"{name}.k", y, d, kv_heads * width), kv_heads)
    v = _linear(graph, f"{name}.v", y, d, kv_heads * width)
    attend = _attend_appended if concat else _attend
    mixed = attend(graph, layer, (q, k, v), heads, kv_heads, width)
    x = graph.add("Add", [x, _linear(graph, f"{name}.o", mixed, d, d)], f"{name}.attended")
    y = _norm(graph, f"{name}.post_norm", x, d)
    gate = _linear(graph, f"{name}.gate", y, d, ff)
    silu = graph.add("Mul", [gate, graph.add("Sigmoid", [gate], f"{name}.sigmoid")], f"{name}.silu")
    hidden = graph.add("Mul", [silu, _linear(graph, f"{name}.up", y, d, ff)], f"{name}.hidden")
    return graph.add("Add", [x, _linear(graph, f"{name}.down", hidden, ff, d)], f"{name}.out")


def _rotated(graph: Nodes, name: str, x: str, heads: int) -> str:
    return graph.add("RotaryEmbedding", [x, "cos", "sin"], f"{name}.rotated", num_heads=heads)


def _attend(graph: Nodes, layer: int, qkv: Sequence[str], heads: int, kv_heads: int, width: int) -> str:
    """Attention, which appends the new keys and values to the caches itself."""
    mixed = f"layers.{layer}.mixed"
    past = [f"past.{layer}.key", f"past.{layer}.value"]
    present = [f"present.{layer}.key", f"present.{layer}.value"]
    counts: dict[str, Any] = {"q_num_heads": heads, "kv_num_heads": kv_heads}
    graph.nodes.append(helper.make_node("Attention", [*qkv, "", *past], [mixed, *present], **counts))
    return mixed


def _attend_appended(graph: Nodes, layer: int, qkv: Sequence[str], heads: int, kv_heads: int, width: int) -> str:
    """New keys and values behind the old ones by Concat, then Attention over [batch, heads, positions, width]."""
    parts = [
        graph.add(
            "Transpose",
            [graph.add("Reshape", [part, graph.integers(0, 0, count, width)], f"layers.{layer}.{kind}.heads")],
            f"layers.{layer}.{kind}.by_head",
            perm=[0, 2, 1, 3],
        )
        for kind, part, count in zip("qkv", qkv, (heads, kv_heads, kv_heads), strict=True)
    ]
    for kind, index in (("key", 1), ("value", 2)):
        parts[index] = graph.add("Concat", [f"past.{layer}.{kind}", parts[index]], f"present.{layer}.{kind}", axis=2)
    mixed = graph.add("Attention", parts, f"layers.{layer}.mixed.by_head")
    back = graph.add("Transpose", [mixed], f"layers.{layer}.mixed.back", perm=[0, 2, 1, 3])
    return graph.add("Reshape", [back, graph.integers(0, 0, heads * width)], f"layers.{layer}.mixed")
