"""``--fail-on``: limits that a change must not pass."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import click

from tap_planner.plan import PlanDiff, Verdict
from tap_planner_cli.units import format_percent, title

METRICS = {
    "step_time": "step_ns",
    "compute_time": "compute_ns",
    "communication_time": "communication_ns",
    "memory": "memory_bytes",
}
_LIMIT = re.compile(rf"({'|'.join(METRICS)})>([0-9]{{1,6}}(?:\.[0-9]{{1,2}})?)%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A metric may not grow by more than so much; or, without metric, decisions may not change."""

    metric: str | None
    basis_points: int = 0

    def passed_by(self, diff: PlanDiff) -> str | None:
        """What passes the limit, in words; None if nothing does."""
        if self.metric is None:
            return "decisions changed" if diff.verdict is Verdict.DECISIONS_CHANGED else None
        change = diff.quantity(METRICS[self.metric])
        if 10_000 * change.delta <= self.basis_points * change.old:
            return None
        return (
            f"{title(change.name)} {format_percent(change.basis_points)}, the limit is "
            f"{format_percent(self.basis_points)}"
        )


class LimitType(click.ParamType):
    """``step_time>5%`` or ``decisions``."""

    name = "limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Limit:
        """Read the limit."""
        if isinstance(value, Limit):
            return value
        if value == "decisions":
            return Limit(metric=None)
        match = _LIMIT.fullmatch(value.replace(" ", ""))
        if match is None:
            self.fail(
                f"{value!r} is no limit, expected decisions or METRIC>PERCENT% as step_time>5%; "
                f"metrics: {', '.join(METRICS)}",
                param,
                ctx,
            )
        return Limit(metric=match[1], basis_points=int(Decimal(match[2]) * 100))
