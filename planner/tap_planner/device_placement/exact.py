"""The shortest step over all placements and all schedules, by CP-SAT, for small graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ortools.sat.python import cp_model

from tap_planner.device_placement.bounds import lower_bound_ns
from tap_planner.device_placement.exact_model import ScheduleModel, time_unit_ns
from tap_planner.device_placement.problem import Placement, Problem
from tap_planner.device_placement.sequences import in_order_of_use
from tap_planner.device_placement.timeline import Timeline, play

__all__ = ["ExactResult", "ExactStatus", "solve_exactly"]

DETERMINISTIC_SECONDS = 10.0
"""CP-SAT's own measure of effort; of this model 3 to 15 seconds each."""


class ExactStatus(Enum):
    """What is known."""

    OPTIMAL = "optimal"
    """No schedule is shorter."""
    FEASIBLE = "feasible"
    """There may be shorter ones, down to the bound."""
    INFEASIBLE = "infeasible"
    """No placement fits in the memory under the constraints."""
    UNKNOWN = "unknown"
    """Nothing was found before the limit on effort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """The best schedule found and what is proven."""

    status: ExactStatus
    bound_ns: int
    """No schedule of any placement is shorter; with ``INFEASIBLE`` it means nothing."""
    makespan_ns: int | None = None
    placement: Placement | None = None
    start_ns: tuple[int, ...] | None = None
    """By task."""


def solve_exactly(
    problem: Problem,
    *,
    hint: Sequence[int] | None = None,
    priority: Sequence[int] | None = None,
    deterministic_seconds: float = DETERMINISTIC_SECONDS,
) -> ExactResult:
    """Look for the shortest schedule and prove how short one can be.

    Schedules are those in which a device runs one task at a time and a channel carries one transfer at a time, each
    tensor once to every other device that reads it; tasks and transfers start whenever they may. What :func:`play`
    plays is one of them, so the bound holds for it; but the shortest schedule may let a device or channel wait on
    purpose, which :func:`play` never does.

    Args:
        problem: what is placed; some 60 groups are often proven.
        hint: a placement to start from; one that does not fit is not used.
        priority: [num_tasks], by which the hint is played; None: tasks by number.
        deterministic_seconds: the limit on CP-SAT's effort.

    Returns:
        The same for the same arguments and version of OR-tools. Without anything better it is the hint.
    """
    least = lower_bound_ns(problem)
    known = _known(problem, hint, priority)
    unit = time_unit_ns(problem)
    most = None if known is None else known.timeline.makespan_ns
    model = ScheduleModel(problem, unit_ns=unit, least_ns=least, most_ns=most)
    if known is not None:
        model.hint(known.placement, known.timeline)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = deterministic_seconds
    status = solver.solve(model.model)
    assert status in _KNOWN_STATUSES, solver.status_name(status)
    if status == cp_model.INFEASIBLE:
        assert known is None, "a schedule that was played does not satisfy the model"
        return ExactResult(status=ExactStatus.INFEASIBLE, bound_ns=least)
    proven = solver.best_objective_bound
    bound = max(least, unit * round(proven)) if math.isfinite(proven) else least
    if status == cp_model.UNKNOWN:
        return _unproven(known, bound)
    found = model.read(solver)
    return ExactResult(
        status=ExactStatus.OPTIMAL if status == cp_model.OPTIMAL else ExactStatus.FEASIBLE,
        bound_ns=bound,
        makespan_ns=found.makespan_ns,
        placement=found.placement,
        start_ns=found.start_ns,
    )


_KNOWN_STATUSES = (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.INFEASIBLE, cp_model.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    placement: Placement
    timeline: Timeline


def _unproven(known: _Known | None, bound: int) -> ExactResult:
    """The hint, where there is one."""
    if known is None:
        return ExactResult(status=ExactStatus.UNKNOWN, bound_ns=bound)
    makespan = known.timeline.makespan_ns
    return ExactResult(
        status=ExactStatus.OPTIMAL if makespan <= bound else ExactStatus.FEASIBLE,
        bound_ns=min(bound, makespan),
        makespan_ns=makespan,
        placement=known.placement,
        start_ns=tuple(known.timeline.start_ns.tolist()),
    )


def _known(problem: Problem, hint: Sequence[int] | None, priority: Sequence[int] | None) -> _Known | None:
    """The hint as it is played, with devices that are alike in the sequence of their first groups."""
    if hint is None or any(problem.overshoot_bytes(hint)) or not problem.is_allowed(hint):
        return None
    placement = in_order_of_use(problem, hint)
    timeline = play(problem, placement, range(problem.num_tasks) if priority is None else priority)
    return _Known(placement=placement, timeline=timeline)
