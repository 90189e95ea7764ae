"""Elimination of Pareto sets: all (time, memory) pairs that matter, for each assignment of the kept variables.

A factor holds, per cell of its scope, the pairs that no other pair of the cell dominates; joining adds pairs, and
eliminating a variable merges cells. Pairs whose weighted cost cannot belong to a solution within the window are
dropped on the way. Every pair remembers where it came from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tap_planner.search.elimination import Elimination
from tap_planner.search.factors import INFINITE, Factor, WidthError
from tap_planner.search.weighting import Weights

MAX_POINTS = 400_000
"""Most pairs that a join may make."""


@dataclass(frozen=True, slots=True)
class ParetoFactor:
    """Undominated (time, memory) pairs per cell."""

    scope: tuple[int, ...]
    sizes: tuple[int, ...]
    cell: np.ndarray
    """[num_points] index of the cell, row-major over ``sizes``; ascending."""
    ns: np.ndarray
    num_bytes: np.ndarray
    parents: tuple[tuple[ParetoFactor, np.ndarray], ...] = ()
    """Factors that were joined, with the index of the point in each."""

    def values(self, point: int) -> tuple[int, ...]:
        """Values of the scope's variables at a point."""
        return tuple(int(v) for v in np.unravel_index(int(self.cell[point]), self.sizes)) if self.sizes else ()

    def trace(self, point: int, assignment: dict[int, int]) -> None:
        """Fill in the values of all variables that a point stands for, in place."""
        stack: list[tuple[ParetoFactor, int]] = [(self, point)]
        while stack:
            factor, index = stack.pop()
            assignment.update(zip(factor.scope, factor.values(index), strict=True))
            stack.extend((parent, int(indices[index])) for parent, indices in factor.parents)


def from_tables(scope: tuple[int, ...], ns: np.ndarray, num_bytes: np.ndarray) -> ParetoFactor:
    """One pair per allowed cell of dense tables."""
    flat = ns.reshape(-1)
    allowed = np.flatnonzero(flat < int(INFINITE) >> 6)
    return ParetoFactor(scope, ns.shape, allowed, flat[allowed], num_bytes.reshape(-1)[allowed])


def weighted_table(factor: ParetoFactor, weights: Weights) -> Factor:
    """The least weighted cost of every cell."""
    table = np.full(math.prod(factor.sizes), INFINITE, dtype=np.int64)
    np.minimum.at(table, factor.cell, factor.ns * weights.time + factor.num_bytes * weights.memory)
    return Factor(factor.scope, table.reshape(factor.sizes))


