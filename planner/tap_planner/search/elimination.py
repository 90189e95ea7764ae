"""Exact min-plus variable elimination, with backtracking and min-marginals.

Bucket elimination: Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial Intelligence 113,
1999. Where a lower bound is enough, buckets whose table would be too large are split: Dechter, Rish, "Mini-buckets: a
general scheme for bounded inference", JACM 50(2), 2003.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tap_planner.search.factors import INFINITE, Factor, join, least, num_entries


@dataclass(slots=True)
class _Bucket:
    variable: int
    size: int
    """Number of its values."""
    neighbours: tuple[int, ...]
    factors: tuple[Factor, ...]
    message: np.ndarray
    """[*neighbours]"""
    parent: int | None = None
    """The bucket that joined the message; None for the table over ``keep``."""

    def row(self, assignment: Mapping[int, int]) -> np.ndarray:
        """[variable] cost of its values, where the neighbours are assigned."""
        cells = ([slice(None) if v == self.variable else assignment[v] for v in f.scope] for f in self.factors)
        parts = (f.table[tuple(cell)] for f, cell in zip(self.factors, cells, strict=True))
        return sum(parts, start=np.zeros(self.size, dtype=np.int64))

    def joined(self) -> np.ndarray:
        """[*neighbours, variable] sum of the factors."""
        scope = (*self.neighbours, self.variable)
        sizes = {self.variable: self.size}
        sizes.update((v, length) for f in self.factors for v, length in zip(f.scope, f.table.shape, strict=True))
        return join(self.factors, scope, sizes)


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
                row = row + bucket.row(assignment)
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
        for number, _, belief in self._beliefs(total):
            variable = self._buckets[number].variable
            costs = belief.min(axis=tuple(range(belief.ndim - 1)))
            known = result.get(variable)
            result[variable] = costs if known is None else np.maximum(known, costs)
        return result

    def _total(self, outside: np.ndarray | None) -> np.ndarray:
        return self.table if outside is None else np.minimum(self.table + outside, INFINITE)

    def inside(self, ceiling: int, outside: np.ndarray | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per bucket, [*neighbours] least cost of everything but what its message stands for, and the cells of
        [*neighbours, variable] (row-major) that solutions at or below the ceiling may have.

        Args:
            ceiling: the largest cost that matters.
            outside: [*keep] cost added to each assignment of the kept variables.
        """
        found = self._beliefs(self._total(outside))
        return [(rest, np.flatnonzero(belief.reshape(-1) <= ceiling)) for _, rest, belief in found][::-1]

    def _beliefs(self, total: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(its number, [*neighbours] what is outside, [*neighbours, variable] least total cost) of every bucket, the
        last one first. Only the beliefs that others still need are kept.

        Args:
            total: [*keep] least total cost.
        """
        waiting = Counter(bucket.parent for bucket in self._buckets)
        beliefs: dict[int, np.ndarray] = {}
        for number in range(len(self._buckets) - 1, -1, -1):
            bucket = self._buckets[number]
            if bucket.parent is None:
                whole, scope = total, self.keep
            else:
                above = self._buckets[bucket.parent]
                whole, scope = beliefs[bucket.parent], (*above.neighbours, above.variable)
            reduced = _reduce_to(whole, scope, bucket.neighbours)
            rest = np.where(bucket.message >= INFINITE, INFINITE, reduced - bucket.message)
            belief = bucket.joined()
            belief += rest[..., None]
            np.minimum(belief, INFINITE, out=belief)
            waiting[bucket.parent] -= 1
            if bucket.parent is not None and not waiting[bucket.parent]:
                del beliefs[bucket.parent]
            if waiting[number]:
                beliefs[number] = belief
            yield number, rest, belief

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
            message = least(list(group.values()), variable, neighbours, domains)
            for number in group:
                if number in maker:
                    buckets[maker[number]].parent = len(buckets)
            maker[following] = len(buckets)
            buckets.append(_Bucket(variable, domains[variable], neighbours, tuple(group.values()), message))
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
    return num_entries({variable}.union(*(f.scope for f in factors)), domains)
