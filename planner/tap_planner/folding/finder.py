"""The repeat finder.

Two operators one period apart match when their labels are equal and, for each operand, the distance to its maker is
equal or the maker is the same. A stretch of matches as long as the period is a proof that two blocks are isomorphic.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from tap_planner.collector import collector_paused
from tap_planner.folding.encoding import Encoding, encode
from tap_planner.folding.shared import find_shared
from tap_planner.folding.types import MIN_PERIOD, FoldedGraph, Run
from tap_planner.graph import Graph

_CANDIDATES = 48
"""Periods tried from each of the two sources."""
_GRAM = 6
"""Operators in a row whose labels are compared to guess periods."""


@dataclass(frozen=True, slots=True, order=True)
class _Stretch:
    """Operators ``start .. stop`` each match the one ``period`` later; the block they span ends at stop + period."""

    start: int
    stop: int
    period: int


def fold(graph: Graph, tags: Mapping[str, Hashable] | None = None) -> FoldedGraph:
    """Find the repeated blocks of a graph.

    Runs are chosen greedily by how many operators they save and do not overlap. A run is a chain: a value made in
    one occurrence is read in it, in the next, or, if it is the last, after the run. The loss is in no run. What the
    runs leave is searched for blocks that come again elsewhere.

    Args:
        graph: the graph.
        tags: by operator id, what sets operators apart that are equal in themselves (rules of the user).
    """
    with collector_paused():
        encoding = encode(graph, tags)
    found = _choose(encoding, _stretches(encoding))
    runs = tuple(run for run in found if run.period >= MIN_PERIOD)
    return FoldedGraph(
        graph=graph,
        runs=runs,
        shared=find_shared(encoding, found),
        short_runs=tuple(run for run in found if run.period < MIN_PERIOD),
    )


def _distances(keys: np.ndarray) -> Counter[int]:
    """How often equal keys come again at each distance."""
    order = np.argsort(keys, kind="stable")
    same = keys[order][1:] == keys[order][:-1]
    return Counter((order[1:] - order[:-1])[same].tolist())


def _periods(encoding: Encoding) -> list[int]:
    """Likely periods, ascending."""
    size = encoding.size
    grams = np.zeros(size, np.uint64)
    for shift in range(_GRAM):
        shifted = np.zeros(size, np.uint64)
        shifted[: max(size - shift, 0)] = encoding.labels[shift:].astype(np.uint64) + np.uint64(1)
        grams = grams * np.uint64(1000003) + shifted
    found: set[int] = set()
    for counts in (_distances(encoding.labels), _distances(grams)):
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        found.update(period for period, _ in ranked[:_CANDIDATES] if period <= size // 2)
    return sorted(found)


def _matches(encoding: Encoding, period: int) -> np.ndarray:
    """[n - period] whether operator i matches operator i + period."""
    equal = encoding.labels[period:] == encoding.labels[:-period]
    index = np.flatnonzero(equal)
    later = index + period
    relative = encoding.origins[later] - encoding.origins[index] == period
    absolute = encoding.entities[later] == encoding.entities[index]
    equal[index] = (relative | absolute).all(axis=1)
    return equal


def _stretches(encoding: Encoding) -> list[_Stretch]:
    found: list[_Stretch] = []
    for period in _periods(encoding):
        matches = _matches(encoding, period)
        steps = np.diff(np.concatenate(([0], matches.astype(np.int8), [0])))
        starts, stops = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
        long = stops - starts >= period
        found.extend(
            _Stretch(int(start), int(stop), period) for start, stop in zip(starts[long], stops[long], strict=True)
        )
    return found


def _choose(encoding: Encoding, stretches: list[_Stretch]) -> list[Run]:
    """Greedy choice; what overlaps a chosen run is cut to what is free and comes again."""
    used = np.zeros(encoding.size, bool)
    waiting: list[tuple[int, int, int, int, _Stretch]] = []

    def push(stretch: _Stretch) -> None:
        for run in _runs(encoding, stretch):
            heapq.heappush(waiting, (-run.saving, run.period, run.start, run.count, stretch))

    for stretch in stretches:
        push(stretch)
    chosen: list[Run] = []
    while waiting:
        _, period, start, count, stretch = heapq.heappop(waiting)
        run = Run(start=start, period=period, count=count)
        if not used[run.start : run.stop].any():
            used[run.start : run.stop] = True
            chosen.append(run)
            continue
        for low, high in _free(used, run.start, run.stop):
            if high - low >= 2 * period:
                push(_Stretch(low, high - period, period))
    return sorted(chosen, key=lambda run: run.start)


def _free(used: np.ndarray, start: int, stop: int) -> list[tuple[int, int]]:
    """Intervals of ``start .. stop`` that no run uses."""
    steps = np.diff(np.concatenate(([0], (~used[start:stop]).astype(np.int8), [0])))
    return [
        (start + int(low), start + int(high))
        for low, high in zip(np.flatnonzero(steps == 1), np.flatnonzero(steps == -1), strict=True)
    ]


def _runs(encoding: Encoding, stretch: _Stretch) -> list[Run]:
    """The chains in a stretch, cut where blocks begin with the fewest live values."""
    period = stretch.period
    spare = (stretch.stop - stretch.start) % period
    start = stretch.start + _narrowest(encoding, stretch, spare)
    count = (stretch.stop - start) // period + 1
    return _segments(encoding, start, period, count)


def _narrowest(encoding: Encoding, stretch: _Stretch, spare: int) -> int:
    """Offset in 0..spare at which the fewest values cross the cut in the second block."""
    period, first = stretch.period, stretch.start
    base = first + period
    makers, readers = encoding.edges_from(first, base + spare)
    near = readers - makers <= period
    last = np.full(base + spare - first, -1, np.int64)
    np.maximum.at(last, makers[near] - first, readers[near])
    alive = np.flatnonzero(last >= 0)
    crossing = np.zeros(len(last) + period + 2, np.int64)
    np.add.at(crossing, alive + 1, 1)
    np.add.at(crossing, last[alive] + 1 - first, -1)
    return int(np.argmin(np.cumsum(crossing)[base - first : base - first + spare + 1]))


def _segments(encoding: Encoding, start: int, period: int, count: int) -> list[Run]:
    """Maximal chains among the occurrences of a stretch, at a fixed phase."""
    relative, absolute = _columns(encoding, start, period, count)
    ends = _must_end(encoding, start, period, count)
    origins = encoding.origins[start : start + period * count].reshape(count, period, -1)
    activation = ~encoding.is_local[start : start + period]
    runs: list[Run] = []
    first = 0
    while first < count - 1:
        all_relative = np.ones(relative.shape[1:], bool)
        all_absolute = np.ones(relative.shape[1:], bool)
        # A shared activation is made before the run: one made inside would belong to one occurrence only.
        all_absolute &= ~activation | (origins[first] < start + first * period)
        stop = first + 1
        while stop < count and not ends[stop - 1]:
            next_relative = all_relative & relative[stop - 1]
            next_absolute = all_absolute & absolute[stop - 1]
            if not (next_relative | next_absolute).all():
                break
            all_relative, all_absolute = next_relative, next_absolute
            stop += 1
        if stop - first >= 2:
            runs.append(Run(start=start + first * period, period=period, count=stop - first))
            first = stop
        else:
            first += 1
    return runs


def _columns(encoding: Encoding, start: int, period: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """[count - 1, period, k] whether operands match the next occurrence's by distance, and by identity."""
    window = slice(start, start + period * count)
    origins = encoding.origins[window].reshape(count, period, -1)
    entities = encoding.entities[window].reshape(count, period, -1)
    last = encoding.last_use[window].reshape(count, period, -1)
    local = encoding.is_local[window].reshape(count, period, -1)
    low = (start + period * np.arange(count))[:, None, None]
    inside = ~local | ((origins >= low) & (last < low + period))
    relative = (origins[1:] - origins[:-1] == period) & inside[1:] & inside[:-1]
    return relative, entities[1:] == entities[:-1]


def _must_end(encoding: Encoding, start: int, period: int, count: int) -> np.ndarray:
    """[count] whether an occurrence's values are read further away than in the next occurrence."""
    makers, readers = encoding.edges_from(start, start + period * count)
    own = (makers - start) // period
    far = ((readers - start) // period - own >= 2) | (readers == encoding.size)
    ends = np.zeros(count, bool)
    ends[own[far]] = True
    return ends
