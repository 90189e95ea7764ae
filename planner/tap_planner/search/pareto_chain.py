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
from tap_planner.search.elimination import INFINITE, Elimination, Factor, WidthError, eliminate
from tap_planner.search.pareto import ParetoFactor, drop, join, pareto_eliminate, within
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


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """Pareto pairs over (shared assignment, first state, last state) of some links."""

    factor: ParetoFactor
    links: tuple[ParetoFactor, ...]
    """The points of each link, in order."""
    chosen: tuple[np.ndarray, ...]
    """Per link, for each pair the point of the link."""


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
    joined = [_join_run(run, weights, ceiling) for run in runs]
    named = [_named(run.points, found.factor) for run, found in zip(runs, joined, strict=True)]
    factors = [*outer, *named]
    guide = _guide(factors, sizes, weights)
    pairs = (weights.time, weights.memory)
    last = pareto_eliminate(factors, sizes, guide, np.zeros((), dtype=np.int64), pairs, ceiling)
    total = join(last, (), sizes)
    fitting = np.flatnonzero(total.num_bytes <= limit_bytes * SCALE)
    if len(fitting) == 0:
        return None, 0
    best = int(fitting[np.lexsort((total.num_bytes[fitting], total.ns[fitting]))[0]])
    values: dict[int, int] = {}
    total.trace(best, values)
    links = [
        _occurrences(run.points, found, factor, values)
        for run, found, factor in zip(runs, joined, named, strict=True)
    ]
    return Counted(outer=values, links=links), int(total.ns[best]) // SCALE
