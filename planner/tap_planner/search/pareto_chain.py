"""Pareto sets of short chains: all (time, memory) pairs that a run's occurrences can have together.

Min-plus over Pareto sets: the sets of the links from boundary state to boundary state are joined one link after the
other, and what cannot belong to a solution within the window is dropped after each. For a few occurrences this is
faster than counting points with CP-SAT (``counts.py``), which small counts do not suit; the answer is the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tap_planner.search.chain import Chain, min_plus
from tap_planner.search.counts import Counted, RunPoints
from tap_planner.search.elimination import eliminate
from tap_planner.search.factors import INFINITE, WidthError
from tap_planner.search.pareto import ParetoFactor, drop, join, pareto_eliminate, weighted_table, within
from tap_planner.search.terms import SCALE
from tap_planner.search.weighting import Weights

MAX_LINKS = 12
"""Occurrences after the first up to which chains are joined."""
MAX_CHAIN_POINTS = 50_000
"""Pairs of a chain up to which it is worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRun:
    """A run whose chain is to be joined.

    Args:
        points: Pareto points of its links.
        chain: their weighted matrices.
        outside: [s, a, b] weighted cost of everything outside the chain.
    """

    points: RunPoints
    chain: Chain
    outside: np.ndarray


def solve_chains(
    outer: Sequence[ParetoFactor],
    sizes: Mapping[int, int],
    runs: Sequence[ChainRun],
    weights: Weights,
    limit_bytes: int,
    ceiling: int,
) -> tuple[Counted | None, int]:
    """(fastest solution within the limit and the window, its time); None and 0 where there is none.

    Args:
        outer: points of the outer part, over what it has in common with the runs.
        sizes: domain sizes of the variables that they are over.
        runs: all runs.
        weights: of the Lagrangian bound.
        limit_bytes: memory limit.
        ceiling: upper end of the window: SCALE x weighted cost.

    Raises:
        WidthError: too many pairs.
    """
    joined = [_Joining(run, weights, ceiling) for run in runs]
    factors = [*outer, *(one.factor for one in joined)]
    tables = [weighted_table(factor, weights) for factor in factors]
    domains = {variable: sizes[variable] for factor in factors for variable in factor.scope}
    guide = eliminate(domains, tables, ())
    nothing = np.zeros((), dtype=np.int64)
    last = pareto_eliminate(factors, domains, guide, nothing, (weights.time, weights.memory), ceiling)
    total = join(last, (), domains)
    fitting = np.flatnonzero(total.num_bytes <= limit_bytes * SCALE)
    if len(fitting) == 0:
        return None, 0
    best = int(fitting[np.lexsort((total.num_bytes[fitting], total.ns[fitting]))[0]])
    values: dict[int, int] = {}
    chosen = _trace(total, best, [link for one in joined for link in one.links], values)
    return Counted(outer=values, links=[one.occurrences(chosen) for one in joined]), int(total.ns[best]) // SCALE


class _Joining:
    """The chain of a run, joined.

    Args:
        run: the run.
        weights: of the Lagrangian bound.
        ceiling: upper end of the window.

    Raises:
        WidthError: too many pairs.
    """

    def __init__(self, run: ChainRun, weights: Weights, ceiling: int) -> None:
        self._points = run.points
        states, shared = math.prod(run.points.boundary_sizes), math.prod(run.points.shared_sizes)
        self._sizes = {_SHARED: shared, **{_state(n): states for n in range(run.points.count + 2)}}
        self.links = [self._link(number) for number in range(run.points.count + 1)]
        """The points of each link, between numbered states."""
        first, current = _state(0), self.links[0]
        rests = _rests(run)
        for number, link in enumerate(self.links):
            if number:
                scope = (_SHARED, first, _state(number), _state(number + 1))
                current = drop(join([current, link], scope, self._sizes), _state(number))
            current = within(current, rests[number], weights.time, weights.memory, ceiling)
            if len(current.cell) > MAX_CHAIN_POINTS:
                raise WidthError(f"{len(current.cell)} Pareto points of a chain")
        self.factor = self._named(current)
        """Its pairs, over the variables of the outer part."""

    def _points_of(self, number: int) -> ParetoFactor:
        return self._points.middle if number < self._points.count else self._points.final

    def _link(self, number: int) -> ParetoFactor:
        points = self._points_of(number)
        scope = (_SHARED, _state(number), _state(number + 1))
        sizes = tuple(self._sizes[variable] for variable in scope)
        return ParetoFactor(scope, sizes, points.cell, points.ns, points.num_bytes)

    def _named(self, factor: ParetoFactor) -> ParetoFactor:
        points = self._points
        scope = (*points.shared, *points.first, *points.last)
        sizes = (*points.shared_sizes, *points.boundary_sizes, *points.boundary_sizes)
        same = np.arange(len(factor.cell))
        return ParetoFactor(scope, sizes, factor.cell, factor.ns, factor.num_bytes, ((factor, same),))

    def occurrences(self, chosen: Mapping[int, int]) -> list[tuple[Mapping[int, int], bool]]:
        """Values of every link, and whether it is the last.

        Args:
            chosen: by the identity of a link, its point.
        """
        known: dict[tuple[bool, int], dict[int, int]] = {}
        found: list[tuple[Mapping[int, int], bool]] = []
        for number, link in enumerate(self.links):
            last, point = number == self._points.count, chosen[id(link)]
            if (last, point) not in known:
                self._points_of(number).trace(point, known.setdefault((last, point), {}))
            found.append((known[last, point], last))
        return found


_SHARED = -1
"""Stands for the shared variables of a run."""


def _state(number: int) -> int:
    """Stands for the boundary state after so many links."""
    return -2 - number


def _rests(run: ChainRun) -> list[np.ndarray]:
    """Per link, [s, a, b] the least weighted cost of what lies after it and outside."""
    rest = np.swapaxes(run.outside, 1, 2)
    found = [run.outside]
    for number in reversed(range(run.points.count)):
        rest = min_plus(run.chain.last if number == run.points.count - 1 else run.chain.link, rest)
        found.append(np.minimum(np.swapaxes(rest, 1, 2), INFINITE))
    return found[::-1]


def _trace(factor: ParetoFactor, point: int, links: Sequence[ParetoFactor], values: dict[int, int]) -> dict[int, int]:
    """By the identity of each link, its point; ``values`` gets those of the outer part's variables."""
    ends = {id(link) for link in links}
    found: dict[int, int] = {}
    stack: list[tuple[ParetoFactor, int]] = [(factor, point)]
    while stack:
        current, index = stack.pop()
        if id(current) in ends:
            found[id(current)] = index
            continue
        pairs = zip(current.scope, current.values(index), strict=True)
        values.update((variable, value) for variable, value in pairs if variable >= 0)
        stack.extend((parent, int(indices[index])) for parent, indices in current.parents)
    return found
