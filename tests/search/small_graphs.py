"""Random graphs small enough to enumerate every assignment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from onnx import TensorProto, helper

from tap_planner.graph import Graph
from tests.search.models import Nodes, bound, model_file

BATCH = 4
Shape = tuple[int, ...]
KINDS = (
    "MatMul",
    "Add",
    "Mul",
    "MatMul",
    "Relu",
    "Add",
    "LayerNormalization",
    "Softmax",
    "Mul",
    "Reshape",
    "Transpose",
)
UNARY = ("Relu", "Softmax", "LayerNormalization")


class _Builder:
    """A graph under construction: nodes, and the shapes of what they make."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.graph = Nodes()
        self.shapes: dict[str, Shape] = {}
        self.inputs: dict[str, Shape] = {}
        self.count = 0

    def input(self, name: str, *shape: int) -> str:
        self.inputs[name] = self.shapes[name] = shape
        return name

    def emit(self, op: str, inputs: Sequence[str], shape: Shape, **attributes: Any) -> str:
        self.count += 1
        name = self.graph.add(op, inputs, f"t{self.count}", **attributes)
        self.shapes[name] = shape
        return name

    def weight(self, *shape: int) -> str:
        """A new parameter, or one that was used before."""
        same = [p.name for p in self.graph.initializers if tuple(p.dims) == shape and p.name.startswith("w")]
        if same and self.draw(st.integers(0, 2)):
            return self.draw(st.sampled_from(same))
        return self.graph.weight(f"w{len(self.graph.initializers)}", *shape)

    def unary(self, op: str, x: str) -> str:
        shape = self.shapes[x]
        if op == "LayerNormalization":
            return self.emit(op, [x, self.weight(shape[-1]), self.weight(shape[-1])], shape, axis=-1)
        return self.emit(op, [x], shape, **({"axis": -1} if op == "Softmax" else {}))

    def binary(self, op: str, x: str) -> str:
        shape = self.shapes[x]
        others = [name for name, known in self.shapes.items() if known == shape]
        other = self.draw(st.sampled_from([*others, "bias", "weight"]))
        if other == "bias":
            other = self.weight(shape[-1])
        elif other == "weight":
            other = self.weight(*shape[1:]) if len(shape) > 1 else self.weight(*shape)
        return self.emit(op, [x, other], shape)

    def matmul(self, x: str) -> str:
        shape = self.shapes[x]
        others = [name for name, known in self.shapes.items() if len(known) == 2 and known[0] == shape[-1]]
        if len(shape) == 2 and others and self.draw(st.integers(0, 2)) == 0:
            other = self.draw(st.sampled_from(others))
            return self.emit("MatMul", [x, other], (shape[0], self.shapes[other][1]))
        size = self.draw(st.sampled_from([shape[-1], shape[-1], 4]))
        return self.emit("MatMul", [x, self.weight(shape[-1], size)], (*shape[:-1], size))

    def reshape(self, x: str) -> str:
        shape = self.shapes[x]
        after = (shape[0], 2, shape[1] // 2) if len(shape) == 2 else (shape[0], shape[1] * shape[2])
        return self.emit("Reshape", [x, self.graph.integers(*after)], after)

    def transpose(self, x: str) -> str:
        shape = self.shapes[x]
        perm = self.draw(st.permutations(range(len(shape))))
        return self.emit("Transpose", [x], tuple(shape[d] for d in perm), perm=list(perm))

    def any_operator(self, x: str) -> str:
        kind = KINDS[self.draw(st.integers(0, len(KINDS) - 1))]
        if kind == "MatMul" and len(self.shapes[x]) > 1:
            return self.matmul(x)
        if kind in ("Add", "Mul"):
            return self.binary(kind, x)
        if kind == "Reshape" and len(self.shapes[x]) in (2, 3) and self.shapes[x][-1] % 2 == 0:
            return self.reshape(x)
        if kind == "Transpose":
            return self.transpose(x)
        return self.unary(kind if kind in UNARY else "Relu", x)

    def bound(self, output: str, *, training: bool) -> Graph:
        inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, list(s)) for n, s in self.inputs.items()]
        outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, list(self.shapes[output]))]
        proto = helper.make_graph(self.graph.nodes, "small", inputs, outputs, self.graph.initializers)
        return bound(model_file(proto), batch=BATCH, training=training)


@st.composite
def small_graphs(draw: st.DrawFn, max_operators: int = 4) -> Graph:
    """A few random operators: tensors with several consumers, tied parameters, products of activations, a loss."""
    builder = _Builder(draw)
    current = builder.input("x", *draw(st.sampled_from([(BATCH,), (BATCH, 1), (BATCH, 4), (BATCH, 6)])))
    current = builder.matmul(current) if len(builder.shapes[current]) > 1 else builder.binary("Mul", current)
    for _ in range(draw(st.integers(1, max_operators - 1))):
        earlier = [name for name in builder.shapes if name not in builder.inputs]
        source = current if draw(st.integers(0, 3)) else draw(st.sampled_from(earlier))
        previous, current = current, builder.any_operator(source)
        if source != previous and builder.shapes[previous] == builder.shapes[current]:
            current = builder.emit("Add", [previous, current], builder.shapes[current])
    return builder.bound(current, training=draw(st.integers(0, 5)) > 0)


@st.composite
def repeated_graphs(draw: st.DrawFn, max_repeats: int = 2) -> Graph:
    """A block of three operators, repeated, on vectors: with a mask or a parameter that all repeats share."""
    builder = _Builder(draw)
    x = builder.input("x", BATCH)
    operands = {"mask": builder.input("mask", BATCH)}
    current = builder.emit("Mul", [x, builder.graph.weight("first", BATCH)], (BATCH,))
    if draw(st.booleans()):
        operands["mask"] = current
    plan = [
        (
            draw(st.sampled_from(["Relu", "Add", "Softmax", "Mul", "Relu"])),
            draw(st.sampled_from(["own", "tied", "mask", "skip"])),
        )
        for _ in range(3)
    ]
    plan[0] = ("Mul", draw(st.sampled_from(["own", "tied"])))
    for repeat in range(draw(st.integers(2, max_repeats))):
        skip = current
        for position, (op, operand) in enumerate(plan):
            others = {
                "own": lambda r=repeat, p=position: builder.graph.weight(f"w{r}_{p}", BATCH),
                "tied": lambda p=position: builder.graph.weight(f"tied{p}", BATCH),
                "mask": lambda: operands["mask"],
                "skip": lambda s=skip: s,
            }
            inputs = [current, others[operand]()] if op in ("Add", "Mul") else [current]
            current = builder.emit(op, inputs, (BATCH,))
    if draw(st.booleans()):
        current = builder.emit("Relu", [current], (BATCH,))
    return builder.bound(current, training=True)
