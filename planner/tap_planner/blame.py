"""Nothing fits: which of the rules stands in the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from tap_planner.errors import InfeasibleError, TapError
from tap_planner.plan import Constraint
from tap_planner.requests import PreparedSearch, with_rules

if TYPE_CHECKING:
    from tap_planner.search import SearchResult

__all__ = ["blame_rules"]

_MOST_RULES = 12
"""With more rules only all of them together are looked at."""


def blame_rules(
    prepared: PreparedSearch, error: InfeasibleError, search: Callable[[PreparedSearch], SearchResult]
) -> InfeasibleError:
    """Name the rules without which a plan fits, each found by planning again.

    Args:
        prepared: the request.
        error: the answer to it.
        search: searches a request; it stops at the first plan that fits.

    Returns:
        The answer, with the rules that the memory limit conflicts with; as it was where rules are not the reason.
    """
    constraints, target = prepared.options.constraints, prepared.options.target
    if not constraints and target is None:
        return error
    if not _fits(prepared, (), None, search):
        return error
    alone: list[str] = []
    if len(constraints) <= _MOST_RULES:
        for rule in constraints:
            if _fits(prepared, tuple(other for other in constraints if other != rule), target, search):
                alone.append(rule.shown)
    if target is not None and _fits(prepared, constraints, None, search):
        alone.append(f"--target {target}")
    if alone:
        what = f"{' and '.join(alone)} {'each conflict' if len(alone) > 1 else 'conflicts'} with that limit"
        hint = f"Drop {alone[0]}; or {error.hint}"
    else:
        what, hint = "the rules together conflict with that limit", f"Drop some rules; or {error.hint}"
    which = "any of them" if len(alone) > 1 else "it" if alone else "them"
    return InfeasibleError(
        f"{error.message}; {what}: without {which} a plan fits",
        hint=hint,
        least_memory_bytes=error.least_memory_bytes,
        limit_bytes=error.limit_bytes,
    )


def _fits(
    prepared: PreparedSearch,
    constraints: tuple[Constraint, ...],
    target: str | None,
    search: Callable[[PreparedSearch], SearchResult],
) -> bool:
    try:
        other = with_rules(prepared, constraints, target)
        search(replace(other, requests=tuple(replace(request, gap=Fraction(1)) for request in other.requests)))
    except TapError:
        return False
    return True
