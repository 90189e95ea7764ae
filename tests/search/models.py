"""Models for the search's tests: small decoders of any depth, and random graphs of a few operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tap_planner.graph import BindOptions, Graph, LossOptions, ModelFile, bind

OPSET = 20


def model_file(graph: onnx.GraphProto) -> ModelFile:
    """A model as if it had been read from disk."""
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    return ModelFile(path=Path("model.onnx"), proto=proto, sha256="0" * 64, opset=OPSET)


def bound(model: ModelFile, *, batch: int, dims: dict[str, int] | None = None, training: bool = True) -> Graph:
    """The model bound with a mean loss, or for inference with explicit ends."""
    loss = LossOptions(kind="mean")
    options = BindOptions(batch=batch, dims=dims or {}, training=training, ends=not training, loss=loss)
    return bind(model, options)


@dataclass(slots=True)
class Nodes:
    """Collects nodes, and initializers whose data lies in an absent file."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def weight(self, name: str, *shape: int) -> str:
        """A parameter without data."""
        if all(known.name != name for known in self.initializers):
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
            tensor.data_location = TensorProto.EXTERNAL
            entry = tensor.external_data.add()
            entry.key, entry.value = "location", "weights.bin"
            self.initializers.append(tensor)
        return name

    def integers(self, *values: int) -> str:
        """A one-dimensional integer constant."""
        name = "ints_" + "_".join(str(value).replace("-", "m") for value in values)
        if all(known.name != name for known in self.initializers):
            self.initializers.append(numpy_helper.from_array(np.array(values, dtype=np.int64), name))
        return name

    def scalar(self, value: float) -> str:
        """A scalar constant."""
        name = f"scalar_{value}".replace(".", "_").replace("-", "m")
        if all(known.name != name for known in self.initializers):
            self.initializers.append(helper.make_tensor(name, TensorProto.FLOAT, [], [value]))
        return name

    def add(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """A node with one output."""
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))
        return output


def decoder(
    kind: str,
    *,
    layers: int,
    d: int = 64,
    heads: int = 4,
    kv_heads: int = 4,
    ff: int = 256,
    learned_mask: bool = False,
    tied: bool = False,
) -> ModelFile:
    """A decoder of tokens [batch, seq]: ``gpt`` (LayerNorm, biases, Gelu) or ``llama`` (RMSNorm, SwiGLU).

    Fewer ``kv_heads`` than ``heads`` make grouped-query attention. All layers share one mask: an input, or, with
    ``learned_mask``, an activation that they all give a gradient. ``tied``: the head reads the embedding.
    """
    graph = Nodes()
    if learned_mask:
        graph.add("Mul", ["given_mask", graph.weight("mask.w", 16)], "mask")
    hidden = graph.add("Gather", [graph.weight("embed.w", 160, d), "ids"], "embedded")
    for layer in range(layers):
        hidden = _attention(graph, kind, f"l{layer}", hidden, d, heads, kv_heads)
        hidden = _mlp(graph, kind, f"l{layer}", hidden, d, ff)
    head = graph.add("Transpose", ["embed.w"], "head", perm=[1, 0]) if tied else graph.weight("head.w", d, 160)
    graph.add("MatMul", [_norm(graph, kind, "last", hidden, d), head], "logits")
    inputs = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "seq"]),
        helper.make_tensor_value_info("given_mask" if learned_mask else "mask", TensorProto.FLOAT, ["seq", "seq"]),
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "seq", 160])]
    return model_file(helper.make_graph(graph.nodes, kind, inputs, outputs, graph.initializers))


def _norm(graph: Nodes, kind: str, name: str, x: str, d: int) -> str:
    scale = graph.weight(f"{name}.scale", d)
    if kind == "gpt":
        return graph.add("LayerNormalization", [x, scale, graph.weight(f"{name}.shift", d)], f"{name}.norm", axis=-1)
    square = graph.add("Mul", [x, x], f"{name}.square")
    mean = graph.add("ReduceMean", [square, graph.integers(-1)], f"{name}.mean", keepdims=1)
    root = graph.add("Sqrt", [graph.add("Add", [mean, graph.scalar(1e-5)], f"{name}.eps")], f"{name}.root")
    return graph.add("Mul", [graph.add("Div", [x, root], f"{name}.unit"), scale], f"{name}.norm")


