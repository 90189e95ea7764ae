"""Random small convolutional networks, and random plans that split their space wherever that is allowed."""

from __future__ import annotations

import random
from collections.abc import Callable

from onnx import TensorProto, helper

from tap_planner.graph import Graph, ModelFile, Operator
from tap_planner.operators import rule_of
from tap_planner.sharding import Strategy, axis_choices, make_strategy
from tests.apply.random_plans import RandomPlan
from tests.search.models import Nodes, bound, model_file

Shape = tuple[int, ...]


class _Network:
    """A chain of windowed and elementwise operators with a few branches, on [batch, channels, height, width]."""

    def __init__(self, seed: int, size: Shape) -> None:
        self.random = random.Random(seed)
        self.graph = Nodes()
        self.name = "x"
        self.shape: Shape = (1, 4, *size)
        self.input = self.shape

    @property
    def channels(self) -> int:
        return self.shape[1]

    def emit(self, op: str, shape: Shape, *more: str, **attributes: object) -> None:
        self.name = self.graph.add(op, [self.name, *more], f"t{len(self.graph.nodes)}", **attributes)
        self.shape = shape

    def window(self, *kernels: int) -> tuple[dict[str, list[int]], Shape]:
        """A window that halves or keeps the space, where the space lets it, and the space after it."""
        rank = len(self.shape) - 2
        halves = all(size % 2 == 0 and size > 4 for size in self.shape[2:])
        stride = self.random.choice((1, 2)) if halves else 1
        kernel = self.random.choice(kernels)
        dilation = self.random.choice((1, 2)) if kernel == 3 and stride == 1 else 1
        lacking = dilation * (kernel - 1) + 1 - stride
        begin = self.random.choice((lacking // 2, (lacking + 1) // 2)) if lacking > 0 else 0
        pads = [begin] * rank + [max(lacking - begin, 0)] * rank
        attributes = {"strides": [stride] * rank, "pads": pads, "dilations": [dilation] * rank}
        return attributes, tuple(size // stride for size in self.shape[2:])

    def convolution(self) -> None:
        attributes, space = self.window(3, 5)
        lacking = attributes["pads"][0] + attributes["pads"][-1] + attributes["strides"][0]
        kernel = (lacking - 1) // attributes["dilations"][0] + 1
        groups, made = self.random.choice((1, 1, 2)), self.random.choice((2, 4))
        count = len(self.graph.nodes)
        shape = (made, self.channels // groups, *(kernel,) * len(space))
        more = [self.graph.weight(f"w{count}", *shape)]
        if self.random.random() < 0.5:
            more.append(self.graph.weight(f"b{count}", made))
        self.emit("Conv", (1, made, *space), *more, group=groups, kernel_shape=list(shape[2:]), **attributes)

    def point(self) -> None:
        weight = self.graph.weight(f"w{len(self.graph.nodes)}", 4, self.channels, *(1,) * (len(self.shape) - 2))
        self.emit("Conv", (1, 4, *self.shape[2:]), weight)

    def pool(self) -> None:
        name = self.random.choice(("MaxPool", "AveragePool", "AveragePool", "LpPool"))
        attributes, space = self.window(2, 3)
        kernel = (attributes["pads"][0] + attributes["pads"][-1] + attributes["strides"][0] - 1) // attributes[
            "dilations"
        ][0] + 1
        extra = {"count_include_pad": self.random.choice((0, 1))} if name == "AveragePool" else {}
        self.emit(name, (*self.shape[:2], *space), kernel_shape=[kernel] * len(space), **attributes, **extra)

    def transposed(self) -> None:
        if max(self.shape[2:]) > 8:
            return self.point()
        kernel, pad = self.random.choice(((2, 0), (4, 1)))
        rank = len(self.shape) - 2
        weight = self.graph.weight(f"w{len(self.graph.nodes)}", self.channels, 4, *(kernel,) * rank)
        space = tuple(2 * size for size in self.shape[2:])
        pads, strides = [pad] * (2 * rank), [2] * rank
        return self.emit(
            "ConvTranspose", (1, 4, *space), weight, pads=pads, strides=strides, kernel_shape=[kernel] * rank
        )

    def residual(self) -> None:
        skip, shape = self.name, self.shape
        self.emit("Tanh", shape)
        self.emit("Add", shape, skip)

    def joined(self) -> None:
        skip, shape = self.name, self.shape
        self.emit("Sigmoid", shape)
        self.emit("Concat", (1, 2 * self.channels, *shape[2:]), skip, axis=1)

    def build(self, count: int) -> ModelFile:
        self.convolution()
        steps: list[Callable[[], None]] = [
            *(self.convolution, self.convolution, self.pool, self.pool, self.point),
            *(self.transposed, self.residual, self.joined),
        ]
        for _ in range(count):
            self.random.choice(steps)()
        self.point()
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *self.input[1:]])]
        outputs = [helper.make_tensor_value_info(self.name, TensorProto.FLOAT, ["batch", *self.shape[1:]])]
        return model_file(helper.make_graph(self.graph.nodes, "space", inputs, outputs, self.graph.initializers))


def spatial_model(seed: int, size: Shape, *, count: int = 5) -> ModelFile:
    """A random network without weights."""
    return _Network(seed, size).build(count)


def spatial_graph(seed: int, size: Shape, *, batch: int = 2, count: int = 5) -> Graph:
    """A random network bound for training."""
    return bound(spatial_model(seed, size, count=count), batch=batch)


class SpatialPlan(RandomPlan):
    """A random plan that splits space most of the time, also over several axes and several dims."""

    def _choose(self, operator: Operator) -> Strategy:
        rule = rule_of(operator.signature)
        dims = rule.outputs[0][2:] if len(rule.outputs[0]) > 2 else ()
        wanted = {dim[0] for dim in dims if dim}
        found = axis_choices(rule, self.hints[operator.id], [False] * len(operator.inputs))
        options = [choice for choice in found if choice.index in wanted and choice.blocks == 1]
        for _ in range(20 if options and self.random.random() < 0.8 else 0):
            choices = tuple(self.random.choice(options) for _ in self.mesh_shape)
            strategy = make_strategy(operator.signature, rule, choices, self.mesh_shape)
            if strategy is not None:
                return strategy
        return super()._choose(operator)
