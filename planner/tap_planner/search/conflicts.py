"""Why rules leave an operator nothing: the fewest rules that exclude each other there."""

from __future__ import annotations

from collections.abc import Sequence

from tap_planner.graph import Operator
from tap_planner.operators import FactorRule
from tap_planner.search.constraints import Demand, NoStrategyError, StrategyFilter
from tap_planner.sharding import Strategy

__all__ = ["no_strategy"]


def no_strategy(
    strategy_filter: StrategyFilter, operator: Operator, rule: FactorRule, strategies: Sequence[Strategy], mesh: str
) -> NoStrategyError:
    """The error for an operator all of whose strategies some rule excludes.

    Args:
        strategy_filter: the rules on the mesh.
        operator: the operator.
        rule: its factor rule.
        strategies: all that it has without rules.
        mesh: the mesh, for the message.
    """
    sources = _conflicting(strategy_filter, operator, rule, strategies)
    where = f"operator {operator.id!r} ({operator.type})"
    if len(sources) == 1:
        what = f"{sources[0]} leaves {where} no strategy"
    else:
        what = f"{', '.join(sources[:-1])} and {sources[-1]} exclude each other at {where}"
    values = _values(strategy_filter, operator, rule, strategies, sources)
    return NoStrategyError(
        f"{what} on the mesh {mesh}: {values}",
        hint="Loosen the rule, or choose another --mesh." if len(sources) == 1 else "Drop one of them.",
    )


def _conflicting(
    strategy_filter: StrategyFilter, operator: Operator, rule: FactorRule, strategies: Sequence[Strategy]
) -> list[str]:
    """Sources of a smallest set of rules (none of which can be left out) that no strategy keeps."""
    demands = strategy_filter.demands(operator)
    even = strategy_filter.rules.even
    sources = [demand.source for demand in demands] + ([even] if even else [])
    kept = list(dict.fromkeys(sources))
    for source in list(kept):
        others = [other for other in kept if other != source]
        if not _some_left(strategy_filter, demands, others, rule, strategies):
            kept = others
    return kept


def _some_left(
    strategy_filter: StrategyFilter,
    demands: Sequence[Demand],
    sources: Sequence[str],
    rule: FactorRule,
    strategies: Sequence[Strategy],
) -> bool:
    asked = [demand for demand in demands if demand.source in sources]
    even = strategy_filter.rules.even in sources
    return any(
        all(demand.is_kept(strategy_filter.axes, strategy.names(rule)) for demand in asked)
        and (not even or strategy_filter.is_even(strategy, rule))
        for strategy in strategies
    )


def _values(
    strategy_filter: StrategyFilter,
    operator: Operator,
    rule: FactorRule,
    strategies: Sequence[Strategy],
    sources: Sequence[str],
) -> str:
    """What the operator could be along the axes that the conflict is about."""
    asked = {demand.axis for demand in strategy_filter.demands(operator) if demand.source in sources}
    parts: list[str] = []
    for index, axis in enumerate(strategy_filter.axes):
        if axis in asked or not asked or None in asked:
            even = {strategy.names(rule)[index] for strategy in strategies if strategy_filter.is_even(strategy, rule)}
            names = dict.fromkeys(strategy.names(rule)[index] for strategy in strategies)
            shown = ", ".join(name if name in even else f"{name} (unevenly)" for name in names)
            parts.append(f"along {axis} it could be {shown}")
    return "; ".join(parts)
