"""Plans that split the sequence: attention in a ring or with all keys gathered, everything around it by position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tap_planner.graph import Graph, Operator, TensorKind
from tap_planner.operators import FactorKind, FactorRule, rule_of
from tap_planner.sharding import Choice, Strategy, axis_choices, make_strategy, map_batch
from tests.apply.random_plans import RandomPlan


def sequence_factors(graph: Graph, length: int) -> Mapping[str, tuple[int, ...]]:
    """Per operator the factors that are the sequence, from graph inputs on, those of the first output dims first."""
    dims = {
        name: tensor.type.shape.index(length)
        for name, tensor in graph.tensors.items()
        if tensor.kind is TensorKind.INPUT and length in tensor.type.shape
    }
    found = map_batch(replace(graph, batch_dims=dims)).factors
    rules = {operator.id: rule_of(operator.signature) for operator in graph.operators}
    return {name: tuple(sorted(factors, key=lambda f: _place(rules[name], f))) for name, factors in found.items()}


def _place(rule: FactorRule, factor: int) -> tuple[int, int]:
    for output in rule.outputs:
        for dim, factors in enumerate(output):
            if factor in factors:
                return dim, factor
    return len(rule.factors), factor


class SequencePlan(RandomPlan):
    """A plan that splits the sequence wherever it can.

    Args:
        graph: what the plan is for.
        mesh_shape: sizes of the axes.
        seed: which one.
        length: of the sequence.
        attention: ``ring``, ``gather`` or ``any``: how fused attention sees all keys.
        share: how often an operator splits the sequence rather than something at random.
        recompute: see ``RandomPlan``.
        zero: see ``RandomPlan``.
    """

    def __init__(
        self,
        graph: Graph,
        mesh_shape: tuple[int, ...],
        seed: int,
        *,
        length: int,
        attention: str = "any",
        share: float = 0.8,
        recompute: str = "none",
        zero: int | None = 0,
    ) -> None:
        super().__init__(graph, mesh_shape, seed, recompute=recompute, zero=zero)
        self._attention = attention
        self._share = share
        self._factors = sequence_factors(graph, length)

    def _choose(self, operator: Operator) -> Strategy:
        rule = rule_of(operator.signature)
        for _ in range(20 if self.random.random() < self._share else 0):
            choices = tuple(self._choice(operator, rule) for _ in self.mesh_shape)
            strategy = make_strategy(operator.signature, rule, choices, self.mesh_shape)
            if strategy is not None:
                return strategy
        return super()._choose(operator)

    def _choice(self, operator: Operator, rule: FactorRule) -> Choice:
        """The sequence on most axes, if the operator has it; else anything."""
        sequence = [f for f in self._factors.get(operator.id, ()) if rule.factors[f].kind is not FactorKind.FIXED]
        if rule.rings and self._attention != "gather" and (self._attention == "ring" or self.random.random() < 0.5):
            preferred = Choice("ring", 0)
        elif sequence:
            preferred = Choice("factor", sequence[0])
        else:
            preferred = Choice("none")
        if self._share == 1 or self.random.random() < 0.7:
            return preferred
        hints = self.hints[operator.id]
        return self.random.choice(axis_choices(rule, hints, [False] * len(operator.inputs)))
