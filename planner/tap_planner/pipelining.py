"""From the answer of a search for all stages together to a pipeline: where it is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tap_planner.plan import cut_decisions
from tap_planner.rerunning import Reruns
from tap_planner.schedule import PipelineSchedule, balanced_cuts

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster
    from tap_planner.graph import Graph
    from tap_planner.plan import Decisions
    from tap_planner.program import Program
    from tap_planner.search import SearchResult

__all__ = ["cut_in_pipeline"]

PLACINGS = 2
"""How often it is asked anew which repeats run again, as cuts move with them."""
ROOM = 0.98
"""Of the room, what stages are cut for: what is held while a slot runs is not counted."""
WIDE = 2
"""Cuts are tried where no more than so many times the bytes cross over that must somewhere (``_needed``)."""


def cut_in_pipeline(result: SearchResult, cluster: Cluster, limit_bytes: int | None = None) -> Program:
    """Cut the plan of a search result in stages of about equal time; where one of them would hold more than there is
    room for, in such that hold less, if that can be.

    Args:
        result: a plan for all stages together.
        cluster: the devices that they use.
        limit_bytes: what a device may hold; None: anything.

    Raises:
        UsageError: the model cannot be cut in so many parts.
    """
    from tap_planner.cost import workspace_bytes
    from tap_planner.program import lower

    graph, whole, pipeline = result.folded.graph, result.decisions, result.pipeline
    assert pipeline is not None
    schedule = pipeline.at(whole.microbatches)
    trial = lower(*cut_decisions(graph, whole, _even(graph, schedule), schedule))
    times = _Times(graph, whole, trial, cluster, schedule.num_virtual_stages)
    reruns = Reruns(graph, whole, trial, times.durations, times.work_ns, schedule)
    cuts = times.cuts(reruns.work_ns)
    assert cuts is not None
    for _ in range(PLACINGS):
        if not reruns.place(cuts):
            break
        cuts = times.cuts(reruns.work_ns) or cuts
    if limit_bytes is not None:
        taken = workspace_bytes(
            cluster, result.mesh.shape, graph, whole.precision, training=True, num_stages=schedule.num_stages
        )
        cuts = _within(reruns, times, cuts, int((limit_bytes - taken) * ROOM))
    return lower(*cut_decisions(graph, reruns.decisions, [graph.operators[index].id for index in cuts], schedule))


def _within(reruns: Reruns, times: _Times, cuts: tuple[int, ...], room: int) -> tuple[int, ...]:
    """Cuts whose stages hold no more than there is room for, as long as there are any."""
    for _ in range(PLACINGS):
        if reruns.fullest(cuts) <= room:
            break
        fitting = times.cuts(reruns.work_ns, reruns.fitting(cuts, room))
        if fitting is None:
            break
        cuts = fitting
        reruns.place(cuts)
    return cuts


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

        self._graph, self._whole, self._parts = graph, whole, parts
        self.durations = Durations(trial, cluster)
        """Of the trial's instructions."""
        self._links, self._pipeline = self.durations.links, PIPELINE
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

    def cuts(
        self, work_ns: Sequence[int], fits: Callable[[int, np.ndarray], np.ndarray] | None = None
    ) -> tuple[int, ...] | None:
        """Where chunks begin (see ``schedule.balanced_cuts``)."""
        return balanced_cuts(work_ns, self.border_ns, self._parts, self.allowed, fits)

    def _work(self, trial: Program) -> list[int]:
        from tap_planner.program import Compute, Redistribute

        place = {operator.id: index for index, operator in enumerate(self._graph.operators)}
        found = [0] * len(self._graph.operators)
        for instruction in trial.microbatch:
            match instruction:
                case Compute(operator=index):
                    name = trial.graph.operators[index].id
                    ns = self.durations.compute_ns(instruction)
                case Redistribute(redistribution=edge):
                    name, ns = trial.decisions.redistributions[edge].consumers[0], 0
                case _:
                    continue
            ns += sum(busy.ns for busy in self.durations.collectives(instruction))
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
                    size = self.durations.tensor_bytes(output.tensor, output.placement)
                    change[made[output.tensor] + 1] += size
                    change[last[output.tensor] + 1] -= size
        return np.cumsum(change)[:-1]
