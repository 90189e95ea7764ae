"""How transfers come past what their two stages do on the same levels of the topology."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from tap_planner.simulate.intervals import Intervals
from tap_planner.simulate.overlap import Levels
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.running import Run
from tap_planner.simulate.sending import Out
from tap_planner.simulate.uses import uses_of

NEVER = 1 << 62
"""Later than anything."""

Kept = tuple[tuple[int, list[Intervals | None]], ...]
"""What transfers along a route stand still for: stages, each with what its slots use, by number of the slot."""


class Transfer:
    """A transfer on its way; of those that are issued at the same time the one with the lowest number comes first."""

    __slots__ = ("end_ns", "has_arrived", "issued_ns", "kept", "microbatch", "number", "out", "parts", "start_ns")

    def __init__(self, out: Out, kept: Kept, microbatch: int, issued_ns: int, number: int) -> None:
        self.out, self.kept = out, kept
        self.microbatch = microbatch
        self.issued_ns = issued_ns
        self.number = number
        self.start_ns = self.end_ns = -1
        """Negative: it waits for its links. The end is as far as slots have times."""
        self.has_arrived = False
        """Whether its end is known."""
        self.parts: Sequence[tuple[int, int]] = ()
        """When it moves, where it stands still meanwhile."""

    @property
    def moves(self) -> Sequence[tuple[int, int]]:
        """When it moves."""
        return self.parts or ((self.start_ns, self.end_ns),)

    def moved_ns(self, begin_ns: int) -> int:
        """How long it moves after some time."""
        if not self.parts:
            return min(self.end_ns - begin_ns, self.end_ns - self.start_ns)
        return sum(end - max(start, begin_ns) for start, end in self.moves if end > begin_ns)


class Crossing:
    """The slots of all stages in time, as transfers see them. Slots are numbered stage by stage.

    Args:
        passes: what slots may do.
        runs: per pass, when.
        pass_of: per slot its pass.
        first: per stage its first slot; last how many there are.
        following: per stage the first slot that has no time yet; kept by the caller.
        starts_ns: per slot, where it has; kept by the caller.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        runs: Sequence[Run],
        pass_of: Sequence[int],
        *,
        first: Sequence[int],
        following: Sequence[int],
        starts_ns: Sequence[int],
    ) -> None:
        self._passes, self._runs, self._pass_of = passes, runs, pass_of
        self._first, self._following, self._starts = first, following, starts_ns
        self._uses: dict[Levels, list[Intervals | None]] = {}
        """Per slot, of all stages."""
        self._hidden: dict[int, int] = {}
        """Per slot until when what it does keeps no transfer; where that is later than its start."""

    def kept(self, out: Out) -> Kept:
        """What transfers along a route stand still for; empty: for nothing."""
        if not out.levels:
            return ()
        if out.levels not in self._uses:
            known = [uses_of(*one, out.levels) for one in zip(self._passes, self._runs, strict=True)]
            self._uses[out.levels] = [known[index] for index in self._pass_of]
        uses = self._uses[out.levels]
        return tuple(
            (stage, uses)
            for stage in out.route.stages
            if any(uses[number] is not None for number in range(self._first[stage], self._first[stage + 1]))
        )

    def changed(self, number: int, run: Callable[[], Run]) -> None:
        """A slot does not run as its pass by itself, but as is asked for where that matters."""
        for levels, uses in self._uses.items():
            if uses[number] is not None:
                uses[number] = uses_of(self._passes[self._pass_of[number]], run(), levels)

    def hide(self, number: int, until_ns: int) -> None:
        """What a slot does until some time keeps no transfer."""
        self._hidden[number] = max(until_ns, self._hidden.get(number, 0))

    def move(self, given: Transfer) -> int:
        """Let a transfer that has its links move, as far as slots have times; returns when it arrives."""
        start, ns = given.start_ns, given.out.ns
        for stage, uses in given.kept:
            if self._open(stage, uses, start, ns) != (start, NEVER):
                given.parts = self._parts(given.kept, start, ns)
                given.end_ns = given.parts[-1][1] if ns else start
                return given.end_ns
        given.parts, given.end_ns = (), start + ns
        return given.end_ns

    def _parts(self, kept: Kept, clock: int, left: int) -> list[tuple[int, int]]:
        """When a transfer moves that does not move all the time."""
        found: list[tuple[int, int]] = []
        while left:
            begin, until = clock, NEVER
            for stage, uses in kept:
                clock, shut = self._open(stage, uses, clock, left)
                until = min(until, shut)
            if clock > begin and len(kept) > 1:
                continue  # the first stage may use them again by then
            done = min(left, until - clock)
            found.append((clock, clock + done))
            clock, left = clock + done, left - done
        return found

    def _open(self, stage: int, uses: Sequence[Intervals | None], clock: int, left: int) -> tuple[int, int]:
        """From when on a stage leaves links to transfers, not before some time, and until when; ``NEVER`` where it does
        so for the time that is left."""
        starts, first, stop = self._starts, self._first[stage], self._following[stage]
        number = bisect_right(starts, clock, first, stop) - 1
        if number < first:
            number = first
        while number < stop:
            base = starts[number]
            if base >= clock + left:
                break
            found = uses[number]
            number += 1
            if found is None:
                continue
            hidden = self._hidden.get(number - 1, 0) if self._hidden else 0
            index = bisect_right(found.ends, (hidden if hidden > clock else clock) - base)
            if index == len(found.ends):
                continue
            begin = base + found.starts[index]
            if begin < hidden:
                begin = hidden
            if begin > clock:
                return clock, begin if begin < clock + left else NEVER
            clock = base + found.ends[index]
            if index + 1 < len(found.ends):
                begin = base + found.starts[index + 1]
                return clock, begin if begin < clock + left else NEVER
        return clock, NEVER
