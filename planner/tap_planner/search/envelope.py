"""What is known of a Lagrangian bound between the multipliers that were tried.

The bound is concave over the multiplier. Every solution is a line that it nowhere exceeds, and so is, outside of the
two, the line through the bounds of two multipliers. Where the least of these lines is largest is where the best bound
may lie, and how large it can be at most (Kelley, "The cutting-plane method for solving convex programs", J. SIAM 8,
1960).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

_Line = tuple[float, float]
"""Value at the multiplier 0, and slope."""


class Envelope:
    """Upper bounds of a concave function over multipliers of at least 0."""

    def __init__(self) -> None:
        self._values: dict[float, float] = {}
        self._lines: set[_Line] = set()

    def add_value(self, multiplier: float, value: float) -> None:
        """What the function is at a multiplier; less is a tie of no use."""
        self._values[multiplier] = max(value, self._values.get(multiplier, value))

    def add_line(self, value: float, slope: float) -> None:
        """A line above the function: value at 0, and slope."""
        self._lines.add((value, slope))

    def peak(self) -> tuple[float, float] | None:
        """(the most that the function can be, the multiplier where it may be); None: it may grow without end."""
        places = sorted(self._values)
        best: tuple[float, float] | None = None
        for left, right in zip([None, *places], [*places, None], strict=True):
            found = self._peak_between(places, left, right)
            if found is None:
                return None
            if best is None or found[0] > best[0]:
                best = found
        return best

    def _peak_between(
        self, places: Sequence[float], left: float | None, right: float | None
    ) -> tuple[float, float] | None:
        """The peak of the least line between two neighbouring multipliers, or beyond the first or last of all."""
        lines = [*self._lines, *self._secants(places, left, right)]
        low = 0.0 if left is None else left
        if not lines:
            return None
        ends = [low] if right is None else [low, right]
        if right is None and all(slope > 0 for _, slope in lines):
            return None
        crossings = {
            (other[0] - one[0]) / (one[1] - other[1])
            for one, other in itertools.combinations(lines, 2)
            if one[1] != other[1]
        }
        inside = (place for place in crossings if place >= low and (right is None or place <= right))
        return max((min(value + slope * place for value, slope in lines), place) for place in (*ends, *inside))

    def _secants(self, places: Sequence[float], left: float | None, right: float | None) -> Iterable[_Line]:
        """Lines through two neighbouring values that are above the function between two others."""
        for one, other in itertools.pairwise(places):
            if (left is not None and other <= left) or (right is not None and one >= right):
                slope = (self._values[other] - self._values[one]) / (other - one)
                yield self._values[one] - slope * one, slope
