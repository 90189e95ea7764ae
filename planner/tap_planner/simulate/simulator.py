"""One step of a Program in time: slots of its schedule on every stage, transfers between stages, the end of the step.

One rank stands for each stage: the ranks of a stage do the same. docs/simulator.md says what is simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tap_planner.cluster import Cluster
from tap_planner.plan import Overlap
from tap_planner.program import Program
from tap_planner.simulate.backgrounds import UPDATED
from tap_planner.simulate.closing import OPTIMIZER, Ending, Slot
from tap_planner.simulate.events import StageRecord
from tap_planner.simulate.memory import Peak, Peaks, stored_by
from tap_planner.simulate.playing import Played, play
from tap_planner.simulate.products import PRODUCT
from tap_planner.simulate.routes import TRANSFER
from tap_planner.simulate.sending import StageOrder
from tap_planner.simulate.slots import Slots, ways
from tap_planner.simulate.timeline import StageMemory, StageTimeline, Timeline


def simulate(
    program: Program, cluster: Cluster, *, overlap: Overlap | None = None, devices: Sequence[int] = ()
) -> Timeline:
    """Simulate one step of a Program.

    Args:
        program: the plan, lowered.
        cluster: the devices that its stages use (``part_of``); with ``devices``, all that there are.
        overlap: what runs behind something else; a stage waits for every other collective, and with ``Overlap.NONE``
            for every transfer that it sends. None: as the cluster's library can (gloo: nothing).
        devices: by stage, the rank in ``cluster`` of its one device (a device placement, ``PlacedPlan.devices``), on
            whose kind and links it is timed: transfers queue at what they share there. Empty: ranks in order, all of
            the cluster, at the pace of the slowest.

    Raises:
        UsageError: the stages wait for each other, the schedule lacks a slot, or ``devices`` do not fit the program or
            the cluster.
        ClusterError: a device has no peak that serves the precision.
    """
    every = [Slots(program, cluster, overlap=way, devices=devices) for way in ways(overlap)]
    return min((_Simulation(program, slots).timeline() for slots in every), key=lambda timeline: timeline.step_ns)


@dataclass(frozen=True, slots=True)
class _Ended:
    """The end of a step."""

    endings: tuple[tuple[Ending, ...], ...]
    """Per stage."""
    behind_ns: Sequence[int]
    """Per stage what of its gathers runs behind the next step."""
    step_ns: int


class _Simulation:
    """Working state of ``simulate``."""

    def __init__(self, program: Program, slots: Slots) -> None:
        self._program = program
        self._places, self._closing = slots.places, slots.closing
        self._passes, self._orders, self._channels = slots.passes, slots.orders, slots.channels

    def timeline(self) -> Timeline:
        """Play it, and account for it."""
        played = play(self._passes, self._orders, self._channels)
        ended = self._ended(played)
        endings, behind_ns, step_ns = ended.endings, ended.behind_ns, ended.step_ns
        peaks = Peaks(self._passes)
        return Timeline(
            step_ns=step_ns,
            stages=tuple(
                self._stage(stage, step_ns, each, endings[stage], behind_ns[stage], peaks.of(self._orders[stage], each))
                for stage, each in enumerate(played)
            ),
        )

    def _ended(self, played: Sequence[Played]) -> _Ended:
        """The end of the step: gathers of updated parameters behind the next step, as far as they go; where that ends
        later, none of them."""
        nothing = (0,) * len(played)
        slots = map(self._slots_of, self._orders, played)
        behind_ns = tuple(self._closing.behind_next_ns(stage, of_stage) for stage, of_stage in enumerate(slots))
        every = [self._ended_with(played, behind_ns)] if any(behind_ns) else []
        return min((*every, self._ended_with(played, nothing)), key=lambda ended: ended.step_ns)

    def _ended_with(self, played: Sequence[Played], behind_ns: Sequence[int]) -> _Ended:
        """The same with gathers that run so long behind the next step. A stage that waits for the rest there holds up
        all others."""
        endings = self._closing.endings([each.free_ns for each in played], behind_ns)
        ends = [end[-1].end_ns if end else each.free_ns for end, each in zip(endings, played, strict=True)]
        if any(behind_ns):
            late = [sum(e.end_ns - e.start_ns for e in of_stage if e.kind == UPDATED) for of_stage in endings]
            ends = [end - own + max(late) for end, own in zip(ends, late, strict=True)]
        return _Ended(endings, behind_ns, max(ends, default=0))

    def _slots_of(self, order: StageOrder, played: Played) -> Iterator[Slot]:
        free_ns = 0
        for index, start_ns, run in zip(order.passes, played.starts_ns, played.runs, strict=True):
            yield Slot(self._passes[index], start_ns - free_ns)
            free_ns = start_ns + run.duration_ns

    def _stage(
        self, stage: int, step_ns: int, played: Played, endings: Sequence[Ending], behind_ns: int, peak: Peak
    ) -> StageTimeline:
        order = self._orders[stage]
        communication, exposed = Counter[str]({UPDATED: behind_ns}), Counter[str]()
        compute_ns = sum(ending.end_ns - ending.start_ns for ending in endings if ending.kind == OPTIMIZER)
        for index, count in Counter(order.passes).items():
            each = self._passes[index]
            compute_ns += count * each.compute_ns
            _add(exposed, each.waited_ns.items(), count)
            _add(communication, (*each.waited_ns.items(), (PRODUCT, each.behind_ns)), count)
            _add(communication, ((job.kind, job.ns) for job in each.background), count)
            _add(communication, ((TRANSFER, route.ns) for _, route in each.receives), count)
        for jobs in order.loose.values():
            _add(communication, ((job.kind, job.ns) for job in jobs))
        _add(exposed, [*played.exposed_ns.items(), (TRANSFER, played.waited_ns)])
        for ending in endings:
            if ending.kind != OPTIMIZER:
                spent = [(ending.kind, ending.end_ns - ending.start_ns)]
                _add(communication, spent)
                _add(exposed, spent)
        return StageTimeline(
            stage=stage,
            step_ns=step_ns,
            compute_ns=compute_ns,
            communication_ns=dict(+communication),
            exposed_ns=dict(+exposed),
            memory=self._memory(stage, peak),
            record=self._record(stage, played, endings),
        )

    def _memory(self, stage: int, peak: Peak) -> StageMemory:
        stored = stored_by(self._program.decisions, self._places.held_by(stage))
        return StageMemory(
            parameter_bytes=stored.parameters,
            gradient_bytes=stored.gradients,
            optimizer_bytes=stored.optimizer,
            activation_bytes=peak.held.activations,
            working_bytes=peak.held.working,
            peak_ns=peak.time_ns,
        )

    def _record(self, stage: int, played: Played, endings: Sequence[Ending]) -> StageRecord:
        pipeline = self._program.decisions.pipeline
        suffixes = [""] * len(self._program.chunks)
        if pipeline is not None and pipeline.schedule.num_chunks > 1:
            suffixes = [f".{pipeline.schedule.rank_and_chunk(chunk)[1]}" for chunk in range(len(suffixes))]
        return StageRecord(
            stage=stage,
            suffixes=tuple(suffixes),
            passes=self._passes,
            order=self._orders[stage],
            played=played,
            endings=tuple(endings),
        )


def _add(counter: Counter[str], amounts: Iterable[tuple[str, int]], times: int = 1) -> None:
    for kind, ns in amounts:
        counter[kind] += times * ns
