"""From the answer of a search for all stages together to a pipeline: where it is cut, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from tap_planner.errors import InfeasibleError, LimitReachedError
from tap_planner.plan import cut_decisions
from tap_planner.schedule import PipelineSchedule, balanced_cuts

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster
    from tap_planner.graph import Graph
    from tap_planner.plan import Decisions
    from tap_planner.program import Program
    from tap_planner.requests import PreparedSearch
    from tap_planner.search import SearchResult

__all__ = ["cut_in_pipeline", "fitting_plan"]

MAX_ROUNDS = 6
"""Searches under a lower and lower limit, where a stage holds more than its share."""
ROUGH = Fraction(1, 100)
"""How near the optimum such a plan needs to be proven under its own limit."""
MARGIN = Fraction(99, 100)
"""Of the limit that would be just low enough, were all stages to shrink alike."""

WIDE = 2
"""Cuts are tried where no more than so many times the bytes cross over that must somewhere (``_needed``)."""


def cut_in_pipeline(result: SearchResult, cluster: Cluster) -> Program:
    """Cut the plan of a search result in stages of about equal time.

    Args:
        result: a plan for all stages together.
        cluster: the devices that they use.

    Raises:
        UsageError: the model cannot be cut in so many parts.
    """
    from tap_planner.program import lower

    graph, whole, pipeline = result.folded.graph, result.decisions, result.pipeline
    assert pipeline is not None
    schedule = pipeline.at(whole.microbatches)
    trial = lower(*cut_decisions(graph, whole, _even(graph, schedule), schedule))
    times = _Times(graph, whole, trial, cluster, schedule.num_virtual_stages)
    cuts = balanced_cuts(times.work_ns, times.border_ns, schedule.num_virtual_stages, times.allowed)
    return lower(*cut_decisions(graph, whole, [graph.operators[index].id for index in cuts], schedule))


class Lowered(Protocol):
    """A search result as a Program on the devices that it uses."""

    @property
    def program(self) -> Program:
        """The plan, cut and lowered."""
        ...

    @property
    def used(self) -> Cluster:
        """The devices that it uses."""
        ...


Found = TypeVar("Found", bound=Lowered)


def fitting_plan(
    prepared: PreparedSearch,
    first: SearchResult,
    lower: Callable[[SearchResult], Found],
) -> Found:
    """The plan of a search, if every stage fits; else that of a search under a limit that leaves the fullest more room.

    Args:
        prepared: the request.
        first: its answer.
        lower: cuts and predicts a plan.

    Raises:
        LimitReachedError: no plan was found whose stages fit.
    """
    from tap_planner.requests import limit_bytes
    from tap_planner.search import search, search_parts
    from tap_planner.simulate import price_program

    limit, result, share = limit_bytes(prepared.cluster, prepared.options), first, Fraction(1)
    needed = 0
    for _ in range(MAX_ROUNDS):
        lowered = lower(result)
        needed = price_program(lowered.program, lowered.used).memory_bytes
        if limit is None or needed <= limit:
            return lowered
        share *= MARGIN * Fraction(limit, needed)
        requests = [
            replace(r, limit_bytes=int((r.limit_bytes or 0) * share), gap=max(r.gap, ROUGH)) for r in prepared.requests
        ]
        try:
            result = search_parts(requests, search, below_best=True)
        except InfeasibleError:
            break
    raise LimitReachedError(
        f"the fullest stage of the best plan needs {needed} bytes, the limit is {limit}; no plan was found whose "
        "stages all fit, and it is not proven that there is none",
        hint="Choose more stages, another --mesh, more --microbatches, or --recompute full.",
    )


def _even(graph: Graph, schedule: PipelineSchedule) -> Sequence[str]:
    """Parts of about as many operators each."""
    count, parts = len(graph.operators), schedule.num_virtual_stages
    starts = sorted({count * part // parts for part in range(parts)})
    return [graph.operators[index].id for index in starts]


def _needed(crossing: np.ndarray, work_ns: np.ndarray, parts: int) -> int:
    """The bytes that cross over somewhere, if every cut lies within half a part of where equal parts have it.

    The least place of the whole model says little: hardly anything crosses behind the inputs and before the loss.

    Args:
        crossing: [operators] bytes that cross before each.
        work_ns: [operators] their time.
        parts: how many parts there are to be.
    """
    before = (np.cumsum(work_ns) - work_ns) * (parts / max(int(work_ns.sum()), 1))
    cut = np.floor(before + 0.5).astype(np.int64)
    near = [crossing[(cut == part) & (np.arange(len(crossing)) > 0)] for part in range(1, parts)]
    return int(max((sizes.min() for sizes in near if len(sizes)), default=crossing.max(initial=0)))


class _Times:
    """What operators take, and what goes over where a model is cut before one.

    Args:
        graph: the model of one microbatch.
        whole: its plan.
        trial: the same plan, cut somehow: where does not matter.
        cluster: the devices.
        parts: how many it is to be cut in.
    """

    def __init__(self, graph: Graph, whole: Decisions, trial: Program, cluster: Cluster, parts: int) -> None:
        from tap_planner.cluster import PIPELINE
        from tap_planner.simulate import Durations

        self._graph, self._whole = graph, whole
        self._durations = Durations(trial, cluster)
        self._links, self._pipeline = self._durations.links, PIPELINE
        self.work_ns = self._work(trial)
        """Per operator, forward, recomputation and backward with their collectives."""
        crossing = self._crossing()
        needed = _needed(crossing, np.asarray(self.work_ns), parts)
        self.allowed = [bool(size <= WIDE * needed) for size in crossing]
        """Per operator, whether little enough goes over before it."""
        self.border_ns = [
            2 * self._links.cost("send_recv", (PIPELINE,), int(size)).ns if may else 0
            for size, may in zip(crossing, self.allowed, strict=True)
        ]
        """Per operator, what a cut before it sends, forward and back."""

    def _work(self, trial: Program) -> list[int]:
        from tap_planner.program import Compute, Redistribute

        place = {operator.id: index for index, operator in enumerate(self._graph.operators)}
        found = [0] * len(self._graph.operators)
        for instruction in trial.microbatch:
            match instruction:
                case Compute(operator=index):
                    name = trial.graph.operators[index].id
                    ns = self._durations.compute_ns(instruction)
                case Redistribute(redistribution=edge):
                    name, ns = trial.decisions.redistributions[edge].consumers[0], 0
                case _:
                    continue
            ns += sum(busy.ns for busy in self._durations.collectives(instruction))
            if name in place:
                found[place[name]] += ns
        return found

    def _crossing(self) -> np.ndarray:
        """[operators] bytes of a rank that are made before each operator and read by it or later."""
        made: dict[str, int] = {}
        last: dict[str, int] = {}
        for index, operator in enumerate(self._graph.operators):
            made.update((name, index) for name in operator.outputs)
            last.update((name, index) for name in operator.inputs if name in made)
        change = np.zeros(len(self._graph.operators) + 1, dtype=np.int64)
        for operator in self._whole.operators:
            for output in operator.outputs:
                if output.tensor in last:
                    size = self._durations.tensor_bytes(output.tensor, output.placement)
                    change[made[output.tensor] + 1] += size
                    change[last[output.tensor] + 1] -= size
        return np.cumsum(change)[:-1]
