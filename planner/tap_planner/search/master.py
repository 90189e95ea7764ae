"""The master."""

from __future__ import annotations

from tap_planner.search.elimination import WidthError
from tap_planner.search.solver import Assignment, Solver, Weights


def solve_master(solver: Solver, limit_bytes: int, ceiling_ns: int, weights: Weights) -> tuple[int, Assignment | None]:
    raise WidthError("not yet")
