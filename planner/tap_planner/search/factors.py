"""Cost tables over variables, and what elimination does with them: add them, and minimise over one variable.

Tables are int64; ``INFINITE`` marks what is forbidden. Most of the time of a search is spent in ``least``, so that it
never makes the whole sum: factors are added in the order that keeps tables small until two are left, and these block by
block, each of which stays in the processor's cache until it is minimised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

INFINITE = np.int64(1) << 56
"""Cost of what is forbidden: more than any sum of real costs, and a hundred of them stay inside int64."""
MAX_TABLE_ENTRIES = 8_000_000
"""Largest table that elimination may build (64 MB)."""
BLOCK_ENTRIES = 1 << 16
"""Entries of a sum that are minimised at once (512 KiB; measured: half and twice as many are as fast)."""
MAX_RECIPES = 20_000
"""Sums of tables whose order is remembered (about 2 KB each)."""


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


def join(factors: Sequence[Factor], scope: tuple[int, ...], domains: Mapping[int, int]) -> np.ndarray:
    """Sum of factors as a table over ``scope``.

    Raises:
        WidthError: the table would exceed ``MAX_TABLE_ENTRIES``.
    """
    check_size(scope, domains)
    total = np.zeros([domains[v] for v in scope], dtype=np.int64)
    tables = [factor.table for factor in factors]
    for number, factor in enumerate(factors):
        total += _laid(number, factor.scope, scope, domains).of(tables)
    return total


def check_size(scope: tuple[int, ...], domains: Mapping[int, int]) -> None:
    """Refuse a table over ``scope`` that is too large.

    Raises:
        WidthError: it would exceed ``MAX_TABLE_ENTRIES``.
    """
    size = num_entries(scope, domains)
    if size > MAX_TABLE_ENTRIES:
        raise WidthError(f"a table of {size} entries over {len(scope)} variables", scope)


def num_entries(scope: Iterable[int], domains: Mapping[int, int]) -> int:
    """Entries of a table over ``scope``."""
    size = 1
    for v in scope:
        size *= domains[v]
    return size


def least(
    factors: Sequence[Factor], variable: int, neighbours: tuple[int, ...], domains: Mapping[int, int]
) -> np.ndarray:
    """The sum of factors, minimised over one variable.

    Args:
        factors: what is added; all of them are over ``variable``.
        variable: what is minimised over.
        neighbours: all other variables of the factors.
        domains: number of values of every variable.

    Returns:
        [*neighbours]; at most ``INFINITE``.

    Raises:
        WidthError: the sum would exceed ``MAX_TABLE_ENTRIES``.
    """
    key = (variable, neighbours, tuple([(factor.scope, factor.table.shape) for factor in factors]))
    recipe = _RECIPES.get(key)
    if recipe is None:
        check_size((*neighbours, variable), domains)
        if len(_RECIPES) >= MAX_RECIPES:
            _RECIPES.clear()
        recipe = _RECIPES[key] = _recipe([factor.scope for factor in factors], variable, neighbours, domains)
    return recipe.least([factor.table for factor in factors])


@dataclass(frozen=True, slots=True)
class _Laid:
    """A table with a dim for every variable of a sum, of size 1 where it does not depend on it."""

    number: int
    """Of the table."""
    order: tuple[int, ...] | None
    """Of its dims; None: as they are."""
    shape: tuple[int, ...]

    def of(self, tables: Sequence[np.ndarray]) -> np.ndarray:
        """The table among all."""
        table = tables[self.number]
        return (table if self.order is None else table.transpose(self.order)).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How tables of certain shapes are summed and minimised: which two first, and how their dims lie."""

    sums: tuple[tuple[_Laid, _Laid], ...]
    """Each gives a further table."""
    last: tuple[_Laid, ...]
    """What is left: two tables at most, the variable that is minimised over first."""
    shape: tuple[int, ...]
    """Of their sum."""
    order: tuple[int, ...]
    """Of the dims of the result."""

    def least(self, tables: list[np.ndarray]) -> np.ndarray:
        """The minimum of the sum; ``tables`` grows."""
        for one, other in self.sums:
            tables.append(one.of(tables) + other.of(tables))
        if not self.last:
            return np.zeros((), dtype=np.int64)
        if len(self.last) == 1:
            least = self.last[0].of(tables).min(axis=0)
        else:
            least = self._least_of_two(self.last[0].of(tables), self.last[1].of(tables))
        return np.minimum(least.transpose(self.order), INFINITE, order="C")

    def _least_of_two(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        shape = self.shape
        if len(shape) == 1:
            return np.asarray((one + other).min())
        one, other = np.ascontiguousarray(one), np.ascontiguousarray(other)
        result = np.empty(shape[1:], dtype=np.int64)
        step = min(max(BLOCK_ENTRIES * shape[1] // math.prod(shape), 1), shape[1])
        block = np.empty((shape[0], step, *shape[2:]), dtype=np.int64)
        for start in range(0, shape[1], step):
            end = min(start + step, shape[1])
            part = block[:, : end - start]
            np.add(_rows(one, start, end), _rows(other, start, end), out=part)
            np.minimum.reduce(part, axis=0, out=result[start:end])
        return result


_RECIPES: dict[object, _Recipe] = {}
"""By variables and shapes: a search sums tables of the same few shapes again and again."""


def _recipe(
    scopes: Sequence[tuple[int, ...]], variable: int, neighbours: tuple[int, ...], domains: Mapping[int, int]
) -> _Recipe:
    sums: list[tuple[_Laid, _Laid]] = []
    known = list(scopes)

    def add(one: int, other: int) -> int:
        scope = (*known[one], *(v for v in known[other] if v not in known[one]))
        sums.append((_laid(one, known[one], scope, domains), _laid(other, known[other], scope, domains)))
        known.append(scope)
        return len(known) - 1

    few = _merged(known, add, domains)
    if not few:
        return _Recipe((), (), (), ())
    left, right = few[0], few[-1]
    only_left = sorted((v for v in known[left] if v not in known[right]), key=domains.__getitem__)
    only_right = sorted((v for v in known[right] if v not in known[left]), key=domains.__getitem__)
    if only_left and only_right and domains[only_left[-1]] > domains[only_right[-1]]:
        left, right, only_left, only_right = right, left, only_right, only_left
    both = [v for v in known[left] if v in known[right] and v != variable]
    rest = (*only_left, *both, *only_right)  # the longest dim last: that is where numpy is fast
    scope = (variable, *rest)
    last = tuple(_laid(number, known[number], scope, domains) for number in dict.fromkeys((left, right)))
    order = tuple(rest.index(v) for v in neighbours)
    return _Recipe(tuple(sums), last, tuple(domains[v] for v in scope), order)


def _merged(
    scopes: Sequence[tuple[int, ...]], add: Callable[[int, int], int], domains: Mapping[int, int]
) -> tuple[int, ...]:
    """At most two tables of the same sum, by ``add``, which makes a further one of two."""
    sizes = {number: num_entries(scope, domains) for number, scope in enumerate(scopes)}
    waiting = sorted(sizes, key=sizes.__getitem__)
    few: list[int] = []
    while waiting:  # what lies inside the scope of another one costs next to nothing
        number = waiting.pop(0)
        for place, larger in enumerate(waiting):
            if set(scopes[number]).issubset(scopes[larger]):
                waiting[place] = add(larger, number)
                break
        else:
            few.append(number)
    while len(few) > 2:
        pairs = itertools.combinations(range(len(few)), 2)
        one, other = min(pairs, key=lambda pair: num_entries({*scopes[few[pair[0]]], *scopes[few[pair[1]]]}, domains))
        few[one] = add(few[one], few.pop(other))
    return tuple(few)


def _laid(number: int, own: tuple[int, ...], scope: tuple[int, ...], domains: Mapping[int, int]) -> _Laid:
    """How a table over ``own`` lies in a sum over ``scope``."""
    order = sorted(range(len(own)), key=lambda dim: scope.index(own[dim]))
    shape = tuple(domains[v] if v in own else 1 for v in scope)
    return _Laid(number, None if order == list(range(len(own))) else tuple(order), shape)


def _rows(table: np.ndarray, start: int, end: int) -> np.ndarray:
    """A range of the second dim, unless that is broadcast."""
    return table if table.shape[1] == 1 else table[:, start:end]
