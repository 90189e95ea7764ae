"""A pass in time: when its main stream comes to each position, and when its background runs.

The rules are those of ``overlap``, which counts what is hidden; here the clock runs along. Jobs of the background that
the pass does not have to finish (reductions that only the end of the step waits for) are carried on to what comes next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tap_planner.simulate.intervals import Intervals, joined
from tap_planner.simulate.overlap import Background, Busy, Levels


class Job:
    """A collective of the background stream on its way.

    Args:
        given: what it is.
        bound: whether its pass must finish it.
    """

    __slots__ = ("began_ns", "bound", "kind", "left_ns", "levels", "needed", "start")

    def __init__(self, given: Background, *, bound: bool) -> None:
        self.kind: str = given.kind
        self.left_ns: int = given.ns
        self.levels: Levels = given.levels
        self.start: int = given.start
        self.needed: int | None = given.needed
        self.bound: bool = bound
        self.began_ns: int = -1
        """When it first moved; negative: not yet."""

    def move(self, done_ns: int, clock_ns: int) -> bool:
        """Let it move for a while from a time on; whether it is done then."""
        if self.began_ns < 0:
            self.began_ns = clock_ns
        self.left_ns -= done_ns
        return self.left_ns == 0


Move = tuple[int, int, Levels]
"""From when to when the background moved, over which levels."""


class Kept:
    """When the background stands still for something else.

    Args:
        moves: of that, in times of the clock.
    """

    def __init__(self, moves: Iterable[Move]) -> None:
        self._moves = tuple(moves)
        self._known: dict[Levels, Intervals] = {}
        self.until_ns: int = max((end for _, end, _ in self._moves), default=0)
        """The last of it."""

    def of(self, levels: Levels) -> Intervals:
        """What needs some levels."""
        if levels not in self._known:
            self._known[levels] = joined((a, b) for a, b, used in self._moves if not levels.isdisjoint(used))
        return self._known[levels]


@dataclass(frozen=True, slots=True)
class Span:
    """A job that is done."""

    kind: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A pass that has run. Times count from its start."""

    offsets_ns: tuple[int, ...]
    """When the main stream comes to each position, and when it is done with the last."""
    duration_ns: int
    """Until its stage is free again."""
    exposed_ns: Mapping[str, int]
    """What the main stream waited for of the background, by kind."""
    spans: tuple[Span, ...]
    """What of the background was done."""
    moves: tuple[Move, ...]
    """When it moved, in order."""


class Streams:
    """The two streams of a stage, from one pass to the next."""

    def __init__(self) -> None:
        self.carried: list[Job] = []
        """Jobs of earlier passes, first come first."""

    def idle(self, start_ns: int, end_ns: int) -> tuple[Span, ...]:
        """Let the background run while the main stream has nothing to do.

        Returns:
            What was done, in times of the same clock.
        """
        spans: list[Span] = []
        clock = start_ns
        while self.carried and clock < end_ns:
            job = self.carried[0]
            done = min(job.left_ns, end_ns - clock)
            if job.move(done, clock):
                spans.append(Span(job.kind, job.began_ns, clock + done))
                del self.carried[0]
            clock += done
        return tuple(spans)

    def run(
        self,
        main: Sequence[Iterable[Busy]],
        bound: Iterable[Background],
        loose: Iterable[Background] = (),
        *,
        start_ns: int = 0,
        is_last: bool = False,
    ) -> Run:
        """Run a pass, and carry on what it leaves.

        Args:
            main: what the main stream does at each position.
            bound: background that it must finish.
            loose: background that it may leave.
            start_ns: when it starts.
            is_last: whether it waits for everything all the same.
        """
        running = _Running(main, self.carried, bound, loose, start_ns)
        run = running.result(is_last=is_last)
        self.carried = running.left()
        return run


def run_bound(
    main: Sequence[Iterable[Busy]],
    carried: Iterable[Job],
    bound: Iterable[Background],
    loose: Iterable[Background],
    *,
    start_ns: int,
    kept: Kept,
) -> tuple[Run, tuple[Job, ...]]:
    """Run a pass in which nothing of the background moves but what it must finish and what is queued in front of that.

    Args:
        main: what the main stream does at each position.
        carried: jobs of earlier passes, first come first.
        bound: background that it must finish.
        loose: background that it may leave.
        start_ns: when it starts.
        kept: what the background stands still for.

    Returns:
        The pass, and what is left, in the order of the queue.
    """
    running = _Running(main, carried, bound, loose, start_ns, only_bound=True, kept=kept)
    return running.result(is_last=False), running.waiting()


