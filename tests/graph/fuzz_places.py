"""Places in an ONNX model where damage can be done, and the odd values that do it."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

T = TypeVar("T")
Random = np.random.Generator
Mutator = Callable[[Random, onnx.ModelProto], bool]

EXTREME_INTS = (
    *(0, -1, 1, 2, 3, 4, 7, 16, -2, -5, 255, 1000, 65537, 2**20, -(2**20), 2**31 - 1, 2**31, -(2**31), 2**32 + 1),
    *(2**40, 2**53 + 1, 2**62, -(2**62), 2**63 - 1, -(2**63)),
)
EXTREME_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, -1e38, float("inf"), float("-inf"), float("nan"), 0.5)
ODD_NAMES = (
    *("", " ", "a b", "x\ny", "\x1b[31mred", "\u202egnp", "\ud7ff", "\U0001f600" * 5, "../../etc/passwd", "%s{0}$(id)"),
    *("n" * 5000, "__proto__", "labels", "loss", "batch", "'", '"', "\x00", "a__0", "a__unused_1", "x__batch"),
)
LOCATIONS = ("w.bin", "../w.bin", "/etc/passwd", "", "a/../../b", "c:\\w", "sub/w", "w\x00", ".")
EQUATIONS = (
    *("ij,jk->ik", "i,j,k,l,m,n,o,p->ijklmnop", "...ij,...jk->...ik", "ii->i", "ij->", "->", "", "ij,jk", "iI,Ij->ij"),
    *("a" * 60 + "->a", ",".join(string.ascii_letters) + "->" + string.ascii_letters, "ij->ijj", "éé->é"),
    *("i j->zz", "..."),
)


FUSED_ATTRIBUTES = (
    *("num_heads", "kv_num_heads", "unidirectional", "hidden_size", "K", "N", "bits", "block_size", "do_rotary"),
    *("axis", "is_packed", "interleaved", "top_k", "k", "local_window_size", "transA", "transB", "group"),
)


def pick(rng: Random, items: Sequence[T]) -> T:
    """One of the items."""
    return items[int(rng.integers(len(items)))]


def chance(rng: Random, share: float) -> bool:
    return bool(rng.random() < share)


def graphs(model: onnx.ModelProto) -> list[onnx.GraphProto]:
    """The graph and all subgraphs."""
    found: list[onnx.GraphProto] = []
    pending = [model.graph]
    while pending:
        graph = pending.pop()
        found.append(graph)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    pending.append(attribute.g)
    return found


def all_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    nodes = [node for graph in graphs(model) for node in graph.node]
    nodes.extend(node for function in model.functions for node in function.node)
    return nodes


def all_attributes(model: onnx.ModelProto) -> list[AttributeProto]:
    return [attribute for node in all_nodes(model) for attribute in node.attribute]


def all_tensors(model: onnx.ModelProto) -> list[TensorProto]:
    tensors = [tensor for graph in graphs(model) for tensor in graph.initializer]
    tensors.extend(attribute.t for attribute in all_attributes(model) if attribute.HasField("t"))
    return tensors


def declared_values(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    parts = [part for graph in graphs(model) for part in (graph.input, graph.output, graph.value_info)]
    return [value for part in parts for value in part]


def value_names(graph: onnx.GraphProto) -> list[str]:
    """Names that a node could read."""
    names = [value.name for value in graph.input]
    names.extend(tensor.name for tensor in graph.initializer)
    names.extend(name for node in graph.node for name in node.output if name)
    return names or ["x"]


@cache
def schemas() -> tuple[onnx.defs.OpSchema, ...]:
    return tuple(sorted(onnx.defs.get_all_schemas(), key=lambda schema: (schema.domain, schema.name)))


def odd_text(rng: Random) -> str:
    letters = string.ascii_letters + "_-. é0123"
    return "".join(pick(rng, letters) for _ in range(int(rng.integers(0, 9))))


def integer(rng: Random) -> int:
    if chance(rng, 0.3):
        return int(rng.integers(-4, 12))
    return pick(rng, EXTREME_INTS)
