"""Pipelines for the simulator's tests: uniform MLPs, and any plan cut in chunks of its operators."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from onnx import TensorProto, helper

from tap_planner.cluster import Cluster, load_cluster
from tap_planner.graph import Graph, Operator
from tap_planner.operators import rule_of
from tap_planner.plan import Decisions, Region, cut_decisions
from tap_planner.program import Program, lower
from tap_planner.schedule import PipelineSchedule
from tap_planner.sharding import PARTIAL, REPLICATE, Choice, Placements, Strategy, make_strategy
from tests.apply.random_plans import RandomPlan
from tests.search.models import Nodes, bound, model_file

WIDTH, ROWS = 1024, 512
"""Of a layer, and of a microbatch."""
LAYER_NS = 2 * ROWS * WIDTH * WIDTH // 1024
"""Of the forward of a layer on ``plain_cluster``, and of each part of its backward."""
LAYER_BYTES = 4 * ROWS * WIDTH
"""What a layer keeps of a microbatch, and what stages send each other."""
SLOT_SLACK_NS = 4
"""At most so much do all the rest of a slot, its transfers and its share of the optimizer's step take."""


@functools.cache
def mlp(layers: int, *, width: int = WIDTH, rows: int = ROWS, skip: tuple[int, int] | None = None) -> Graph:
    """Products with square matrices.

    A vector is added before them, so that all of them have both gradients. With ``skip`` the result of one layer is
    added to that of a later one.
    """
    nodes = Nodes()
    value = nodes.add("Add", ["x", nodes.weight("shift", width)], "y")
    for layer in range(layers):
        value = nodes.add("MatMul", [value, nodes.weight(f"w{layer}", width, width)], f"y{layer}")
        if skip is not None and layer == skip[1]:
            value = nodes.add("Add", [value, f"y{skip[0]}"], f"z{layer}")
    graph = helper.make_graph(
        nodes.nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])],
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, ["batch", width])],
        nodes.initializers,
    )
    return bound(model_file(graph), batch=rows)


def plain_cluster(stages: int, *, nodes: int = 1, bytes_per_s: int = 10**18, library: str = "nccl") -> Cluster:
    """Devices that do 1024 FLOPs in a nanosecond, and next to nothing else takes time.

    Args:
        stages: devices of a node.
        nodes: how many.
        bytes_per_s: of every link.
        library: of the cluster.
    """
    cluster = load_cluster(f"{nodes}x{stages}:a100-sxm4-80gb")
    device = replace(
        cluster.device,
        launch_ns=0,
        backward_launch_ns=0,
        memory_bandwidth_bytes_per_s=10**18,
        peak_flops={"float32": 1024 * 10**9},
        matrix_efficiency_permille=1000,
    )
    levels = tuple(
        replace(level, bandwidth_bytes_per_s=bytes_per_s, latency_ns=0, nics=1, paces=(), reduces=False)
        for level in cluster.levels
    )
    return replace(cluster, device=device, levels=levels, library=library, collective_launch_ns=0)


class Replicated(RandomPlan):
    """Nothing is split, and every operator is a region; gradients are summed over all axes."""

    def _choose(self, operator: Operator) -> Strategy:
        choices = (Choice("none"),) * len(self.mesh_shape)
        strategy = make_strategy(operator.signature, rule_of(operator.signature), choices, self.mesh_shape)
        assert strategy is not None
        return strategy

    def _regions(self) -> tuple[Region, ...]:
        names = [operator.id for operator in self.graph.operators]
        return tuple(Region(operators=(name,), run=None, occurrence=0, recompute="none") for name in names)

    def _storage(self, *given: object) -> tuple[Placements, Placements]:
        whole = (REPLICATE,) * len(self.mesh_shape)
        return whole, tuple(REPLICATE if size == 1 else PARTIAL for size in self.mesh_shape)


def replicated(
    graph: Graph, starts: Sequence[str], schedule: PipelineSchedule, *, ranks: int = 1, zero: int = 0
) -> Program:
    """A graph in chunks that begin at these operators, in float32 and trained with plain SGD; each stage has so many
    ranks, in nodes of their own."""
    decisions = Replicated(graph, (ranks,), 0, zero=zero, optimizer="sgd").build()
    axes = (replace(decisions.axes[0], levels=("network",) if ranks > 1 else ()),)
    return cut(graph, replace(decisions, axes=axes, precision="fp32"), starts, schedule)


def layer_starts(layers: int, chunks: int) -> tuple[str, ...]:
    """The operators that begin equal chunks of the MLP."""
    size = layers // chunks
    return ("y", *(f"y{first}" for first in range(size, layers, size)))


def uniform(layers: int, schedule: PipelineSchedule) -> Program:
    """The MLP in equal chunks, one device per stage."""
    return replicated(mlp(layers), layer_starts(layers, schedule.num_virtual_stages), schedule)


def cut(
    graph: Graph,
    decisions: Decisions,
    starts: Sequence[str],
    schedule: PipelineSchedule,
    scatter_axes: tuple[int, ...] = (),
) -> Program:
    """A plan in chunks that begin at these operators; transfers shared out over some axes."""
    return lower(*cut_decisions(graph, decisions, starts, schedule, scatter_axes))


def evenly(graph: Graph, chunks: int) -> tuple[str, ...]:
    """Operators that begin chunks of about equally many."""
    count = len(graph.operators)
    return tuple(graph.operators[chunk * count // chunks].id for chunk in range(chunks))


def on_levels(decisions: Decisions, levels: tuple[tuple[str, ...], ...]) -> Decisions:
    """The plan with the levels that its axes span."""
    axes = tuple(replace(axis, levels=names) for axis, names in zip(decisions.axes, levels, strict=True))
    return replace(decisions, axes=axes)
