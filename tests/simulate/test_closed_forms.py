"""Simulated steps of uniform pipelines, against the formulas of the schedules and against ``schedule.makespan``."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tap_planner.program import Program
from tap_planner.schedule import Durations, PipelineSchedule, Work, bubble_ns, in_flight, make_schedule, makespan
from tap_planner.simulate import StageTimeline, Timeline, simulate
from tests.schedule.pipelines import KINDS, random_schedule
from tests.simulate.pipelines import (
    LAYER_BYTES,
    LAYER_NS,
    SLOT_SLACK_NS,
    layer_starts,
    mlp,
    plain_cluster,
    replicated,
    uniform,
)

SIZES = [(2, 4), (4, 4), (4, 8), (4, 12)]
everywhere = pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(make_schedule(name, p, m, v), id=f"{name}-v{v}-p{p}-m{m}")
        for (name, v), (p, m) in itertools.product(KINDS, SIZES)
    ],
)


def layers_of(schedule: PipelineSchedule) -> int:
    """Two layers in each chunk."""
    return 2 * schedule.num_virtual_stages


def slack_ns(schedule: PipelineSchedule) -> int:
    """What everything but the layers may take on one way through the slots."""
    return SLOT_SLACK_NS * (3 * schedule.num_chunks * schedule.num_microbatches + 2 * schedule.num_virtual_stages)


@everywhere
def test_step_is_work_and_bubble(schedule: PipelineSchedule) -> None:
    """A rank's work and the published bubble, to the few nanoseconds that other operators and transfers take."""
    part = 2 * LAYER_NS
    timeline = simulate(uniform(layers_of(schedule), schedule), plain_cluster(schedule.num_stages))
    work = 3 * part * schedule.num_chunks * schedule.num_microbatches
    bubble = bubble_ns(
        schedule.name,
        schedule.num_stages,
        schedule.num_microbatches,
        forward_ns=part,
        input_backward_ns=part,
        weight_backward_ns=part,
    )
    assert work + bubble <= timeline.step_ns <= work + bubble + slack_ns(schedule)
    for stage in timeline.stages:
        assert work <= stage.compute_ns <= work + slack_ns(schedule)
        assert stage.bubble_ns == pytest.approx(bubble, abs=slack_ns(schedule))
        assert stage.utilisation == stage.compute_ns / timeline.step_ns


@everywhere
def test_peaks_are_what_is_in_flight(schedule: PipelineSchedule) -> None:
    """Between slots, each microbatch that a rank holds of a chunk takes its layers' operands (where the loss is, its
    operand too); within a slot, what is sent besides."""
    timeline = simulate(uniform(layers_of(schedule), schedule), plain_cluster(schedule.num_stages))
    last = schedule.rank_and_chunk(schedule.num_virtual_stages - 1)[0]
    for stage, found in enumerate(timeline.stages):
        counts = in_flight(schedule.name, schedule.num_stages, schedule.num_microbatches, schedule.num_chunks, stage)
        expected = counts.until_weight_backward * 2 * LAYER_BYTES
        between = max(_held_after_slots(found))
        within = max(point.activation_bytes for point in found.memory_curve)
        if stage != last:
            assert between == expected
            assert within == expected + LAYER_BYTES
        else:
            losses = counts.until_input_backward * LAYER_BYTES
            assert expected < between <= expected + losses
        assert between <= within
        assert within >= found.memory.activation_bytes


def _held_after_slots(stage: StageTimeline) -> Iterator[int]:
    """Activations at the end of every slot."""
    curve = stage.memory_curve
    times = [point.time_ns for point in curve]
    for event in stage.events:
        if event.stream == "main" and event.microbatch is not None:
            yield curve[bisect.bisect_right(times, event.end_ns) - 1].activation_bytes


@pytest.mark.parametrize("seed", range(12))
def test_slots_start_when_makespan_says(seed: int) -> None:
    """With unequal chunks and transfers that never queue, slot for slot as the schedule is timed by itself."""
    drawn = random_schedule(seed, chain=True)
    schedule = _of_one_kind(drawn)
    count = schedule.num_virtual_stages
    program = replicated(mlp(2 * count + 1), _unequal(count), schedule)
    timeline = simulate(program, plain_cluster(schedule.num_stages))
    timing = makespan(schedule, _durations(program, timeline))
    for stage, found in enumerate(timeline.stages):
        main = [event for event in found.events if event.stream == "main" and event.kind != "optimizer"]
        assert tuple(event.start_ns for event in main) == timing.start_ns[stage]
        assert tuple(event.end_ns for event in main) == timing.end_ns[stage]
        assert [event.label for event in main] == [schedule.slot_text(slot) for slot in schedule.orders[stage]]


def _of_one_kind(schedule: PipelineSchedule) -> PipelineSchedule:
    """With whole backwards only, as one with both parts in turn sends after the first of them."""
    orders = []
    for order in schedule.orders:
        whole = (replace(slot, work=Work.BACKWARD) if slot.work is Work.INPUT_BACKWARD else slot for slot in order)
        orders.append(tuple(slot for slot in whole if slot.work is not Work.WEIGHT_BACKWARD))
    return replace(schedule, orders=tuple(orders))


def _unequal(chunks: int) -> tuple[str, ...]:
    """Chunks of one, three, one, three ... layers."""
    starts = layer_starts(2 * chunks, chunks)
    return tuple(name if chunk % 2 == 0 else f"y{2 * chunk - 1}" for chunk, name in enumerate(starts))


def _durations(program: Program, timeline: Timeline) -> Durations:
    """Of the chunks, as the first microbatch takes them; transfers as long as they are."""
    times: dict[tuple[int, str], int] = {}
    transfers = {1}
    for stage in timeline.stages:
        for event in stage.events:
            if event.stream == "main" and event.chunk is not None:
                times.setdefault((event.chunk, event.kind), event.end_ns - event.start_ns)
            elif event.kind == "send":
                transfers.add(event.end_ns - event.start_ns)
    (transfer,) = transfers
    chunks = range(len(program.chunks))
    return Durations(
        forward_ns=tuple(times[chunk, "forward"] for chunk in chunks),
        input_backward_ns=tuple(times[chunk, "backward"] for chunk in chunks),
        weight_backward_ns=(0,) * len(chunks),
        transfer_ns=transfer,
    )


@pytest.mark.parametrize("name", ["zb-h1", "zbv"])
def test_split_backwards_start_when_makespan_says(name: str) -> None:
    """The same where the backward is in two parts."""
    schedule = make_schedule(name, 4, 8)
    program = uniform(layers_of(schedule), schedule)
    timeline = simulate(program, plain_cluster(4))
    times: dict[tuple[int | None, str], int] = {}
    for stage in timeline.stages:
        for event in stage.events:
            if event.stream == "main":
                times.setdefault((event.chunk, event.kind), event.end_ns - event.start_ns)
    forward, inputs, weights = (
        tuple(times[chunk, kind] for chunk in range(schedule.num_virtual_stages))
        for kind in ("forward", "input_backward", "weight_backward")
    )
    assert all(abs(ns - 2 * LAYER_NS) <= SLOT_SLACK_NS for ns in (*forward, *inputs, *weights))
    timing = makespan(
        schedule,
        Durations(forward_ns=forward, input_backward_ns=inputs, weight_backward_ns=weights, transfer_ns=1),
    )
    for stage, found in enumerate(timeline.stages):
        main = [event for event in found.events if event.stream == "main" and event.kind != "optimizer"]
        assert tuple(event.start_ns for event in main) == timing.start_ns[stage]
