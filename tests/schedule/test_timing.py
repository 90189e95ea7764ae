"""Times of slots: against iteration to a fixed point, and by hand."""

from __future__ import annotations

import pytest

from tap_planner.errors import UsageError
from tap_planner.schedule import Durations, PipelineSchedule, Slot, make_schedule, makespan, picture, slot_graph
from tests.schedule.pipelines import (
    B,
    F,
    I,
    Key,
    W,
    keys,
    needed,
    random_durations,
    random_schedule,
    schedule_of,
    schedules,
)


def fixed_point(schedule: PipelineSchedule, durations: Durations) -> dict[Key, int]:
    """The end of each slot: all begin at 0 and are put off until none begins before what it needs."""
    orders = keys(schedule)
    everything = {key for order in orders for key in order}
    rank_of = {key: rank for rank, order in enumerate(orders) for key in order}

    def length(key: Key) -> int:
        inputs, weights = durations.input_backward_ns, durations.weight_backward_ns
        parts = {F: [durations.forward_ns], I: [inputs], W: [weights], B: [inputs, weights]}
        return sum(times[key[2]] for times in parts[key[0]])

    end = {key: length(key) for key in everything}
    changed = True
    while changed:
        changed = False
        for order in orders:
            for before, key in zip((None, *order), order, strict=False):
                arrivals = [end[before]] if before else [0]
                for need in needed(key, schedule, everything):
                    arrivals.append(end[need] + durations.transfer_ns * (rank_of[need] != rank_of[key]))
                if max(arrivals) + length(key) > end[key]:
                    end[key] = max(arrivals) + length(key)
                    changed = True
    return end


@pytest.mark.parametrize("schedule", [*schedules(range(1, 5), range(1, 7)), *map(random_schedule, range(40))])
def test_times_are_the_least_fixed_point(schedule: PipelineSchedule) -> None:
    """Every slot ends when iteration says, with unequal times and slow transfers."""
    durations = random_durations(schedule, seed=schedule.num_slots)
    expected = fixed_point(schedule, durations)
    timing = makespan(schedule, durations)
    assert timing.end_ns == tuple(tuple(expected[key] for key in order) for order in keys(schedule))
    assert timing.makespan_ns == max(expected.values())


def test_starts_busy_and_idle_by_hand() -> None:
    """Two ranks, two microbatches, forward 2, backward 1 + 2, transfers 1."""
    schedule = schedule_of("F0 F1 B0 B1", "F0 B0 F1 I1 W1", m=2)
    durations = Durations.uniform(2, forward_ns=2, input_backward_ns=1, weight_backward_ns=2, transfer_ns=1)
    timing = makespan(schedule, durations)
    assert timing.start_ns == ((0, 2, 9, 12), (3, 5, 8, 10, 11))
    assert timing.end_ns == ((2, 4, 12, 15), (5, 8, 10, 11, 13))
    assert timing.makespan_ns == 15
    assert timing.busy_ns == (10, 10)
    assert timing.idle_ns == (5, 5)


@pytest.mark.parametrize("m", range(1, 7))
def test_fill_drain_pays_each_transfer_twice(m: int) -> None:
    """With transfers of time t fill-drain's bubble is (p-1) (F + B + W + 2t)."""
    durations = Durations.uniform(4, forward_ns=5, input_backward_ns=6, weight_backward_ns=3, transfer_ns=2)
    assert makespan(make_schedule("fill-drain", 4, m), durations).makespan_ns == m * 14 + 3 * (14 + 4)


def test_no_transfer_inside_a_rank() -> None:
    """The last rank of a vee hands over to itself at once."""
    schedule = make_schedule("zbv", 1, 1)
    durations = Durations.uniform(2, forward_ns=1, input_backward_ns=1, weight_backward_ns=1, transfer_ns=100)
    assert makespan(schedule, durations).makespan_ns == 6


def test_dependencies_of_slots() -> None:
    """A slot waits for the neighbour's slot, its own forward and its own backward of inputs."""
    graph = slot_graph(schedule_of("F0 B0", "F0 I0 W0", m=1))
    assert graph.dependencies(0, 0) == ()
    assert graph.dependencies(0, 1) == ((0, 0), (1, 1))
    assert graph.dependencies(1, 0) == ((0, 0),)
    assert graph.dependencies(1, 1) == ((1, 0),)
    assert graph.dependencies(1, 2) == ((1, 1),)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "message"),
    [
        (make_schedule("zbv", 2, 2), 2, "'zbv': times of 2 virtual stages, expected 4"),
        (schedule_of("B0 F0", m=1), 1, "'mine': the ranks wait for each other"),
        (schedule_of("F0 B0", "F0", m=1), 2, "'mine': rank 0: B0 needs a slot that is in no order"),
    ],
)
def test_what_cannot_be_timed(schedule: PipelineSchedule, num_stages: int, message: str) -> None:
    """Times that do not fit and orders that do not run are errors."""
    durations = Durations.uniform(num_stages, forward_ns=1, input_backward_ns=1, weight_backward_ns=1)
    with pytest.raises(UsageError, match=message):
        makespan(schedule, durations)


def test_picture_by_hand() -> None:
    """Cells are units; a whole backward takes two."""
    assert picture(schedule_of("F0 F1 B0 B1", "F0 I0 F1 I1 W0 W1", m=2)) == (
        "rank 0 |F0F1..B0==B1==|\nrank 1 |..F0I0F1I1W0W1|"
    )


def test_slots_are_values() -> None:
    """Equal slots are one key."""
    assert {Slot(F, 1), Slot(F, 1, 0)} == {Slot(F, 1)}
