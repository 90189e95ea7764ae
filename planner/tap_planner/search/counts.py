"""CP-SAT over counts of Pareto points.

A solution picks one point of every factor of the outer part, and for every run a walk through boundary states that uses
each link point some number of times. Counts suffice: the walk is an Eulerian path of the chosen multigraph, so flow
balance and connectedness (added when violated) make the model exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tap_planner.search.pareto import ParetoFactor
from tap_planner.search.terms import SCALE

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver, IntVar

DETERMINISTIC_SECONDS = 20.0
"""Effort of one CP-SAT call, in its deterministic time."""
MAX_CUTS = 20
ROUNDING = 1e-3
"""What a bound may be short of a whole number by."""

_Point = tuple[int, int, int]
"""(shared assignment, boundary state before, boundary state after) of a link point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPoints:
    """Pareto points of a run's links."""

    number: int
    count: int
    """Links before the last one."""
    shared: tuple[int, ...]
    """Variables outside that all links are coupled with."""
    shared_sizes: tuple[int, ...]
    first: tuple[int, ...]
    """Boundary variables of the first occurrence."""
    last: tuple[int, ...]
    """Boundary variables of the last occurrence."""
    boundary_sizes: tuple[int, ...]
    middle: ParetoFactor
    final: ParetoFactor

    def keys(self, factor: ParetoFactor) -> list[_Point]:
        """Cells of a factor of links."""
        sizes = (_product(self.shared_sizes), _product(self.boundary_sizes), _product(self.boundary_sizes))
        cells = np.unravel_index(factor.cell, sizes)
        return list(zip(*(column.tolist() for column in cells), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A solution: places among the possible values of every variable."""

    outer: dict[int, int]
    links: list[list[tuple[Mapping[int, int], bool]]]
    """Per run, per later occurrence, the values of its link, and whether it is the last."""


class CountModel:
    """CP-SAT over counts of points.

    Args:
        outer: factors of the outer part.
        runs: points of the runs' links.
        limit_bytes: memory limit.
    """

    def __init__(self, outer: Sequence[ParetoFactor], runs: Sequence[RunPoints], limit_bytes: int) -> None:
        from ortools.sat.python import cp_model

        self._cp = cp_model
        self._outer, self._runs = outer, runs
        self._model = cp_model.CpModel()
        self._values: dict[tuple[int, int], IntVar] = {}
        """(kept variable, place of its value): whether it has it."""
        self._costs: list[tuple[IntVar, int, int]] = []
        self._chosen = [self._add_factor(number, factor) for number, factor in enumerate(outer)]
        self._middle: list[list[IntVar]] = []
        self._final: list[list[IntVar]] = []
        self._starts: list[dict[tuple[int, int], IntVar]] = []
        for run in runs:
            self._add_run(run)
        for variable in sorted({variable for variable, _ in self._values}):
            self._model.add_exactly_one(flag for (other, _), flag in self._values.items() if other == variable)
        self._model.add(sum(size * v for v, _, size in self._costs) <= limit_bytes)
        self._model.minimize(sum(ns * v for v, ns, _ in self._costs))

    # -- the model ---------------------------------------------------------------------------------------------

    def _value(self, variable: int, place: int) -> IntVar:
        key = (variable, place)
        if key not in self._values:
            self._values[key] = self._model.new_bool_var(f"v{variable}.{place}")
        return self._values[key]

    def _add_costs(self, factor: ParetoFactor, variables: Sequence[IntVar]) -> None:
        self._costs.extend(
            (variable, int(ns) // SCALE, int(size) // SCALE)
            for variable, ns, size in zip(variables, factor.ns, factor.num_bytes, strict=True)
        )

    def _add_factor(self, number: int, factor: ParetoFactor) -> list[IntVar]:
        """One point of a factor of the outer part."""
        chosen = [self._model.new_bool_var(f"o{number}.{i}") for i in range(len(factor.cell))]
        self._model.add_exactly_one(chosen)
        self._add_costs(factor, chosen)
        grid = np.unravel_index(factor.cell, factor.sizes) if factor.scope else ()
        for variable, column in zip(factor.scope, grid, strict=True):
            self._tie(variable, column.tolist(), chosen)
        return chosen

    def _tie(self, variable: int, places: Sequence[int], flags: Sequence[IntVar]) -> None:
        """A kept variable has the value that the one true flag stands for."""
        by_place: dict[int, list[IntVar]] = {}
        for place, flag in zip(places, flags, strict=True):
            by_place.setdefault(place, []).append(flag)
        for place, same in by_place.items():
            self._model.add(sum(same) == self._value(variable, place))
        self._only(variable, by_place)

    def _only(self, variable: int, places: Mapping[int, object]) -> None:
        """A kept variable has one of these values."""
        self._model.add_exactly_one(self._value(variable, place) for place in places)

    def _states(
        self, name: str, run: RunPoints, cells: Sequence[tuple[int, int]], boundary: tuple[int, ...]
    ) -> dict[tuple[int, int], IntVar]:
        """Exactly one (shared assignment, boundary state), with the kept variables that make it up."""
        flags = {cell: self._model.new_bool_var(f"{name}{run.number}.{cell}") for cell in cells}
        self._model.add_exactly_one(flags.values())
        grid = _unravel([shared for shared, _ in cells], run.shared_sizes)
        for variable, column in zip(run.shared, grid, strict=True):
            self._tie(variable, column, list(flags.values()))
        grid = _unravel([state for _, state in cells], run.boundary_sizes)
        for variable, column in zip(boundary, grid, strict=True):
            self._tie(variable, column, list(flags.values()))
        return flags

    def _add_run(self, run: RunPoints) -> None:
        model = self._model
        middle = [model.new_int_var(0, run.count, f"m{run.number}.{i}") for i in range(len(run.middle.cell))]
        final = [model.new_bool_var(f"l{run.number}.{i}") for i in range(len(run.final.cell))]
        self._middle.append(middle)
        self._final.append(final)
        self._add_costs(run.middle, middle)
        self._add_costs(run.final, final)
        model.add_exactly_one(final)
        middle_keys, final_keys = run.keys(run.middle), run.keys(run.final)
        starts = self._states("s", run, sorted({(s, a) for s, a, _ in (*middle_keys, *final_keys)}), run.first)
        ends = self._states("e", run, sorted({(s, b) for s, _, b in final_keys}), run.last)
        self._starts.append(starts)
        balance: dict[tuple[int, int], list[tuple[int, IntVar]]] = {}
        totals: dict[int, list[tuple[int, IntVar]]] = {}
        arrivals: dict[tuple[int, int], list[tuple[int, IntVar]]] = {}
        for (s, a), flag in starts.items():
            balance.setdefault((s, a), []).append((1, flag))
            totals.setdefault(s, []).append((-run.count, flag))
        for variable, (s, a, b) in zip(middle, middle_keys, strict=True):
            balance.setdefault((s, a), []).append((-1, variable))
            balance.setdefault((s, b), []).append((1, variable))
            totals.setdefault(s, []).append((1, variable))
        for variable, (s, a, b) in zip(final, final_keys, strict=True):
            balance.setdefault((s, a), []).append((-1, variable))
            arrivals.setdefault((s, b), []).append((-1, variable))
        for cell, flag in ends.items():
            arrivals.setdefault(cell, []).append((1, flag))
        for equations in (balance, totals, arrivals):
            for terms in equations.values():
                model.add(sum(factor * variable for factor, variable in terms) == 0)

    # -- solutions ---------------------------------------------------------------------------------------------

    def solve(self, reach_ns: int) -> tuple[Counted | None, int]:
        """(solution, lower bound of the least time); cuts are added while some walk falls into unconnected pieces."""
        for _ in range(MAX_CUTS):
            solver = self._cp.CpSolver()
            solver.parameters.num_workers = 1
            solver.parameters.random_seed = 0
            solver.parameters.max_deterministic_time = DETERMINISTIC_SECONDS
            status = solver.solve(self._model)
            if status == self._cp.INFEASIBLE:
                return None, reach_ns
            if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
                return None, min(reach_ns, _whole(solver.best_objective_bound) if status else 0)
            bound = _whole(solver.best_objective_bound)
            if status == self._cp.OPTIMAL:  # the float is not exact
                bound = sum(ns * int(solver.value(variable)) for variable, ns, _ in self._costs)
            if not self._cut(solver):
                return self._found(solver), min(bound, reach_ns)
        return None, 0

    def _start(self, solver: CpSolver, position: int) -> int:
        """Boundary state at which a run's links begin."""
        return next(state for (_, state), flag in self._starts[position].items() if solver.value(flag))

    def _used(self, solver: CpSolver, position: int) -> list[tuple[int, int, int, int]]:
        """(state before, state after, point, count) of the middle links in use."""
        keys = self._runs[position].keys(self._runs[position].middle)
        return [
            (a, b, point, int(solver.value(variable)))
            for point, (variable, (_, a, b)) in enumerate(zip(self._middle[position], keys, strict=True))
            if solver.value(variable)
        ]

    def _cut(self, solver: CpSolver) -> bool:
        """Forbid the unconnected pieces of the present solution; whether there were any."""
        cut = False
        for position, run in enumerate(self._runs):
            used = self._used(solver, position)
            reached, grown = {self._start(solver, position)}, True
            while grown:
                grown = False
                for a, b, _, _ in used:
                    if a in reached and b not in reached:
                        reached.add(b)
                        grown = True
            lost = {a for a, _, _, _ in used if a not in reached}
            if not lost:
                continue
            cut = True
            keyed = list(zip(self._middle[position], run.keys(run.middle), strict=True))
            inside = [v for v, (_, a, b) in keyed if a in lost and b in lost]
            entering = [v for v, (_, a, b) in keyed if a not in lost and b in lost]
            starting = [flag for (_, state), flag in self._starts[position].items() if state in lost]
            self._model.add(sum(inside) <= run.count * (sum(entering) + sum(starting)))
        return cut

    def _found(self, solver: CpSolver) -> Counted:
        outer: dict[int, int] = {}
        for (variable, place), flag in self._values.items():
            if solver.value(flag):
                outer[variable] = place
        for factor, chosen in zip(self._outer, self._chosen, strict=True):
            factor.trace(_true(solver, chosen), outer)
        links: list[list[tuple[Mapping[int, int], bool]]] = []
        for position, run in enumerate(self._runs):
            known: dict[int, dict[int, int]] = {}
            occurrences: list[tuple[Mapping[int, int], bool]] = []
            for point in _eulerian(self._start(solver, position), self._used(solver, position)):
                if point not in known:
                    run.middle.trace(point, known.setdefault(point, {}))
                occurrences.append((known[point], False))
            final: dict[int, int] = {}
            run.final.trace(_true(solver, self._final[position]), final)
            links.append([*occurrences, (final, True)])
        return Counted(outer=outer, links=links)


def _whole(bound: float) -> int:
    """A bound of an integer, which a float may miss by a little."""
    return max(0, math.floor(bound + ROUNDING))


def _true(solver: CpSolver, flags: Sequence[IntVar]) -> int:
    """Index of the one true flag."""
    return next(i for i, flag in enumerate(flags) if solver.value(flag))


def _product(sizes: Sequence[int]) -> int:
    return int(np.prod(sizes, dtype=np.int64)) if sizes else 1


def _unravel(cells: Sequence[int], sizes: tuple[int, ...]) -> list[list[int]]:
    """Per variable, its value in every cell."""
    if not sizes:
        return []
    return [column.tolist() for column in np.unravel_index(np.array(cells, dtype=np.int64), sizes)]


def _eulerian(start: int, used: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """Points in the order of a walk that uses each as often as it says (Hierholzer)."""
    leaving: dict[int, list[tuple[int, int]]] = {}
    for a, b, point, count in sorted(used, reverse=True):
        leaving.setdefault(a, []).extend([(b, point)] * count)
    stack: list[tuple[int, int | None]] = [(start, None)]
    walk: list[int] = []
    while stack:
        state, point = stack[-1]
        if leaving.get(state):
            stack.append(leaving[state].pop())
        else:
            stack.pop()
            if point is not None:
                walk.append(point)
    walk.reverse()
    return walk
