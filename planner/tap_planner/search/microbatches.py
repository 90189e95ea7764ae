"""What is known of a smaller microbatch from the graph of a larger one, without binding it: the strategies it lacks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tap_planner.graph import Graph
from tap_planner.operators import FactorRule, rule_of
from tap_planner.search.model import Model
from tap_planner.sharding import Strategy, can_split, compound_factors


class BatchFactors:
    """By operator, the factors that hold the whole batch and nothing but whole samples: with k times as many
    microbatches they are a k-th as long.

    Args:
        graph: the graph of one microbatch.
        carrying: per operator id, the factors whose contiguous split splits the batch (``BatchMap.factors``).
        whole: the graph in which they were found, of a multiple of the batch.
    """

    def __init__(self, graph: Graph, carrying: Mapping[str, frozenset[int]], whole: Graph) -> None:
        self._graph = graph
        self._carrying = carrying
        self._whole = {operator.id: operator for operator in whole.operators if operator.id in carrying}
        self._times = whole.batch // graph.batch

    def of(self, index: int) -> frozenset[int]:
        """Of the operator number ``index``."""
        operator = self._graph.operators[index]
        twin = self._whole.get(operator.id)
        if twin is None:
            return frozenset()
        rule, whole = rule_of(operator.signature), rule_of(twin.signature)
        if [factor.name for factor in rule.factors] != [factor.name for factor in whole.factors]:
            return frozenset()
        return frozenset(
            factor
            for factor in self._carrying[operator.id]
            if rule.factors[factor].size % self._graph.batch == 0
            and rule.factors[factor].size * self._times == whole.factors[factor].size
        )


def lost_strategies(model: Model, batch: BatchFactors, times: int) -> Mapping[int, np.ndarray]:
    """By class of operator, [strategies] those that do not exist with more microbatches: the batch cannot be split so.

    Args:
        model: of the graph of one of the larger microbatches.
        batch: where the batch is in that graph.
        times: how many times as many microbatches.
    """
    factors: dict[int, frozenset[int]] = {}
    for index in model.space.index.skeleton:
        key = int(model.class_of[index])
        factors[key] = factors[key] & batch.of(index) if key in factors else batch.of(index)
    found: dict[int, np.ndarray] = {}
    known: dict[tuple[int, frozenset[int]], np.ndarray] = {}
    for key, held in factors.items():
        if not held:
            continue
        space = model.space.operator(key)
        case = (id(space), held)
        if case not in known:
            rule, shape = rule_of(model.graph.operators[key].signature), model.space.mesh_shape
            lost = [not _exists(rule, strategy, held, times, shape) for strategy in space.strategies]
            known[case] = np.array(lost)
        if known[case].any():
            found[key] = known[case]
    return found


def _exists(
    rule: FactorRule, strategy: Strategy, held: frozenset[int], times: int, mesh_shape: tuple[int, ...]
) -> bool:
    """Whether the factors that hold the batch can still be split so where they are ``times`` times shorter."""
    compound = compound_factors(rule)
    for factor in held:
        axes = [axis for axis, choice in enumerate(strategy.choices) if choice.divides(rule) == factor]
        if not axes or any(strategy.choices[axis].blocks > 1 for axis in axes):
            continue
        parts, length = [mesh_shape[axis] for axis in axes], rule.factors[factor].size // times
        if not can_split(length, parts, even_only=factor in compound):
            return False
    return True
