"""Series of numbers and families of names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.plan.names import decode_list, decode_names, decode_series, encode_list, encode_names, encode_series


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0], "0"),
        ([0, 1], "0,1"),
        (range(96), "0..95"),
        (range(0, 100, 10), "0..90/10"),
        ([3, 7, 12, 13, 14], "3,7,12..14"),
        ([5, 4, 3], "5,4,3"),
        ([2, 2, 2], "2,2,2"),
    ],
)
def test_series(values: list[int], text: str) -> None:
    """A series is written as ranges where it has three numbers or more of one step."""
    assert encode_series(values) == text
    assert decode_series(text) == tuple(values)


@pytest.mark.parametrize("text", ["", "a", "1..", "5..3", "0..9999999999", "1,,2", "01"])
def test_malformed_series(text: str) -> None:
    """What is no series, or a series too long to be meant, is refused."""
    with pytest.raises(ValueError, match=r"no number|empty or too long"):
        decode_series(text)


@pytest.mark.parametrize(
    ("names", "encoded"),
    [
        (["a"], ["a"]),
        (["m", "m", "m"], "m"),
        ([f"h.{i}.ln_1" for i in range(96)], {"pattern": "h.{i}.ln_1", "values": "0..95"}),
        ([f"/h.{i}/Add_{i}" for i in (3, 5)], {"pattern": "/h.{i}/Add_{i}", "values": "3,5"}),
        (
            [f"h.{i}/Add_{31 * i + 8}" for i in range(95)],
            {"pattern": "h.{i}/Add_{j}", "values": "0..94;8..2922/31"},
        ),
        (["h.0/Add_8", "h.1/Add_9"], ["h.0/Add_8", "h.1/Add_9"]),
        (["x", "h.0", "h.1", "h.2"], ["x", {"pattern": "h.{i}", "values": "0..2"}]),
        (["a01", "a02", "a03"], ["a01", "a02", "a03"]),
        (["{i}1", "{i}2"], ["{i}1", "{i}2"]),
        (["a", "b"], ["a", "b"]),
    ],
)
def test_families(names: list[str], encoded: object) -> None:
    """A family takes the shortest of its forms, and never one that reads back differently."""
    assert encode_names(names) == encoded
    assert decode_names(encode_names(names), len(names)) == tuple(names)


@pytest.mark.parametrize("values", ["0..2;0..1", "0;1;2;3", "0..1;"])
def test_malformed_values(values: str) -> None:
    """Series of different lengths, or more than there are placeholders, are refused."""
    with pytest.raises(ValueError, match=r"differ in length|no number"):
        decode_list([{"pattern": "{i}{j}", "values": values}])


@given(st.lists(st.from_regex(r"[ab{}i.]{0,2}[0-9]{0,2}[x{]?[0-9]{0,2}", fullmatch=True), min_size=1, max_size=8))
def test_names_come_back(names: list[str]) -> None:
    """Any names survive, odd ones too."""
    assert decode_names(encode_names(names), len(names)) == tuple(names)
    assert decode_list(encode_list(names)) == tuple(names)
