"""Where the batch is: which factor of each operator carries the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tap_planner.graph import Graph
from tap_planner.operators import FactorKind, FactorRule, lookup, rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMap:
    """The batch, followed from the graph's inputs through the factor rules."""

    factors: Mapping[str, frozenset[int]]
    """Per operator id the factors whose contiguous split splits the batch."""
    choices: Mapping[str, frozenset[str]]
    """The same as names of choices (``b``; never ``m[8]``, which splits what lies inside the batch)."""
    obstacles: tuple[str, ...]
    """Operators (ids) whose result depends on the whole batch or that cannot split it: they forbid microbatches."""


def map_batch(graph: Graph) -> BatchMap:
    """Follow the batch dim of the inputs through the graph, and back to what meets it (an expanded class token)."""
    marks: dict[str, frozenset[tuple[int, int]]] = {
        name: frozenset({(dim, 1)})
        for name, dim in graph.batch_dims.items()
        if dim is not None and graph.tensors[name].type.shape[dim] > 1
    }
    rules = [rule_of(operator.signature) for operator in graph.operators]
    carrying: list[frozenset[int]] = [frozenset() for _ in rules]
    forwards = True
    while True:
        grown = False
        order = range(len(rules)) if forwards else range(len(rules) - 1, -1, -1)
        for index in order:
            operator, rule = graph.operators[index], rules[index]
            names = (*operator.inputs, *operator.outputs)
            found = _carrying(rule, names, marks)
            if found - carrying[index]:
                carrying[index] |= found
                grown = True
                for name, operand in zip(names, (*rule.inputs, *rule.outputs), strict=True):
                    if name is not None and operand is not None:
                        marks[name] = marks.get(name, frozenset()) | _marks_of(rule, operand, carrying[index])
        if not grown:
            break
        forwards = not forwards
    return _batch_map(graph, rules, carrying)


def _batch_map(graph: Graph, rules: list[FactorRule], carrying: list[frozenset[int]]) -> BatchMap:
    factors: dict[str, frozenset[int]] = {}
    choices: dict[str, frozenset[str]] = {}
    obstacles: list[str] = []
    for operator, rule, found in zip(graph.operators, rules, carrying, strict=True):
        if not found:
            continue
        factors[operator.id] = found
        choices[operator.id] = frozenset(rule.factors[index].name for index in found)
        kinds = {rule.factors[index].kind for index in found}
        summed = FactorKind.SUM in kinds and operator.type != "Loss"
        if FactorKind.FIXED in kinds or summed or lookup(operator.type).random:
            obstacles.append(operator.id)
    return BatchMap(factors=factors, choices=choices, obstacles=tuple(obstacles))


def _carrying(
    rule: FactorRule, names: tuple[str | None, ...], marks: Mapping[str, frozenset[tuple[int, int]]]
) -> frozenset[int]:
    """Factors that begin where some operand's batch begins."""
    found: set[int] = set()
    for name, operand in zip(names, (*rule.inputs, *rule.outputs), strict=True):
        if name is None or operand is None:
            continue
        for dim, start in marks.get(name, ()):
            outer = 1
            for factor in operand[dim]:
                if outer == start and rule.factors[factor].size > 1:
                    found.add(factor)
                    break
                outer *= rule.factors[factor].size
    return frozenset(found)


def _marks_of(
    rule: FactorRule, operand: tuple[tuple[int, ...], ...], carrying: frozenset[int]
) -> frozenset[tuple[int, int]]:
    """(dim, boundary) pairs at which an operand's carrying factors begin."""
    found: set[tuple[int, int]] = set()
    for dim, factors in enumerate(operand):
        outer = 1
        for factor in factors:
            if factor in carrying:
                found.add((dim, outer))
            outer *= rule.factors[factor].size
    return frozenset(found)
