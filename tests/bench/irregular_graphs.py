"""Irregular models by generators, as ONNX without weights: random cells, unrolled recurrent nets, a recommender.

Everything is drawn by ``random.Random`` with a given seed, so the same call makes the same model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import onnx
from onnx import TensorProto, helper

from tests.search.models import Nodes

__all__ = [
    "bidirectional_rnn",
    "mixture",
    "nas_cells",
    "random_wiring",
    "recommender",
    "unrolled_lstm",
    "unrolled_rnn",
]


def _model(
    graph: Nodes, inputs: Sequence[onnx.ValueInfoProto], output: str, shape: Sequence[int | str]
) -> onnx.ModelProto:
    result = helper.make_tensor_value_info(output, TensorProto.FLOAT, list(shape))
    made = helper.make_graph(graph.nodes, "irregular", list(inputs), [result], graph.initializers)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)


def _floats(name: str, *shape: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])


def _conv(graph: Nodes, name: str, x: str, channels: tuple[int, int], size: int, *, groups: int = 1) -> str:
    """Padded so that the picture keeps its size."""
    weight = graph.weight(f"{name}.w", channels[1], channels[0] // groups, size, size)
    return graph.add("Conv", [x, weight], f"{name}.conv", kernel_shape=[size] * 2, pads=[size // 2] * 4, group=groups)


def _sum(graph: Nodes, name: str, parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else graph.add("Sum", list(parts), f"{name}.sum")


def _head(graph: Nodes, x: str, channels: int) -> str:
    pooled = graph.add("GlobalAveragePool", [x], "pooled")
    flat = graph.add("Flatten", [pooled], "flat", axis=1)
    return graph.add("Gemm", [flat, graph.weight("head.w", channels, 1000)], "logits")


# -- convolutions ------------------------------------------------------------------------------------------------


def watts_strogatz(draw: random.Random, nodes: int, near: int, chance: float) -> list[tuple[int, int]]:
    """A ring whose nodes know their ``near`` nearest, each edge rewired with a chance; from smaller to larger."""
    edges = {(node, (node + step) % nodes) for node in range(nodes) for step in range(1, near // 2 + 1)}
    for edge in sorted(edges):
        free = [other for other in range(nodes) if other != edge[0] and (edge[0], other) not in edges]
        if draw.random() < chance and free:
            edges.remove(edge)
            edges.add((edge[0], draw.choice(free)))
    return sorted({(min(edge), max(edge)) for edge in edges})


def random_wiring(
    seed: int, *, stages: int = 3, nodes: int = 12, channels: int = 64, size: int = 56
) -> onnx.ModelProto:
    """Randomly wired convolutions (Xie et al., ICCV'19): stages of Watts-Strogatz graphs with K = 4 and P = 0.75.

    A node is ReLU, convolution and batch normalisation (left out here: it folds into the convolution) of the sum of
    what it reads; nodes that none reads are averaged, here summed, at the end of the stage.
    """
    draw, graph = random.Random(seed), Nodes()
    x = _conv(graph, "stem", "x", (3, channels), 3)
    for stage in range(stages):
        wide = channels << stage
        if stage:
            x = graph.add("MaxPool", [x], f"s{stage}.pool", kernel_shape=[2, 2], strides=[2, 2])
            x = _conv(graph, f"s{stage}.widen", x, (wide // 2, wide), 1)
        edges = watts_strogatz(draw, nodes, 4, 0.75)
        made: list[str] = []
        for node in range(nodes):
            name, before = f"s{stage}.n{node}", [made[a] for a, b in edges if b == node]
            active = graph.add("Relu", [_sum(graph, name, before or [x])], f"{name}.relu")
            made.append(_conv(graph, name, active, (wide, wide), 3))
        read = {a for a, _ in edges}
        x = _sum(graph, f"s{stage}", [made[node] for node in range(nodes) if node not in read])
    return _model(graph, [_floats("x", 3, size, size)], _head(graph, x, channels << (stages - 1)), ["batch", 1000])


def nas_cells(seed: int, *, cells: int = 6, blocks: int = 5, channels: int = 128, size: int = 28) -> onnx.ModelProto:
    """Cells as in NASNet (Zoph et al., CVPR'18): each reads the two cells before it.

    A block adds two operations on what was drawn of the cell's inputs and earlier blocks; those that none reads are
    joined.
    """
    draw, graph = random.Random(seed), Nodes()
    cell_outputs = [_conv(graph, f"stem{side}", "x", (3, channels), 3) for side in (0, 1)]
    for cell in range(cells):
        states = [
            _conv(graph, f"c{cell}.in{side}", state, (channels, channels), 1)
            for side, state in enumerate(cell_outputs[-2:])
        ]
        unread = set(range(2, 2 + blocks))
        for block in range(blocks):
            parts: list[str] = []
            for side in (0, 1):
                source = draw.randrange(len(states))
                unread.discard(source)
                operation = draw.choice(_OPERATIONS)
                parts.append(operation(graph, f"c{cell}.b{block}.{side}", states[source], channels))
            states.append(graph.add("Add", parts, f"c{cell}.b{block}"))
        joined = [states[state] for state in sorted(unread)]
        whole = joined[0] if len(joined) == 1 else graph.add("Concat", joined, f"c{cell}.joined", axis=1)
        cell_outputs.append(_conv(graph, f"c{cell}.out", whole, (channels * len(joined), channels), 1))
    return _model(graph, [_floats("x", 3, size, size)], _head(graph, cell_outputs[-1], channels), ["batch", 1000])


def _separable(graph: Nodes, name: str, x: str, channels: int, size: int) -> str:
    active = graph.add("Relu", [x], f"{name}.relu")
    deep = _conv(graph, f"{name}.deep", active, (channels, channels), size, groups=channels)
    return _conv(graph, f"{name}.wide", deep, (channels, channels), 1)


def _pooled(graph: Nodes, name: str, x: str, kind: str) -> str:
    return graph.add(kind, [x], f"{name}.pool", kernel_shape=[3, 3], pads=[1, 1, 1, 1])


_OPERATIONS: tuple[Callable[[Nodes, str, str, int], str], ...] = (
    lambda graph, name, x, channels: _separable(graph, name, x, channels, 3),
    lambda graph, name, x, channels: _separable(graph, name, x, channels, 5),
    lambda graph, name, x, channels: _conv(graph, name, x, (channels, channels), 3),
    lambda graph, name, x, channels: _pooled(graph, name, x, "AveragePool"),
    lambda graph, name, x, channels: _pooled(graph, name, x, "MaxPool"),
    lambda graph, name, x, channels: x,
)


# -- recurrent nets ----------------------------------------------------------------------------------------------


def _steps(graph: Nodes, steps: int, hidden: int) -> list[str]:
    """The input [batch, steps, hidden] cut into steps of [batch, hidden]."""
    names = [f"x{step}" for step in range(steps)]
    graph.nodes.append(helper.make_node("Split", ["x"], [f"{name}.cut" for name in names], axis=1, num_outputs=steps))
    return [graph.add("Reshape", [f"{name}.cut", graph.integers(-1, hidden)], name) for name in names]


def _lstm_step(
    graph: Nodes, name: str, weights: tuple[str, str], x: str, state: tuple[str, str] | None
) -> tuple[str, str]:
    """Gates of a Gemm of the input and one of the state; (hidden, cell)."""
    gates = graph.add("MatMul", [x, weights[0]], f"{name}.wx")
    if state is not None:
        gates = graph.add("Add", [gates, graph.add("MatMul", [state[0], weights[1]], f"{name}.rh")], f"{name}.gates")
    cut = [f"{name}.{gate}" for gate in "ifog"]
    graph.nodes.append(helper.make_node("Split", [gates], cut, axis=1, num_outputs=4))
    enter, leave = (graph.add("Sigmoid", [gate], f"{gate}.on") for gate in (cut[0], cut[2]))
    cell = graph.add("Mul", [enter, graph.add("Tanh", [cut[3]], f"{name}.new")], f"{name}.entered")
    if state is not None:
        forget = graph.add("Sigmoid", [cut[1]], f"{cut[1]}.on")
        cell = graph.add("Add", [cell, graph.add("Mul", [forget, state[1]], f"{name}.kept")], f"{name}.cell")
    return graph.add("Mul", [leave, graph.add("Tanh", [cell], f"{name}.shown")], f"{name}.hidden"), cell


def unrolled_lstm(*, layers: int = 3, steps: int = 8, hidden: int = 1024) -> onnx.ModelProto:
    """LSTM layers, step by step; the weights of a layer are those of all its steps."""
    graph = Nodes()
    row = _steps(graph, steps, hidden)
    for layer in range(layers):
        weights = tuple(graph.weight(f"l{layer}.{kind}", hidden, 4 * hidden) for kind in "wr")
        state: tuple[str, str] | None = None
        above: list[str] = []
        for step, x in enumerate(row):
            state = _lstm_step(graph, f"l{layer}.t{step}", (weights[0], weights[1]), x, state)
            above.append(state[0])
        row = above
    graph.add("MatMul", [row[-1], graph.weight("head", hidden, hidden)], "y")
    return _model(graph, [_floats("x", steps, hidden)], "y", ["batch", hidden])


def _rnn_row(graph: Nodes, name: str, row: Sequence[str], hidden: int) -> list[str]:
    """A plain recurrent layer over inputs in a sequence."""
    w, r = (graph.weight(f"{name}.{kind}", hidden, hidden) for kind in "wr")
    found: list[str] = []
    for step, x in enumerate(row):
        total = graph.add("MatMul", [x, w], f"{name}.t{step}.wx")
        if found:
            back = graph.add("MatMul", [found[-1], r], f"{name}.t{step}.rh")
            total = graph.add("Add", [total, back], f"{name}.t{step}.sum")
        found.append(graph.add("Tanh", [total], f"{name}.t{step}.hidden"))
    return found


def unrolled_rnn(*, layers: int = 4, steps: int = 10, hidden: int = 2048) -> onnx.ModelProto:
    """Plain recurrent layers, step by step: a grid of layers and steps."""
    graph = Nodes()
    row = _steps(graph, steps, hidden)
    for layer in range(layers):
        row = _rnn_row(graph, f"l{layer}", row, hidden)
    graph.add("MatMul", [row[-1], graph.weight("head", hidden, hidden)], "y")
    return _model(graph, [_floats("x", steps, hidden)], "y", ["batch", hidden])


def bidirectional_rnn(*, layers: int = 2, steps: int = 10, hidden: int = 2048) -> onnx.ModelProto:
    """Each layer runs over the steps in both directions, which know nothing of each other, and adds them."""
    graph = Nodes()
    row = _steps(graph, steps, hidden)
    for layer in range(layers):
        ahead = _rnn_row(graph, f"l{layer}.ahead", row, hidden)
        back = _rnn_row(graph, f"l{layer}.back", row[::-1], hidden)[::-1]
        row = [graph.add("Add", pair, f"l{layer}.t{step}") for step, pair in enumerate(zip(ahead, back, strict=True))]
    graph.add("MatMul", [_sum(graph, "all", row), graph.weight("head", hidden, hidden)], "y")
    return _model(graph, [_floats("x", steps, hidden)], "y", ["batch", hidden])


# -- mixtures of experts -----------------------------------------------------------------------------------------


def mixture(*, layers: int = 3, experts: int = 8, width: int = 1024, deep: int = 4096) -> onnx.ModelProto:
    """Layers of experts, every one of them for every token, weighted by a gate (Jacobs et al., 1991): wide branches."""
    graph, x = Nodes(), "x"
    for layer in range(layers):
        name = f"l{layer}"
        scores = graph.add("MatMul", [x, graph.weight(f"{name}.gate", width, experts)], f"{name}.scores")
        shares = graph.add("Softmax", [scores], f"{name}.shares", axis=-1)
        cut = [f"{name}.share{expert}" for expert in range(experts)]
        graph.nodes.append(helper.make_node("Split", [shares], cut, axis=1, num_outputs=experts))
        parts: list[str] = []
        for expert, share in enumerate(cut):
            own = f"{name}.e{expert}"
            high = graph.add("MatMul", [x, graph.weight(f"{own}.up", width, deep)], f"{own}.high")
            active = graph.add("Relu", [high], f"{own}.on")
            low = graph.add("MatMul", [active, graph.weight(f"{own}.down", deep, width)], f"{own}.low")
            parts.append(graph.add("Mul", [low, share], f"{own}.part"))
        x = graph.add("Add", [x, _sum(graph, name, parts)], f"{name}.y")
    return _model(graph, [_floats("x", width)], x, ["batch", width])


# -- recommendation ----------------------------------------------------------------------------------------------


def recommender(
    *, tables: int = 26, rows: int = 200_000, width: int = 64, bags: int = 16, deep: int = 1024
) -> onnx.ModelProto:
    """As DLRM (Naumov et al., 2019): tables of embeddings, a small net of the dense features, a large one of all."""
    graph = Nodes()
    value = helper.make_tensor_value_info
    inputs = [_floats("dense", 13)]
    low = graph.add("MatMul", ["dense", graph.weight("low0", 13, deep)], "low0.y")
    low = graph.add("MatMul", [graph.add("Relu", [low], "low0.on"), graph.weight("low1", deep, width)], "low1.y")
    parts = [graph.add("Relu", [low], "low1.on")]
    for table in range(tables):
        inputs.append(value(f"ids{table}", TensorProto.INT64, ["batch", bags]))
        found = graph.add("Gather", [graph.weight(f"table{table}", rows, width), f"ids{table}"], f"t{table}.rows")
        parts.append(graph.add("ReduceSum", [found, graph.integers(1)], f"t{table}.sum", keepdims=0))
    x = graph.add("Concat", parts, "features", axis=1)
    for layer, (before, after) in enumerate((((tables + 1) * width, deep), (deep, deep), (deep, 1))):
        x = graph.add("MatMul", [x, graph.weight(f"top{layer}", before, after)], f"top{layer}.y")
        x = graph.add("Relu", [x], f"top{layer}.on") if after > 1 else graph.add("Sigmoid", [x], "click")
    return _model(graph, inputs, x, ["batch", 1])
