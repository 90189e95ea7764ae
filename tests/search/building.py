"""Short ways from a graph to the parts of the search."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache

from tap_planner.cluster import Cluster, load_cluster, parse_mesh
from tap_planner.cost import PriceList
from tap_planner.folding import FoldedGraph, fold
from tap_planner.graph import Graph
from tap_planner.plan import Decisions
from tap_planner.program import Program, lower
from tap_planner.search import (
    Assignment,
    Configuration,
    CostedModel,
    MicrobatchGraphs,
    Model,
    Recompute,
    SearchRequest,
    SearchResult,
    Settings,
    Solver,
    StrategyFilter,
    ZeroSetting,
    assemble,
    build_model,
    search,
)
from tap_planner.search.configuration import zero_settings
from tap_planner.search.graph_index import GraphIndex
from tap_planner.sharding import block_hints

MESHES = {
    (2,): ("1x2", "dp=2"),
    (4,): ("2x2", "dp=4"),
    (8,): ("1x8", "dp=8"),
    (2, 2): ("2x2", "dp=2,tp=2"),
    (2, 4): ("2x4", "dp=2,tp=4"),
    (4, 8): ("4x8", "dp=4,tp=8"),
}
"""Nodes x devices, and the mesh on them."""


@cache
def cluster_of(shape: tuple[int, ...]) -> Cluster:
    """A100s for a mesh, whose launches and communicators are so small that the sizes of small graphs still count."""
    cluster = load_cluster(f"{MESHES[shape][0]}:a100-sxm4-80gb")
    device = replace(cluster.device, launch_ns=5, backward_launch_ns=20)
    return replace(cluster, device=device, collective_buffers_bytes=1000)


def make_model(
    graph: Graph,
    shape: tuple[int, ...],
    *,
    precision: str = "fp32",
    folded: bool = True,
    strategy_filter: StrategyFilter | None = None,
    prices: PriceList = PriceList.TIME,
) -> Model:
    """The model of a graph on a mesh; ``folded`` False leaves every repeat by itself."""
    cluster = cluster_of(shape)
    return build_model(
        GraphIndex(fold(graph) if folded else FoldedGraph(graph=graph, runs=())),
        cluster,
        parse_mesh(MESHES[shape][1], cluster),
        precision,
        strategy_filter or StrategyFilter(),
        dict(block_hints(graph)),
        prices,
    )


def configuration_of(
    *, zero: int = 0, recompute: str = "none", microbatches: int = 1, training: bool = True, precision: str = "fp32"
) -> Configuration:
    """Settings of the whole plan."""
    return Configuration(
        settings=Settings(
            recomputes=(Recompute[recompute.upper()],),
            zeros=(ZeroSetting(level=zero, axes=None),),
            whole_level=zero,
        ),
        microbatches=microbatches,
        optimizer="adamw",
        precision=precision,
        training=training,
    )


def solver_of(model: Model, configuration: Configuration) -> Solver:
    """A fresh solver."""
    return Solver(CostedModel(model, configuration))


def decisions_of(model: Model, configuration: Configuration, assignment: Assignment) -> Decisions:
    """The plan of an assignment."""
    return assemble(model, configuration, assignment, None)


def program_of(model: Model, configuration: Configuration, assignment: Assignment) -> Program:
    """The lowered plan of an assignment."""
    return lower(model.graph, decisions_of(model, configuration, assignment))


def free_configuration(
    recomputes: tuple[Recompute, ...],
    levels: tuple[int, ...],
    num_axes: int,
    *,
    hybrid: bool = True,
    microbatches: int = 1,
    training: bool = True,
    optimizer_states: str = "fp32",
) -> Configuration:
    """Settings that every region and every ZeRO group chooses from."""
    zeros = zero_settings(levels, num_axes, hybrid=hybrid)
    return Configuration(
        settings=Settings(recomputes=recomputes, zeros=zeros, whole_level=max(levels)),
        microbatches=microbatches,
        optimizer="adamw",
        precision="fp32",
        training=training,
        optimizer_states=optimizer_states,
    )


def searched(
    model: Model,
    configuration: Configuration,
    limit_bytes: int | None,
    strategy_filter: StrategyFilter | None = None,
) -> SearchResult:
    """What the search ships for one mesh and configuration."""
    return search(request_of(model, configuration, limit_bytes, strategy_filter))


def request_of(
    model: Model,
    configuration: Configuration,
    limit_bytes: int | None,
    strategy_filter: StrategyFilter | None = None,
) -> SearchRequest:
    """What the search is asked for one mesh and configuration."""
    zeros = configuration.settings.zeros
    return SearchRequest(
        graphs=MicrobatchGraphs(lambda microbatches: model.space.folded),
        batch=model.graph.batch * configuration.microbatches,
        cluster=cluster_of(model.space.mesh_shape),
        meshes=(model.space.mesh,),
        precision=configuration.precision,
        optimizer=configuration.optimizer if configuration.training else "",
        training=configuration.training,
        zero_levels=tuple(dict.fromkeys(zero.level for zero in zeros)),
        recomputes=tuple(mode.label for mode in configuration.settings.recomputes),
        hybrid_zero=any(zero.axes is not None for zero in zeros),
        microbatches=configuration.microbatches,
        limit_bytes=limit_bytes,
        gap=Fraction(0),
        constraints=lambda mesh, graph: strategy_filter or StrategyFilter(),
        loss_output=None,
        optimizer_states=configuration.optimizer_states,
        prices=model.space.price_list,
    )


def storable_states(model: Model) -> dict[int, list[int]]:
    """Per parameter variable the storage states that all its reads can be made from."""
    result: dict[int, list[int]] = {}
    for name, variable in model.shared_parameters.items():
        states = model.states(model.parameter_of(model.class_of_variable(variable)))
        result[variable] = list(range(len(states)))
        for read in model.space.index.parameter_reads[name]:
            table = model.space.table(model.graph.tensors[read].type)
            result[variable] = [
                number
                for number in result[variable]
                if model.state_index(read, states[number].placement) < len(table.states)
                and model.state_index(read, states[number].gradient) < len(table.states)
            ]
    return result


def random_assignments(model: Model, seed: int, count: int, *, per_class: bool) -> Iterator[Assignment]:
    """Assignments with one random strategy per operator, or per class of operators that repeats share."""
    chance = random.Random(seed)
    storable = storable_states(model)
    for _ in range(count):
        by_class: dict[int, int] = {}

        def draw(variable: int, values: list[int], chosen: dict[int, int] = by_class) -> int:
            key = model.class_of_variable(variable) if per_class else variable
            if key not in chosen:
                chosen[key] = chance.choice(values)
            return chosen[key]

        operators = tuple(draw(v, list(range(model.domain(v)))) for v in range(model.num_operators))
        parameters = {v: draw(v, values) for v, values in storable.items()}
        yield Assignment(operators=operators, parameters=parameters)
