"""Sums of tables, minimised block by block, against the whole sum."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tap_planner.search import factors
from tap_planner.search.factors import INFINITE, MAX_TABLE_ENTRIES, Factor, WidthError, join, least


@given(st.integers(0, 1 << 30), st.sampled_from([1, 7, 64, factors.BLOCK_ENTRIES]))
@settings(max_examples=400)
def test_least_is_the_minimum_of_the_sum(seed: int, block: int) -> None:
    """Any number of factors, dims in any order, blocks of any size, forbidden entries: as the whole sum, minimised."""
    chance = random.Random(seed)
    domains = {v: chance.randint(1, 5) for v in range(5)}
    made: list[Factor] = []
    for _ in range(chance.randint(0, 6)):
        scope = tuple(chance.sample(range(1, 5), chance.randint(0, 4)))
        scope = tuple(chance.sample((0, *scope), len(scope) + 1))
        values = [int(INFINITE) if chance.random() < 0.1 else chance.randint(0, 99) for _ in range(5 ** len(scope))]
        shape = tuple(domains[v] for v in scope)
        made.append(Factor(scope, np.array(values[: int(np.prod(shape))], dtype=np.int64).reshape(shape)))
    neighbours = tuple(sorted({v for factor in made for v in factor.scope} - {0}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors, "BLOCK_ENTRIES", block)
        found = least(made, 0, neighbours, domains)
    expected = np.minimum(join(made, (*neighbours, 0), domains).min(axis=-1), INFINITE)
    assert found.dtype == np.int64 and np.array_equal(found, expected)


def test_what_is_too_large_is_refused_before_it_is_made() -> None:
    """The error names the variables."""
    domains = dict.fromkeys(range(3), 300)
    assert MAX_TABLE_ENTRIES < 300**3
    pairs = [Factor((0, 1), np.zeros((300, 300), np.int64)), Factor((0, 2), np.zeros((300, 300), np.int64))]
    with pytest.raises(WidthError, match="27000000 entries over 3 variables") as caught:
        least(pairs, 0, (1, 2), domains)
    assert set(caught.value.scope) == {0, 1, 2}
