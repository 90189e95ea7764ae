"""From the answer of a search for all stages together to a pipeline: where it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
    from tap_planner.simulate import Durations

__all__ = ["PipelineCuts", "sharing_transfers"]

RELAXINGS = 3
"""How often repeats are asked anew whether they need to run again, as cuts move with them."""
PLACINGS = 2
"""How often it is asked anew which repeats run again, as cuts move with them."""
ROOM = 0.998
"""Of the limit, what stages are cut for."""
WIDE = 2
"""Cuts are tried where no more than so many times the bytes cross over that must somewhere (``_needed``)."""


class PipelineCuts:
    """Cuts of the plan of a search result in the stages of a pipeline.

    Args:
        result: a plan for all stages together.
        cluster: the devices that they use.

    Raises:
        UsageError: the model cannot be cut in so many parts.
    """

    def __init__(self, result: SearchResult, cluster: Cluster) -> None:
        from tap_planner.program import lower

        self._result, self._cluster = result, cluster
        self._graph, whole = result.folded.graph, result.decisions
        assert result.pipeline is not None
        self._schedule = schedule = result.pipeline.at(whole.microbatches)
        trial = lower(*cut_decisions(self._graph, whole, _even(self._graph, schedule), schedule))
        self._times = _Times(self._graph, whole, trial, cluster, schedule)
        self._reruns = Reruns(
            *(self._graph, whole, trial, self._times.durations, self._times.work_ns, schedule),
            rooms=self._times.rooms_bytes,
        )
        cuts = self._times.cuts(self._reruns.work_ns)
        assert cuts is not None
        for _ in range(PLACINGS):
            if not self._reruns.place(cuts):
                break
            cuts = self._times.cuts(self._reruns.work_ns) or cuts
        self._cuts, self._settings = cuts, self._reruns.settings
        self._held = self._reruns.held(cuts)
        """What the stages of the last program are estimated to hold."""
        self._beyond = [0] * schedule.num_stages
        """Per stage, how much more it was found to hold than estimated."""
        self._learnt: set[str] = set()
        """Settings of repeats that were tried for all of them."""

    def even(self) -> Program:
        """In stages of about equal time."""
        return self._cut(self._cuts)

    def within(
        self, limits_bytes: Sequence[int], taken_bytes: Sequence[int], recomputes: Sequence[str]
    ) -> Program | None:
        """In stages of which none holds more than its limit, as far as that can be told, and whose repeats run again no
        more than that needs; None where there are none, or none but those of equal time.

        What stages hold is estimated; how far that is off is learnt from what they were found to hold before.

        Args:
            limits_bytes: per stage, what a device may hold.
            taken_bytes: per stage, what it holds in the last program that was made.
            recomputes: how repeats may recompute; none: as many of them run again as before.
        """
        reruns, times, cuts = self._reruns, self._times, self._cuts
        off = (taken - held for taken, held in zip(taken_bytes, self._held, strict=True))
        self._beyond = [max(known, more) for known, more in zip(self._beyond, off, strict=True)]
        rooms = [int(limit * ROOM) - more for limit, more in zip(limits_bytes, self._beyond, strict=True)]
        reruns.restore(self._settings)
        for _ in range(PLACINGS):
            if self._fit(cuts, rooms):
                break
            fitting = times.cuts(reruns.work_ns, reruns.fitting(cuts, rooms))
            if fitting is None:
                return None
            cuts = fitting
            reruns.place(cuts)
        if recomputes and reruns.runs_again:
            cuts = self._relaxed(cuts, rooms, recomputes)
        if cuts == self._cuts and reruns.settings == self._settings:
            return None
        self._held = reruns.held(cuts)
        return self._cut(cuts)

    def _relaxed(self, cuts: tuple[int, ...], rooms: Sequence[int], recomputes: Sequence[str]) -> tuple[int, ...]:
        """Cuts between which repeats that have room no longer run again, as far as they fit."""
        self._learn(recomputes)
        reruns, times = self._reruns, self._times
        for _ in range(RELAXINGS):
            changed = False
            while reruns.relax(cuts, rooms, times.rows):
                changed = True
            fitting = times.cuts(reruns.work_ns, reruns.fitting(cuts, rooms))
            if fitting is None or not self._fit(fitting, rooms) or (fitting == cuts and not changed):
                break
            cuts = fitting
        return cuts

    def _fit(self, cuts: Sequence[int], rooms: Sequence[int]) -> bool:
        """Whether no stage is estimated to hold more than its room."""
        return all(held <= room for held, room in zip(self._reruns.held(cuts), rooms, strict=True))

    def _learn(self, recomputes: Sequence[str]) -> None:
        """Find out what repeats take and hold with settings that none of their kind has."""
        from tap_planner.program import lower

        graph, whole, schedule = self._graph, self._result.decisions, self._schedule
        for setting in (setting for setting in recomputes if setting not in self._learnt):
            self._learnt.add(setting)
            regions = (region if region.run is None else replace(region, recompute=setting) for region in whole.regions)
            other = replace(whole, regions=tuple(regions))
            trial = lower(*cut_decisions(graph, other, _even(graph, schedule), schedule))
            self._reruns.learn(setting, trial, *self._times.of(trial))

    def _cut(self, cuts: Sequence[int]) -> Program:
        from tap_planner.program import lower

        graph = self._graph
        names = [graph.operators[index].id for index in cuts]
        return lower(*cut_decisions(graph, self._reruns.decisions, names, self._schedule))


def sharing_transfers(program: Program, cluster: Cluster) -> Iterator[Program]:
    """A pipeline with transfers shared out over axes on which ranks hold the same of them: over those inside a node,
    where gathering is cheap, and over all.

    Args:
        program: in stages; without any there is nothing to share out.
        cluster: its devices.
    """
    from tap_planner.program import Send, lower, transferred

    decisions, pipeline = program.decisions, program.decisions.pipeline
    if pipeline is None:
        return
    alike: set[int] = set()
    for instruction in program.microbatch:
        if isinstance(instruction, Send) and instruction.peer is not None:
            _, placements = transferred(program, instruction.phase, instruction.operator)
            alike.update(a for a, size in enumerate(decisions.mesh_shape) if size > 1 and placements[a].is_replicate)
    inside = {axis for axis in alike if decisions.axes[axis].levels == (cluster.levels[0].name,)}
    for axes in dict.fromkeys((tuple(sorted(inside)), tuple(sorted(alike)))):
        if axes and axes != pipeline.scatter_axes:
            yield lower(program.graph, replace(decisions, pipeline=replace(pipeline, scatter_axes=axes)))


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
        schedule: says how many parts it is to be cut in, and which lie on one stage.
    """

    def __init__(
        self, graph: Graph, whole: Decisions, trial: Program, cluster: Cluster, schedule: PipelineSchedule
    ) -> None:
        from tap_planner.cluster import PIPELINE, alike_stages
        from tap_planner.simulate import Durations

        self._graph, self._whole, self._parts = graph, whole, schedule.num_virtual_stages
        stages = [schedule.rank_and_chunk(part)[0] for part in range(self._parts)]
        self._of_stage = [len(schedule.chunks_of(stage)) for stage in stages]
        """Per part, how many its stage has: each is to be the shorter for it."""
        alike = alike_stages(cluster, schedule.num_stages)
        firsts = sorted(set(alike))
        self.rows = [firsts.index(alike[stage]) for stage in stages]
        """Per part, which times are those of its stage."""
        self._cluster, self._kinds = cluster, firsts if len(firsts) > 1 else [None]
        self.durations, self.work_ns = self.of(trial)
        """Of the trial's instructions; and [kinds of stages, operators] forward, recomputation and backward with their
        collectives."""
        self.rooms_bytes = Durations(trial, cluster).room_bytes
        """Per stage, the memory of one of its devices."""
        self._links, self._pipeline = self.durations.links, PIPELINE
        crossing = self._crossing()
        needed = _needed(crossing, self.work_ns.mean(axis=0), self._parts)
        self.allowed = [bool(size <= WIDE * needed) for size in crossing]
        """Per operator, whether little enough goes over before it."""
        self.border_ns = [
            2 * self._links.cost("send_recv", (PIPELINE,), int(size)).ns if may else 0
            for size, may in zip(crossing, self.allowed, strict=True)
        ]
        """Per operator, what a cut before it sends, forward and back."""

    def cuts(
        self, work_ns: np.ndarray, fits: Callable[[int, np.ndarray], np.ndarray] | None = None
    ) -> tuple[int, ...] | None:
        """Where chunks begin (see ``schedule.balanced_cuts``)."""
        return balanced_cuts(work_ns, self.border_ns, self.rows, self.allowed, fits, self._of_stage)

    def of(self, trial: Program) -> tuple[Durations, np.ndarray]:
        """The same of another plan that is cut as the trial: times of its instructions, and of operators."""
        from tap_planner.simulate import Durations

        timed = [Durations(trial, self._cluster, all_on=kind) for kind in self._kinds]
        return timed[0], np.array([self._work(trial, durations) for durations in timed], dtype=np.int64)

    def _work(self, trial: Program, durations: Durations) -> list[int]:
        from tap_planner.program import Compute, Redistribute

        place = {operator.id: index for index, operator in enumerate(self._graph.operators)}
        found = [0] * len(self._graph.operators)
        for instruction in trial.microbatch:
            match instruction:
                case Compute(operator=index):
                    name = trial.graph.operators[index].id
                    ns = durations.compute_ns(instruction)
                case Redistribute(redistribution=edge):
                    name, ns = trial.decisions.redistributions[edge].consumers[0], 0
                case _:
                    continue
            ns += sum(busy.ns for busy in durations.collectives(instruction))
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
