"""Chains of repeats: min-plus powers of a block's boundary matrix."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from tap_planner.search.factors import INFINITE


def min_plus(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Min-plus product of batched matrices: [s, a, c] x [s, c, b] -> [s, a, b]."""
    batch, rows, middle = left.shape
    columns = right.shape[2]
    result = np.full((batch, rows, columns), INFINITE, dtype=np.int64)
    through = np.empty_like(result)
    for c in range(middle):
        np.add(left[:, :, c, None], right[:, c, None, :], out=through)
        np.minimum(result, through, out=result)
    return result


class Chain:
    """``count`` equal links followed by one last link.

    Args:
        link: [s, a, b] least cost of one link from boundary state a to b under the shared assignment s.
        last: the same for the last link.
        count: number of links before the last one; 0 is allowed.
    """

    def __init__(self, link: np.ndarray, last: np.ndarray, count: int) -> None:
        self.link = link
        self.last = last
        self.count = count

    @cached_property
    def _powers(self) -> list[np.ndarray]:
        """link ** (2 ** k)"""
        powers = [self.link]
        while 1 << len(powers) <= self.count:
            powers.append(min_plus(powers[-1], powers[-1]))
        return powers

    @cached_property
    def _suffixes(self) -> list[tuple[int, np.ndarray]]:
        """(k, product of link ** (2 ** k) and all that follows), in chain order."""
        suffixes: list[tuple[int, np.ndarray]] = []
        table = self.last
        for k, power in enumerate(self._powers):
            if self.count >> k & 1:
                table = min_plus(power, table)
                suffixes.append((k, table))
        suffixes.reverse()
        return suffixes

    @property
    def table(self) -> np.ndarray:
        """[s, a, b] least cost of the whole chain."""
        return self._suffixes[0][1] if self._suffixes else self.last

    def path(self, s: int, a: int, b: int) -> list[int]:
        """Boundary states of a cheapest chain, ``count + 2`` of them (ties: smallest states)."""
        states = [a]
        known: dict[tuple[int, int, int], tuple[int, ...]] = {}
        for number, (k, _) in enumerate(self._suffixes):
            rest = self._suffixes[number + 1][1] if number + 1 < len(self._suffixes) else self.last
            current = states[-1]
            following = int((self._powers[k][s, current, :] + rest[s, :, b]).argmin())
            states.extend(self._between(s, k, current, following, known))
        states.append(b)
        return states

    def _between(
        self, s: int, k: int, a: int, b: int, known: dict[tuple[int, int, int], tuple[int, ...]]
    ) -> tuple[int, ...]:
        """The states after ``a`` of a cheapest path of 2 ** k links from a to b.

        ``known`` has those of the (k, a, b) met before: most of a long chain is alike.
        """
        if k == 0:
            return (b,)
        if (k, a, b) not in known:
            half = self._powers[k - 1]
            middle = int((half[s, a, :] + half[s, :, b]).argmin())
            known[k, a, b] = self._between(s, k - 1, a, middle, known) + self._between(s, k - 1, middle, b, known)
        return known[k, a, b]

    def outside_of_links(self, outside: np.ndarray) -> np.ndarray:
        """Least cost of everything but one link, over all positions of that link among the ``count + 1``.

        Args:
            outside: [s, a, b] cost of what is outside the chain.

        Returns:
            [s, a, b]
        """
        # around[n] = least of link ** q x outside x link ** p with p + q = n: by doubling, as p or q is at least half
        around = np.swapaxes(outside, 1, 2)
        power: np.ndarray | None = None
        for bit in bin(self.count)[2:] if self.count else "":
            longer = power if bit == "0" else (self.link if power is None else min_plus(power, self.link))
            if longer is not None:
                around = np.minimum(min_plus(longer, around), min_plus(around, longer))
            double = None if power is None else min_plus(power, power)
            if bit == "1":
                double = self.link if double is None else min_plus(double, self.link)
            power = double
        return np.minimum(np.swapaxes(around, 1, 2), INFINITE)
