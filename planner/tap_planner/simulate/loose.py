"""Reductions of the end of the step of a stage whose transfers use the same links, behind its slots and transfers.

One moves at a time, first come first served, while neither the main stream nor a transfer of the stage uses a level
that it needs. A slot that has background of its own takes what is waiting into its queue, and leaves what is behind all
that it must finish.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable

from tap_planner.simulate.intervals import Intervals, joined
from tap_planner.simulate.overlap import Levels
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.running import Job, Move, Run, Span
from tap_planner.simulate.uses import uses_of


class Loose:
    """The reductions of one stage."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Job, int]] = deque()
        """Each with when it may start."""
        self._slots: list[tuple[int, Pass, Run]] = []
        self._uses: dict[tuple[int, Levels], Intervals | None] = {}
        """When the main stream uses levels, by run."""
        self._clock = 0
        self.spans: list[Span] = []
        """What was done while no slot had to finish it."""

    @property
    def is_waiting(self) -> bool:
        """Whether anything is not known to be done."""
        return bool(self._queue)

    def take(self, stop_ns: int, moves: Iterable[Move]) -> list[Job]:
        """All that is not done at some time, for a slot that starts then.

        Args:
            stop_ns: when.
            moves: when transfers of the stage move until then.
        """
        self.run(moves, stop_ns)
        jobs = [job for job, _ in self._queue]
        for job in jobs:
            job.start = -1
        self._queue.clear()
        return jobs

    def give(self, start_ns: int, given: Pass, run: Run, jobs: Iterable[Job]) -> None:
        """A slot of the stage.

        Args:
            start_ns: when it starts.
            given: what it does.
            run: when; of the background, what it has to finish.
            jobs: what else may start in it, in order.
        """
        done = max((end for _, end, _ in run.moves), default=0)
        self._queue.extend((job, start_ns + max(done, run.offsets_ns[max(job.start, 0)])) for job in jobs)
        self._slots.append((start_ns, given, run))

    def run(self, moves: Iterable[Move], stop_ns: int | None = None) -> Counter[str]:
        """Let them move.

        Args:
            moves: when transfers of the stage move.
            stop_ns: until when; None: until all is done.

        Returns:
            How long, by kind.
        """
        transfers, known = list(moves), dict[Levels, Intervals]()
        moved: Counter[str] = Counter()
        while self._queue:
            job, available = self._queue[0]
            begin = max(self._clock, available)
            if stop_ns is not None and begin >= stop_ns:
                break
            if job.levels not in known:
                known[job.levels] = self._kept(job.levels, transfers)
            moved[job.kind] += self._move(job, begin, stop_ns, known[job.levels])
            if job.left_ns:
                break
            self._queue.popleft()
        if stop_ns is not None:
            self._clock = max(self._clock, stop_ns)
        return moved

    @property
    def clock_ns(self) -> int:
        """When it has run until; once all is done, when that was."""
        return self._clock

    def _move(self, job: Job, clock: int, stop_ns: int | None, kept: Intervals) -> int:
        """Let one move from a time on, as far as nothing keeps it; returns how long."""
        before = job.left_ns
        index = bisect_right(kept.ends, clock)
        while True:
            room = before
            if before and index < len(kept.starts):
                if kept.starts[index] <= clock:
                    clock = kept.ends[index]
                    index += 1
                    continue
                room = kept.starts[index] - clock
            if before and stop_ns is not None:
                room = min(room, stop_ns - clock)
                if room <= 0:
                    return before - job.left_ns
            done = min(job.left_ns, room)
            if job.move(done, clock):
                self._clock = clock + done
                self.spans.append(Span(job.kind, job.began_ns, self._clock))
                return before
            clock += done

    def _kept(self, levels: Levels, transfers: Iterable[Move]) -> Intervals:
        """When a reduction over some levels stands still."""
        found = [(a, b) for a, b, used in transfers if b > self._clock and not levels.isdisjoint(used)]
        for begin, given, run in self._slots:
            key = (id(run), levels)
            if key not in self._uses:
                self._uses[key] = uses_of(given, run, levels)
            uses = self._uses[key]
            if uses is not None and begin + run.duration_ns > self._clock:
                found.extend((begin + a, begin + b) for a, b in zip(uses.starts, uses.ends, strict=True))
        return joined(found)
