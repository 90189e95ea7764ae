"""The multiplier on memory at which a limit is just kept: what is known of it from the solutions met."""

from __future__ import annotations

import math
from fractions import Fraction

from tap_planner.search.choices import Choices
from tap_planner.search.envelope import Envelope
from tap_planner.search.weighting import Outcome, Weights

LARGEST_WEIGHTED = 1 << 50
"""Weighted costs of solutions stay below this (before SCALE), so that their sums stay below what is infinite."""
LARGEST_ENTRY = 8
"""Single entries of tables may be so many times what a solution costs."""
STEP = 2
"""By how much a multiplier is raised whose solution does not fit, where none is known whose solution does."""
FINE = 16
"""Numerators of multipliers may be so large, where that leaves costs countable: there are few fractions below that."""
PRECISION = Fraction(17, 16)
"""Multipliers as near as this need no further one between them."""
POOL = 8
"""Solutions whose values are combined."""


class Crossing:
    """Solutions around a limit, and the multipliers that gave them.

    Args:
        limit_bytes: memory limit per device; None for none.
        divisor: activations count 1/divisor.
        dearest: the largest entry of a table, in ns.
    """

    def __init__(self, limit_bytes: int | None, divisor: int, dearest: int) -> None:
        self._limit, self._divisor, self._dearest = limit_bytes, divisor, dearest
        self.too_large: Outcome | None = None
        """The solution that does not fit at the largest multiplier that gave one."""
        self.small: Outcome | None = None
        """The solution that fits at the least multiplier that gave one."""
        self.tried: set[Fraction] = set()
        self.envelope = Envelope()
        """Of the bound of the relaxed model."""
        self.pool: list[Choices] = []
        """The last solutions met, whether or not they fit."""
        self._low = Fraction(0)
        """The largest multiplier met whose solution does not fit."""
        self._high: Fraction | None = None
        """The least multiplier met whose solution fits."""
        self._lines: set[tuple[int, int]] = set()
        """(ns, bytes) of all solutions met."""

    def fits(self, found: Outcome) -> bool:
        """Whether a solution keeps the limit."""
        return self._limit is None or found.divided_bytes(self._divisor) <= self._limit

    def add(self, found: Outcome) -> None:
        """Remember a solution as one of the two around the limit."""
        if found.choices is None:
            return
        if self._limit is not None:
            self.envelope.add_line(found.ns, found.divided_bytes(self._divisor) - self._limit)
        if self._divisor == 1 and self._limit is not None:
            self.pool = [*self.pool[1 - POOL :], found.choices]
            self._lines.add((found.ns, found.num_bytes))
        if self.fits(found):
            if self.small is None or found.ns < self.small.ns:
                self.small = found
        elif self.too_large is None or found.ns > self.too_large.ns:
            self.too_large = found

    def add_at(self, multiplier: Fraction, found: Outcome) -> None:
        """Remember a solution and the multiplier that gave it."""
        self.add(found)
        if self.fits(found):
            self._high = multiplier if self._high is None else min(self._high, multiplier)
        else:
            self._low = max(self._low, multiplier)

    def weighted(self, weights: Weights) -> list[int]:
        """What the two solutions around the limit cost, as far as there are any."""
        return [found.weighted(weights) for found in (self.too_large, self.small) if found is not None]

    def next_multiplier(self, unlimited_ns: int) -> Fraction | None:
        """Where the bound may be largest, or else between the two multipliers that the limit lies between; None where
        they are near enough.

        Args:
            unlimited_ns: see ``rounded``.
        """
        if self.too_large is None:
            return None
        found = self.envelope.peak()
        if found is not None:
            crossing = self.rounded(Fraction(found[1]), unlimited_ns)
            if self._high is None and self._low:  # the solution that fits is the smallest, and may be very slow
                crossing = min(crossing, self.rounded(self._low * STEP, unlimited_ns))
            if self._low < crossing and (self._high is None or crossing < self._high):
                return crossing
        if self._high is None:
            return self.rounded(self._low * 8 if self._low else Fraction(1, 16), unlimited_ns)
        if self._high <= self._low * PRECISION:
            return None
        between = (self._low + self._high) / 2 if self._high < 4 * self._low else self._high / 4
        return self.rounded(between, unlimited_ns)

    def highest(self) -> tuple[Fraction, Fraction] | None:
        """(value, multiplier) where the least of all lines is largest; None without lines that rise and that do not."""
        assert self._limit is not None
        slopes = [(ns, num_bytes - self._limit) for ns, num_bytes in self._lines]
        rising = [line for line in slopes if line[1] > 0]
        falling = [line for line in slopes if line[1] <= 0]
        crossings = {
            Fraction(low[0] - high[0], high[1] - low[1]) for high in rising for low in falling if low[0] > high[0]
        }
        values = ((min(ns + weight * slope for ns, slope in slopes), weight) for weight in crossings)
        return max(values, default=None)

    def rounded(self, weight: Fraction, unlimited_ns: int) -> Fraction:
        """A multiplier near ``weight`` under which costs stay countable.

        Args:
            weight: ns per byte.
            unlimited_ns: a lower bound of the least time without the limit; 0 where none is known.
        """
        known = [found for found in (self.too_large, self.small) if found is not None]
        slowest = min(max((found.ns for found in known), default=1), 8 * max(unlimited_ns, 1))
        slowest = max(slowest, self._dearest // LARGEST_ENTRY)
        most_bytes = max((found.num_bytes for found in known), default=1)
        weight = min(weight, Fraction(max(LARGEST_WEIGHTED // most_bytes, 1)))
        largest = LARGEST_WEIGHTED // max(slowest, most_bytes * math.ceil(weight))
        if 0 < weight * largest < FINE:  # below 1, bytes count for less than they are
            largest = min(math.ceil(FINE / weight), LARGEST_WEIGHTED // max(slowest, math.ceil(most_bytes * weight)))
        return weight.limit_denominator(max(largest, 1))
