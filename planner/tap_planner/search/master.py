"""The master: closes a memory limit exactly with CP-SAT over the Pareto points that survive.

Within a window above the Lagrangian bound, every part of the model (outer part, links) is reduced to its Pareto
points. A solution picks one point of the outer part, and for every run a walk through boundary states that uses each
link point some number of times. Counts suffice: the walk is an Eulerian path of the chosen multigraph, so flow balance
and connectedness (added when violated) make the model exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tap_planner.search.chain import Chain, min_plus
from tap_planner.search.composition import compose
from tap_planner.search.elimination import INFINITE, WidthError, eliminate
from tap_planner.search.minimisation import Minimisation
from tap_planner.search.model import PartKind
from tap_planner.search.pareto import ParetoFactor, from_tables, pareto_eliminate
from tap_planner.search.parts import Parts
from tap_planner.search.solver import Solver
from tap_planner.search.terms import SCALE
from tap_planner.search.weighting import Assignment, Weights

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver, IntVar

DETERMINISTIC_SECONDS = 20.0
"""Effort of one CP-SAT call, in its deterministic time."""
FIRST_WINDOW = 4_000
"""The first window above the bound is the bound divided by this."""
WINDOW_GROWTH = 5
MAX_CUTS = 20


def solve_master(
    solver: Solver, limit_bytes: int, bound_ns: int, ceiling_ns: int, weights: Weights
) -> tuple[int, Assignment | None]:
    """Look for the fastest assignment within the limit that is faster than ``ceiling_ns``.

    Args:
        solver: the configuration.
        limit_bytes: memory limit.
        bound_ns: what is proven so far.
        ceiling_ns: only faster assignments matter.
        weights: of the Lagrangian bound.

    Returns:
        A lower bound of the least time (at most the ceiling), and the best assignment found, if any is faster.

    Raises:
        WidthError: the first window already holds too much.
    """
    _, marginals = solver.marginals(weights)
    window = max(bound_ns // FIRST_WINDOW, 1)
    best: Assignment | None = None
    proven = bound_ns
    while proven < ceiling_ns:
        reach = min(bound_ns + window, ceiling_ns)
        ceiling = SCALE * (weights.time * reach + weights.memory * limit_bytes)
        alive = solver.parts.domains.within(marginals, ceiling)
        found, inside = None, reach
        if all(len(values) for values in alive.values()):
            try:
                restricted = solver.restrict(alive)
                restricted.prepare_sets()
                found, inside = _Master(restricted.parts, weights, limit_bytes, ceiling).solve(reach)
            except WidthError:
                if best is None and proven == bound_ns:
                    raise
                break
        if found is not None:
            ns, num_bytes = solver.price(found)
            if num_bytes <= limit_bytes and ns < ceiling_ns:
                best, ceiling_ns = found, ns
        proven = max(proven, min(inside, reach))
        if inside < reach and found is None:
            break
        if reach >= ceiling_ns:
            proven = max(proven, min(inside, ceiling_ns))
            break
        window *= WINDOW_GROWTH
    return min(proven, ceiling_ns), best


@dataclass(frozen=True, slots=True)
class _RunPoints:
    """Pareto points of a run's links."""

    middle: ParetoFactor
    last: ParetoFactor
    shared: int
    """Number of assignments of the shared variables."""
    states: int


