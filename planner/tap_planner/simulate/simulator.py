"""One step of a Program in time: slots of its schedule on every stage, transfers between stages, the end of the step.

One rank stands for each stage: the ranks of a stage do the same. docs/simulator.md says what is simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tap_planner.cluster import Cluster
from tap_planner.program import Program
from tap_planner.simulate.closing import OPTIMIZER, Ending
from tap_planner.simulate.events import StageRecord
from tap_planner.simulate.memory import Peak, Peaks, stored_by
from tap_planner.simulate.playing import Played, play
from tap_planner.simulate.routes import TRANSFER
from tap_planner.simulate.slots import Slots
from tap_planner.simulate.timeline import StageMemory, StageTimeline, Timeline


def simulate(
    program: Program, cluster: Cluster, *, overlap: bool | None = None, devices: Sequence[int] = ()
) -> Timeline:
    """Simulate one step of a Program.

    Args:
        program: the plan, lowered.
        cluster: the devices that its stages use (``part_of``); with ``devices``, all that there are.
        overlap: whether anything runs behind the main stream of a stage; else it waits for every collective, and for
            every transfer that it sends. None: as the cluster's library can (gloo: nothing).
        devices: by stage, the rank in ``cluster`` of its one device (a device placement, ``PlacedPlan.devices``), on
            whose kind and links it is timed: transfers queue at what they share there. Empty: ranks in order, all of
            the cluster, at the pace of the slowest.

    Raises:
        UsageError: the stages wait for each other, the schedule lacks a slot, or ``devices`` do not fit the program or
            the cluster.
        ClusterError: a device has no peak that serves the precision.
    """
    return _Simulation(program, Slots(program, cluster, overlap=overlap, devices=devices)).timeline()


class _Simulation:
    """Working state of ``simulate``."""

    def __init__(self, program: Program, slots: Slots) -> None:
        self._program = program
        self._places, self._closing = slots.places, slots.closing
        self._passes, self._orders, self._channels = slots.passes, slots.orders, slots.channels

    def timeline(self) -> Timeline:
        """Play it, and account for it."""
        played = play(self._passes, self._orders, self._channels)
        endings = self._closing.endings([each.free_ns for each in played])
        peaks = Peaks(self._passes)
        ends = [end[-1].end_ns if end else each.free_ns for end, each in zip(endings, played, strict=True)]
        step_ns = max(ends, default=0)
        return Timeline(
            step_ns=step_ns,
            stages=tuple(
                self._stage(stage, step_ns, each, endings[stage], peaks.of(self._orders[stage], each))
                for stage, each in enumerate(played)
            ),
        )

    def _stage(self, stage: int, step_ns: int, played: Played, endings: Sequence[Ending], peak: Peak) -> StageTimeline:
        order = self._orders[stage]
        communication, exposed = Counter[str](), Counter[str]()
        compute_ns = sum(ending.end_ns - ending.start_ns for ending in endings if ending.kind == OPTIMIZER)
        for index, count in Counter(order.passes).items():
            each = self._passes[index]
            compute_ns += count * each.compute_ns
            _add(exposed, each.waited_ns.items(), count)
            _add(communication, each.waited_ns.items(), count)
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
