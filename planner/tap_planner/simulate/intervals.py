"""Intervals of time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Intervals(NamedTuple):
    """Ascending; they neither overlap nor touch."""

    starts: list[int]
    ends: list[int]


def joined(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Intervals in any order."""
    starts: list[int] = []
    ends: list[int] = []
    for start, end in sorted(intervals):
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    return Intervals(starts, ends)
