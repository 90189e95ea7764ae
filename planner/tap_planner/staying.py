"""Plans that stay near to an old one: what the use cases ask of the search."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from tap_planner.errors import UsageError
from tap_planner.plan import PlanDocument, expand
from tap_planner.requests import PreparedSearch, limit_bytes
from tap_planner.staging import is_staged

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster
    from tap_planner.search import SearchResult

__all__ = ["check_old_plan", "near_result"]


def check_old_plan(prepared: PreparedSearch, old: PlanDocument) -> None:
    """Refuse an old plan that has nothing in common with what is planned, and pipelines.

    Raises:
        UsageError: none of its operators is one of the model's; it or what is planned has pipeline stages.
    """
    if old.pipeline.num_stages > 1 or is_staged(prepared):
        which = "what is planned" if is_staged(prepared) else "the old plan"
        raise UsageError(
            f"--stay-near: {which} has pipeline stages",
            hint="Leave --stay-near out; tap-diff compares two plans.",
        )
    known = {operator.id: operator.type for operator in expand(old).operators}
    operators = prepared.graph.operators
    if any(known.get(o.id) == o.type for o in operators if o.id != prepared.graph.loss):  # all models have a loss
        return
    cluster, before = prepared.cluster.name, str(old.cluster.get("name", ""))
    on = "" if cluster == before else f" on {before}, not on {cluster}"
    raise UsageError(
        f"--stay-near: the old plan is of {old.model.name}{on}: none of its {len(known)} operators is one of the "
        f"{len(operators)} of {prepared.graph.name} (here the first is {operators[0].id if operators else 'none'!r}, "
        f"there {next(iter(known), 'none')!r})",
        hint=f"give an old plan of {prepared.graph.name}, or leave --stay-near out",
    )


def near_result(prepared: PreparedSearch, result: SearchResult, old: PlanDocument) -> SearchResult:
    """Exchange the best plan for one near to the old one; see ``search.stay_near``."""
    from tap_planner.search import stay_near

    def limit(cluster: Cluster) -> int | None:
        return limit_bytes(cluster, prepared.options)

    regret = Fraction(prepared.options.max_regret_basis_points or 0, 10_000)
    return stay_near(prepared.requests, result, expand(old), regret, limit)
