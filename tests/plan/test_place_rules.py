"""Where operators may lie, as users write it."""

from __future__ import annotations

import pytest

from tap_planner.errors import UsageError
from tap_planner.plan import PlaceRule, parse_place_rule


@pytest.mark.parametrize(
    ("text", "pattern", "where", "ranks"),
    [
        ("encoder.*: 0-1", "encoder.*", "0-1", (0, 1)),
        ("conv2d:3", "conv2d", "3", (3,)),
        ("  a/b : 5, 0 - 2,1 ", "a/b", "5,0-2,1", (0, 1, 2, 5)),
        ("embed*: cpu", "embed*", "cpu", None),
        ("embed*: old nodes", "embed*", "old nodes", None),
        ("tf:0: together", "tf:0", "together", None),
    ],
)
def test_rules(text: str, pattern: str, where: str, ranks: tuple[int, ...] | None) -> None:
    """Ranks, a node group, or the word for one device; the pattern may hold colons."""
    rule = parse_place_rule(text)
    assert rule == PlaceRule(pattern=pattern, where=where)
    assert rule.ranks == ranks and rule.is_together == (where == "together")
    assert parse_place_rule(str(rule)) == rule


@pytest.mark.parametrize("text", ["", "conv2d", ": 0", "conv2d:", "conv2d: -1", "conv2d: 1.5", "conv2d: 0,,1"])
def test_what_is_no_rule(text: str) -> None:
    """Is quoted, with what was expected."""
    with pytest.raises(UsageError, match="is not understood, expected PATTERN: DEVICES") as caught:
        parse_place_rule(text)
    assert repr(text) in caught.value.message and caught.value.hint


@pytest.mark.parametrize("text", ["a: 3-1", "a: 0,9999999", "a: 0-2000000"])
def test_what_is_no_range(text: str) -> None:
    """Backwards, or more devices than there can be."""
    with pytest.raises(UsageError, match="is no range of ranks"):
        parse_place_rule(text)
