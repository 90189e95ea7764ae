"""What rules leave of the space: demands on the choices of operators and on where shared parameters lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tap_planner.errors import UsageError
from tap_planner.graph import Operator
from tap_planner.operators import FactorRule
from tap_planner.sharding import Placements, Strategy

__all__ = ["Demand", "NoStrategyError", "SpaceRules", "StorageDemand", "StrategyFilter"]


class NoStrategyError(UsageError):
    """Rules leave an operator no strategy on a mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one rule asks of the choices of one operator."""

    axis: str | None
    """Name of the mesh axis; None: every axis."""
    names: frozenset[str] = frozenset()
    """Choices, exactly: ``m`` is not ``m[8]``."""
    bases: frozenset[str] = frozenset()
    """Choices in whatever blocks: ``n`` is also ``n[3]``."""
    forbid: bool = False
    """True: none of these may be chosen; False: one of them must be."""
    source: str = field(compare=False)
    """The rule, as messages call it. Rules that ask the same do not set operators apart."""

    def allows(self, choice: str) -> bool:
        """Whether a choice (its name in the plan) on the axis keeps the demand."""
        return (choice in self.names or choice.partition("[")[0] in self.bases) != self.forbid

    def is_kept(self, axes: Sequence[str], choices: Sequence[str]) -> bool:
        """Whether the choices on all axes keep it; on a mesh without the axis there is nothing to keep."""
        return all(self.allows(choice) for axis, choice in zip(axes, choices, strict=True) if self.axis in (None, axis))


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageDemand:
    """What one rule asks of the storage of a parameter that several operands read."""

    axis: str | None
    """None: every axis."""
    sharded: bool
    source: str = field(compare=False)

    def is_kept(self, axes: Sequence[str], placements: Placements) -> bool:
        """Whether a storage keeps it."""
        return all(
            placement.is_shard == self.sharded
            for axis, placement in zip(axes, placements, strict=True)
            if self.axis in (None, axis)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceRules:
    """Rules worked out for one graph."""

    demands: Mapping[str, tuple[Demand, ...]] = field(default_factory=dict)
    """By operator id."""
    storage: Mapping[str, tuple[StorageDemand, ...]] = field(default_factory=dict)
    """By parameter, of those with several readers."""
    tags: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """By operator id, all that the rules say of it: operators with unlike tags must not stand for each other."""
    even: str = ""
    """Where not empty every split must be even; the source of that rule."""


NO_RULES = SpaceRules()


class StrategyFilter:
    """The rules on one mesh.

    Args:
        rules: worked out for the graph.
        axes: names of the mesh's axes.
        mesh_shape: their sizes.
    """

    def __init__(
        self, rules: SpaceRules = NO_RULES, axes: tuple[str, ...] = (), mesh_shape: tuple[int, ...] = ()
    ) -> None:
        self.rules = rules
        self.axes = axes
        self._mesh_shape = mesh_shape

    def demands(self, operator: Operator) -> tuple[Demand, ...]:
        """Demands on an operator. Operators with equal demands and signatures keep the same strategies."""
        return self.rules.demands.get(operator.id, ())

    def allows(self, operator: Operator, strategy: Strategy, rule: FactorRule) -> bool:
        """Whether a strategy keeps every rule."""
        choices = strategy.names(rule)
        return all(demand.is_kept(self.axes, choices) for demand in self.demands(operator)) and (
            not self.rules.even or self.is_even(strategy, rule)
        )

    def is_even(self, strategy: Strategy, rule: FactorRule) -> bool:
        """Whether every device gets an equal share of what is split."""
        for index, factor in enumerate(rule.factors):
            axes = [axis for axis, choice in enumerate(strategy.choices) if choice.divides(rule) == index]
            parts = math.prod(self._mesh_shape[axis] for axis in axes)
            if parts > 1 and strategy.factor_sizes[index] * parts != factor.size:
                return False
        return True

    def allows_storage(self, parameter: str, shape: tuple[int, ...], placements: Placements) -> bool:
        """Whether a parameter with several readers may be stored so."""
        kept = all(demand.is_kept(self.axes, placements) for demand in self.rules.storage.get(parameter, ()))
        return kept and (not self.rules.even or self._is_even_storage(shape, placements))

    def _is_even_storage(self, shape: tuple[int, ...], placements: Placements) -> bool:
        for dim, size in enumerate(shape):
            axes = [axis for axis, placement in enumerate(placements) if placement.is_shard and placement.dim == dim]
            if size % math.prod(self._mesh_shape[axis] for axis in axes):
                return False
        return True
