"""Cost tables over variables, and what elimination does with them: add them, and minimise over one variable.

Tables are int64; ``INFINITE`` marks what is forbidden. Most of the time of a search is spent in ``least``, so that it
never makes the whole sum: factors are added in the order that keeps tables small until two are left, and these block by
block, each of which stays in the processor's cache until it is minimised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

INFINITE = np.int64(1) << 56
"""Cost of what is forbidden: more than any sum of real costs, and a hundred of them stay inside int64."""
MAX_TABLE_ENTRIES = 8_000_000
"""Largest table that elimination may build (64 MB)."""
BLOCK_ENTRIES = 1 << 16
"""Entries of a sum that are minimised at once (512 KiB; measured: half and twice as many are as fast)."""


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
    for factor in factors:
        total += _over(factor, scope)
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
    check_size((*neighbours, variable), domains)
    few = _merged(factors, domains)
    if not few:
        return np.zeros((), dtype=np.int64)
    if len(few) == 1:
        rest = tuple(v for v in few[0].scope if v != variable)
        table = few[0].table.min(axis=few[0].scope.index(variable))
    else:
        rest, table = _least_of_two(few[0], few[1], variable, domains)
    return np.minimum(table.transpose([rest.index(v) for v in neighbours]), INFINITE, order="C")


def _least_of_two(
    left: Factor, right: Factor, variable: int, domains: Mapping[int, int]
) -> tuple[tuple[int, ...], np.ndarray]:
    """(variables of the dims, minimum over a variable of the sum of two factors)."""
    only_left = sorted((v for v in left.scope if v not in right.scope), key=domains.__getitem__)
    only_right = sorted((v for v in right.scope if v not in left.scope), key=domains.__getitem__)
    if only_left and only_right and domains[only_left[-1]] > domains[only_right[-1]]:
        left, right, only_left, only_right = right, left, only_right, only_left
    both = [v for v in left.scope if v in right.scope and v != variable]
    rest = (*only_left, *both, *only_right)  # the longest dim last: that is where numpy is fast
    if not rest:
        return rest, np.asarray((left.table + right.table).min())
    scope = (variable, *rest)
    one, other = (np.ascontiguousarray(_over(factor, scope)) for factor in (left, right))
    shape = [domains[v] for v in scope]
    result = np.empty(shape[1:], dtype=np.int64)
    step = min(max(BLOCK_ENTRIES * shape[1] // math.prod(shape), 1), shape[1])
    block = np.empty((shape[0], step, *shape[2:]), dtype=np.int64)
    for start in range(0, shape[1], step):
        end = min(start + step, shape[1])
        part = block[:, : end - start]
        np.add(_rows(one, start, end), _rows(other, start, end), out=part)
        np.minimum.reduce(part, axis=0, out=result[start:end])
    return rest, result


def _rows(table: np.ndarray, start: int, end: int) -> np.ndarray:
    """A range of the second dim, unless that is broadcast."""
    return table if table.shape[1] == 1 else table[:, start:end]


def _merged(factors: Sequence[Factor], domains: Mapping[int, int]) -> list[Factor]:
    """The same sum as at most two factors."""
    merged = sorted(factors, key=lambda factor: factor.table.size)
    few: list[Factor] = []
    while merged:  # what lies inside the scope of another one costs next to nothing
        factor = merged.pop(0)
        for number, larger in enumerate(merged):
            if set(factor.scope).issubset(larger.scope):
                merged[number] = _sum(larger, factor)
                break
        else:
            few.append(factor)
    while len(few) > 2:
        pairs = itertools.combinations(range(len(few)), 2)
        one, other = min(pairs, key=lambda pair: num_entries({*few[pair[0]].scope, *few[pair[1]].scope}, domains))
        few[one] = _sum(few[one], few.pop(other))
    return few


def _sum(one: Factor, other: Factor) -> Factor:
    scope = (*one.scope, *(v for v in other.scope if v not in one.scope))
    return Factor(scope, _over(one, scope) + _over(other, scope))


def _over(factor: Factor, scope: tuple[int, ...]) -> np.ndarray:
    """The table with a dim for every variable of ``scope``, of size 1 where it does not depend on it."""
    places = [scope.index(v) for v in factor.scope]
    table = factor.table
    if any(later < earlier for earlier, later in itertools.pairwise(places)):
        table = table.transpose(sorted(range(len(places)), key=places.__getitem__))
    expanded = [1] * len(scope)
    for place, length in zip(places, factor.table.shape, strict=True):
        expanded[place] = length
    return table.reshape(expanded)
