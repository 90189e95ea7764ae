"""What is refused: incomplete orders, and orders that deadlock."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import networkx as nx
import pytest

from tap_planner.errors import UsageError
from tap_planner.schedule import ChunkOrder, PipelineSchedule, check
from tests.schedule.pipelines import Key, keys, needed, random_schedule, schedule_of, schedules


@pytest.mark.parametrize("p", range(1, 9))
def test_named_schedules_are_right(p: int) -> None:
    """Every schedule of every size passes."""
    for schedule in schedules(range(p, p + 1), range(1, 3 * p)):
        check(schedule)


def test_a_large_schedule() -> None:
    """A chain through 300 ranks meets no limit on recursion."""
    for schedule in schedules(range(300, 301), range(300, 301)):
        check(schedule)
    backwards = "B0 F0"
    with pytest.raises(UsageError, match="rank 299 at B0 waits for F0, which comes later in its own order"):
        check(schedule_of(*["F0 B0"] * 299, backwards, m=1))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (schedule_of("F0 F1 B0 B1", "F0 B0 B1", m=2), "rank 1: F1 is missing"),
        (schedule_of("F0 B0 F1", "F0 B0 F1 B1", m=2), "rank 0: B1 (or I1 and W1) is missing"),
        (schedule_of("F0 I0", m=1), "rank 0: W0 is missing"),
        (schedule_of("F0 W0", m=1), "rank 0: I0 is missing"),
        (schedule_of("F0 B0", m=2), "rank 0: F1 is missing"),
        (schedule_of("F0 B0", m=10**12), "rank 0: F1 is missing"),
        (schedule_of("F0.0 F0.1 B0.1", m=1, v=2), "rank 0: B0.0 (or I0.0 and W0.0) is missing"),
        (schedule_of("F0 F0 B0", m=1), "rank 0: F0 occurs twice"),
        (schedule_of("F0 I0 W0 W0", m=1), "rank 0: W0 occurs twice"),
        (schedule_of("F0 B0 W0", m=1), "rank 0: B0 and W0, expected a whole backward or a split one"),
        (schedule_of("F0 I0 B0", m=1), "rank 0: B0 and I0, expected a whole backward or a split one"),
        (schedule_of("F0 F1 B0 B1", m=1), "rank 0: F1 at position 1, expected microbatches 0 to 0 and chunks 0 to 0"),
        (schedule_of("F0 F0.1 B0", m=1), "rank 0: F0.1 at position 1, expected microbatches 0 to 0 and chunks 0 to 0"),
        (schedule_of("F0 B0", m=1, chunk_order=ChunkOrder.VEE), "1 chunks per rank in a vee, expected 2"),
        (replace(schedule_of("F0 B0", m=1), num_stages=2), "orders for 1 ranks, expected 2"),
        (replace(schedule_of("F0 B0", m=1), num_chunks=0), "num_chunks is 0, expected at least 1"),
    ],
)
def test_incomplete_orders(schedule: PipelineSchedule, message: str) -> None:
    """The slot that is missing, doubled or unknown is named with its rank."""
    with pytest.raises(UsageError) as caught:
        check(schedule)
    assert caught.value.message == f"pipeline schedule 'mine': {message}"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("schedule", "circle"),
    [
        (schedule_of("B0 F0", m=1), "rank 0 at B0 waits for F0, which comes later in its own order"),
        (schedule_of("F0 W0 I0", m=1), "rank 0 at W0 waits for I0, which comes later in its own order"),
        (
            schedule_of("F0 B0 F1 B1", "F0 F1 B0 B1", m=2),
            "rank 0 at B0 waits for B0 of rank 1, which comes after F1 there; rank 1 at F1 waits for F1 of rank 0,"
            " which comes after B0 there",
        ),
        (
            schedule_of("F0.0 F0.1 B0.1 B0.0", "F0.1 F0.0 B0.1 B0.0", m=1, v=2),
            "rank 0 at F0.1 waits for F0.0 of rank 1, which comes after F0.1 there; rank 1 at F0.1 waits for F0.1 of"
            " rank 0",
        ),
        (
            schedule_of("F0 F1 B0 B1", "F0 B0 F1 B1", "F0 F1 B0 B1", m=2),
            "rank 1 at B0 waits for B0 of rank 2, which comes after F1 there; rank 2 at F1 waits for F1 of rank 1,"
            " which comes after B0 there",
        ),
    ],
)
def test_deadlocks(schedule: PipelineSchedule, circle: str) -> None:
    """The ranks that wait for each other are named, each with what it waits for; others are not."""
    with pytest.raises(UsageError) as caught:
        check(schedule)
    assert caught.value.message == f"pipeline schedule 'mine': the ranks wait for each other: {circle}"
    assert "behind what it waits for" in caught.value.hint


def deadlocks(schedule: PipelineSchedule) -> bool:
    """Whether the graph of orders and dependencies has a cycle."""
    orders = keys(schedule)
    everything = {key for order in orders for key in order}
    graph: nx.DiGraph[Key] = nx.DiGraph()
    for order in orders:
        graph.add_edges_from(itertools.pairwise(order))
        graph.add_edges_from((need, key) for key in order for need in needed(key, schedule, everything))
    return not nx.is_directed_acyclic_graph(graph)


@pytest.mark.parametrize("seed", range(60))
def test_verdicts_are_those_of_the_graph(seed: int) -> None:
    """Orders with some slots swapped are refused exactly when the graph has a cycle."""
    draw = random.Random(seed)
    schedule = random_schedule(seed)
    check(schedule)
    orders = [list(order) for order in schedule.orders]
    for _ in range(draw.randint(1, 3)):
        order = draw.choice(orders)
        position = draw.randrange(len(order) - 1)
        order[position : position + 2] = reversed(order[position : position + 2])
    swapped = replace(schedule, orders=tuple(map(tuple, orders)))
    if deadlocks(swapped):
        with pytest.raises(UsageError, match="wait for each other"):
            check(swapped)
    else:
        check(swapped)
