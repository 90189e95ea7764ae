"""Objective A and memory model M of a pipeline, and of each of its stages.

A is the makespan of the schedule, where every slot takes the sum of its instructions and transfers hide behind the work
of the stages, and what the stage whose step ends last does beside: reductions of gradients, gathers and the optimizer,
as in ``additive``. M is that of the stage that holds most: its parameters, and the activations of as many microbatches
of its chunks as the schedule has in flight; where it leaves the backward of parameters for later, what waits for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tap_planner.program import Compute, Instruction, Program, Receive, Redistribute, Send
from tap_planner.schedule import Durations as SlotTimes
from tap_planner.schedule import makespan, peak_bytes
from tap_planner.simulate.durations import Durations

__all__ = ["StagePrices", "in_flight_bytes", "stage_times"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """What one stage does in a step."""

    compute_ns: int
    """Operators of all microbatches."""
    communication_ns: int
    """The collectives that they wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrices:
    """The slots of a pipeline in time."""

    makespan_ns: int
    stages: tuple[StageTime, ...]


def stage_times(program: Program, durations: Durations) -> StagePrices:
    """Time the slots of the schedule.

    Args:
        program: of a pipeline.
        durations: what its instructions take.
    """
    pipeline = program.decisions.pipeline
    assert pipeline is not None
    timing = _Slots(program, durations)
    parts = [[timing.of(part) for part in (c.forward, c.backward, c.weights)] for c in program.chunks]
    columns = [tuple(sum(chunk[part]) for chunk in parts) for part in range(3)]
    times = SlotTimes(
        forward_ns=columns[0],
        input_backward_ns=columns[1],
        weight_backward_ns=columns[2],
        transfer_ns=timing.transfer_ns,
    )
    played = makespan(pipeline.schedule, times)
    count = program.decisions.microbatches
    stages: list[StageTime] = []
    for stage in range(program.decisions.num_stages):
        own = [part for chunk, three in enumerate(parts) if program.stage_of(chunk) == stage for part in three]
        compute, communication = (count * sum(part[kind] for part in own) for kind in range(2))
        stages.append(StageTime(compute_ns=compute, communication_ns=communication))
    return StagePrices(makespan_ns=played.makespan_ns, stages=tuple(stages))


class _Slots:
    """What lists of instructions take."""

    def __init__(self, program: Program, durations: Durations) -> None:
        self._durations = durations
        self.transfer_ns = max(
            (
                durations.transfer_ns(instruction, (program.stage_of(number), instruction.peer))
                for number, chunk in enumerate(program.chunks)
                for instruction in (*chunk.forward, *chunk.backward)
                if isinstance(instruction, Send) and instruction.peer is not None
            ),
            default=0,
        )
        """The longest transfer between two stages."""

    def of(self, instructions: Iterable[Instruction]) -> tuple[int, int]:
        """Compute, and the collectives that are waited for."""
        compute = communication = 0
        for instruction in instructions:
            if isinstance(instruction, Compute):
                compute += self._durations.compute_ns(instruction)
            if isinstance(instruction, Compute | Redistribute | Receive):
                communication += sum(busy.ns for busy in self._durations.collectives(instruction))
        return compute, communication


def in_flight_bytes(
    program: Program, held: Sequence[int], waiting: Sequence[int], working: Sequence[int]
) -> tuple[int, ...]:
    """Per stage, the bytes of all activations when they are most.

    Args:
        program: of a pipeline.
        held: per chunk, of one microbatch, from its forward to its backward.
        waiting: per chunk, from the backward of inputs to that of parameters, where these are apart.
        working: per chunk, with what exists only while a region of it runs backward.
    """
    pipeline = program.decisions.pipeline
    assert pipeline is not None
    peaks = peak_bytes(pipeline.schedule, whole_bytes=tuple(held), weight_bytes=tuple(waiting))
    found: list[int] = []
    for stage, peak in enumerate(peaks):
        own = [chunk for chunk in range(len(held)) if program.stage_of(chunk) == stage]
        found.append(peak + max(working[chunk] - held[chunk] for chunk in own))
    return tuple(found)
