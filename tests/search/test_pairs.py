"""Tables of terms of one reader against exact prices."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tap_planner.search.pairs import PairTables, is_pair
from tap_planner.search.terms import SCALE
from tests.search.test_terms import Case, cases


@given(cases(), st.booleans())
@settings(max_examples=400)
def test_pairs_are_the_point_price(case: Case, thinned: bool) -> None:
    """Every entry of a pair's tables is the exact price of that combination, of all values or of some."""
    assume(is_pair(case.term))
    alive = [values[::2] if thinned else values for values in case.alive]
    tables = PairTables(case.term, alive)
    ns, num_bytes = tables.of(tables.case(case.policy))
    prices = dict(case.points())
    assert ns.shape == num_bytes.shape == tuple(len(values) for values in alive)
    for places in np.ndindex(ns.shape):
        point = prices[tuple(int(values[place]) for values, place in zip(alive, places, strict=True))]
        assert (int(ns[places]), int(num_bytes[places])) == (point[0] * SCALE, point[1] * SCALE)