def _undominated(cell: np.ndarray, ns: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """Indices of the pairs that no other pair of their cell dominates, by cell, then memory."""
    order = np.lexsort((ns, num_bytes, cell))
    if len(order) < 2:
        return order
    cell = cell[order]
    group = np.cumsum(np.r_[0, cell[1:] != cell[:-1]])
    _, rank = np.unique(ns[order], return_inverse=True)
    key = rank - group * (int(rank.max()) + 1)
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = key[1:] < np.minimum.accumulate(key)[:-1]
    return order[keep]


def join(
    factors: Sequence[ParetoFactor],
    scope: tuple[int, ...],
    sizes: Mapping[int, int],
    cells: np.ndarray | None = None,
) -> ParetoFactor:
    """Sums of pairs, over ``scope``.

    Args:
        factors: what is added.
        scope: holds the scopes of all of them.
        sizes: domain sizes.
        cells: the cells that matter, ascending; None: all.

    Raises:
        WidthError: more than ``MAX_POINTS`` pairs.
    """
    ordered = sorted(factors, key=lambda f: len(f.cell))
    if cells is None:
        result = _spread(ordered.pop(0), scope, sizes)
    else:
        if len(cells) > MAX_POINTS:
            raise WidthError(f"{len(cells)} Pareto points")
        none = np.zeros(len(cells), dtype=np.int64)
        result = ParetoFactor(scope, tuple(sizes[v] for v in scope), cells, none, none)
    for factor in ordered:
        result = _add(result, factor, sizes)
    return result


def _spread(factor: ParetoFactor, scope: tuple[int, ...], sizes: Mapping[int, int]) -> ParetoFactor:
    """The same pairs over a larger scope."""
    shape = tuple(sizes[v] for v in scope)
    missing = [v for v in scope if v not in factor.scope]
    copies = 1
    for v in missing:
        copies *= sizes[v]
    if copies * len(factor.cell) > MAX_POINTS:
        raise WidthError(f"{copies * len(factor.cell)} Pareto points")
    grid = dict(zip(factor.scope, np.unravel_index(factor.cell, factor.sizes), strict=True)) if factor.scope else {}
    extra = np.unravel_index(np.arange(copies), tuple(sizes[v] for v in missing)) if missing else ()
    index = np.repeat(np.arange(len(factor.cell)), copies)
    columns = [
        np.tile(extra[missing.index(v)], len(factor.cell)) if v in missing else np.asarray(grid[v])[index]
        for v in scope
    ]
    cell = np.ravel_multi_index(columns, shape) if scope else np.zeros(len(index), dtype=np.int64)
    order = np.argsort(cell, kind="stable")
    index = index[order]
    return ParetoFactor(scope, shape, cell[order], factor.ns[index], factor.num_bytes[index], ((factor, index),))


def _add(wide: ParetoFactor, narrow: ParetoFactor, sizes: Mapping[int, int]) -> ParetoFactor:
    """Add the pairs of a factor whose scope lies inside that of ``wide``."""
    grid = dict(zip(wide.scope, np.unravel_index(wide.cell, wide.sizes), strict=True)) if wide.scope else {}
    if narrow.scope:
        wanted = np.ravel_multi_index([grid[v] for v in narrow.scope], narrow.sizes)
    else:
        wanted = np.zeros(len(wide.cell), dtype=np.int64)
    start = np.searchsorted(narrow.cell, wanted, side="left")
    count = np.searchsorted(narrow.cell, wanted, side="right") - start
    total = int(count.sum())
    if total > MAX_POINTS:
        raise WidthError(f"{total} Pareto points")
    left = np.repeat(np.arange(len(wide.cell)), count)
    within = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
    right = np.repeat(start, count) + within
    cell = wide.cell[left]
    ns = wide.ns[left] + narrow.ns[right]
    num_bytes = wide.num_bytes[left] + narrow.num_bytes[right]
    kept = _undominated(cell, ns, num_bytes)
    return ParetoFactor(
        wide.scope,
        wide.sizes,
        cell[kept],
        ns[kept],
        num_bytes[kept],
        ((wide, left[kept]), (narrow, right[kept])),
    )


def drop(factor: ParetoFactor, variable: int) -> ParetoFactor:
    """Merge the cells that differ in one variable."""
    axis = factor.scope.index(variable)
    scope = factor.scope[:axis] + factor.scope[axis + 1 :]
    sizes = factor.sizes[:axis] + factor.sizes[axis + 1 :]
    grid = np.unravel_index(factor.cell, factor.sizes)
    columns = [grid[d] for d in range(len(grid)) if d != axis]
    cell = np.ravel_multi_index(columns, sizes) if scope else np.zeros(len(factor.cell), dtype=np.int64)
    kept = _undominated(cell, factor.ns, factor.num_bytes)
    return ParetoFactor(
        scope,
        sizes,
        cell[kept],
        factor.ns[kept],
        factor.num_bytes[kept],
        ((factor, kept),),
    )


def within(factor: ParetoFactor, rest: np.ndarray, time: int, memory: int, ceiling: int) -> ParetoFactor:
    """Only the pairs whose weighted cost, with the least cost of the rest, stays at or below the ceiling."""
    cost = factor.ns * time + factor.num_bytes * memory + rest.reshape(-1)[factor.cell]
    kept = np.flatnonzero(cost <= ceiling)
    if len(kept) == len(factor.cell):
        return factor
    return ParetoFactor(
        factor.scope, factor.sizes, factor.cell[kept], factor.ns[kept], factor.num_bytes[kept], ((factor, kept),)
    )


def pareto_eliminate(
    factors: Sequence[ParetoFactor],
    sizes: Mapping[int, int],
    guide: Elimination,
    outside: np.ndarray,
    weights: tuple[int, int],
    ceiling: int,
) -> tuple[ParetoFactor, ...]:
    """Factors over kept variables of ``guide`` whose sums are the Pareto pairs of the whole.

    Args:
        factors: pairs per cell.
        sizes: domain sizes.
        guide: the weighted elimination of the same factors; gives the order and the bounds.
        outside: [*keep] weighted cost of what lies outside.
        weights: of time and memory, as in ``guide``.
        ceiling: weighted cost above which nothing matters.

    Raises:
        WidthError: too many pairs.
    """
    active = list(factors)
    for variable, (rest, cells) in zip(guide.order, guide.inside(ceiling, outside), strict=True):
        mine = [f for f in active if variable in f.scope]
        active = [f for f in active if variable not in f.scope]
        neighbours = tuple(sorted({v for f in mine for v in f.scope} - {variable}))
        joined = join(mine, (*neighbours, variable), sizes, cells)
        active.append(within(drop(joined, variable), rest, *weights, ceiling))
    return tuple(active)


def pareto_join(
    factors: Sequence[ParetoFactor],
    sizes: Mapping[int, int],
    guide: Elimination,
    outside: np.ndarray,
    weights: tuple[int, int],
    ceiling: int,
) -> ParetoFactor:
    """The sums of factors over kept variables, as one factor over all of them; arguments as in ``pareto_eliminate``.

    Raises:
        WidthError: too many pairs.
    """
    cells = np.flatnonzero((guide.table + outside).reshape(-1) <= ceiling)
    return within(join(factors, guide.keep, sizes, cells), outside, *weights, ceiling)
