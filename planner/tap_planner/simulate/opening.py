"""A slot on its way whose background stands still while transfers of its stage move."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from tap_planner.simulate.passes import Pass
from tap_planner.simulate.running import Job, Kept, Move, Run, run_bound
from tap_planner.simulate.shortening import ShortPass


class OpenSlot:
    """What the slot does as far as is known: what happens before a time is, once that has come.

    Args:
        number: of the slot.
        start_ns: when it starts.
        given: what it does.
        alone: when, by itself.
        short: the same pass with the reductions of the end of the step that may start in it.
        carried: jobs of earlier slots, first come first.
    """

    def __init__(
        self, number: int, start_ns: int, given: Pass, alone: Run, short: ShortPass, carried: Sequence[Job] = ()
    ) -> None:
        self.number, self.start_ns = number, start_ns
        self.given = given
        self._alone, self._short, self._carried = alone, short, carried
        self._run: Run | None = None
        """Of the short pass; None: it runs as by itself."""
        self._left: Sequence[Job] = ()
        self._sends = [position for position, _ in given.sends]
        self.sent = 0
        """How much it has sent."""
        self.event_ns: int | None = None
        """When it is looked at again."""

    @property
    def next_ns(self) -> int:
        """When it next sends something, or when it is over."""
        run = self._run
        if self.sent == len(self._sends):
            return self.start_ns + (self._alone if run is None else run).duration_ns
        position = self._sends[self.sent]
        if run is None:
            return self.start_ns + self._alone.offsets_ns[position]
        return self.start_ns + run.offsets_ns[self._short.position(position)]

    @property
    def has_sent(self) -> bool:
        """Whether it has sent all."""
        return self.sent == len(self._sends)

    def whole(self) -> Run:
        """When it does what."""
        return self._alone if self._run is None else self._short.whole(self._run)

    @property
    def left(self) -> Sequence[Job]:
        """What it leaves, in the order of the queue."""
        for job in self._left:
            job.start = self._short.original(job.start)
        return self._left

    def play(self, moves: Iterable[Move]) -> bool:
        """Play it anew; whether that makes a difference.

        Args:
            moves: when transfers of the stage move.
        """
        before = self._run
        moving = [move for move in moves if move[1] > self.start_ns]
        if self._carried or self._short.loose:
            self._run, self._left = self._played(moving, self.start_ns)
        elif self._meets(moving):
            self._run = self._known(moving)
        else:
            self._run = None
        return self._run != before

    def _known(self, moving: Sequence[Move]) -> Run:
        """In a steady state many slots find the same transfers at the same times from their start."""
        start = self.start_ns
        latest = self._alone.duration_ns + sum(end - begin for begin, end, _ in moving)
        relative = [
            (max(begin - start, 0), end - start, levels) for begin, end, levels in moving if begin - start < latest
        ]
        key = tuple(sorted(relative, key=lambda move: (move[0], move[1], sorted(move[2]))))
        if key not in self._short.runs:
            self._short.runs[key] = self._played(key, 0)[0]
        return self._short.runs[key]

    def _played(self, moving: Sequence[Move], start_ns: int) -> tuple[Run, Sequence[Job]]:
        return run_bound(
            self._short.main,
            [copy.copy(job) for job in self._carried],
            self._short.background,
            self._short.loose,
            start_ns=start_ns,
            kept=Kept(moving),
        )

    def _meets(self, moving: Sequence[Move]) -> bool:
        """Whether any transfer keeps what runs by itself in the background."""
        alone, start = self._alone.moves, self.start_ns
        for begin, end, used in moving:
            number = bisect_right(alone, begin - start, key=lambda move: move[1])
            while number < len(alone) and start + alone[number][0] < end:
                if not used.isdisjoint(alone[number][2]):
                    return True
                number += 1
        return False
