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
_DimHints = tuple[tuple[int, tuple[int, ...]], ...]
"""(dim, block counts) of a tensor."""
_Case = tuple[int, tuple[int, ...], tuple[_DimHints | None, ...]]


def block_hints(graph: Graph) -> Mapping[str, tuple[tuple[int, ...], ...]]:
    """Per operator id, per factor of its rule: the block counts (> 1, ascending) in which the factor may be split."""
    spread = _Spread(graph)
    spread.run()
    return {operator.id: spread.factors(index) for index, operator in enumerate(graph.operators)}


class _Spread:
    """Hints on their way through a graph. What an operator makes of those around it is found out once for all operators
    of its rule: repeated layers differ in nothing.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: Graph) -> None:
        self._rules = [rule_of(operator.signature) for operator in graph.operators]
        self._names = [(*operator.inputs, *operator.outputs) for operator in graph.operators]
        self._hints: dict[str, _DimHints] = {}
        """By tensor; those without hints are missing."""
        self._grown: dict[_Case, Mapping[int, _DimHints]] = {}
        self._found: dict[_Case, tuple[tuple[int, ...], ...]] = {}
        self._touching: dict[str, list[int]] = {}
        for index, names in enumerate(self._names):
            for name in dict.fromkeys(names):
                if name is not None:
                    self._touching.setdefault(name, []).append(index)

    def run(self) -> None:
        """Spread hints until nothing changes."""
        compound = {id(rule): _has_compound(rule) for rule in self._rules}
        queue = deque(index for index, rule in enumerate(self._rules) if compound[id(rule)])
        queued = set(queue)
        while queue:
            index = queue.popleft()
            queued.discard(index)
            names = self._names[index]
            for place, hints in sorted(self._grow(index).items(), key=lambda item: str(names[item[0]])):
                name = names[place]
                assert name is not None
                self._hints[name] = hints
                for neighbour in self._touching[name]:
                    if neighbour not in queued:
                        queued.add(neighbour)
                        queue.append(neighbour)

    def _case(self, index: int) -> _Case:
        """What decides: the rule, which operands are one tensor, and their hints."""
        names = self._names[index]
        alike = tuple([names.index(name) for name in names])
        return id(self._rules[index]), alike, tuple([self._hints.get(name or "") for name in names])

    def _grow(self, index: int) -> Mapping[int, _DimHints]:
        """By operand, the hints of those that have more now."""
        case = self._case(index)
        if case not in self._grown:
            names, hints = self._opened(index, case)
            grown = _propagate(self._rules[index], names, hints)
            self._grown[case] = {int(name): _packed(name, hints) for name in grown}
        return self._grown[case]

    def factors(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Of an operator, per factor the hints."""
        case = self._case(index)
        if case not in self._found:
            self._found[case] = _factor_hints(self._rules[index], *self._opened(index, case))
        return self._found[case]

    def _opened(self, index: int, case: _Case) -> tuple[tuple[str | None, ...], dict[DimKey, set[int]]]:
        """Names that stand for an operator's tensors, and their hints."""
        _, alike, known = case
        names = zip(self._names[index], alike, strict=True)
        opened = tuple(None if name is None else str(place) for name, place in names)
        hints = {
            (name, dim): set(blocks)
            for name, found in zip(opened, known, strict=True)
            if name is not None
            for dim, blocks in found or ()
        }
        return opened, hints


def _packed(name: str, hints: Mapping[DimKey, set[int]]) -> _DimHints:
    return tuple(
        (dim, tuple(sorted(blocks))) for (other, dim), blocks in sorted(hints.items()) if other == name and blocks
    )


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
