"""How many activations a schedule holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tap_planner.schedule.pipeline import PipelineSchedule, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Most microbatches of a chunk that a rank holds at a time; with v chunks per rank each is 1/v of the rank."""

    until_input_backward: int
    """From the start of the forward to the end of the backward, or of that of inputs: all activations are held."""
    until_weight_backward: int
    """From the start of the forward to the end of the backward, or of that of parameters: what a product needs for its
    parameters' gradients is still held."""


def peak_in_flight(schedule: PipelineSchedule) -> tuple[InFlight, ...]:
    """Per rank the peaks of both counts (each at its own time; ``peak_bytes`` weighs both at the same time)."""
    ones, zeros = ((count,) * schedule.num_virtual_stages for count in (1, 0))
    until_input = peak_bytes(schedule, whole_bytes=ones, weight_bytes=zeros)
    until_weight = peak_bytes(schedule, whole_bytes=ones, weight_bytes=ones)
    return tuple(
        InFlight(until_input_backward=first, until_weight_backward=second)
        for first, second in zip(until_input, until_weight, strict=True)
    )


def peak_bytes(
    schedule: PipelineSchedule, *, whole_bytes: Sequence[int], weight_bytes: Sequence[int]
) -> tuple[int, ...]:
    """Most bytes of activations that each rank holds at a time.

    Args:
        schedule: a complete one.
        whole_bytes: per virtual stage, what a microbatch holds from the start of its forward to the end of its
            backward (whole, or of inputs).
        weight_bytes: per virtual stage, what it holds from the end of its backward of inputs to the end of that of
            parameters, where the backward is split.

    Returns:
        Per rank.
    """
    peaks: list[int] = []
    for rank, order in enumerate(schedule.orders):
        held = peak = 0
        stages = schedule.chunks_of(rank)
        for slot in order:
            stage = stages[slot.chunk]
            match slot.work:
                case Work.FORWARD:
                    held += whole_bytes[stage]
                case Work.BACKWARD:
                    held -= whole_bytes[stage]
                case Work.INPUT_BACKWARD:
                    held += weight_bytes[stage] - whole_bytes[stage]
                case Work.WEIGHT_BACKWARD:
                    held -= weight_bytes[stage]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


@dataclass(frozen=True, slots=True)
class Moment:
    """What a rank holds at a time, in microbatches of each of its chunks."""

    whole: tuple[int, ...]
    """All activations: between the start of the forward and the end of the backward, or of that of inputs."""
    waiting: tuple[int, ...]
    """What the backward of parameters waits with."""


def fullest_moments(schedule: PipelineSchedule) -> tuple[tuple[Moment, ...], ...]:
    """Per rank the first times at which it holds most microbatches whole, most waiting, and most of both together."""
    found: list[tuple[Moment, ...]] = []
    for rank, order in enumerate(schedule.orders):
        whole, waiting = ([0] * len(schedule.chunks_of(rank)) for _ in range(2))
        most = [(-1, Moment((), ())) for _ in range(3)]
        for slot in order:
            match slot.work:
                case Work.FORWARD:
                    whole[slot.chunk] += 1
                case Work.BACKWARD:
                    whole[slot.chunk] -= 1
                case Work.INPUT_BACKWARD:
                    whole[slot.chunk] -= 1
                    waiting[slot.chunk] += 1
                case Work.WEIGHT_BACKWARD:
                    waiting[slot.chunk] -= 1
            held = (sum(whole), sum(waiting), sum(whole) + sum(waiting))
            for number, count in enumerate(held):
                if count > most[number][0]:
                    most[number] = (count, Moment(tuple(whole), tuple(waiting)))
        found.append(tuple(dict.fromkeys(moment for _, moment in most)))
    return tuple(found)
