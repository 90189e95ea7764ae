"""Constraints as the command line writes them."""

from __future__ import annotations

import pytest

from tap_planner.errors import UsageError
from tap_planner.plan import Constraint, parse_constraint


@pytest.mark.parametrize(
    ("text", "constraint"),
    [
        ("batch!=tp", Constraint(kind="batch", axis="tp", forbid=True)),
        ("batch=dp", Constraint(kind="batch", axis="dp", forbid=False)),
        ("MatMul:tp=n", Constraint(kind="operator", pattern="MatMul", axis="tp", value="n", forbid=False)),
        ("h.*:0:tp!=n[3]", Constraint(kind="operator", pattern="h.*:0", axis="tp", value="n[3]", forbid=True)),
    ],
)
def test_constraints(text: str, constraint: Constraint) -> None:
    """A constraint is read into its parts and written back alike."""
    assert parse_constraint(text) == constraint
    assert str(constraint) == text


@pytest.mark.parametrize("text", ["", "batch", "batch!tp", "batch!=", "MatMul=n", ":tp=n", "MatMul:tp==n"])
def test_malformed_constraints(text: str) -> None:
    """Anything else is an error that shows the two forms."""
    with pytest.raises(UsageError, match="expected batch!=AXIS or PATTERN:AXIS=FACTOR"):
        parse_constraint(text)
