"""Multipliers are fractions near what was asked for, under which costs stay countable."""

from __future__ import annotations

from fractions import Fraction
from typing import cast

import pytest

from tap_planner.search import Outcome
from tap_planner.search.crossing import LARGEST_WEIGHTED, Crossing


@pytest.mark.parametrize("num_bytes", [10**9, 86 * 10**9, 6 * 10**12, 2 * 10**13])
@pytest.mark.parametrize("ns", [10**6, 10**9, 2 * 10**11])
@pytest.mark.parametrize("weight", [Fraction(1, 554), Fraction(7, 1850), Fraction(1, 12), Fraction(83, 1001)])
def test_a_small_multiplier_is_not_lost(num_bytes: int, ns: int, weight: Fraction) -> None:
    """However much memory a deep model takes: with few fractions the bound could not come near the optimum."""
    crossing = Crossing(num_bytes // 2, 1, 0)
    crossing.add(Outcome(bound=0, choices=cast("None", object()), ns=ns, num_bytes=num_bytes))
    rounded = crossing.rounded(weight, ns)
    assert abs(rounded - weight) <= weight / 32
    assert rounded.denominator * ns <= LARGEST_WEIGHTED and rounded.numerator * num_bytes <= LARGEST_WEIGHTED
