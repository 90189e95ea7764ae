"""The predicted time of one step: every collective with its latency, and what of it is hidden behind compute.

One microbatch is a pass of the main stream. Gradients of ZeRO 2 and 3 are reduced in every pass, those of ZeRO 0 and 1
in the last one. A bucket may be reduced when the last of its gradients is made; a ZeRO-3 gather may start with the
region that runs before the one that needs it. All must be done at the end of the pass; nothing overlaps with the
optimizer's step and the gathers after it. Over gloo nothing overlaps at all: its collectives need the cores that
compute, and ``tap-apply``, which runs there, waits for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tap_planner.cluster import Cluster
from tap_planner.program import (
    Compute,
    GatherParameters,
    Instruction,
    Phase,
    Program,
    Redistribute,
    ReduceGradients,
    ReduceShards,
    UpdateParameters,
)
from tap_planner.simulate.durations import Durations
from tap_planner.simulate.overlap import Background, Busy, hidden_ns

GRADIENT = "gradient"
"""Kind of hidden time: reductions of gradients."""
GATHER = "gather"
"""Kind of hidden time: ZeRO-3 gathers of parameters, prefetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one step is expected to take on the rank at coordinate 0."""

    compute_ns: int
    """Operators of all microbatches, and the optimizer."""
    communication_ns: int
    """All collectives, one after the other."""
    hidden: Mapping[str, int]
    """Communication that runs behind the main stream, by kind (``GRADIENT``, ``GATHER``)."""

    @property
    def hidden_ns(self) -> int:
        """All that is hidden."""
        return sum(self.hidden.values())

    @property
    def step_ns(self) -> int:
        """The step from end to end."""
        return self.compute_ns + self.communication_ns - self.hidden_ns


def predict(program: Program, cluster: Cluster) -> Prediction:
    """Predict the time of one step of a Program.

    Args:
        program: the plan, lowered.
        cluster: the devices that its mesh uses (``part_of``).
    """
    return _Predicting(program, cluster).result()


class _Predicting:
    """Working state of ``predict``."""

    def __init__(self, program: Program, cluster: Cluster) -> None:
        self._program = program
        self._durations = Durations(program, cluster)
        self._overlaps = cluster.library != "gloo"
        self._compute_ns = 0
        self._communication_ns = 0
        self._main: list[tuple[Busy, ...]] = []
        """What the main stream does at each instruction of a microbatch."""
        self._every: list[Background] = []
        """Background collectives of every microbatch."""
        self._once: list[Background] = []
        """Those of the last microbatch alone."""

    def result(self) -> Prediction:
        """Walk through a microbatch and the end of the step."""
        microbatches = self._program.decisions.microbatches
        self._microbatch()
        self._compute_ns *= microbatches
        self._communication_ns *= microbatches
        self._step()
        hidden: Counter[str] = Counter({GRADIENT: 0, GATHER: 0})
        for passes, background in ((microbatches - 1, self._every), (1, [*self._every, *self._once])):
            if self._overlaps and passes and background:
                for kind, ns in hidden_ns(self._main, background).items():
                    hidden[kind] += passes * ns
        return Prediction(compute_ns=self._compute_ns, communication_ns=self._communication_ns, hidden=dict(hidden))

    def _microbatch(self) -> None:
        instructions = self._program.microbatch
        self._made = _last_gradient(self._program, instructions)
        earliest = _prefetch(self._program, instructions)
        for position, instruction in enumerate(instructions):
            collectives = self._durations.collectives(instruction)
            self._communication_ns += sum(piece.ns for piece in collectives)
            pieces: tuple[Busy, ...] = ()
            match instruction:
                case Compute(phase=phase, operator=index):
                    ns = self._durations.operator_ns(index)[phase is Phase.BACKWARD]
                    self._compute_ns += ns
                    pieces = (Busy(ns), *collectives)
                case GatherParameters():
                    self._every.extend(_background(GATHER, collectives, start=earliest[position], needed=position))
                case ReduceGradients(bucket=bucket) | ReduceShards(bucket=bucket):
                    start = self._made.get(bucket, position)
                    self._every.extend(_background(GRADIENT, collectives, start=start))
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
                    self._once.extend(_background(GRADIENT, collectives, start=start))
                case UpdateParameters():
                    self._compute_ns += self._durations.update_ns()
                case _:
                    pass


def _background(
    kind: str, collectives: Iterable[Busy], *, start: int, needed: int | None = None
) -> Iterator[Background]:
    for piece in collectives:
        yield Background(kind=kind, ns=piece.ns, levels=piece.levels, start=start, needed=needed)


def _last_gradient(program: Program, instructions: Sequence[Instruction]) -> Mapping[int, int]:
    """Per bucket the position after the instruction that makes the last of its gradients."""
    bucket_of = {name: bucket.id for bucket in program.decisions.buckets for name in bucket.parameters}
    tensors = program.graph.tensors
    made: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        match instruction:
            case Compute(phase=Phase.BACKWARD, operator=index):
                operands = program.decisions.operators[index].inputs
                names = [operand.tensor for operand in operands if operand is not None and operand.gradient is not None]
            case Redistribute(phase=Phase.BACKWARD, redistribution=edge):
                names = [program.decisions.redistributions[edge].tensor]
            case _:
                continue
        for name in names:
            read = tensors[name].read
            if read is not None and read.parameter in bucket_of:
                made[bucket_of[read.parameter]] = position + 1
    return made


def _prefetch(program: Program, instructions: Sequence[Instruction]) -> list[int]:
    """Per position that of the first instruction of the region that runs before."""
    region_of: dict[int, int] = {}
    for number, region in enumerate(program.decisions.regions):
        for _ in region.operators:
            region_of[len(region_of)] = number
    following: list[object] = []
    """Per position, backwards: which region of which direction it belongs to, that of the next operator."""
    current: object = None
    for instruction in reversed(instructions):
        if isinstance(instruction, Compute):
            current = (region_of[instruction.operator], instruction.phase is not Phase.FORWARD)
        following.append(current)
    following.reverse()
    earliest: list[int] = []
    before = begin = 0
    for position, segment in enumerate(following):
        if position and segment != following[position - 1]:
            before, begin = begin, position
        earliest.append(before)
    return earliest