class _Running:
    """Working state of ``Streams.run`` and ``run_bound``."""

    def __init__(
        self,
        main: Sequence[Iterable[Busy]],
        carried: Iterable[Job],
        bound: Iterable[Background],
        loose: Iterable[Background],
        start_ns: int,
        *,
        only_bound: bool = False,
        kept: Kept | None = None,
    ) -> None:
        self._main = main
        self._kept, self._kept_ns = kept, 0 if kept is None else kept.until_ns
        self._start = start_ns
        end = len(main)
        jobs = [*(Job(given, bound=True) for given in bound), *(Job(given, bound=False) for given in loose)]
        jobs.sort(key=lambda job: (job.start, end if job.needed is None else job.needed))  # stable: then as listed
        self._queue = [*carried, *jobs]
        self._bound = max((number + 1 for number, job in enumerate(self._queue) if job.bound), default=0)
        """How many of the queue must be done at the end."""
        self._movable = self._bound if only_bound else len(self._queue)
        self._first = 0
        self._clock = start_ns
        self._exposed: Counter[str] = Counter()
        self._spans: list[Span] = []
        self._moves: list[Move] = []

    def result(self, *, is_last: bool) -> Run:
        waits = {job.needed: number + 1 for number, job in enumerate(self._queue) if job.needed is not None}
        offsets: list[int] = []
        for position, pieces in enumerate(self._main):
            if position in waits:
                self._wait(waits[position])
            offsets.append(self._clock - self._start)
            for piece in pieces:
                self._pass_by(piece, position)
        offsets.append(self._clock - self._start)
        self._wait(len(self._queue) if is_last else self._bound)
        return Run(
            offsets_ns=tuple(offsets),
            duration_ns=self._clock - self._start,
            exposed_ns=self._exposed,
            spans=tuple(self._spans),
            moves=tuple(self._moves),
        )

    def waiting(self) -> tuple[Job, ...]:
        """What is not done, in the order of the queue."""
        return tuple(self._queue[self._first :])

    def left(self) -> list[Job]:
        """What is carried on, in the order of the queue."""
        jobs = self._queue[self._first :]
        for job in jobs:
            job.start = -1
        return jobs

    def _wait(self, count: int) -> None:
        """The main stream waits until so many of the queue are done."""
        while self._first < count:
            job = self._queue[self._first]
            begin, done = self._open(job, self._clock)
            self._exposed[job.kind] += done
            self._move(job, done, begin)
            self._clock = begin + done

    def _pass_by(self, piece: Busy, position: int) -> None:
        """A piece of the main stream, and what of the background runs behind it."""
        clock, end = self._clock, self._clock + piece.ns
        while clock < end and self._first < self._movable:
            job = self._queue[self._first]
            if job.start > position or not piece.levels.isdisjoint(job.levels):
                break
            done = job.left_ns
            if clock < self._kept_ns:
                clock, done = self._open(job, clock)
                if clock >= end:
                    break
            if done > end - clock:
                done = end - clock
            self._move(job, done, clock)
            clock += done
        self._clock = end

    def _open(self, job: Job, clock: int) -> tuple[int, int]:
        """From when on nothing keeps a job, not before some time, and for how long, as far as it needs that."""
        left = job.left_ns
        if self._kept is None or clock >= self._kept_ns or not left:
            return clock, left
        kept = self._kept.of(job.levels)
        index = bisect_right(kept.ends, clock)
        if index < len(kept.starts) and kept.starts[index] <= clock:
            clock = kept.ends[index]
            index += 1
        return clock, min(left, kept.starts[index] - clock) if index < len(kept.starts) else left

    def _move(self, job: Job, done_ns: int, clock_ns: int) -> None:
        """Let the first of the queue move."""
        begin = clock_ns - self._start
        if done_ns:
            self._moves.append((begin, begin + done_ns, job.levels))
        if job.move(done_ns, clock_ns):
            self._spans.append(Span(job.kind, job.began_ns - self._start, begin + done_ns))
            self._first += 1
