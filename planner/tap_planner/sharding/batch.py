"""Where the batch is: which factor of each operator carries the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tap_planner.graph import Graph
from tap_planner.operators import FactorKind, FactorRule, rule_of


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
    """Follow the batch dim of the inputs through the graph."""
    marks: dict[str, frozenset[tuple[int, int]]] = {
        name: frozenset({(dim, 1)}) for name, dim in graph.batch_dims.items() if dim is not None
    }
    factors: dict[str, frozenset[int]] = {}
    choices: dict[str, frozenset[str]] = {}
    obstacles: list[str] = []
    for operator in graph.operators:
        rule = rule_of(operator.signature)
        carrying = _carrying(rule, operator.inputs, marks)
        if not carrying:
            continue
        factors[operator.id] = carrying
        choices[operator.id] = frozenset(rule.factors[index].name for index in carrying)
        kinds = {rule.factors[index].kind for index in carrying}
        if FactorKind.FIXED in kinds or (FactorKind.SUM in kinds and operator.type != "Loss"):
            obstacles.append(operator.id)
        for name, output in zip(operator.outputs, rule.outputs, strict=True):
            marks[name] = _marks_of(rule, output, carrying)
    return BatchMap(factors=factors, choices=choices, obstacles=tuple(obstacles))


def _carrying(
    rule: FactorRule, inputs: tuple[str | None, ...], marks: Mapping[str, frozenset[tuple[int, int]]]
) -> frozenset[int]:
    """Factors that begin where some operand's batch begins."""
    found: set[int] = set()
    for name, operand in zip(inputs, rule.inputs, strict=True):
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
    rule: FactorRule, output: tuple[tuple[int, ...], ...], carrying: frozenset[int]
) -> frozenset[tuple[int, int]]:
    found: set[tuple[int, int]] = set()
    for dim, factors in enumerate(output):
        outer = 1
        for factor in factors:
            if factor in carrying:
                found.add((dim, outer))
            outer *= rule.factors[factor].size
    return frozenset(found)
