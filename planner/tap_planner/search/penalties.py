"""Changes to an old plan as costs: the tables of a model in which every change takes time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from tap_planner.search.costing import ParameterCosts
from tap_planner.search.distance import GONE, UNMATCHED, Described, Distance, WidenedModel
from tap_planner.search.solver import Solver


class ChangeTables:
    """How many decisions change with every value of a variable, over all occurrences that it stands for.

    Args:
        distance: the old plan in the variables of a model.
    """

    def __init__(self, distance: Distance) -> None:
        self.distance = distance
        self._model = distance.costed.model
        self._operators: dict[int, np.ndarray] = {}
        self._parameters: dict[int, Mapping[int, np.ndarray]] = {}

    def occurrences(self, variable: int) -> list[int]:
        """The variables that one of a part stands for."""
        model = self._model
        if variable < model.num_operators:
            number = int(model.run_of[variable])
            if number < 0 or int(model.occurrence_of[variable]) != 1:
                return [variable]
            run = model.runs[number]
            return [variable + occurrence * len(run.first) for occurrence in range(run.num_links)]
        home = model.parameters.home(variable)
        if home is None or home[1] != 1:
            return [variable]
        later = range(1, model.runs[home[0]].num_links + 1)
        return [model.parameters.at_occurrence(variable, occurrence) for occurrence in later]

    def operators(self, index: int) -> np.ndarray:
        """[recompute settings, strategies] changed operators, and regions that begin with the operator."""
        if index not in self._operators:
            self._operators[index] = self._of_operator(index)
        return self._operators[index]

    def _of_operator(self, index: int) -> np.ndarray:
        distance, model = self.distance, self._model
        same = self.occurrences(index)
        modes = distance.costed.options(int(model.region_of[index]))
        changed = np.zeros((len(modes), model.domain(index)), dtype=np.int64)
        for value, times in Counter(distance.strategies[same].tolist()).items():
            if value != UNMATCHED:
                changed += times
                if value != GONE:
                    changed[:, value] -= times
        if index == 0 or model.region_of[index - 1] != model.region_of[index]:
            for other in same:
                known = distance.recompute.get(int(model.region_of[other]))
                changed += np.array([[known is not None and known != {mode.label}] for mode in modes], dtype=np.int64)
        return changed

    def parameters(self, variable: int) -> Mapping[int, np.ndarray]:
        """By data axes (as bits), [ZeRO settings, values] changed parameters among those stored with a variable."""
        if variable not in self._parameters:
            self._parameters[variable] = self._of_parameters(variable)
        return self._parameters[variable]

    def _of_parameters(self, variable: int) -> Mapping[int, np.ndarray]:
        distance, known = self.distance, self.distance.old.parameters
        size, num_zeros = self._model.domain(variable), len(distance.costed.zeros)
        changed: dict[int, np.ndarray] = {}
        for slot, names in enumerate(zip(*(self._names(other) for other in self.occurrences(variable)), strict=True)):
            times = Counter(known.get(name) for name in names)
            named = {known.get(name): name for name in names}
            for value in range(size):
                described = self._described(variable, slot, value)
                table = changed.setdefault(described[1], np.zeros((num_zeros, size), dtype=np.int64))
                for zero in range(num_zeros):
                    table[zero, value] += sum(
                        count * distance.differs(named[old], described, zero) for old, count in times.items()
                    )
        return changed

    def _names(self, variable: int) -> tuple[str, ...]:
        if variable >= self._model.num_operators:
            return (self._model.parameter_of(variable),)
        return tuple(name for _, name in self.distance.single_reads.get(variable, ()))

    def _described(self, variable: int, slot: int, value: int) -> Described:
        if variable >= self._model.num_operators:
            return self.distance.state(variable, value)
        position, _ = self.distance.single_reads[variable][slot]
        return self.distance.stored(variable, position, value)


class PenalisedModel(WidenedModel):
    """A model in which every change to an old plan takes time.

    The occurrences of a run after the first share one table: there a change costs the share of them for which it is
    one.

    Args:
        tables: what changes.
        penalty_ns: the price of a change.
    """

    def __init__(self, tables: ChangeTables, penalty_ns: int) -> None:
        known = tables.distance.costed
        super().__init__(known.model, known.configuration, tables.distance.old)
        self._changes = tables
        self._penalty = penalty_ns
        self._penalised_times: dict[int, np.ndarray] = {}
        self._penalised_parameters: dict[int, ParameterCosts] = {}

    def operator_ns(self, index: int) -> np.ndarray:
        """[recompute settings, strategies] compute of a step, and the price of changes."""
        if index not in self._penalised_times:
            price = self._changes.operators(index) * self._penalty // len(self._changes.occurrences(index))
            self._penalised_times[index] = super().operator_ns(index) + price
        return self._penalised_times[index]

    def parameter_costs(self, variable: int) -> ParameterCosts:
        """By data axes, ns and bytes of what is stored with a variable, and the price of changes."""
        if variable not in self._penalised_parameters:
            costs = dict(super().parameter_costs(variable))
            count = len(self._changes.occurrences(variable))
            for mask, changed in self._changes.parameters(variable).items():
                ns, num_bytes = costs[mask]
                costs[mask] = (ns + changed * self._penalty // count, num_bytes)
            self._penalised_parameters[variable] = costs
        return self._penalised_parameters[variable]


class PenalisedSolver(Solver):
    """A solver for which the fastest recompute setting need not be the best: another may be the old one."""

    @property
    def fastest(self) -> Solver:
        """The solver itself."""
        return self

    def restrict(self, alive: Mapping[int, np.ndarray], loose: frozenset[int] | None = frozenset()) -> Solver:
        """A solver of the same model whose variables keep only the given values (by class)."""
        return PenalisedSolver(self.costed, alive, loose)
