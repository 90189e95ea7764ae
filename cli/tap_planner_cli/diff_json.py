"""A plan diff as JSON."""

from __future__ import annotations

import dataclasses
import enum
import json

from tap_planner.plan import PlanDiff

FORMAT_VERSION = "1.0"


def diff_to_json(diff: PlanDiff) -> str:
    """JSON text with the fields of ``PlanDiff``; predicted quantities carry their difference."""
    document = {"format_version": FORMAT_VERSION, "kind": "tap.diff", **_plain(diff)}
    document["predicted"] = [
        {
            "name": change.name,
            "old": change.old,
            "new": change.new,
            "delta": change.delta,
            "basis_points": change.basis_points,
        }
        for change in diff.predicted
    ]
    return json.dumps(document, indent=2) + "\n"


def _plain(diff: PlanDiff) -> dict[str, object]:
    def convert(pairs: list[tuple[str, object]]) -> dict[str, object]:
        return {key: value.value if isinstance(value, enum.Enum) else value for key, value in pairs}

    return dataclasses.asdict(diff, dict_factory=convert)
