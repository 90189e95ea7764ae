"""Constraints as the command line writes them."""

from __future__ import annotations

import json

import jsonschema
import pytest

from tap_planner.errors import UsageError
from tap_planner.plan import Constraint, PlanOptions, parse_constraint, schema
from tap_planner.plan.decode_options import options_from_json
from tap_planner.plan.encode import options_to_json
from tap_planner.plan.reader import Value


@pytest.mark.parametrize(
    ("text", "constraint"),
    [
        ("batch!=tp", Constraint(kind="batch", axis="tp", forbid=True)),
        ("batch=dp", Constraint(kind="batch", axis="dp", forbid=False)),
        ("MatMul:tp=n", Constraint(kind="operator", pattern="MatMul", axis="tp", value="n", forbid=False)),
        ("layers.*.mlp.*:tp", Constraint(kind="operator", pattern="layers.*.mlp.*", axis="tp")),
        ("lm_head:!tp", Constraint(kind="operator", pattern="lm_head", axis="tp", forbid=True)),
        ("w.*:tp=row|n[3]", Constraint(kind="operator", pattern="w.*", axis="tp", value="row|n[3]")),
        ("*.bias:replicate", Constraint(kind="replicate", pattern="*.bias")),
        ("h.*:0:tp!=n[3]", Constraint(kind="operator", pattern="h.*:0", axis="tp", value="n[3]", forbid=True)),
    ],
)
def test_constraints(text: str, constraint: Constraint) -> None:
    """A constraint is read into its parts and written back alike."""
    assert parse_constraint(text) == constraint
    assert str(constraint) == text


@pytest.mark.parametrize(
    "text", ["", "batch", "batch!tp", "batch!=", "MatMul=n", ":tp=n", "MatMul:tp==n", "m: !tp=n", "m: tp=n|"]
)
def test_malformed_constraints(text: str) -> None:
    """Anything else is an error that shows the two forms."""
    with pytest.raises(UsageError, match="expected batch!=AXIS or PATTERN:AXIS=FACTOR"):
        parse_constraint(text)


def test_spaces_do_not_matter() -> None:
    """Rules may be written with spaces."""
    rule = parse_constraint(" layers.*.mlp.* : tp = row | column ")
    assert rule == parse_constraint("layers.*.mlp.*:tp=row|column")


def test_options_round_trip() -> None:
    """Rules and target are stored and read back, keep to the schema, and know that they come from a plan."""
    texts = ("batch!=tp", "MatMul:tp=n", "layers.*:tp", "lm_head:!tp", "w:tp!=row|n[3]", "*.bias:replicate")
    options = PlanOptions(
        batch=8,
        loss="mean",
        loss_output="y",
        target="megatron",
        recompute="selective",
        constraints=tuple(map(parse_constraint, texts)),
    )
    written = json.loads(json.dumps(options_to_json(options)))
    read = options_from_json(Value(written, "options"))
    assert read == options
    assert read.constraints[1].shown == "the plan's constraint 'MatMul:tp=n'"
    jsonschema.validate(written, {"$ref": "#/$defs/options", "$defs": schema()["$defs"]})


def test_options_without_rules_are_written_as_before() -> None:
    """Plans without a target do not mention it, and the rules of older plans are read as they were."""
    assert "target" not in options_to_json(PlanOptions(batch=8, loss="mean", loss_output="y"))
    old = [
        {"kind": "batch", "axis": "tp", "rule": "forbid"},
        {"kind": "operator", "operators": "h.*", "axis": "tp", "value": "n", "rule": "require"},
    ]
    written = {**options_to_json(PlanOptions(batch=8, loss="mean", loss_output="y")), "constraints": old}
    rules = options_from_json(Value(json.loads(json.dumps(written)), "options")).constraints
    assert rules == tuple(map(parse_constraint, ("batch!=tp", "h.*:tp=n")))
    assert options_to_json(PlanOptions(batch=8, constraints=rules))["constraints"] == old
