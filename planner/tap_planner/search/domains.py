"""Values of variables that are still possible."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tap_planner.search.configuration import Recompute
from tap_planner.search.costing import CostedModel
from tap_planner.search.terms import Term


class Domains:
    """The possible values of every variable; variables of one class share theirs.

    Args:
        costed: the variables.
        alive: by class, the values that are possible; all where a class is missing.
    """

    def __init__(self, costed: CostedModel, alive: Mapping[int, np.ndarray] | None = None) -> None:
        self.costed = costed
        self.model = costed.model
        self._by_class: dict[int, np.ndarray] = dict(alive or {})
        self._by_variable: dict[int, np.ndarray] = {}

    def alive(self, variable: int) -> np.ndarray:
        """Values of a variable that are still possible."""
        known = self._by_variable.get(variable)
        if known is None:
            known = self._by_variable[variable] = self.of_class(self.model.class_of_variable(variable))
        return known

    def of_class(self, key: int) -> np.ndarray:
        """Values of the variables of a class that are still possible."""
        if key not in self._by_class:
            self._by_class[key] = self.costed.values(key)
        return self._by_class[key]

    def of_producer(self, term: Term) -> np.ndarray:
        """Possible values of a term's producer; a single one where there is none."""
        return np.zeros(1, dtype=np.int64) if term.producer is None else self.alive(term.producer)

    def modes(self, region: int) -> tuple[Recompute, ...]:
        """Recompute settings of a region that are still possible."""
        options = self.costed.options(region)
        if len(options) == 1:
            return options
        return tuple(options[index] for index in self.alive(self.model.recompute_variable(region)).tolist())

    def value(self, variable: int, index: int) -> int:
        """The value at a place among the possible ones."""
        return int(self.alive(variable)[index])

    def within(self, marginals: Mapping[int, np.ndarray], ceiling: int) -> dict[int, np.ndarray]:
        """By class, the values whose min-marginal is at most ``ceiling``.

        Args:
            marginals: by class, the least cost of every possible value.
            ceiling: the largest cost that matters.
        """
        return {key: self.of_class(key)[costs <= ceiling] for key, costs in marginals.items()}
