"""What is known of a concave function is never less than the function, and all of it where every line is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.search.envelope import Envelope

Line = tuple[int, int]
"""Value at 0, and slope."""
LARGEST = 40
"""Of places that are tried: past it the least line of those drawn is the same for ever."""
STEP = 1 / 8

lines_drawn = st.lists(st.tuples(st.integers(0, 100), st.integers(-9, 9)), min_size=1, max_size=6)
places_drawn = st.lists(st.integers(0, 4 * LARGEST).map(lambda quarters: quarters / 4), max_size=5)
"""Multiples of 1/4, so that values are exact."""


def function_of(lines: Sequence[Line], place: float) -> float:
    """The least of the lines: concave and piecewise linear."""
    return min(value + slope * place for value, slope in lines)


def highest(lines: Sequence[Line]) -> float:
    """Its maximum over places of at least 0, which is at 0 or where two lines cross; inf without end."""
    if all(slope > 0 for _, slope in lines):
        return math.inf
    places = [(b - a) / (m - n) for a, m in lines for b, n in lines if m != n]
    return max(function_of(lines, place) for place in (0.0, *places) if place >= 0)


def envelope_of(lines: Sequence[Line], known: Sequence[Line], places: Sequence[float]) -> Envelope:
    """Some of the lines, and values of the function that all of them make."""
    envelope = Envelope()
    for value, slope in known:
        envelope.add_line(value, slope)
    for place in places:
        envelope.add_value(place, function_of(lines, place))
    return envelope


def within(one: float, other: float) -> bool:
    """Whether the one is no more than the other, up to what floats lose."""
    return one <= other + 1e-9 * max(abs(one), abs(other), 1)


@given(lines_drawn, st.data(), places_drawn)
def test_the_peak_is_an_upper_bound(lines: list[Line], data: st.DataObject, places: list[float]) -> None:
    """Whatever lines and values are known, the function is nowhere above the peak."""
    known = [line for line in lines if data.draw(st.booleans())]
    found = envelope_of(lines, known, places).peak()
    if found is None:
        return
    most, place = found
    assert place >= 0
    assert within(highest(lines), most)
    grid = (step * STEP for step in range(int(LARGEST / STEP) + 1))
    assert all(within(function_of(lines, x), most) for x in grid)


@given(lines_drawn, places_drawn)
def test_with_all_lines_it_is_the_maximum(lines: list[Line], places: list[float]) -> None:
    """Values that are known as well change nothing, and the function is that much at the place of the peak."""
    found = envelope_of(lines, lines, places).peak()
    if highest(lines) == math.inf:
        assert found is None
        return
    assert found is not None
    most, place = found
    assert most == pytest.approx(highest(lines), abs=1e-9)
    assert function_of(lines, place) == pytest.approx(most, abs=1e-9)


@given(lines_drawn, st.data(), places_drawn)
def test_no_peak_only_where_what_is_known_has_none(lines: list[Line], data: st.DataObject, places: list[float]) -> None:
    """None says that all known lines rise, and that no two known values fall or stay level in the end."""
    known = [line for line in lines if data.draw(st.booleans())]
    tried = sorted(set(places))
    values = [function_of(lines, place) for place in tried]
    ends = any(slope <= 0 for _, slope in known)
    ends = ends or any(later <= earlier for earlier, later in itertools.pairwise(values))
    assert (envelope_of(lines, known, places).peak() is None) == (not ends)


def test_a_known_value_says_more_than_the_lines() -> None:
    """Two lines cross at 10 over 5, but the function is known to be 6 there: secants bring the peak down."""
    envelope = Envelope()
    envelope.add_line(0, 2)
    envelope.add_line(20, -2)
    assert envelope.peak() == (10.0, 5.0)
    envelope.add_value(5.0, 6.0)
    assert envelope.peak() == (10.0, 5.0)  # one value by itself has no slope
    envelope.add_value(0.0, 0.0)
    envelope.add_value(10.0, 0.0)
    most, place = envelope.peak() or (math.inf, 0.0)
    assert most == pytest.approx(7.5) and place in (3.75, 6.25)


def test_the_larger_of_two_values_counts() -> None:
    """A bound that was found again may be lower, by ties that fell otherwise: the better one stays."""
    envelope = Envelope()
    for place, value in ((1.0, 4.0), (1.0, 1.0), (2.0, 4.0), (3.0, 4.0)):
        envelope.add_value(place, value)
    most, _ = envelope.peak() or (math.inf, 0.0)
    assert most == 4.0


def test_nothing_known_is_no_bound() -> None:
    """Neither without lines and values, nor with a single value."""
    envelope = Envelope()
    assert envelope.peak() is None
    envelope.add_value(1.0, 2.0)
    assert envelope.peak() is None
