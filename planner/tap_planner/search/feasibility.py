"""Whether rules leave every operator something on a mesh, without making all strategies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from tap_planner.cluster import Mesh
from tap_planner.graph import Graph, Operator, TensorKind
from tap_planner.operators import rule_of
from tap_planner.search.conflicts import no_strategy
from tap_planner.search.constraints import NoStrategyError, StrategyFilter
from tap_planner.sharding import axis_choices, enumerate_strategies, make_strategy

__all__ = ["first_conflict"]


def first_conflict(
    graph: Graph, hints: Mapping[str, tuple[tuple[int, ...], ...]], strategy_filter: StrategyFilter, mesh: Mesh
) -> NoStrategyError | None:
    """The error for the first operator to which rules leave nothing; None where there is none.

    Demands speak of one axis each, so only the choices that they leave on each axis are put together, up to the first
    strategy that is found.

    Args:
        graph: the graph of one microbatch.
        hints: its block hints.
        strategy_filter: the rules on the mesh.
        mesh: the mesh.
    """
    known: set[object] = set()
    for operator in graph.operators:
        demands = strategy_filter.demands(operator)
        if not demands:  # an even split of nothing is always left
            continue
        key = (operator.signature, hints[operator.id], _partial_operands(graph, operator), demands)
        if key in known:
            continue
        known.add(key)
        if not _has_strategy(graph, hints, strategy_filter, mesh, operator):
            rule = rule_of(operator.signature)
            strategies = enumerate_strategies(
                operator.signature, rule, mesh.shape, hints[operator.id], _partial_operands(graph, operator)
            )
            return no_strategy(strategy_filter, operator, rule, strategies, str(mesh))
    return None


def _partial_operands(graph: Graph, operator: Operator) -> tuple[bool, ...]:
    return tuple(name is not None and graph.tensors[name].kind is TensorKind.ACTIVATION for name in operator.inputs)


def _has_strategy(
    graph: Graph,
    hints: Mapping[str, tuple[tuple[int, ...], ...]],
    strategy_filter: StrategyFilter,
    mesh: Mesh,
    operator: Operator,
) -> bool:
    signature = operator.signature
    rule = rule_of(signature)
    choices = axis_choices(rule, hints[operator.id], _partial_operands(graph, operator))
    demands = strategy_filter.demands(operator)
    per_axis = [
        [
            choice
            for choice in choices
            if all(demand.allows(choice.name(rule)) for demand in demands if demand.axis in (None, axis))
        ]
        for axis in strategy_filter.axes
    ]
    for chosen in itertools.product(*per_axis):
        strategy = make_strategy(signature, rule, chosen, mesh.shape)
        if strategy is not None and strategy_filter.allows(operator, strategy, rule):
            return True
    return False
