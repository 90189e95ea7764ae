"""``--optimizer-states auto``: AdamW's moments in float32, or in bfloat16 where that buys something.

Under the cost model bfloat16 moments are never slower and never larger, and what they cost, numerical fidelity, no
objective sees. So the two are planned apart, each with its own proof, and bfloat16 is taken only where float32 costs
more than ``SHARE``, or does not fit (docs/decisions/optimizer-states.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from tap_planner.errors import InfeasibleError, LimitReachedError
from tap_planner.moments import rounds_moments
from tap_planner.plan import OPTIMIZER_STATES, PlanOptions, StatesChoice, StatesOutcome
from tap_planner.requests import PreparedSearch, with_options

if TYPE_CHECKING:
    from tap_planner.search import SearchResult
    from tap_planner.staging import StagedPlan

Answer = TypeVar("Answer", "SearchResult", "StagedPlan")
"""The best plan of a space, with its proof."""

__all__ = ["SHARE", "choose_states", "with_states"]

SHARE = Fraction(1, 50)
"""Moments stay float32 while the step takes no more than this share longer than with bfloat16."""


def with_states(prepared: PreparedSearch, states: str) -> PreparedSearch:
    """The same search with moments of one element type; its options stay as they were given."""
    if prepared.options.optimizer_states == states:
        return prepared
    made = with_options(prepared, replace(prepared.options, optimizer_states=states))
    return replace(made, options=prepared.options)


def choose_states(
    prepared: PreparedSearch, search: Callable[[PreparedSearch], Answer], old_states: str | None = None
) -> tuple[PreparedSearch, Answer]:
    """Search with the moments that are asked for; where that is open, with both, and take one.

    Args:
        prepared: the request.
        search: searches all parts of a space.
        old_states: the moments of an old plan to stay near to: they are kept where the options' regret allows it.

    Returns:
        The space that the plan is of, and the plan.

    Raises:
        InfeasibleError: no plan fits, not even with the smaller moments.
        LimitReachedError: nothing that fits was found, though it is not proven that nothing does.
    """
    if prepared.options.optimizer_states != "auto" or not rounds_moments(prepared.options):
        return prepared, search(prepared)
    spaces = {states: with_states(prepared, states) for states in OPTIMIZER_STATES}
    found: dict[str, Answer] = {}
    outcomes: dict[str, StatesOutcome] = {}
    failures: dict[str, InfeasibleError | LimitReachedError] = {}
    for states, space in spaces.items():
        try:
            found[states] = result = search(space)
            outcomes[states] = StatesOutcome(objective_ns=result.objective_ns, bound_ns=result.bound_ns)
        except InfeasibleError as failure:
            failures[states] = failure
            outcomes[states] = StatesOutcome(least_memory_bytes=failure.least_memory_bytes)
        except LimitReachedError as failure:
            failures[states] = failure
            outcomes[states] = StatesOutcome()
    if not found:
        raise failures["bf16"]
    times = {states: result.objective_ns for states, result in found.items()}
    chosen = _better(times, prepared.options, old_states)
    choice = StatesChoice(fp32=outcomes["fp32"], bf16=outcomes["bf16"])
    return spaces[chosen], replace(found[chosen], states=choice)


def _better(times: dict[str, int], options: PlanOptions, old_states: str | None) -> str:
    if len(times) == 1:
        return next(iter(times))
    chosen = "bf16" if times["fp32"] > times["bf16"] * (1 + SHARE) else "fp32"
    regret = Fraction(options.max_regret_basis_points or 0, 10_000)
    if old_states is not None and times[old_states] <= times[chosen] * (1 + regret):
        return old_states
    return chosen