class _Master:
    """Pareto points of all parts within a window.

    Args:
        parts: what the window leaves of the model; set variables are prepared.
        weights: of the Lagrangian bound.
        limit_bytes: memory limit.
        ceiling: upper end of the window: SCALE x weighted cost.
    """

    def __init__(self, parts: Parts, weights: Weights, limit_bytes: int, ceiling: int) -> None:
        self.parts = parts
        self.limit_bytes = limit_bytes
        self.minimisation = Minimisation(parts, weights, True)
        """The exact weighted minimisation."""
        self._weights = weights
        self._ceiling = ceiling
        if self.minimisation.bound > ceiling:
            self._outer = None
            return
        self._runs = tuple(self._run_points(number) for number in range(len(parts.model.runs)))
        self._outer = self._outer_points()

    # -- points ------------------------------------------------------------------------------------------------

    def _pareto(self, kind: PartKind, number: int, outside: np.ndarray, keep: tuple[int, ...]) -> ParetoFactor:
        tables = self.parts.tables(kind, number, True)
        factors = [
            from_tables(scope, ns, num_bytes)
            for scope, ns, num_bytes in zip(tables.scopes, tables.ns, tables.num_bytes, strict=True)
        ]
        domains = dict(tables.domains)
        for variable in keep:
            domains.setdefault(variable, self.parts.size(variable))
        guide = eliminate(domains, tables.weighted(self._weights), keep)
        return pareto_eliminate(
            factors, domains, guide, outside, (self._weights.time, self._weights.memory), self._ceiling
        )

    def _run_points(self, number: int) -> _RunPoints:
        minimisation = self.minimisation
        shared, boundary = minimisation.sizes(number)
        outside = minimisation.outside(number)
        chain = minimisation.chains[number]
        keep = self.parts.tables(PartKind.LINK, number, True).keep
        shape = (*shared, *boundary, *boundary)
        middle = self._pareto(PartKind.LINK, number, _around_middle(chain, outside).reshape(shape), keep)
        last = self._pareto(PartKind.LAST, number, _around_last(chain, outside).reshape(shape), keep)
        return _RunPoints(middle, last, math.prod(shared), math.prod(boundary))

    def _outer_points(self) -> ParetoFactor:
        minimisation = self.minimisation
        keep: list[int] = []
        for number in range(len(self._runs)):
            keep.extend(v for v in minimisation.chain_scope(number) if v not in keep)
        total = np.zeros(tuple(self.parts.size(v) for v in keep), dtype=np.int64)
        for number in range(len(self._runs)):
            scope = minimisation.chain_scope(number)
            table = minimisation.chains[number].table.reshape(minimisation.chain_shape(number))
            expanded = [1] * len(keep)
            for variable in scope:
                expanded[keep.index(variable)] = self.parts.size(variable)
            order = sorted(range(len(scope)), key=lambda d: keep.index(scope[d]))
            total = total + np.transpose(table, order).reshape(expanded)
        return self._pareto(PartKind.OUTER, 0, np.minimum(total, INFINITE), tuple(keep))

    # -- CP-SAT ------------------------------------------------------------------------------------------------

    def solve(self, reach_ns: int) -> tuple[Assignment | None, int]:
        """(assignment, lower bound of the least time inside the window); the bound is ``reach_ns`` if there is none."""
        if self._outer is None or len(self._outer.cell) == 0:
            return None, reach_ns
        model = _CountModel(self, self._outer, self._runs)
        return model.solve(reach_ns)

    def boundary_cells(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per outer point: shared assignment, first and last boundary state of a run."""
        assert self._outer is not None
        minimisation = self.minimisation
        shared, boundary = minimisation.sizes(number)
        grid = dict(zip(self._outer.scope, np.unravel_index(self._outer.cell, self._outer.sizes), strict=True))
        scope = minimisation.chain_scope(number)
        columns = [grid[v] for v in scope]
        zeros = np.zeros(len(self._outer.cell), dtype=np.int64)

        def flat(part: Sequence[np.ndarray], sizes: tuple[int, ...]) -> np.ndarray:
            return np.ravel_multi_index(list(part), sizes) if sizes else zeros

        k, n = len(shared), len(boundary)
        return flat(columns[:k], shared), flat(columns[k : k + n], boundary), flat(columns[k + n :], boundary)


def _around_middle(chain: Chain, outside: np.ndarray) -> np.ndarray:
    """[s, a, b] least cost of everything but one middle link."""
    if chain.count == 0:
        return np.full_like(outside, INFINITE)
    closed = np.swapaxes(min_plus(chain.last, np.swapaxes(outside, 1, 2)), 1, 2)
    return Chain(chain.link, chain.link, chain.count - 1).outside_of_links(closed)


def _around_last(chain: Chain, outside: np.ndarray) -> np.ndarray:
    """[s, a, b] least cost of everything but the last link."""
    if chain.count == 0:
        return outside
    before = Chain(chain.link, chain.link, chain.count - 1).table
    reached = min_plus(np.swapaxes(outside, 1, 2), before)
    return np.minimum(np.swapaxes(reached, 1, 2), INFINITE)


class _CountModel:
    """CP-SAT over counts of points."""

    def __init__(self, master: _Master, outer: ParetoFactor, runs: tuple[_RunPoints, ...]) -> None:
        from ortools.sat.python import cp_model

        self._cp = cp_model
        self._master = master
        self._outer = outer
        self._runs = runs
        self._model = cp_model.CpModel()
        self._choice = [self._model.new_bool_var(f"o{i}") for i in range(len(outer.cell))]
        self._model.add_exactly_one(self._choice)
        self._costs: list[tuple[IntVar, int, int]] = [
            (variable, int(ns) // SCALE, int(size) // SCALE)
            for variable, ns, size in zip(self._choice, outer.ns, outer.num_bytes, strict=True)
        ]
        self._middle: list[list[IntVar]] = []
        self._last: list[list[IntVar]] = []
        for number in range(len(runs)):
            self._add_run(number)
        self._model.add(sum(size * v for v, _, size in self._costs) <= master.limit_bytes)
        self._model.minimize(sum(ns * v for v, ns, _ in self._costs))

    def _keys(self, factor: ParetoFactor, number: int) -> list[tuple[int, int, int]]:
        run = self._runs[number]
        cells = np.unravel_index(factor.cell, (run.shared, run.states, run.states))
        return list(zip(*(column.tolist() for column in cells), strict=True))

    def _add_run(self, number: int) -> None:
        run, model = self._runs[number], self._model
        count = self._master.minimisation.chains[number].count
        middle = [model.new_int_var(0, count, f"m{number}.{i}") for i in range(len(run.middle.cell))]
        last = [model.new_bool_var(f"l{number}.{i}") for i in range(len(run.last.cell))]
        self._middle.append(middle)
        self._last.append(last)
        for factor, variables in ((run.middle, middle), (run.last, last)):
            self._costs.extend(
                (variable, int(ns) // SCALE, int(size) // SCALE)
                for variable, ns, size in zip(variables, factor.ns, factor.num_bytes, strict=True)
            )
        model.add_exactly_one(last)
        shared, first, final = (column.tolist() for column in self._master.boundary_cells(number))
        balance: dict[tuple[int, int], list[tuple[int, IntVar]]] = {}
        ends: dict[tuple[int, int], list[tuple[int, IntVar]]] = {}
        totals: dict[int, list[tuple[int, IntVar]]] = {}
        for variable, s, a, b in zip(self._choice, shared, first, final, strict=True):
            balance.setdefault((s, a), []).append((1, variable))
            ends.setdefault((s, b), []).append((1, variable))
            totals.setdefault(s, []).append((-count, variable))
        for variable, (s, a, b) in zip(middle, self._keys(run.middle, number), strict=True):
            balance.setdefault((s, a), []).append((-1, variable))
            balance.setdefault((s, b), []).append((1, variable))
            totals.setdefault(s, []).append((1, variable))
        for variable, (s, a, b) in zip(last, self._keys(run.last, number), strict=True):
            balance.setdefault((s, a), []).append((-1, variable))
            ends.setdefault((s, b), []).append((-1, variable))
        for equations in (balance, ends, totals):
            for terms in equations.values():
                model.add(sum(factor * variable for factor, variable in terms) == 0)

    def solve(self, reach_ns: int) -> tuple[Assignment | None, int]:
        """Solve, adding cuts while some run's walk falls into unconnected pieces."""
        for _ in range(MAX_CUTS):
            solver = self._cp.CpSolver()
            solver.parameters.num_workers = 1
            solver.parameters.random_seed = 0
            solver.parameters.max_deterministic_time = DETERMINISTIC_SECONDS
            status = solver.solve(self._model)
            if status == self._cp.INFEASIBLE:
                return None, reach_ns
            if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
                return None, min(reach_ns, int(max(0.0, solver.best_objective_bound)) if status else 0)
            bound = int(solver.objective_value) if status == self._cp.OPTIMAL else int(solver.best_objective_bound)
            if not self._cut(solver):
                return self._assignment(solver), min(bound, reach_ns)
        return None, 0

    def _walks(self, solver: CpSolver, number: int) -> tuple[int, int, list[tuple[int, int, int, int]]]:
        """Start state, and the (a, b, point, count) of the middle links used."""
        chosen = next(i for i, v in enumerate(self._choice) if solver.value(v))
        start = int(self._master.boundary_cells(number)[1][chosen])
        used = [
            (a, b, point, int(solver.value(variable)))
            for point, (variable, (_, a, b)) in enumerate(
                zip(self._middle[number], self._keys(self._runs[number].middle, number), strict=True)
            )
            if solver.value(variable)
        ]
        return chosen, start, used

    def _cut(self, solver: CpSolver) -> bool:
        """Forbid the unconnected pieces of the present solution; whether there were any."""
        cut = False
        for number in range(len(self._runs)):
            _, start, used = self._walks(solver, number)
            reached, grown = {start}, True
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
            count = self._master.minimisation.chains[number].count
            keys = self._keys(self._runs[number].middle, number)
            variables = self._middle[number]
            inside = [v for v, (_, a, b) in zip(variables, keys, strict=True) if a in lost and b in lost]
            entering = [v for v, (_, a, b) in zip(variables, keys, strict=True) if a not in lost and b in lost]
            first = self._master.boundary_cells(number)[1].tolist()
            starting = [v for v, a in zip(self._choice, first, strict=True) if a in lost]
            self._model.add(sum(inside) <= count * (sum(entering) + sum(starting)))
        return cut

    def _assignment(self, solver: CpSolver) -> Assignment:
        values: dict[int, int] = {}
        chosen = next(i for i, v in enumerate(self._choice) if solver.value(v))
        self._outer.trace(chosen, values)
        links: list[list[dict[int, int]]] = []
        for number, run in enumerate(self._runs):
            _, start, used = self._walks(solver, number)
            walk = _eulerian(start, used)
            occurrences: list[dict[int, int]] = []
            for factor, point in [*((run.middle, p) for p in walk), (run.last, self._last_point(solver, number))]:
                inner: dict[int, int] = {}
                factor.trace(point, inner)
                occurrences.append(inner)
            links.append(occurrences)
        return compose(self._master.parts.domains, values, links)

    def _last_point(self, solver: CpSolver, number: int) -> int:
        return next(i for i, v in enumerate(self._last[number]) if solver.value(v))


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
