"""The Pareto front: what nothing else beats in one thing without being worse in the other."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

__all__ = ["pareto_front"]


def pareto_front(times: Sequence[Fraction | int], sizes: Sequence[int]) -> tuple[bool, ...]:
    """Of points, those that no other is as good as in both and better than in one; equal ones all are or are not.

    Args:
        times: [points] the less the better.
        sizes: [points] the less the better.
    """
    found = [False] * len(times)
    best: tuple[Fraction | int, int] | None = None  # of the points so far, the last on the front
    for point in sorted(range(len(times)), key=lambda point: (times[point], sizes[point])):
        here = (times[point], sizes[point])
        if best is None or here[1] < best[1]:
            best = here
        found[point] = here == best
    return tuple(found)
