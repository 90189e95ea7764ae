"""The search over configurations: meshes, ZeRO levels, recompute settings, microbatch counts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import cast

from tap_planner.collector import collector_paused
from tap_planner.errors import InfeasibleError, LimitReachedError
from tap_planner.plan import Decisions
from tap_planner.search.assemble import assemble
from tap_planner.search.enumeration import SearchSpace, model_of
from tap_planner.search.lane import Lane
from tap_planner.search.lanes import LANES, LocalWorker, LostProcessError, Worker, ask, ask_all, run_lanes, workers_of
from tap_planner.search.messages import ChosenPlan, FoundPlan, PlanKey, Report
from tap_planner.search.request import (
    NothingFasterError,
    NothingFitsError,
    SearchRequest,
    SearchResult,
    SearchStatistics,
    does_not_fit,
    gigabytes,
)

MAX_RUNNERS_UP = 4
"""Other plans within the gap that the result holds."""
MAX_CONTENDERS = 2
"""Plans beyond it, on other meshes."""
_CONTENDING = Fraction(1, 20)
"""How much larger their objective may be."""

_log = logging.getLogger("tap_planner")


@collector_paused()
def search(request: SearchRequest) -> SearchResult:
    """Find the plan of least objective A (of what ``request.prices`` count).

    Models are many small objects that hold no cycles and stay: the cycle collector would scan them again and again. It
    is off in the processes of lanes, too.

    Raises:
        InfeasibleError: nothing fits, with the least memory that any plan needs.
        LimitReachedError: nothing that fits was found, though it is not proven that nothing does.
        NothingFasterError: nothing is faster than the request's ceiling.
        UnsupportedGraphError: sizes are beyond what can be counted.
    """
    space = SearchSpace(request)
    meshes = range(len(request.meshes))
    count = min(LANES, len(meshes))
    work = len(meshes) * len(space.graph(1).operators)
    request.graphs.index(space.counts[0])  # which all lanes begin with

    def lanes() -> tuple[Lane, ...]:
        return tuple(Lane(request, space, meshes[number::count]) for number in range(count))

    try:
        return _answer(request, space, workers_of(lanes(), work))
    except LostProcessError as failure:
        _log.warning(f"a process of the search was lost ({failure or 'ended'}); searching again in this one")
        return _answer(request, space, tuple(LocalWorker(lane) for lane in lanes()))


def _answer(request: SearchRequest, space: SearchSpace, workers: Sequence[Worker]) -> SearchResult:
    """Run the lanes, and put together what they found."""
    try:
        winner = run_lanes(workers)
        best = None if winner is None else cast("PlanKey", ask(workers[winner], "polish"))
        reports = cast("list[Report]", ask_all(workers, "report"))
        if best is None or winner is None:
            if request.ceiling_ns is not None:
                raise NothingFasterError(tuple(leaf for report in reports for leaf in report.leaves))
            raise _nothing_fits(request, reports, cast("list[int]", ask_all(workers, "least_bytes")))
        return _Answer(request, space, workers, reports).result(winner, best)
    finally:
        for worker in workers:
            worker.close()


@dataclass(frozen=True, slots=True)
class _Answer:
    """The result of lanes that have ended."""

    request: SearchRequest
    space: SearchSpace
    workers: Sequence[Worker]
    reports: Sequence[Report]

    def result(self, winner: int, best: PlanKey) -> SearchResult:
        """The best plan of a lane, with the bound of all and those that are as good."""
        ns = next(found.ns for found in self.reports[winner].found if found.key == best)
        bound_ns = min([ns, *(report.ended_ns for report in self.reports if report.ended_ns is not None)])
        others = self._others(best)
        near = [pair for pair in others if pair[1].ns / (1 + self.request.gap) <= bound_ns][:MAX_RUNNERS_UP]
        meshes = {best.mesh, *(found.key.mesh for _, found in near)}
        beyond: dict[int, tuple[int, FoundPlan]] = {}  # by mesh
        for pair in others:
            if 0 < pair[1].ns <= ns * (1 + _CONTENDING) and pair[1].key.mesh not in meshes:
                beyond.setdefault(pair[1].key.mesh, pair)
        contenders = list(beyond.values())[:MAX_CONTENDERS]

        def chosen(pairs: Sequence[tuple[int, FoundPlan]]) -> tuple[SearchResult, ...]:
            return tuple(self._chosen(lane, found.key, bound_ns) for lane, found in pairs)

        best_plan = self._chosen(winner, best, bound_ns)
        return replace(best_plan, runners_up=chosen(near), contenders=chosen(contenders))

    def _others(self, best: PlanKey) -> list[tuple[int, FoundPlan]]:
        """The best plan of each other mesh and microbatch count, with the lane that found it; best first."""
        others: dict[tuple[int, int], tuple[int, FoundPlan]] = {}
        for lane, report in enumerate(self.reports):
            for found in report.found:
                group = (found.key.mesh, found.key.microbatches)
                if group != (best.mesh, best.microbatches) and (group not in others or found.ns < others[group][1].ns):
                    others[group] = (lane, found)
        return sorted(others.values(), key=lambda pair: (pair[1].ns, pair[1].key.mesh, pair[1].key.microbatches))

    def _chosen(self, lane: int, key: PlanKey, bound_ns: int) -> SearchResult:
        plan = cast("ChosenPlan", ask(self.workers[lane], "chosen", key))
        total = sum(report.configurations for report in self.reports)
        solved = sum(report.solved for report in self.reports)
        return SearchResult(
            write=partial(_write, self.request, key, plan),
            folded=self.request.folded(key.microbatches),
            mesh=self.request.meshes[key.mesh],
            objective_ns=plan.objective_ns,
            bound_ns=bound_ns,
            memory_bytes=plan.memory_bytes,
            multiplier=plan.multiplier,
            leaves=tuple(leaf for report in self.reports for leaf in report.leaves),
            statistics=SearchStatistics(
                meshes=len(self.request.meshes),
                configurations=total,
                solved=solved,
                pruned=total - solved,
                strategies=plan.strategies,
            ),
            notes=self.space.notes,
            pipeline=self.request.pipeline,
        )


def _write(request: SearchRequest, key: PlanKey, plan: ChosenPlan) -> Decisions:
    """The decisions of a plan, by a model of its own: those of the search are gone with it, and most plans are never
    written."""
    model = model_of(request, request.meshes[key.mesh], key.microbatches)
    assignment = plan.values.of(model).expand()
    return assemble(model, plan.configuration, assignment, request.loss_output)


def _nothing_fits(
    request: SearchRequest, reports: Sequence[Report], least_bytes: Sequence[int]
) -> InfeasibleError | LimitReachedError:
    """The least memory that any plan of the space needs, over the meshes."""
    assert request.limit_bytes is not None
    limit, least = request.limit_bytes // request.num_stages, -(-min(least_bytes) // request.num_stages)
    is_open = request.pipeline is not None or any(report.ended_ns is not None for report in reports)
    if least <= limit and is_open:
        return LimitReachedError(
            f"no plan within {gigabytes(limit)} per device was found, and it is not proven that there is none",
            hint="raise --max-memory, or fix --zero, --recompute and --microbatches",
        )
    return NothingFitsError(
        does_not_fit(request, least, limit, "every plan needs"),
        tuple(leaf for report in reports for leaf in report.leaves),
    )
