"""Long chains under a memory limit, by dynamic programming over a grid of bytes.

CP-SAT over counts of points (``counts.py``) takes long where many points of a link cost nearly the same: it is a
knapsack with a choice for every link. Here the least time of the first links is kept for every boundary state and
every number of bytes on a grid; bytes of a link are rounded down, which leaves a lower bound: the least time where the
limit is larger by no more than a grid step for each link. The links chosen on the way are a solution where their true
bytes fit. What cannot belong to a solution within the window is left out after every link, by the weighted cost of
what follows; so of every state only a span of the grid is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tap_planner.search.chain import Chain
from tap_planner.search.counts import Counted, RunPoints
from tap_planner.search.elimination import eliminate
from tap_planner.search.factors import INFINITE
from tap_planner.search.pareto import ParetoFactor, join, pareto_eliminate, weighted_table
from tap_planner.search.terms import SCALE
from tap_planner.search.weighting import Weights

MAX_WORK = 2_000_000_000
"""Additions up to which it is worth it (about 3 s)."""
MAX_TABLE_BYTES = 2**29
"""Most bytes of the tables of all starts, which are kept to trace the solution back."""
FEW = 500
"""Points of a link up to which CP-SAT is quick: then a grid is worth it only where it is coarse."""
MAX_CELLS = 4_000_000
"""Places of a grid."""
MAX_STARTS = 64
"""Assignments of what all links are coupled with that are gone through one after the other."""
_NEVER = np.int64(1) << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRun:
    """The only run of a model, with what is outside.

    Args:
        points: Pareto points of its links.
        chain: their weighted matrices.
        outer: points of the outer part, over what it has in common with the run.
        sizes: domain sizes of the variables that these are over.
    """

    points: RunPoints
    chain: Chain
    outer: Sequence[ParetoFactor]
    sizes: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridAnswer:
    """What a grid says of a window."""

    bound_ns: int
    """No solution in the window is faster; far above it where there is none."""
    found: Counted | None
    """A solution that fits."""
    ns: int
    """Its time."""


def solve_on_grid(
    run: LongRun, weights: Weights, limit_bytes: int, ceiling: int, tolerance_ns: int
) -> GridAnswer | None:
    """A solution within the limit, and a lower bound of the least time in the window.

    Args:
        run: the run and what is outside of it.
        weights: of the Lagrangian bound; memory has some.
        limit_bytes: memory limit.
        ceiling: upper end of the window: SCALE x weighted cost.
        tolerance_ns: what the bytes that rounding hides may be worth, at the multiplier of the weights.

    Returns:
        None where the run's ends are coupled in too many ways, or the grid would be too fine.

    Raises:
        WidthError: too many Pareto points outside the run.
    """
    ends = _Ends.of(run, weights, ceiling)
    if ends is None:
        return None
    step = max(tolerance_ns * SCALE * weights.time // (weights.memory * roundings(run)), 1)
    effort = _Effort()
    cells, points, starts = limit_bytes * SCALE // step + 1, len(run.points.middle.cell), len(ends.starts)
    tables = math.prod(run.points.boundary_sizes) * (run.points.count + 2) * starts
    is_fine = cells * points * run.points.count * starts > MAX_WORK or cells * tables * 8 > MAX_TABLE_BYTES
    if cells > MAX_CELLS or (is_fine and points <= FEW):
        return None
    try:
        passes = [_Pass(run, ends, start, weights, limit_bytes * SCALE, ceiling, step, effort) for start in ends.starts]
    except _TooFineError:
        return None
    best = min(passes, key=lambda one: one.least)
    found = best.solution() if best.least < _NEVER else None
    return GridAnswer(bound_ns=best.least // SCALE, found=found and found[0], ns=found[1] if found else 0)


def roundings(run: LongRun) -> int:
    """How often bytes are rounded: for every link, the head, and what the tail leaves."""
    return run.points.count + 3


class _TooFineError(Exception):
    """A grid takes too long, or too much memory."""


@dataclass(slots=True)
class _Effort:
    """What all passes have cost so far."""

    additions: int = 0
    kept_bytes: int = 0

    def add(self, additions: int) -> None:
        """Before so many additions.

        Raises:
            _TooFineError: that is too much.
        """
        self.additions += additions
        if self.additions > MAX_WORK:
            raise _TooFineError

    def keep(self, table: _Table) -> None:
        """After a table that is kept.

        Raises:
            _TooFineError: that is too much.
        """
        self.kept_bytes += sum(row.ns.nbytes for row in table if row is not None)
        if self.kept_bytes > MAX_TABLE_BYTES:
            raise _TooFineError


@dataclass(frozen=True, slots=True)
class _Row:
    """The least SCALE x ns on a span of the grid; ``_NEVER`` elsewhere."""

    first: int
    ns: np.ndarray
    """[places]"""

    @property
    def end(self) -> int:
        """Behind the last place."""
        return self.first + len(self.ns)

    def at(self, place: int) -> int:
        """The least time at a place."""
        return int(self.ns[place - self.first]) if self.first <= place < self.end else int(_NEVER)


_Table = list[_Row | None]
"""By state; None: there is no way to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """One assignment of what all links are coupled with, and of the first boundary where the ends are coupled."""

    shared: int
    state: int | None
    """None: all first boundary states together."""


