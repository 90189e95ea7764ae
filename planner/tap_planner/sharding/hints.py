"""Block hints: in which blocks a dim may be split besides contiguously.

A fused QKV projection must be split inside each of its three parts, because the Split that follows cuts it in three;
a merged ``batch x heads`` dim may be split by heads. The block counts arise where a factor is an inner part of a
compound dim and travel through the factor rules to every operator that touches the dim.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from tap_planner.graph import Graph
from tap_planner.operators import FactorKind, FactorRule, rule_of

MAX_HINTS = 2
"""Block counts kept per dim; more have not been met and would square the number of strategies."""

DimKey = tuple[str, int]


def block_hints(graph: Graph) -> Mapping[str, tuple[tuple[int, ...], ...]]:
    """Per operator id, per factor of its rule: the block counts (> 1, ascending) in which the factor may be split."""
    hints: dict[DimKey, set[int]] = {}
    touching: dict[str, list[int]] = {}
    rules = [rule_of(operator.signature) for operator in graph.operators]
    for index, operator in enumerate(graph.operators):
        for name in {*filter(None, operator.inputs), *operator.outputs}:
            touching.setdefault(name, []).append(index)
    queue = deque(index for index, rule in enumerate(rules) if _has_compound(rule))
    queued = set(queue)
    while queue:
        index = queue.popleft()
        queued.discard(index)
        operator = graph.operators[index]
        names = (*operator.inputs, *operator.outputs)
        for name in sorted(_propagate(rules[index], names, hints)):
            for neighbour in touching[name]:
                if neighbour not in queued:
                    queued.add(neighbour)
                    queue.append(neighbour)
    hinted = {name for (name, _), known in hints.items() if known}
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    for operator, rule in zip(graph.operators, rules, strict=True):
        names = (*operator.inputs, *operator.outputs)
        if hinted.isdisjoint(names):
            found[operator.id] = ((),) * len(rule.factors)
        else:
            found[operator.id] = _factor_hints(rule, names, hints)
    return found


def _has_compound(rule: FactorRule) -> bool:
    return any(len(dim) > 1 for operand in (*rule.inputs, *rule.outputs) for dim in operand or ())


def _factor_sets(rule: FactorRule, names: tuple[str | None, ...], hints: Mapping[DimKey, set[int]]) -> list[set[int]]:
    """Per factor the block counts that any operand dim asks for."""
    wanted: list[set[int]] = [set() for _ in rule.factors]
    for name, operand in zip(names, (*rule.inputs, *rule.outputs), strict=True):
        if name is None or operand is None:
            continue
        for dim, factors in enumerate(operand):
            known = hints.get((name, dim))
            if not known:
                continue
            outer = 1
            for factor in factors:
                size = rule.factors[factor].size
                for blocks in known:
                    inner = blocks // outer
                    if blocks % outer == 0 and 1 < inner < size and size % inner == 0:
                        wanted[factor].add(inner)
                outer *= size
    return wanted


def _factor_hints(
    rule: FactorRule, names: tuple[str | None, ...], hints: Mapping[DimKey, set[int]]
) -> tuple[tuple[int, ...], ...]:
    sets = _factor_sets(rule, names, hints)
    return tuple(
        () if factor.kind is FactorKind.FIXED else tuple(sorted(found)[:MAX_HINTS])
        for factor, found in zip(rule.factors, sets, strict=True)
    )


def _propagate(rule: FactorRule, names: tuple[str | None, ...], hints: dict[DimKey, set[int]]) -> set[str]:
    """Bring the hints of one operator's dims into agreement; returns the tensors whose hints grew."""
    sets = _factor_sets(rule, names, hints)
    grown: set[str] = set()
    for name, operand in zip(names, (*rule.inputs, *rule.outputs), strict=True):
        if name is None or operand is None:
            continue
        for dim, factors in enumerate(operand):
            new: set[int] = set()
            outer = 1
            for factor in factors:
                if rule.factors[factor].kind is not FactorKind.FIXED:
                    new.update(outer * blocks for blocks in sets[factor])
                    if outer > 1 and rule.factors[factor].size > 1:
                        new.add(outer)
                outer *= rule.factors[factor].size
            known = hints.setdefault((name, dim), set())
            for blocks in sorted(new - known):
                if len(known) < MAX_HINTS:
                    known.add(blocks)
                    grown.add(name)
    return grown
