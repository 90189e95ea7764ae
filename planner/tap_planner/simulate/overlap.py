"""How much of the background communication of one pass runs while the main stream is busy elsewhere.

A rank has two streams. The *main* stream runs operators and the collectives that they wait for, one after the other.
The *background* stream runs gradient reductions and prefetched gathers, one at a time, in the order in which they may
start. It moves on while the main stream computes, or communicates over other levels of the topology; it stands still
while the main stream uses a level that it needs, whose links then belong to the main stream. Where the main stream
needs the result of a background collective it waits until that one, and all before it, are done; at the end of the
pass it waits for all. What is waited for is exposed, the rest is hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Levels = frozenset[str]
"""Names of levels of the topology."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Time of the main stream in one piece."""

    ns: int
    levels: Levels = frozenset()
    """Levels whose links it uses; none while it computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """A collective of the background stream; positions count the entries of the main stream."""

    kind: str
    """What it is counted under."""
    ns: int
    levels: Levels
    start: int
    """It may start when the main stream comes to this position."""
    needed: int | None = None
    """The main stream waits for it before this position; None: at the end of the pass."""


def hidden_ns(main: Sequence[Iterable[Busy]], background: Iterable[Background]) -> Mapping[str, int]:
    """Background time that is hidden in one pass, by kind.

    Args:
        main: what the main stream does at each position.
        background: in any order; those that may start at the same position run in order of need, then as listed.
    """
    end = len(main)
    queue = sorted(
        background, key=lambda job: (job.start, end if job.needed is None else job.needed)
    )  # stable: then as listed
    hidden: Counter[str] = Counter({job.kind: 0 for job in queue})
    left = [job.ns for job in queue]
    waits: dict[int, int] = {}
    """Position -> how many of the queue must be done before it."""
    for number, job in enumerate(queue):
        if job.needed is not None:
            if job.needed < job.start:
                raise ValueError(f"a collective is needed at {job.needed}, before it may start at {job.start}")
            waits[job.needed] = number + 1
    first = 0
    for position, pieces in enumerate(main):
        first = max(first, waits.get(position, 0))
        for piece in pieces:
            first = _fill(piece, position, queue, left, first, hidden)
    return hidden


def behind_ns(main: Sequence[Iterable[Busy]], others: Sequence[Background], background: Sequence[Background]) -> int:
    """How much more is hidden with some jobs than without them.

    Args:
        main: what the main stream does at each position.
        others: what else runs in the background.
        background: the jobs.
    """
    return max(0, sum(hidden_ns(main, [*others, *background]).values()) - sum(hidden_ns(main, others).values()))


def _fill(
    piece: Busy, position: int, queue: list[Background], left: list[int], first: int, hidden: Counter[str]
) -> int:
    """Let the background stream run during a piece of the main stream; returns the first of the queue not yet done."""
    time = piece.ns
    while time > 0 and first < len(queue):
        job = queue[first]
        if job.start > position or not piece.levels.isdisjoint(job.levels):
            break
        done = min(time, left[first])
        hidden[job.kind] += done
        left[first] -= done
        time -= done
        if left[first] == 0:
            first += 1
    return first
