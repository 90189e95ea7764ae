"""Exact min-plus variable elimination, with backtracking and min-marginals.

Bucket elimination: Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial Intelligence 113,
1999. Where a lower bound is enough, buckets whose table would be too large are split: Dechter, Rish, "Mini-buckets: a
general scheme for bounded inference", JACM 50(2), 2003. Tables are int64; ``INFINITE`` marks what is forbidden.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

INFINITE = np.int64(1) << 56
"""Cost of what is forbidden: more than any sum of real costs, and a hundred of them stay inside int64."""
MAX_TABLE_ENTRIES = 8_000_000
"""Largest table that elimination may build (64 MB)."""


class WidthError(Exception):
    """Elimination would need a table that is too large.

    Args:
        message: how large.
        scope: variables of the table.
    """

    def __init__(self, message: str, scope: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.scope = scope


@dataclass(frozen=True, slots=True)
class Factor:
    """A cost table over some variables."""

    scope: tuple[int, ...]
    """Variables, one per dim of ``table``."""
    table: np.ndarray


@dataclass(slots=True)
class _Bucket:
    variable: int
    neighbours: tuple[int, ...]
    joined: np.ndarray
    """[*neighbours, variable]"""
    message: np.ndarray
    """[*neighbours]"""
    parent: int | None = None
    """The bucket that joined the message; None for the table over ``keep``."""


class Elimination:
    """The outcome of eliminating all variables but ``keep``."""

    def __init__(self, keep: tuple[int, ...], buckets: list[_Bucket], table: np.ndarray) -> None:
        self.keep = keep
        self.table = table
        """[*keep] least cost for each assignment of the kept variables."""
        self._buckets = buckets

    def backtrack(self, assignment: dict[int, int]) -> None:
        """Extend an assignment of ``keep`` to a cheapest one of all variables (ties: smallest index), in place.

        Where a bucket was split its variable takes the value that is cheapest for the parts together.
        """
        number = len(self._buckets) - 1
        while number >= 0:
            variable = self._buckets[number].variable
            row: np.ndarray | int = 0
            while number >= 0 and self._buckets[number].variable == variable:
                bucket = self._buckets[number]
                row = row + bucket.joined[tuple(assignment[v] for v in bucket.neighbours)]
                number -= 1
            assignment[variable] = int(np.argmin(row))

    def marginals(self, outside: np.ndarray | None = None) -> dict[int, np.ndarray]:
        """Least total cost with each variable fixed to each of its values (a lower bound where buckets were split).

        Args:
            outside: [*keep] cost added to each assignment of the kept variables.
        """
        total = self._total(outside)
        result: dict[int, np.ndarray] = {}
        for position, variable in enumerate(self.keep):
            result[variable] = total.min(axis=tuple(d for d in range(len(self.keep)) if d != position))
        for bucket, rest in zip(self._buckets, self.outside_messages(outside), strict=True):
            belief = np.minimum(bucket.joined + rest[..., None], INFINITE)
            costs = belief.min(axis=tuple(range(belief.ndim - 1)))
            known = result.get(bucket.variable)
            result[bucket.variable] = costs if known is None else np.maximum(known, costs)
        return result

    def _total(self, outside: np.ndarray | None) -> np.ndarray:
        return self.table if outside is None else np.minimum(self.table + outside, INFINITE)

    def outside_messages(self, outside: np.ndarray | None = None) -> list[np.ndarray]:
        """Per bucket [*neighbours]: least cost of everything but what the bucket's message stands for."""
        return self._around(outside)[0]

    def inside(self, ceiling: int, outside: np.ndarray | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per bucket, ``outside_messages`` and the cells of [*neighbours, variable] (row-major) that solutions at or
        below the ceiling may have.

        Args:
            ceiling: the largest cost that matters.
            outside: [*keep] cost added to each assignment of the kept variables.
        """
        rests, beliefs = self._around(outside)
        return [(rest, np.flatnonzero(beliefs[number].reshape(-1) <= ceiling)) for number, rest in enumerate(rests)]

    def _around(self, outside: np.ndarray | None) -> tuple[list[np.ndarray], dict[int, np.ndarray]]:
        """Per bucket [*neighbours] what is outside, and [*neighbours, variable] least total cost."""
        total = self._total(outside)
        beliefs: dict[int, np.ndarray] = {}
        rests: list[np.ndarray] = []
        for number in range(len(self._buckets) - 1, -1, -1):
            bucket = self._buckets[number]
            if bucket.parent is None:
                whole, scope = total, self.keep
            else:
                above = self._buckets[bucket.parent]
                whole, scope = beliefs[bucket.parent], (*above.neighbours, above.variable)
            reduced = _reduce_to(whole, scope, bucket.neighbours)
            rest = np.where(bucket.message >= INFINITE, INFINITE, reduced - bucket.message)
            beliefs[number] = np.minimum(bucket.joined + rest[..., None], INFINITE)
            rests.append(rest)
        rests.reverse()
        return rests, beliefs

    @property
    def order(self) -> tuple[int, ...]:
        """Variable of each bucket, in elimination order."""
        return tuple(bucket.variable for bucket in self._buckets)


def _reduce_to(table: np.ndarray, scope: tuple[int, ...], wanted: tuple[int, ...]) -> np.ndarray:
    """Minimum over all variables but ``wanted``, dims in the order of ``wanted``."""
    missing = tuple(d for d, v in enumerate(scope) if v not in wanted)
    reduced = table.min(axis=missing) if missing else table
    left = [v for v in scope if v in wanted]
    return np.transpose(reduced, [left.index(v) for v in wanted])


def join(factors: Sequence[Factor], scope: tuple[int, ...], domains: Mapping[int, int]) -> np.ndarray:
    """Sum of factors as a table over ``scope``.

    Raises:
        WidthError: the table would exceed ``MAX_TABLE_ENTRIES``.
    """
    shape = tuple(domains[v] for v in scope)
    size = 1
    for length in shape:
        size *= length
    if size > MAX_TABLE_ENTRIES:
        raise WidthError(f"a table of {size} entries over {len(scope)} variables", scope)
    position = {v: d for d, v in enumerate(scope)}
    total = np.zeros(shape, dtype=np.int64)
    for factor in factors:
        places = [position[v] for v in factor.scope]
        table = factor.table
        if any(later < earlier for earlier, later in itertools.pairwise(places)):
            table = table.transpose(sorted(range(len(places)), key=places.__getitem__))
        expanded = [1] * len(scope)
        for v, place in zip(factor.scope, places, strict=True):
            expanded[place] = domains[v]
        total += table.reshape(expanded)
    return total


def elimination_order(
    domains: Mapping[int, int], scopes: Sequence[tuple[int, ...]], keep: tuple[int, ...]
) -> tuple[int, ...]:
    """Order by least size of the joined table (ties: smallest variable)."""
    adjacent: dict[int, set[int]] = {v: set() for v in domains}
    for scope in scopes:
        for v in scope:
            adjacent[v].update(scope)
    for v, others in adjacent.items():
        others.discard(v)

    def weight(v: int) -> int:
        size = domains[v]
        for other in adjacent[v]:
            size *= domains[other]
        return size

    kept = set(keep)
    heap = [(weight(v), v) for v in domains if v not in kept]
    heapq.heapify(heap)
    done: set[int] = set()
    order: list[int] = []
    while heap:
        size, v = heapq.heappop(heap)
        if v in done or size != weight(v):
            continue
        done.add(v)
        order.append(v)
        neighbours = adjacent.pop(v)
        for other in neighbours:
            adjacent[other].discard(v)
            adjacent[other].update(n for n in neighbours if n != other)
        for other in neighbours:
            if other not in kept:
                heapq.heappush(heap, (weight(other), other))
    return tuple(order)


def eliminate(
    domains: Mapping[int, int],
    factors: Sequence[Factor],
    keep: tuple[int, ...] = (),
    order: tuple[int, ...] | None = None,
    split_above: int | None = None,
) -> Elimination:
    """Minimise the sum of ``factors`` over all variables but ``keep``.

    Args:
        domains: number of values of every variable.
        factors: cost tables.
        keep: variables that stay.
        order: elimination order, if it is known from an equal structure.
        split_above: split buckets whose table would have more entries: the result is then a lower bound.

    Raises:
        WidthError: some table would be too large.
    """
    if order is None:
        order = elimination_order(domains, [f.scope for f in factors], keep)
    touching: dict[int, dict[int, Factor]] = {v: {} for v in domains}
    loose: dict[int, Factor] = {}
    maker: dict[int, int] = {}
    for number, factor in enumerate(factors):
        loose[number] = factor
        for v in factor.scope:
            touching[v][number] = factor
    following = len(factors)
    buckets: list[_Bucket] = []
    for variable in order:
        mine = touching.pop(variable)
        for number, factor in mine.items():
            del loose[number]
            for v in factor.scope:
                if v != variable:
                    del touching[v][number]
        for group in _groups(variable, mine, domains, split_above):
            neighbours = tuple(sorted({v for f in group.values() for v in f.scope} - {variable}))
            joined = join(list(group.values()), (*neighbours, variable), domains)
            message = np.minimum(joined.min(axis=-1), INFINITE)
            for number in group:
                if number in maker:
                    buckets[maker[number]].parent = len(buckets)
            maker[following] = len(buckets)
            buckets.append(_Bucket(variable, neighbours, joined, message))
            made = Factor(neighbours, message)
            loose[following] = made
            for v in neighbours:
                touching[v][following] = made
            following += 1
    table = np.minimum(join(list(loose.values()), keep, domains), INFINITE)
    return Elimination(keep, buckets, table)


def _groups(
    variable: int, factors: dict[int, Factor], domains: Mapping[int, int], split_above: int | None
) -> list[dict[int, Factor]]:
    """The factors of a bucket, in groups whose joined tables stay under the limit (one group without limit)."""
    if split_above is None or _joined_size(factors.values(), variable, domains) <= split_above:
        return [factors]
    groups: list[dict[int, Factor]] = []
    own: dict[int, Factor] = {}
    for number, factor in sorted(factors.items(), key=lambda item: (-item[1].table.size, item[0])):
        if factor.scope == (variable,):
            own[number] = factor
            continue
        for group in groups:
            if _joined_size([*group.values(), factor], variable, domains) <= split_above:
                group[number] = factor
                break
        else:
            groups.append({number: factor})
    if not groups:
        return [factors]
    for number, factor in own.items():
        for position, group in enumerate(groups):
            part = factor.table // len(groups) + (factor.table % len(groups) if position == 0 else 0)
            group[number if position == 0 else -1 - number] = Factor(
                factor.scope, np.where(factor.table >= INFINITE, INFINITE, part)
            )
    return groups


def _joined_size(factors: Iterable[Factor], variable: int, domains: Mapping[int, int]) -> int:
    size = domains[variable]
    for v in {v for f in factors for v in f.scope} - {variable}:
        size *= domains[v]
    return size