class _Ends:
    """What is outside a run: points over its first and its last boundary."""

    def __init__(self, run: LongRun, head: ParetoFactor, tail: ParetoFactor, coupled: bool) -> None:
        points = run.points
        self.coupled = coupled
        shared, states = math.prod(points.shared_sizes), math.prod(points.boundary_sizes)
        self.head, self.tail = head, tail
        self.head_cells = _grid(head.cell, (shared, states))
        self.tail_cells = _grid(tail.cell, (shared, states, states) if coupled else (shared, states))
        cells = zip(*(column.tolist() for column in self.head_cells), strict=True)
        found = dict.fromkeys((s, a if coupled else None) for s, a in cells)
        self.starts = [_Start(shared=s, state=a) for s, a in found]

    @staticmethod
    def of(run: LongRun, weights: Weights, ceiling: int) -> _Ends | None:
        """The ends of a run; None where they are coupled in too many ways."""
        points = run.points
        keep = (*points.shared, *points.first, *(v for v in points.last if v not in points.first))
        if len(keep) != len(points.shared) + len(points.first) + len(points.last):
            return None
        tables = [weighted_table(factor, weights) for factor in run.outer]
        domains = {variable: run.sizes[variable] for factor in run.outer for variable in factor.scope}
        domains.update((variable, run.sizes[variable]) for variable in keep)
        guide = eliminate(domains, tables, keep)
        shape = (*points.shared_sizes, *points.boundary_sizes, *points.boundary_sizes)
        outside = run.chain.table.reshape(shape)
        pair = (weights.time, weights.memory)
        factors = pareto_eliminate(run.outer, domains, guide, outside, pair, ceiling)
        front, back = {*points.shared, *points.first}, {*points.shared, *points.last}
        heads = [f for f in factors if front.issuperset(f.scope)]
        tails = [f for f in factors if back.issuperset(f.scope) and not front.issuperset(f.scope)]
        both = [f for f in factors if not (front.issuperset(f.scope) or back.issuperset(f.scope))]
        head = _over((*points.shared, *points.first), heads, domains)
        scope = (*points.shared, *points.first, *points.last) if both else (*points.shared, *points.last)
        tail = _over(scope, [*tails, *both], domains)
        ends = _Ends(run, head, tail, bool(both))
        return ends if len(ends.starts) <= MAX_STARTS else None


def _over(scope: tuple[int, ...], factors: Sequence[ParetoFactor], sizes: Mapping[int, int]) -> ParetoFactor:
    """The sum of factors, over a scope."""
    shape = tuple(sizes[variable] for variable in scope)
    return join(factors, scope, sizes, np.arange(math.prod(shape)))