def _linear(graph: Nodes, kind: str, name: str, x: str, rows: int, columns: int) -> str:
    y = graph.add("MatMul", [x, graph.weight(f"{name}.w", rows, columns)], f"{name}.mm")
    return graph.add("Add", [y, graph.weight(f"{name}.b", columns)], f"{name}.biased") if kind == "gpt" else y


def _heads(graph: Nodes, name: str, x: str, heads: int, size: int, perm: Sequence[int]) -> str:
    parts = graph.add("Reshape", [x, graph.integers(0, 0, heads, size)], f"{name}.heads")
    return graph.add("Transpose", [parts], f"{name}.t", perm=list(perm))


def _repeat(graph: Nodes, name: str, x: str, heads: int, kv_heads: int) -> str:
    """[b, kv, ...] to [b, heads, ...]: every key head serves several query heads."""
    if heads == kv_heads:
        return x
    apart = graph.add("Unsqueeze", [x, graph.integers(2)], f"{name}.apart")
    wide = graph.add("Expand", [apart, graph.integers(1, 1, heads // kv_heads, 1, 1)], f"{name}.wide")
    shape = graph.add("Shape", [wide], f"{name}.shape")
    batch = graph.add("Slice", [shape, graph.integers(0), graph.integers(1)], f"{name}.batch")
    rest = graph.add("Slice", [shape, graph.integers(3), graph.integers(5)], f"{name}.rest")
    target = graph.add("Concat", [batch, graph.integers(heads), rest], f"{name}.target", axis=0)
    return graph.add("Reshape", [wide, target], f"{name}.rep")


def _attention(graph: Nodes, kind: str, name: str, x: str, d: int, heads: int, kv_heads: int) -> str:
    size = d // heads
    y = _norm(graph, kind, f"{name}.n1", x, d)
    q = _heads(graph, f"{name}.q", _linear(graph, kind, f"{name}.q", y, d, d), heads, size, (0, 2, 1, 3))
    k = _heads(
        graph, f"{name}.k", _linear(graph, kind, f"{name}.k", y, d, kv_heads * size), kv_heads, size, (0, 2, 3, 1)
    )
    v = _heads(
        graph, f"{name}.v", _linear(graph, kind, f"{name}.v", y, d, kv_heads * size), kv_heads, size, (0, 2, 1, 3)
    )
    k, v = (_repeat(graph, f"{name}.{n}", t, heads, kv_heads) for n, t in (("k", k), ("v", v)))
    scores = graph.add("Mul", [graph.add("MatMul", [q, k], f"{name}.qk"), graph.scalar(0.25)], f"{name}.scaled")
    weights = graph.add("Softmax", [graph.add("Add", [scores, "mask"], f"{name}.masked")], f"{name}.p", axis=-1)
    mixed = graph.add("Transpose", [graph.add("MatMul", [weights, v], f"{name}.pv")], f"{name}.back", perm=[0, 2, 1, 3])
    merged = graph.add("Reshape", [mixed, graph.integers(0, 0, d)], f"{name}.merged")
    return graph.add("Add", [x, _linear(graph, kind, f"{name}.o", merged, d, d)], f"{name}.res1")


def _mlp(graph: Nodes, kind: str, name: str, x: str, d: int, ff: int) -> str:
    y = _norm(graph, kind, f"{name}.n2", x, d)
    if kind == "gpt":
        hidden = graph.add("Gelu", [_linear(graph, kind, f"{name}.up", y, d, ff)], f"{name}.act")
    else:
        gate = _linear(graph, kind, f"{name}.gate", y, d, ff)
        silu = graph.add("Mul", [gate, graph.add("Sigmoid", [gate], f"{name}.sig")], f"{name}.silu")
        hidden = graph.add("Mul", [silu, _linear(graph, kind, f"{name}.up", y, d, ff)], f"{name}.act")
    return graph.add("Add", [x, _linear(graph, kind, f"{name}.down", hidden, ff, d)], f"{name}.res2")
