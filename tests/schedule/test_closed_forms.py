"""Bubbles and peaks as formulas, against the timed and counted orders."""

from __future__ import annotations

import itertools

import pytest

from tap_planner.errors import UsageError
from tap_planner.schedule import (
    Durations,
    PipelineSchedule,
    bubble_ns,
    in_flight,
    make_schedule,
    makespan,
    peak_bytes,
    peak_in_flight,
)
from tests.schedule.pipelines import F, I, W, random_durations, random_schedule, schedules, slots

TIMES = (
    (10, 10, 10),
    (10, 10, 5),
    (10, 12, 8),
    (10, 15, 10),
    (7, 10, 14),
    (3, 11, 5),
    (10, 10, 25),
    (12, 8, 6),
    (9, 2, 4),
)
"""F, B and W."""


def bubble(schedule: PipelineSchedule, times: tuple[int, int, int]) -> int:
    """Makespan less the work of a rank, timed."""
    forward, inputs, weights = times
    durations = Durations.uniform(
        schedule.num_virtual_stages, forward_ns=forward, input_backward_ns=inputs, weight_backward_ns=weights
    )
    work = schedule.num_microbatches * schedule.num_chunks * sum(times)
    return makespan(schedule, durations).makespan_ns - work


def formula(schedule: PipelineSchedule, times: tuple[int, int, int]) -> int:
    """The closed form."""
    forward, inputs, weights = times
    return bubble_ns(
        schedule.name,
        schedule.num_stages,
        schedule.num_microbatches,
        forward_ns=forward,
        input_backward_ns=inputs,
        weight_backward_ns=weights,
    )


@pytest.mark.parametrize("p", range(1, 9))
def test_bubbles_are_those_of_the_formulas(p: int) -> None:
    """For every schedule, m and times for which there is a formula, timing gives the same."""
    for schedule, times in itertools.product(schedules(range(p, p + 1), range(1, 3 * p + 2)), TIMES):
        try:
            expected = formula(schedule, times)
        except UsageError:
            assert schedule.name == "zbv"
            continue
        assert bubble(schedule, times) == expected, (schedule.name, schedule.num_microbatches, times)


@pytest.mark.parametrize("p", range(1, 7))
def test_published_bubbles(p: int) -> None:
    """With three equal times t of a rank and m = 2p the papers' bubbles: (p-1) t times 3, 3, 3/v, 1 and 1/2."""
    whole = {"fill-drain": 36, "1f1b": 36, "zb-h1": 12, "zbv": 6}
    for name, expected in whole.items():
        part = 6 if name == "zbv" else 12
        assert bubble(make_schedule(name, p, 2 * p), (part, part, part)) == (p - 1) * expected
    for v in (2, 3, 4):
        part = 12 // v
        assert bubble(make_schedule("interleaved", p, 2 * p, v), (part, part, part)) == (p - 1) * 36 // v


@pytest.mark.parametrize("p", range(1, 7))
def test_zbv_has_no_bubble_inside(p: int) -> None:
    """With equal times and m >= 2p-1 no rank idles between its first and its last slot."""
    schedule = make_schedule("zbv", p, 2 * p - 1)
    timing = makespan(schedule, Durations.uniform(2 * p, forward_ns=1, input_backward_ns=1, weight_backward_ns=1))
    for starts, ends, busy in zip(timing.start_ns, timing.end_ns, timing.busy_ns, strict=True):
        assert ends[-1] - starts[0] == busy


@pytest.mark.parametrize(
    ("m", "times"), [(6, (10, 10, 5)), (8, (11, 10, 10))], ids=["few microbatches", "long forward"]
)
def test_zbv_outside_its_conditions(m: int, times: tuple[int, int, int]) -> None:
    """Where no formula holds the error says which would."""
    with pytest.raises(UsageError, match=f"'zbv': no formula for the bubble of {m} microbatches on 4 ranks") as caught:
        formula(make_schedule("zbv", 4, m), times)
    assert "makespan" in caught.value.hint


@pytest.mark.parametrize("p", range(1, 9))
def test_peaks_are_those_of_the_formulas(p: int) -> None:
    """For every schedule, m and rank, counting gives the same."""
    for schedule in schedules(range(p, p + 1), range(1, 3 * p + 2)):
        expected = tuple(
            in_flight(schedule.name, p, schedule.num_microbatches, schedule.num_chunks, rank) for rank in range(p)
        )
        assert peak_in_flight(schedule) == expected, (schedule.name, schedule.num_microbatches)


@pytest.mark.parametrize("seed", range(40))
def test_peaks_against_intervals(seed: int) -> None:
    """What is held at a time is what began and did not end, by the times of a run."""
    schedule = random_schedule(seed)
    timing = makespan(schedule, random_durations(schedule, seed))
    for rank, (peaks, order) in enumerate(zip(peak_in_flight(schedule), schedule.orders, strict=True)):
        begin: dict[tuple[int, int], int] = {}
        inputs: dict[tuple[int, int], int] = {}
        weights: dict[tuple[int, int], int] = {}
        for slot, start, end in zip(order, timing.start_ns[rank], timing.end_ns[rank], strict=True):
            key = (slot.microbatch, slot.chunk)
            if slot.work is F:
                begin[key] = start
            if slot.work not in (F, W):
                inputs[key] = end
            if slot.work not in (F, I):
                weights[key] = end
        counts = [
            max(sum(begin[key] <= now < stop[key] for key in begin) for now in begin.values())
            for stop in (inputs, weights)
        ]
        assert counts == [peaks.until_input_backward, peaks.until_weight_backward]


def test_peak_bytes_of_an_order_by_hand() -> None:
    """Whole activations 10 and 100, of which 4 and 40 stay for the parameters: the peak lies in between."""
    schedule = PipelineSchedule(
        name="mine",
        num_stages=1,
        num_microbatches=2,
        num_chunks=2,
        orders=(slots("F0.0 F0.1 I0.1 F1.0 I0.0 W0.0 F1.1 W0.1 I1.1 I1.0 W1.0 W1.1"),),
    )
    # 10, 110, 50, 60, 54, 50, 150, 110, 50, 44, 40, 0
    assert peak_bytes(schedule, whole_bytes=(10, 100), weight_bytes=(4, 40)) == (150,)
