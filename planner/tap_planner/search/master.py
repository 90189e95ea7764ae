"""The master: closes a memory limit exactly, over the Pareto points that survive, with CP-SAT or by Pareto chains.

Within a window above the Lagrangian bound, every part of the model (outer part, links) is reduced to its Pareto
points. A solution picks one point of the outer part, and for every run a walk through boundary states that uses each
link point some number of times. Counts suffice: the walk is an Eulerian path of the chosen multigraph, so flow balance
and connectedness (added when violated) make the model exact. Short runs are joined link by link (``pareto_chain.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial

import numpy as np

from tap_planner.search.budget import LongRun, solve_on_grid
from tap_planner.search.chain import Chain, min_plus
from tap_planner.search.choices import Choices
from tap_planner.search.composition import compose
from tap_planner.search.counts import Counted, CountModel, RunPoints
from tap_planner.search.elimination import Elimination, eliminate
from tap_planner.search.factors import INFINITE, WidthError
from tap_planner.search.minimisation import Minimisation
from tap_planner.search.model import PartKind
from tap_planner.search.pareto import ParetoFactor, from_tables, pareto_eliminate, pareto_join
from tap_planner.search.pareto_chain import MAX_LINKS, ChainRun, solve_chains
from tap_planner.search.parts import Parts
from tap_planner.search.solver import Solver
from tap_planner.search.terms import SCALE
from tap_planner.search.weighting import Weights

FIRST_WINDOW = 4_000
"""The first window above the bound is the bound divided by this."""
WINDOW_GROWTH = 5
IMPROVING_STEPS = 3
"""Windows between the bound and the best known choices in which better ones are sought."""
SHRUNK = 2
"""By this factor values have to become fewer to be worth new tables."""
GRIDS = (12, 100)
"""Grids of bytes on which rounding hides what is worth such a part of the window, from coarse to fine."""
MAX_SEPARATED = 20_000
"""Entries of the table over the variables that separate the outer part."""


def solve_master(
    solver: Solver, limit_bytes: int, bound_ns: int, ceiling_ns: int, weights: Weights, gap: Fraction = Fraction(0)
) -> tuple[int, Choices | None]:
    """Look for the fastest assignment within the limit that is faster than ``ceiling_ns``.

    Args:
        solver: the configuration.
        limit_bytes: memory limit.
        bound_ns: what is proven so far.
        ceiling_ns: only faster assignments matter.
        weights: of the Lagrangian bound.
        gap: a bound this near the ceiling, or the best assignment, need come no nearer.

    Returns:
        A lower bound of the least time (at most the ceiling), and the best assignment found, if any is faster.

    Raises:
        WidthError: the first window already holds too much.
    """
    _, marginals = solver.marginals(weights)
    solver.make_exact()  # windows are small again
    window = max(bound_ns // FIRST_WINDOW, 1)
    best: Choices | None = None
    proven = bound_ns
    while proven < (enough := math.ceil(ceiling_ns / (1 + gap))):
        reach = min(bound_ns + window, enough)
        ceiling = SCALE * (weights.time * reach + weights.memory * limit_bytes)
        alive = solver.parts.domains.within(marginals, ceiling)
        found, inside = None, reach
        if all(len(values) for values in alive.values()):
            solve = partial(
                _solve_within, weights=weights, limit_bytes=limit_bytes, window=(ceiling, reach), bounds=(proven, gap)
            )
            try:
                found, inside = solver.exactly(alive, solve)
            except WidthError:
                if best is None and proven == bound_ns:
                    raise
                break
        if found is not None:
            ns, num_bytes = solver.price(found)
            if num_bytes <= limit_bytes and ns < ceiling_ns:
                best, ceiling_ns = found, ns
        proven = max(proven, min(inside, reach))
        if inside < reach or reach >= enough:
            break
        window *= WINDOW_GROWTH
    return min(proven, ceiling_ns), best


def improve(solver: Solver, limit_bytes: int, bound_ns: int, ceiling_ns: int, weights: Weights) -> Choices | None:
    """Choices within the limit that are faster than ``ceiling_ns``, among few values; None where none are found.

    Args:
        solver: the configuration, with few values left.
        limit_bytes: memory limit.
        bound_ns: what is proven of all values.
        ceiling_ns: only faster choices matter.
        weights: of the Lagrangian bound.
    """
    best: Choices | None = None
    for part in range(1, IMPROVING_STEPS + 1):
        reach = bound_ns + max((ceiling_ns - bound_ns) // part, 1)
        ceiling = SCALE * (weights.time * reach + weights.memory * limit_bytes)
        try:
            solver.prepare_sets()
            found, _ = _Master(solver.parts, weights, limit_bytes, ceiling).solve(reach)
        except WidthError:
            continue
        if found is not None:
            ns, num_bytes = solver.price(found)
            if num_bytes <= limit_bytes and ns < ceiling_ns:
                best = found
        break
    return best


def _solve_within(
    solver: Solver, *, weights: Weights, limit_bytes: int, window: tuple[int, int], bounds: tuple[int, Fraction]
) -> tuple[Choices | None, int]:
    """Solve the master of a window, given by its upper ends (SCALE x weighted cost, ns), with what is proven so far and
    the gap that may be left; as ``_Master.solve``.

    The exact tables say of more values than the relaxed ones that they cannot belong to a solution in the window.
    """
    ceiling, reach_ns = window
    alive = solver.parts.domains.within(Minimisation(solver.parts, weights, True).marginals(), ceiling)
    if any(len(values) == 0 for values in alive.values()):
        return None, reach_ns
    before = sum(len(solver.parts.domains.of_class(key)) for key in alive)
    if sum(len(values) for values in alive.values()) * SHRUNK > before:
        return _Master(solver.parts, weights, limit_bytes, ceiling).solve(reach_ns, *bounds)
    return solver.exactly(
        alive, lambda inside: _Master(inside.parts, weights, limit_bytes, ceiling).solve(reach_ns, *bounds)
    )


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
        self.weights = weights
        self._ceiling = ceiling
        if self.minimisation.bound > ceiling:
            return
        self.runs = tuple(self._run_points(number) for number in range(len(parts.model.runs)))
        self.outer = self._outer_points()

    # -- points ------------------------------------------------------------------------------------------------

    def _pareto(
        self, kind: PartKind, number: int, outside: np.ndarray, keep: tuple[int, ...]
    ) -> tuple[tuple[ParetoFactor, ...], dict[int, int], Elimination]:
        """(factors over kept variables, sizes of the variables, their weighted elimination)"""
        tables = self.parts.tables(kind, number, True)
        factors = [
            from_tables(scope, ns, num_bytes)
            for scope, ns, num_bytes in zip(tables.scopes, tables.ns, tables.num_bytes, strict=True)
        ]
        domains = dict(tables.domains)
        for variable in keep:
            domains.setdefault(variable, self.parts.size(variable))
        guide = eliminate(domains, tables.weighted(self.weights), keep)
        found = pareto_eliminate(
            factors, domains, guide, outside, (self.weights.time, self.weights.memory), self._ceiling
        )
        return found, domains, guide

    def _link_points(self, kind: PartKind, number: int, outside: np.ndarray, keep: tuple[int, ...]) -> ParetoFactor:
        factors, domains, guide = self._pareto(kind, number, outside, keep)
        return pareto_join(factors, domains, guide, outside, (self.weights.time, self.weights.memory), self._ceiling)

    def _run_points(self, number: int) -> RunPoints:
        minimisation = self.minimisation
        shared, boundary = minimisation.sizes(number)
        outside = minimisation.outside(number)
        chain = minimisation.chains[number]
        keep = self.parts.tables(PartKind.LINK, number, True).keep
        shape = (*shared, *boundary, *boundary)
        return RunPoints(
            number=number,
            count=chain.count,
            shared=minimisation.shared_scope(number),
            shared_sizes=shared,
            first=self.parts.model.runs[number].first_boundary,
            last=self.parts.model.runs[number].last_boundary,
            boundary_sizes=boundary,
            middle=self._link_points(PartKind.LINK, number, _around_middle(chain, outside).reshape(shape), keep),
            final=self._link_points(PartKind.LAST, number, _around_last(chain, outside).reshape(shape), keep),
        )

    def _outer_points(self) -> tuple[ParetoFactor, ...]:
        minimisation = self.minimisation
        keep: list[int] = []
        for number in range(len(self.runs)):
            keep.extend(v for v in minimisation.chain_scope(number) if v not in keep)
        keep.extend(self._separators(keep))
        total = np.zeros(tuple(self.parts.size(v) for v in keep), dtype=np.int64)
        for number in range(len(self.runs)):
            scope = minimisation.chain_scope(number)
            table = minimisation.chains[number].table.reshape(minimisation.chain_shape(number))
            expanded = [1] * len(keep)
            for variable in scope:
                expanded[keep.index(variable)] = self.parts.size(variable)
            order = sorted(range(len(scope)), key=lambda d: keep.index(scope[d]))
            total = total + np.transpose(table, order).reshape(expanded)
        return self._pareto(PartKind.OUTER, 0, np.minimum(total, INFINITE), tuple(keep))[0]

    def _separators(self, keep: Sequence[int]) -> list[int]:
        """More variables to keep: those outside runs that first occurrences read, so that the two sides' points add up
        instead of multiplying."""
        model = self.parts.model
        found: list[int] = []
        entries = math.prod(self.parts.size(v) for v in keep)
        for term in model.outer.terms:
            producer = term.producer
            if producer is None or producer >= model.num_operators or model.run_of[producer] >= 0:
                continue
            enters = any(model.run_of[slot.variable] >= 0 for slot in term.slots)
            if enters and producer not in keep and producer not in found:
                entries *= self.parts.size(producer)
                if entries > MAX_SEPARATED:
                    break
                found.append(producer)
        return found

    # -- counts ------------------------------------------------------------------------------------------------

    def solve(self, reach_ns: int, proven_ns: int = 0, gap: Fraction = Fraction(0)) -> tuple[Choices | None, int]:
        """(choices, lower bound of the least time inside the window); the bound is ``reach_ns`` if there are none.

        Args:
            reach_ns: upper end of the window.
            proven_ns: what is proven so far.
            gap: a bound this near the time of the choices need come no nearer.
        """
        if self.minimisation.bound > self._ceiling or any(len(factor.cell) == 0 for factor in self.outer):
            return None, reach_ns
        found, bound = self._joined(reach_ns) or self._on_grids(reach_ns, proven_ns, gap) or self._counted(reach_ns)
        if found is None:
            return None, bound
        return compose(self.parts.domains, self.weights, found.outer, found.links), bound

    def _counted(self, reach_ns: int) -> tuple[Counted | None, int]:
        return CountModel(self.outer, self.runs, self.limit_bytes).solve(reach_ns)

    def _on_grids(self, reach_ns: int, proven_ns: int, gap: Fraction) -> tuple[Counted | None, int] | None:
        """The same by dynamic programming over bytes, of a single run; None where that says too little."""
        if len(self.runs) != 1 or not proven_ns or not self.weights.memory or not self.runs[0].count:
            return None
        run = LongRun(points=self.runs[0], chain=self.minimisation.chains[0], outer=self.outer, sizes=self._sizes())
        for part in GRIDS:
            tolerance = max((reach_ns - proven_ns) // part, 1)
            try:
                answer = solve_on_grid(run, self.weights, self.limit_bytes, self._ceiling, tolerance)
            except WidthError:
                return None
            if answer is None:
                return None
            if answer.bound_ns >= reach_ns:
                return None, reach_ns
            if answer.found is not None and answer.ns <= answer.bound_ns * (1 + gap):
                return answer.found, answer.bound_ns
        return None

    def _sizes(self) -> dict[int, int]:
        """Domain sizes of the variables of the outer part's factors and of the runs' ends."""
        sizes = {v: size for factor in self.outer for v, size in zip(factor.scope, factor.sizes, strict=True)}
        for number in range(len(self.runs)):
            scope = self.minimisation.chain_scope(number)
            sizes.update(zip(scope, self.minimisation.chain_shape(number), strict=True))
        return sizes

    def _joined(self, reach_ns: int) -> tuple[Counted | None, int] | None:
        """The same by Pareto chains, where all runs are short; None where their sets grow too large."""
        if any(run.count >= MAX_LINKS for run in self.runs):
            return None
        minimisation = self.minimisation
        chains = [
            ChainRun(points=run, chain=minimisation.chains[number], outside=minimisation.outside(number))
            for number, run in enumerate(self.runs)
        ]
        try:
            found, ns = solve_chains(self.outer, self._sizes(), chains, self.weights, self.limit_bytes, self._ceiling)
        except WidthError:
            return None
        return found, reach_ns if found is None else min(ns, reach_ns)


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
