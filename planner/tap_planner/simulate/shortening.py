"""A pass without the positions at which nothing happens, which is faster to run often."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tap_planner.simulate.overlap import Background, Busy, Levels
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.running import Move, Run


class ShortPass:
    """What the main stream of a pass does from one position that matters to the next: those from which on background
    may start, before which it must be done, and at which something is sent.

    Args:
        given: the pass.
        loose: background that it may leave.
        carried: what jobs of earlier passes need.
    """

    def __init__(self, given: Pass, loose: Sequence[Background] = (), carried: Iterable[Levels] = ()) -> None:
        jobs = (*given.background, *loose)
        needed = (job.needed for job in jobs if job.needed is not None)
        sends = (position for position, _ in given.sends)
        keys = sorted({0, len(given.main), *(job.start for job in jobs), *needed, *sends})
        self._index = {position: number for number, position in enumerate(keys)}
        levels = frozenset[str]().union(*(job.levels for job in jobs), *carried)
        self.main: Sequence[tuple[Busy, ...]] = [
            tuple(_joined(itertools.chain.from_iterable(given.main[a:b]), levels)) for a, b in itertools.pairwise(keys)
        ]
        """From each of these positions to the next."""
        self.background = tuple(map(self._moved, given.background))
        self.loose = tuple(map(self._moved, loose))
        self.runs: dict[tuple[Move, ...], Run] = {}
        """How it ran, by when transfers move from its start."""
        self._wholes: dict[int, tuple[Run, Run]] = {}
        self._parts: list[tuple[int, int]] = []
        """Per position of the pass the one before it that matters, and how long after that it comes."""
        for number, (begin, end) in enumerate(itertools.pairwise(keys)):
            offset = 0
            for pieces in given.main[begin:end]:
                self._parts.append((number, offset))
                offset += sum(piece.ns for piece in pieces)
        self._parts.append((len(keys) - 1, 0))

    def position(self, given: int) -> int:
        """Where a position of the pass is that matters."""
        return self._index[given]

    def whole(self, run: Run) -> Run:
        """The pass with all positions, from how this one ran."""
        known = self._wholes.get(id(run))
        if known is None:
            offsets = tuple([run.offsets_ns[number] + offset for number, offset in self._parts])
            known = self._wholes[id(run)] = (run, replace(run, offsets_ns=offsets))  # keeps it, and its id
        return known[1]

    def original(self, position: int) -> int:
        """The position of the pass that is a position here."""
        return next(given for given, number in self._index.items() if number == position)

    def _moved(self, job: Background) -> Background:
        needed = None if job.needed is None else self._index[job.needed]
        return replace(job, start=self._index[job.start], needed=needed)


def _joined(pieces: Iterable[Busy], levels: Levels) -> Iterator[Busy]:
    """Pieces that use the same of some levels in one, without the others."""
    for used, group in itertools.groupby(pieces, key=lambda piece: piece.levels & levels):
        ns = sum(piece.ns for piece in group)
        if ns:
            yield Busy(ns, used)
