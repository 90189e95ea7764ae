"""Element types of the moments in the text of a plan: absent where they are the default, a decision where not."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest

from tap_planner.errors import PlanFormatError
from tap_planner.plan import (
    PlanDocument,
    StatesChoice,
    StatesOutcome,
    compute_digests,
    expand,
    from_text,
    schema,
    to_text,
    with_digests,
)
from tests.plan.plan_builders import make_decisions, make_document, make_stack

CHOICE = StatesChoice(
    fp32=StatesOutcome(least_memory_bytes=123), bf16=StatesOutcome(objective_ns=1_234_567, bound_ns=1_200_000)
)


def made(states: str) -> PlanDocument:
    """A plan with moments of a type."""
    stack = make_stack(2)
    document = make_document(replace(make_decisions(stack), optimizer_states=states), stack.reads)
    return replace(document, options=replace(document.options, batch=8, loss="mean", loss_output="y"))


def test_the_default_leaves_no_trace() -> None:
    """Plans with the default moments are written as plans that know of no other."""
    text = to_text(made("fp32"))
    assert "optimizer_states" not in text and '\n  "optimizer"' not in text
    assert from_text(text).optimizer_states == "fp32"


@pytest.mark.parametrize("choice", [None, CHOICE])
def test_round_trip(choice: StatesChoice | None) -> None:
    """Option, decision and comparison are read as they were written, and keep to the schema."""
    document = made("bf16")
    options = replace(document.options, optimizer_states="auto" if choice else "bf16")
    document = with_digests(
        replace(document, options=options, certificate=replace(document.certificate, states=choice))
    )
    text = to_text(document)
    assert from_text(text) == document and to_text(from_text(text)) == text
    assert expand(from_text(text)).optimizer_states == "bf16"
    jsonschema.validate(json.loads(text), schema())


def test_moments_are_a_decision() -> None:
    """The digest of the decisions covers what was chosen, not what was asked for."""
    wide, narrow = (compute_digests(made(states)) for states in ("fp32", "bf16"))
    assert wide.decisions != narrow.decisions
    left_open = made("bf16")
    left_open = replace(left_open, options=replace(left_open.options, optimizer_states="auto"))
    again = compute_digests(left_open)
    assert again.decisions == narrow.decisions and again.plan != narrow.plan


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"states": "bf16"', '"states": "fp8"', 'optimizer.states: "fp8", expected fp32 or bf16'),
        ('"optimizer_states": "bf16"', '"optimizer_states": "int8"', "options.optimizer_states"),
    ],
)
def test_other_types_are_refused(old: str, new: str, message: str) -> None:
    """A value that is none names its place."""
    document = made("bf16")
    text = to_text(replace(document, options=replace(document.options, optimizer_states="bf16")))
    assert old in text
    with pytest.raises(PlanFormatError, match=message):
        from_text(text.replace(old, new))
