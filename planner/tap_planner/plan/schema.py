"""The JSON Schema of the plan (draft 2020-12), as shipped in the package."""

from __future__ import annotations

import json
from importlib import resources


def schema() -> dict[str, object]:
    """The schema as JSON values."""
    text = resources.files("tap_planner.plan").joinpath("plan-1.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, object] = json.loads(text)
    return loaded
