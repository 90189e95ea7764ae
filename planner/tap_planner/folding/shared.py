"""Blocks that come again, but not as a chain: the levels of a U-Net, the experts of a layer, encoder and decoder.

Two stretches of operators match when they are equal up to a renaming of values: equal labels, and every operand was
last mentioned (made or read) equally far back, where a mention before the stretch counts as none. This is Baker's
matching of parameterised strings (Parameterized pattern matching, J. Computer and System Sciences 52, 1996); equal
distances are a bijection of the values, so a match is a proof of isomorphism.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tap_planner.folding.encoding import Encoding
from tap_planner.folding.types import MIN_PERIOD, Run, SharedBlock

_DIAGONALS = 384
"""Distances tried, those that most operators suggest first."""
_CANDIDATES = 4096
"""Pairs of stretches that are looked at, longest first."""
_MAX_OPERATORS = 30_000
"""Graphs with more operators left after the runs are folded by runs alone: the effort stays bounded."""


@dataclass(frozen=True, slots=True, order=True)
class _Pair:
    """Stretches of ``size`` operators from ``first`` and from ``second`` match and do not overlap."""

    first: int
    second: int
    size: int


def find_shared(encoding: Encoding, runs: Sequence[Run]) -> tuple[SharedBlock, ...]:
    """Shared blocks among the operators that stand for a graph once its runs are folded.

    Blocks are chosen greedily by how many operators they save. A block lies between runs, in the first occurrence of
    a run, or in the first stretch of a larger block.

    Args:
        encoding: the graph.
        runs: its runs, also the short ones.
    """
    spans = _Spans(encoding.size, runs)
    if int((spans.of >= 0).sum()) > _MAX_OPERATORS:
        return ()
    return tuple(_Chooser(_Matcher(encoding), spans).blocks())


class _Spans:
    """Which operators may still be in a block: each belongs to a span, or to none if another one stands for it."""

    def __init__(self, size: int, runs: Sequence[Run]) -> None:
        self.of = np.zeros(size, np.int64)
        """[n] number of the operator's span, -1 if it is in none."""
        self._next = 1
        for run in runs:
            self._name(run.start, run.start + run.period)
            self.of[run.start + run.period : run.stop] = -1
            self._name(run.stop, size)

    def _name(self, start: int, stop: int) -> None:
        self.of[start:stop] = self._next
        self._next += 1

    def fold(self, starts: Sequence[int], size: int) -> None:
        """Make the first stretch a span of its own; it stands for the others."""
        first, *others = starts
        self._split(first, first + size)
        for start in others:
            self._split(start, start + size)
            self.of[start : start + size] = -1

    def _split(self, start: int, stop: int) -> None:
        old = self.of[start]
        after = np.flatnonzero(self.of[stop:] == old)
        self._name(start, stop)
        if len(after):
            self.of[stop + after] = self._next
            self._next += 1

    def pieces(self, pair: _Pair) -> Iterator[_Pair]:
        """The parts of a pair that lie in one span each."""
        ours = self.of[pair.first : pair.first + pair.size]
        theirs = self.of[pair.second : pair.second + pair.size]
        change = (np.diff(ours) != 0) | (np.diff(theirs) != 0)
        cuts = [0, *(np.flatnonzero(change) + 1).tolist(), pair.size]
        for low, high in itertools.pairwise(cuts):
            if high - low >= MIN_PERIOD and ours[low] >= 0 and theirs[low] >= 0:
                yield _Pair(pair.first + low, pair.second + low, high - low)


