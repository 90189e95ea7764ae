"""Searches over parts of a space -> the result for all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tap_planner.errors import InfeasibleError, LimitReachedError
from tap_planner.search.proof import Leaf
from tap_planner.search.request import (
    NothingFasterError,
    NothingFitsError,
    SearchRequest,
    SearchResult,
    SearchStatistics,
)

__all__ = ["merge_results", "search_parts"]


def merge_results(results: Sequence[SearchResult]) -> SearchResult:
    """The best plan of all parts (the first of equal ones), with the bound that holds for all.

    Its leaves are not merged.
    """
    best = min(results, key=lambda result: result.objective_ns)
    parts = [result.statistics for result in results]
    return replace(
        best,
        bound_ns=min(result.bound_ns for result in results),
        statistics=SearchStatistics(
            meshes=sum(part.meshes for part in parts),
            configurations=sum(part.configurations for part in parts),
            solved=sum(part.solved for part in parts),
            pruned=sum(part.pruned for part in parts),
            strategies=best.statistics.strategies,
        ),
    )


def search_parts(requests: Sequence[SearchRequest], search: Callable[[SearchRequest], SearchResult]) -> SearchResult:
    """Search parts of a space one by one.

    Args:
        requests: the parts.
        search: searches one of them.

    Raises:
        InfeasibleError: nothing fits in any part; what is said is about the part that needs the least.
        LimitReachedError: a part without a plan is not proven to have none, so there is no bound.
    """
    results: list[SearchResult] = []
    failures: list[InfeasibleError] = []
    leaves: list[Leaf] = []
    for number, request in enumerate(requests):
        try:
            result = search(request)
            results.append(result)
            leaves += (replace(leaf, part=number) for leaf in result.leaves)
        except InfeasibleError as failure:
            failures.append(failure)
            if isinstance(failure, NothingFitsError):
                leaves += (replace(leaf, part=number) for leaf in failure.leaves)
        except LimitReachedError as failure:
            if len(requests) == 1 or isinstance(failure, NothingFasterError):
                raise
            raise LimitReachedError(
                failure.message, hint=failure.hint or "raise --max-memory, or fix more of the options"
            ) from failure
    if not results:
        raise NothingFitsError(min(failures, key=lambda failure: failure.least_memory_bytes), tuple(leaves))
    return replace(merge_results(results), leaves=tuple(leaves))
