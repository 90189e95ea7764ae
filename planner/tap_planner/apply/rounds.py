"""Measurements in rounds, within a time budget.

Every round runs a block of each measurement, and the median of its blocks counts: what else a machine does meanwhile
falls on all of them alike, and a mean over a block sees what single runs do not (time slices of a scheduler).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tap_planner.apply.team import Team

ROUNDS = 5
_MOST_RUNS = 100
"""Of a block."""


class Measurement(Protocol):
    """Something that takes time."""

    def block(self, runs: int) -> Sequence[float]:
        """Run it so often; what one run took, in ns, by part."""
        ...


def measure_in_rounds(
    makers: Sequence[Callable[[], Measurement]], team: Team, seconds: float, progress: Callable[[int, int], None]
) -> list[tuple[float, ...] | None]:
    """Measure.

    Args:
        makers: each prepares one measurement, on all processes of the team in the same order.
        team: all its processes call this.
        seconds: for all of them; a measurement that no time is left for is not begun.
        progress: called with how many blocks are done, and of how many.

    Returns:
        Medians over the blocks, means over the processes; None for what was not measured.
    """
    end = time.monotonic() + seconds
    total = ROUNDS * len(makers)
    found: list[Measurement | None] = [None] * len(makers)
    once_s = [0.0] * len(makers)
    blocks: list[list[Sequence[float]]] = [[] for _ in makers]
    for number in range(total):
        progress(number, total)
        index = number % len(makers)
        share = -team.most(time.monotonic() - end) / (total - number)
        if share <= 0:
            continue
        measurement = found[index]
        if measurement is None:
            measurement = found[index] = makers[index]()
            measurement.block(1)
            once_s[index] = _once_s(measurement, team)
            share -= once_s[index]
        runs = max(min(int(share / once_s[index]), _MOST_RUNS), 1)
        team.wait_for_all()
        blocks[index].append(measurement.block(runs))
    return [_medians(team, part) if part else None for part in blocks]


def _once_s(measurement: Measurement, team: Team) -> float:
    begin = time.monotonic()
    measurement.block(1)
    return max(team.most(time.monotonic() - begin), 1e-6)


def _medians(team: Team, blocks: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(team.means([statistics.median(part) for part in zip(*blocks, strict=True)]))