class _Matcher:
    """Compares stretches of operators."""

    def __init__(self, encoding: Encoding) -> None:
        self.labels = encoding.labels
        self._width = encoding.entities.shape[1] + 1
        self._distance = _distances(encoding)
        self.grams = _grams(encoding.labels)

    def extent(self, first: int, second: int, limit: int) -> tuple[int, int]:
        """How many operators match from two places on, and how far to go to get past what ends the match."""
        slots = np.arange(self._width - 1)
        low, step = 0, 16
        while low < limit:
            high = min(limit, low + step)
            room = np.arange(low, high)[:, None] * self._width + slots
            ours, theirs = self._distance[first + low : first + high], self._distance[second + low : second + high]
            ours, theirs = np.where(ours <= room, ours, 0), np.where(theirs <= room, theirs, 0)
            differ = ours != theirs
            ends = differ.any(axis=1) | (
                self.labels[first + low : first + high] != self.labels[second + low : second + high]
            )
            if ends.any():
                row = int(np.argmax(ends))
                return low + row, self._past(low + row, room[row], ours[row], theirs[row])
            low, step = high, step * 2
        return limit, limit

    def _past(self, row: int, room: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> int:
        """Operators to leave out at the front so that operands that differ in row ``row`` come from outside."""
        wrong = np.flatnonzero(ours != theirs)
        if not len(wrong):
            return row + 1
        near = np.minimum(ours[wrong], theirs[wrong])
        near = np.where(near == 0, np.maximum(ours[wrong], theirs[wrong]), near)
        return int(((room[wrong] - near) // self._width).max()) + 1

    def matches(self, first: int, second: int, size: int) -> bool:
        """Whether two stretches of ``size`` operators are isomorphic."""
        return self.extent(first, second, size)[0] >= size


def _distances(encoding: Encoding) -> np.ndarray:
    """[n, k] how many mentions ago each operand was last mentioned, 0 if never; an operator mentions its operands,
    then its outputs."""
    size, operands = encoding.entities.shape
    width = operands + 1
    own = np.arange(size)[:, None]
    entities = np.concatenate([encoding.entities, own], axis=1).reshape(-1)
    places = np.flatnonzero(entities >= 0)
    order = places[np.argsort(entities[places], kind="stable")]
    again = entities[order][1:] == entities[order][:-1]
    found = np.zeros(size * width, np.int64)
    found[order[1:][again]] = (order[1:] - order[:-1])[again]
    return found.reshape(size, width)[:, :operands]


def _grams(labels: np.ndarray) -> np.ndarray:
    """[n] number of the ``MIN_PERIOD`` labels from each operator on; the last operators have one of their own."""
    count = len(labels) - MIN_PERIOD + 1
    if count <= 0:
        return np.arange(len(labels))
    rows = np.stack([labels[shift : shift + count] for shift in range(MIN_PERIOD)], axis=1)
    numbers = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    return np.concatenate([numbers, np.arange(MIN_PERIOD - 1) + len(labels)])


class _Chooser:
    """Greedy choice of blocks."""

    def __init__(self, matcher: _Matcher, spans: _Spans) -> None:
        self._matcher = matcher
        self._spans = spans
        free = np.flatnonzero(spans.of >= 0)
        order = free[np.argsort(matcher.grams[free], kind="stable")]
        self._places: dict[int, np.ndarray] = {}
        """Per gram the operators that it starts from."""
        cuts = np.flatnonzero(np.diff(matcher.grams[order])) + 1
        for places in np.split(order, cuts):
            if len(places) > 1:
                self._places[int(matcher.grams[places[0]])] = places

    def blocks(self) -> list[SharedBlock]:
        """The chosen blocks, by their first start."""
        waiting: list[tuple[int, int, int, int]] = []

        def push(pair: _Pair) -> None:
            saving = (len(self._occurrences(pair)) - 1) * pair.size
            if saving > 0:
                heapq.heappush(waiting, (-saving, -pair.size, pair.first, pair.second))

        pairs = sorted(self._pairs(), key=lambda pair: (-pair.size, pair.first, pair.second))
        for pair in pairs[:_CANDIDATES]:
            push(pair)
        chosen: list[SharedBlock] = []
        while waiting:
            saving, size, first, second = heapq.heappop(waiting)
            pair = _Pair(first, second, -size)
            pieces = list(self._spans.pieces(pair))
            if pieces != [pair]:
                for piece in pieces:
                    push(piece)
                continue
            starts = self._occurrences(pair)
            if (len(starts) - 1) * pair.size < -saving:
                push(pair)
                continue
            chosen.append(SharedBlock(starts=tuple(starts), size=pair.size))
            self._spans.fold(starts, pair.size)
        return sorted(chosen, key=lambda block: (block.starts[0], -block.size))

    def _occurrences(self, pair: _Pair) -> list[int]:
        """Starts of all stretches like a pair's first that lie in one span each, without overlaps."""
        spans, first, size = self._spans.of, pair.first, pair.size
        starts: list[int] = []
        for place in self._places.get(int(self._matcher.grams[first]), np.zeros(0, np.int64)).tolist():
            if starts and place < starts[-1] + size:
                continue
            held = spans[place : place + size]
            if len(held) < size or held[0] < 0 or (held != held[0]).any():
                continue
            if place == first or self._matcher.matches(first, place, size):
                starts.append(place)
        return starts

    def _pairs(self) -> Iterator[_Pair]:
        """Longest matches along the distances at which equal grams come again."""
        spans, labels = self._spans.of, self._matcher.labels
        for distance in self._diagonals():
            inside = (spans[distance:] >= 0) & (spans[:-distance] >= 0)
            equal = inside & (labels[distance:] == labels[:-distance])
            same = (np.diff(spans[distance:]) == 0) & (np.diff(spans[:-distance]) == 0)
            starts = equal & ~np.concatenate(([False], equal[:-1] & same))
            stops = equal & ~np.concatenate((equal[1:] & same, [False]))
            for low, high in zip(np.flatnonzero(starts).tolist(), (np.flatnonzero(stops) + 1).tolist(), strict=True):
                yield from self._along(low, high, distance)

    def _along(self, low: int, high: int, distance: int) -> Iterator[_Pair]:
        """Longest matches in one stretch of equal labels."""
        while high - low >= MIN_PERIOD:
            limit = min(high - low, distance)
            size, past = self._matcher.extent(low, low + distance, limit)
            if size >= MIN_PERIOD:
                yield _Pair(low, low + distance, size)
            low += limit if size == limit else max(past, 1)

    def _diagonals(self) -> list[int]:
        steps = [np.diff(places) for places in self._places.values()]
        if not steps:
            return []
        distances, counts = np.unique(np.concatenate(steps), return_counts=True)
        ranked = sorted(zip((-counts).tolist(), distances.tolist(), strict=True))
        return sorted(distance for _, distance in ranked[:_DIAGONALS])
