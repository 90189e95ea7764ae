"""The MLPs of DistIR, and their plans by degrees: data, tensor (columns, then rows) and pipeline parallel.

A layer is a product with a square matrix and a Relu; the loss is a mean (Santhanam et al., "DistIR: An Intermediate
Representation and Simulator for Efficient Neural Network Distribution", 2021, section 4). MLP-1B has 16 layers of 8192
features, MLP-17B 64 of 16384.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from tap_planner.graph import BindOptions, Graph, LossOptions, Operator, ParameterRead, bind
from tap_planner.graph.texts import model_of_text
from tap_planner.operators import rule_of
from tap_planner.plan import Decisions, OperandDecision, cut_decisions
from tap_planner.program import Program, lower
from tap_planner.schedule import make_schedule
from tap_planner.sharding import Choice, Placements, Strategy, make_strategy
from tests.apply.random_plans import RandomPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """One of the models."""

    name: str
    num_layers: int
    hidden: int

    @property
    def num_parameters(self) -> int:
        """Weights; there are no biases."""
        return self.num_layers * self.hidden**2


SMALL = Mlp(name="mlp-small", num_layers=16, hidden=8192)
MEDIUM = Mlp(name="mlp-medium", num_layers=64, hidden=16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """A point of DistIR's grid."""

    data: int
    tensor: int
    pipeline: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"


@cache
def graph_of(mlp: Mlp, batch: int) -> Graph:
    """The graph of one microbatch of so many samples."""
    nodes, value = [], "x"
    for layer in range(mlp.num_layers):
        nodes.append(f"p{layer} = MatMul({value}, w{layer})")
        nodes.append(f"y{layer} = Relu(p{layer})")
        value = f"y{layer}"
    h, last = mlp.hidden, f"y{mlp.num_layers - 1}"
    text = (
        f'<ir_version: 10, opset_import: ["" : 21]> mlp (float[N,{h}] x) => (float[N,{h}] {last}) '
        f"{{ {'; '.join(nodes)} }}"
    )
    model = model_of_text(text.replace("; ", "\n"), {f"w{layer}": (h, h) for layer in range(mlp.num_layers)})
    return bind(model, BindOptions(batch=batch, training=True, loss=LossOptions(kind="mean")))


class _ByDegrees(RandomPlan):
    """Every layer's batch on the first axis; on the second the columns of one layer and the rows of the next."""

    def _choose(self, operator: Operator) -> Strategy:
        rule = rule_of(operator.signature)
        names = {factor.name: index for index, factor in enumerate(rule.factors)}
        tensor = Choice("none")
        if operator.type == "MatMul":
            tensor = Choice("factor", names["n" if int(operator.id[1:]) % 2 == 0 else "k"])
        elif operator.type == "Relu" and int(operator.id[1:]) % 2 == 0:
            tensor = Choice("factor", names["d1"])
        batch = names.get("m", names.get("d0"))
        data = Choice("none") if batch is None else Choice("factor", batch)  # one sample is no factor
        strategy = make_strategy(operator.signature, rule, (data, tensor), self.mesh_shape)
        assert strategy is not None, operator.id
        return strategy

    def _storage(
        self,
        name: str,
        shape: tuple[int, ...],
        uses: Mapping[str, list[tuple[OperandDecision, ParameterRead, int]]],
        trainable: bool,
    ) -> tuple[Placements, Placements | None]:
        operand, _, _ = uses[name][0]
        return operand.placement, operand.gradient


@cache
def _whole(mlp: Mlp, batch: int, data: int, tensor: int) -> Decisions:
    """The plan of one stage, for one microbatch."""
    return replace(_ByDegrees(graph_of(mlp, batch), (data, tensor), 0, optimizer="sgd").build(), precision="fp16")


def program_of(mlp: Mlp, batch: int, degrees: Degrees) -> Program:
    """A plan by degrees, lowered."""
    samples = batch // degrees.microbatches
    graph, whole = graph_of(mlp, samples), _whole(mlp, samples, degrees.data, degrees.tensor)
    if degrees.pipeline == 1:
        return lower(graph, replace(whole, microbatches=degrees.microbatches))
    each = mlp.num_layers // degrees.pipeline
    starts = [f"p{stage * each}" for stage in range(degrees.pipeline)]
    schedule = make_schedule(degrees.schedule, degrees.pipeline, degrees.microbatches)
    return lower(*cut_decisions(graph, whole, starts, schedule))
