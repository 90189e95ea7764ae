"""What the user's constraints leave of the space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tap_planner.graph import Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRule:
    """One constraint on the strategies of some operators along one axis."""

    pattern: str | None
    """fnmatch pattern on operator id, name or type; None for the batch constraint, which is about every operator."""
    axis: int
    factor: str | None
    """Name of the choice (``k``, ``none``, ``partial``); None for the batch factor."""
    forbid: bool
    """True: the choice is forbidden; False: it is required."""


class StrategyFilter:
    """Applies constraints to operators.

    Args:
        rules: the constraints.
        batch_factors: per operator id the choices that split the batch.
    """

    def __init__(self, rules: tuple[StrategyRule, ...], batch_factors: Mapping[str, frozenset[str]]) -> None:
        self._rules = rules
        self._batch_factors = batch_factors

    def rules_for(self, operator: Operator) -> tuple[object, ...]:
        """A key: operators with equal keys and signatures keep the same strategies."""
        named = tuple(rule for rule in self._rules if self._applies(rule, operator))
        return (named, self._batch_factors.get(operator.id) if named else None)

    @staticmethod
    def _applies(rule: StrategyRule, operator: Operator) -> bool:
        pattern = rule.pattern
        names = (operator.id, operator.name, operator.type)
        return pattern is None or any(fnmatchcase(name, pattern) for name in names)

    def allows(self, operator: Operator, names: tuple[str, ...]) -> bool:
        """Whether a strategy (names per axis) satisfies every constraint."""
        for rule in self._rules:
            if not self._applies(rule, operator):
                continue
            chosen = names[rule.axis]
            batch = self._batch_factors.get(operator.id, frozenset())
            matches = chosen in batch if rule.factor is None else rule.factor in (chosen, chosen.partition("[")[0])
            if matches == rule.forbid and (rule.factor is not None or rule.forbid or batch):
                return False
        return True