def _grid(cells: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return tuple(np.unravel_index(cells, shape))


class _Pass:
    """The chain from one start.

    Args:
        run: the run.
        ends: what is outside.
        start: from where.
        weights: of the Lagrangian bound.
        limit: memory limit, SCALE x bytes.
        ceiling: upper end of the window.
        step: of the grid, SCALE x bytes.
        effort: of all passes.

    Raises:
        _TooFineError: that was too much.
    """

    def __init__(
        self,
        run: LongRun,
        ends: _Ends,
        start: _Start,
        weights: Weights,
        limit: int,
        ceiling: int,
        step: int,
        effort: _Effort,
    ) -> None:
        self._run, self._ends, self._start, self._effort = run, ends, start, effort
        self._limit, self._step = limit, step
        self._states = math.prod(run.points.boundary_sizes)
        self._size = limit // step + 1
        self._grid_cost = np.arange(self._size, dtype=np.int64) * (step * weights.memory)
        self._time, self._ceiling = weights.time, ceiling
        self._middle, self._final = (self._links(factor) for factor in (run.points.middle, run.points.final))
        self._tail = self._tail_points()
        rests = self._rests(weights)
        self._tables: list[_Table] = [self._first(rests[0])]
        """Per link passed."""
        for number in range(run.points.count + 1):
            links = self._middle if number < run.points.count else self._final
            self._tables.append(self._after(self._tables[-1], links, rests[number + 1]))
        self.least = self._closed(0)[0]
        """SCALE x the least time, or ``_NEVER``."""

    def _links(self, factor: ParetoFactor) -> list[tuple[int, int, int, int, int]]:
        """(state before, state after, grid steps, SCALE x ns, point), without what another one makes useless."""
        shared = math.prod(self._run.points.shared_sizes)
        s, a, b = _grid(factor.cell, (shared, self._states, self._states))
        mine = np.flatnonzero(s == self._start.shared)
        steps = factor.num_bytes[mine] // self._step
        order = mine[np.lexsort((factor.ns[mine], steps, b[mine], a[mine]))]
        kept: list[tuple[int, int, int, int, int]] = []
        for point in order.tolist():
            row = (int(a[point]), int(b[point]), int(factor.num_bytes[point]) // self._step, int(factor.ns[point]))
            if kept and kept[-1][:2] == row[:2] and kept[-1][3] <= row[3]:
                continue
            kept.append((*row, point))
        return kept

    def _tail_points(self) -> list[tuple[int, int]]:
        """(last state, point of the tail) from this start."""
        cells = self._ends.tail_cells
        mine = cells[0] == self._start.shared
        if self._ends.coupled:
            mine &= cells[1] == self._start.state
        return [(int(cells[-1][point]), point) for point in np.flatnonzero(mine).tolist()]

    def _rests(self, weights: Weights) -> list[np.ndarray]:
        """Per link passed, [states] the least weighted cost of what follows."""
        tail, chain, s = self._ends.tail, self._run.chain, self._start.shared
        rest = np.full(self._states, INFINITE, dtype=np.int64)
        for state, point in self._tail:
            cost = int(tail.ns[point]) * weights.time + int(tail.num_bytes[point]) * weights.memory
            rest[state] = min(rest[state], cost)
        found = [rest]
        for number in range(self._run.points.count + 1):
            link = (chain.link if number else chain.last)[s]
            found.append(np.minimum((link + found[-1][None, :]).min(axis=1), INFINITE))
        return found[::-1]

    def _first(self, rest: np.ndarray) -> _Table:
        found: dict[int, list[tuple[int, int]]] = {}
        for state, steps, ns, _ in self._heads():
            if steps < self._size:
                found.setdefault(state, []).append((steps, ns))
        table: _Table = [None] * self._states
        for state, points in found.items():
            first, end = min(points)[0], max(points)[0] + 1
            row = np.full(end - first, _NEVER, dtype=np.int64)
            for steps, ns in points:
                row[steps - first] = min(row[steps - first], ns)
            table[state] = _Row(first, row)
        return self._pruned(table, rest)

    def _heads(self) -> list[tuple[int, int, int, int]]:
        """(state, grid steps, SCALE x ns, point) of the head from this start."""
        head, (shared, states) = self._ends.head, self._ends.head_cells
        mine = shared == self._start.shared
        if self._start.state is not None:
            mine &= states == self._start.state
        return [
            (int(states[p]), int(head.num_bytes[p]) // self._step, int(head.ns[p]), p)
            for p in np.flatnonzero(mine).tolist()
        ]

    def _pruned(self, table: _Table, rest: np.ndarray) -> _Table:
        """Without what cannot belong to a solution in the window."""
        kept: _Table = [None] * len(table)
        for state, row in enumerate(table):
            if row is None:
                continue
            weighted = row.ns * self._time + self._grid_cost[row.first : row.end]
            lives = (weighted <= self._ceiling - int(rest[state])) & (row.ns < _NEVER)
            places = np.flatnonzero(lives)
            if len(places):
                first, end = int(places[0]), int(places[-1]) + 1
                kept[state] = _Row(row.first + first, np.where(lives, row.ns, _NEVER)[first:end])
        self._effort.keep(kept)
        return kept

    def _after(self, table: _Table, links: Sequence[tuple[int, int, int, int, int]], rest: np.ndarray) -> _Table:
        """The table after one more link."""
        into: dict[int, list[tuple[_Row, int, int]]] = {}
        for before, state, steps, ns, _ in links:
            row = table[before]
            if row is not None and row.first + steps < self._size:
                into.setdefault(state, []).append((row, steps, ns))
        after: _Table = [None] * len(table)
        for state, ways in into.items():
            self._effort.add(sum(len(row.ns) for row, _, _ in ways))
            first = min(row.first + steps for row, steps, _ in ways)
            end = min(max(row.end + steps for row, steps, _ in ways), self._size)
            least = np.full(end - first, _NEVER, dtype=np.int64)
            for row, steps, ns in ways:
                begin = row.first + steps
                part = least[begin - first : row.end + steps - first]
                np.minimum(part, row.ns[: len(part)] + ns, out=part)
            after[state] = _Row(first, least)
        return self._pruned(after, rest)

    # -- solutions ----------------------------------------------------------------------------------------------------

    def _closed(self, slack: int) -> tuple[int, int, int]:
        """(SCALE x least time, point of the tail, place on the grid) of what stays so far under the limit."""
        tail, best = self._ends.tail, (int(_NEVER), -1, -1)
        for state, point in self._tail:
            place = (self._limit - slack - int(tail.num_bytes[point])) // self._step
            row = self._tables[-1][state]
            if row is None or place < row.first:
                continue
            at = int(row.ns[: place - row.first + 1].argmin())
            if row.ns[at] < _NEVER:
                best = min(best, (int(row.ns[at]) + int(tail.ns[point]), point, row.first + at))
        return best

    def solution(self) -> tuple[Counted, int] | None:
        """One that fits, and its time in ns: that of the bound, else one that leaves room for what rounding hides."""
        for slack in (0, self._step * roundings(self._run)):
            least, point, place = self._closed(slack)
            if least < _NEVER:
                found, num_bytes = self._traced(point, place)
                if num_bytes <= self._limit:
                    return found, least // SCALE
        return None

    def _at(self, number: int, state: int, place: int) -> int:
        """The least time after so many links."""
        row = self._tables[number][state]
        return int(_NEVER) if row is None else row.at(place)

    def _traced(self, tail_point: int, place: int) -> tuple[Counted, int]:
        """The solution that ends so, and its SCALE x bytes."""
        points, tail = self._run.points, self._ends.tail
        state = next(state for state, point in self._tail if point == tail_point)
        num_bytes = int(tail.num_bytes[tail_point])
        chosen: list[int] = []
        for number in range(points.count, -1, -1):
            last = number == points.count
            factor = points.final if last else points.middle
            value = self._at(number + 1, state, place)
            for before, after, steps, ns, point in self._final if last else self._middle:
                if after == state and self._at(number, before, place - steps) + ns == value:
                    state, place = before, place - steps
                    num_bytes += int(factor.num_bytes[point])
                    chosen.append(point)
                    break
        value = self._at(0, state, place)
        head_point = next(p for s, steps, ns, p in self._heads() if (s, steps) == (state, place) and ns == value)
        num_bytes += int(self._ends.head.num_bytes[head_point])
        outer: dict[int, int] = {}
        self._ends.head.trace(head_point, outer)
        tail.trace(tail_point, outer)
        known: dict[tuple[bool, int], dict[int, int]] = {}
        links: list[tuple[Mapping[int, int], bool]] = []
        for number, point in enumerate(reversed(chosen)):
            last = number == points.count
            if (last, point) not in known:
                (points.final if last else points.middle).trace(point, known.setdefault((last, point), {}))
            links.append((known[last, point], last))
        return Counted(outer=outer, links=[links]), num_bytes
