"""What ``--optimizer-states auto`` has compared, and how plans write it down."""

from __future__ import annotations

from dataclasses import dataclass

from tap_planner.plan.options import OPTIMIZER_STATES
from tap_planner.plan.reader import Value

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesOutcome:
    """What was found with AdamW's moments in one element type."""

    objective_ns: int | None = None
    """Of the best plan; None: none was found."""
    bound_ns: int | None = None
    """No plan with these moments has a smaller objective; None where none was found."""
    least_memory_bytes: int | None = None
    """Where it is proven that nothing fits: what every plan with these moments needs per device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesChoice:
    """Moments of AdamW in float32 against bfloat16."""

    fp32: StatesOutcome
    bf16: StatesOutcome


_KEYS = ("objective_ns", "bound_ns", "least_memory_bytes")


def states_to_json(choice: StatesChoice) -> Json:
    """Keys without a value are left out."""
    return {"fp32": _outcome_to_json(choice.fp32), "bf16": _outcome_to_json(choice.bf16)}


def _outcome_to_json(outcome: StatesOutcome) -> Json:
    values = ((key, getattr(outcome, key)) for key in _KEYS)
    return {key: value for key, value in values if value is not None}


def states_from_json(value: Value) -> StatesChoice:
    """Inverse of ``states_to_json``."""
    return StatesChoice(fp32=_outcome_from_json(value["fp32"]), bf16=_outcome_from_json(value["bf16"]))


def _outcome_from_json(value: Value) -> StatesOutcome:
    given = {key: value.get(key) for key in _KEYS}
    return StatesOutcome(**{key: found.integer() for key, found in given.items() if found is not None})


def decided_states(value: Value | None) -> str:
    """The element type of the moments from a plan's section ``optimizer``, which is absent where it is the default."""
    return OPTIMIZER_STATES[0] if value is None else value["states"].text(OPTIMIZER_STATES)
