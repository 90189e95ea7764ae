"""The predicted time of one step: every collective with its latency, and what of it is hidden behind compute.

A Program with a pipeline is simulated (``simulator``), and its busiest stage tells the step. Without one the step is
counted, to the same result: one microbatch is a pass of the main stream. Gradients of ZeRO 2 and 3 are reduced in every
pass, those of ZeRO 0 and 1 in the last one. A bucket may be reduced when the last of its gradients is made; a ZeRO-3
gather may start with the region that runs before the one that needs it. All must be done at the end of the pass;
nothing overlaps with the optimizer's step and the gathers after it. Over gloo nothing overlaps at all: its collectives
need the cores that compute, and ``tap-apply``, which runs there, waits for each. ``Overlap`` says what is hidden where
another runtime is to run the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tap_planner.cluster import Cluster
from tap_planner.plan import AS_LIBRARY, Overlap, overlap_of
from tap_planner.program import (
    Compute,
    GatherParameters,
    GatherUpdated,
    Phase,
    Program,
    ReduceGradients,
    ReduceShards,
    UpdateParameters,
)
from tap_planner.simulate.backgrounds import GATHER, GRADIENT, UPDATED, Regions, background, first_reads, last_gradients
from tap_planner.simulate.durations import Durations
from tap_planner.simulate.overlap import Background, Busy, behind_ns, hidden_ns
from tap_planner.simulate.products import PRODUCT, Behind, Products
from tap_planner.simulate.routes import TRANSFER
from tap_planner.simulate.simulator import simulate
from tap_planner.simulate.slots import ways
from tap_planner.simulate.timeline import StageTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one step is expected to take on the rank at coordinate 0, in a pipeline on that of the busiest stage."""

    compute_ns: int
    """Operators of all microbatches, and the optimizer."""
    communication_ns: int
    """All collectives, one after the other, and transfers from other stages."""
    hidden: Mapping[str, int]
    """Communication that runs behind something else, by kind: ``GRADIENT``, ``GATHER``; in a pipeline ``TRANSFER``;
    with ``Overlap.ALL`` also ``PRODUCT`` and ``UPDATED``."""
    bubble_ns: int = 0
    """In a pipeline: what the stage waits for other stages."""

    @property
    def hidden_ns(self) -> int:
        """All that is hidden."""
        return sum(self.hidden.values())

    @property
    def step_ns(self) -> int:
        """The step from end to end."""
        return self.compute_ns + self.communication_ns - self.hidden_ns + self.bubble_ns


def predict(
    program: Program, cluster: Cluster, devices: Sequence[int] = (), *, overlap: Overlap | None = None
) -> Prediction:
    """Predict the time of one step of a Program.

    Args:
        program: the plan, lowered.
        cluster: the devices that its mesh uses (``part_of``); with ``devices``, all that there are.
        devices: by stage, the rank in ``cluster`` of its one device (a device placement), see ``simulate``.
        overlap: what runs behind something else, see ``simulate``.

    Raises:
        UsageError: as ``simulate``.
        ClusterError: a device has no peak that serves the precision.
    """
    if program.decisions.pipeline is not None:
        return _of_stage(simulate(program, cluster, overlap=overlap, devices=devices).busiest, overlap)
    every = [_Predicting(program, cluster, devices, way).result() for way in ways(overlap)]
    return min(every, key=lambda prediction: prediction.step_ns)


def _of_stage(stage: StageTimeline, overlap: Overlap | None) -> Prediction:
    hidden = stage.hidden_ns
    others = (PRODUCT, UPDATED) if overlap is Overlap.ALL else ()
    return Prediction(
        compute_ns=stage.compute_ns,
        communication_ns=sum(stage.communication_ns.values()),
        hidden={kind: hidden.get(kind, 0) for kind in (GRADIENT, GATHER, TRANSFER, *others)},
        bubble_ns=stage.bubble_ns,
    )


class _Predicting:
    """Working state of ``predict``."""

    def __init__(self, program: Program, cluster: Cluster, devices: Sequence[int], overlap: Overlap | None) -> None:
        self._program = program
        self._durations = Durations(program, cluster, devices=devices)
        self._overlap = overlap or overlap_of(AS_LIBRARY, cluster.library)
        self._behind: Mapping[int, Behind] = {}
        """What runs behind products, by position in a microbatch."""
        self._compute_ns = 0
        self._communication_ns = 0
        self._main: list[tuple[Busy, ...]] = []
        """What the main stream does at each instruction of a microbatch."""
        self._every: list[Background] = []
        """Background collectives of every microbatch."""
        self._once: list[Background] = []
        """Those of the last microbatch alone."""
        self._updated: list[Background] = []
        """Those of the first microbatch of the next step."""

    def result(self) -> Prediction:
        """Walk through a microbatch and the end of the step."""
        microbatches = self._program.decisions.microbatches
        self._microbatch()
        self._compute_ns *= microbatches
        self._communication_ns *= microbatches
        self._step()
        hidden: Counter[str] = Counter({GRADIENT: 0, GATHER: 0})
        if self._overlap is Overlap.ALL:
            hidden[PRODUCT] = microbatches * sum(each.hidden_ns for each in self._behind.values())
            hidden[UPDATED] = behind_ns(self._main, self._every, self._updated)
        for passes, jobs in ((microbatches - 1, self._every), (1, [*self._every, *self._once])):
            if self._overlap is not Overlap.NONE and passes and jobs:
                for kind, ns in hidden_ns(self._main, jobs).items():
                    hidden[kind] += passes * ns
        return Prediction(compute_ns=self._compute_ns, communication_ns=self._communication_ns, hidden=dict(hidden))

    def _microbatch(self) -> None:
        instructions = self._program.microbatch
        self._made = last_gradients(self._program, instructions)
        self._reads = first_reads(self._program, instructions)
        earliest = Regions(self._program).earliest(instructions)
        if self._overlap is Overlap.ALL:
            self._behind = Products(self._program, self._durations).of(instructions)
        for position, instruction in enumerate(instructions):
            if position in self._behind:
                given = self._behind[position]
                self._compute_ns += given.compute_ns
                self._communication_ns += given.waited_ns + given.hidden_ns
                self._main.append(given.pieces)
                continue
            collectives = self._durations.collectives(instruction)
            self._communication_ns += sum(piece.ns for piece in collectives)
            pieces: tuple[Busy, ...] = ()
            match instruction:
                case Compute(phase=phase, operator=index):
                    ns = self._durations.operator_ns(index)[phase is Phase.BACKWARD]
                    self._compute_ns += ns
                    pieces = (Busy(ns), *collectives)
                case GatherParameters():
                    self._every.extend(background(GATHER, collectives, start=earliest[position], needed=position))
                case ReduceGradients(bucket=bucket) | ReduceShards(bucket=bucket):
                    start = self._made.get(bucket, position)
                    self._every.extend(background(GRADIENT, collectives, start=start))
                case _:
                    pieces = collectives
            self._main.append(pieces)

    def _step(self) -> None:
        for instruction in self._program.step:
            collectives = self._durations.collectives(instruction)
            self._communication_ns += sum(piece.ns for piece in collectives)
            match instruction:
                case ReduceGradients(bucket=bucket) | ReduceShards(bucket=bucket):
                    start = self._made.get(bucket, len(self._main))
                    self._once.extend(background(GRADIENT, collectives, start=start))
                case UpdateParameters():
                    self._compute_ns += self._durations.update_ns()
                case GatherUpdated(bucket=bucket):
                    self._updated.extend(background(UPDATED, collectives, start=0, needed=self._reads.get(bucket)))
                case _:
                    pass
