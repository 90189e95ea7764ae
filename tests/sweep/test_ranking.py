"""Which combinations are best."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from tap_planner.sweep import Outcome, Status, pareto_front, rank
from tests.sweep.tiny_sweeps import sweep_of

_SMALL = st.integers(0, 6)


@given(st.lists(st.tuples(_SMALL, _SMALL), max_size=12))
def test_the_front_is_what_nothing_dominates(points: list[tuple[int, int]]) -> None:
    """Against brute force, equal points alike."""

    def dominated(point: tuple[int, int]) -> bool:
        return any(other[0] <= point[0] and other[1] <= point[1] and other != point for other in points)

    found = pareto_front([point[0] for point in points], [point[1] for point in points])
    assert list(found) == [not dominated(point) for point in points]


def _planned(step_ns: int, memory_bytes: int, batch: int = 8, **more: int) -> Outcome:
    return Outcome(status=Status.PLANNED, step_ns=step_ns, memory_bytes=memory_bytes, batch=batch, **more)


def test_the_order_of_rows() -> None:
    """Plans by their time for each sample, then memory, then the grid; what has no plan last, by what it needs."""
    combinations = sweep_of("dp,tp,zero=0|1").combinations
    outcomes = {
        0: Outcome(status=Status.IMPOSSIBLE),
        1: _planned(100, 5),
        2: Outcome(status=Status.INFEASIBLE, least_memory_bytes=9),
        3: _planned(150, 4, batch=16),
        4: Outcome(status=Status.INFEASIBLE, least_memory_bytes=8),
        5: _planned(100, 5),
    }
    rows = rank(combinations, outcomes)
    assert [combinations.index(row.combination) for row in rows] == [3, 1, 5, 4, 2, 0]
    assert [row.rank for row in rows] == [1, 2, 3, None, None, None]
    assert [row.pareto for row in rows] == [True, False, False, False, False, False]
    assert rows[0].outcome.time_per_sample == Fraction(150, 16)


def test_the_order_by_another_objective() -> None:
    """What is to be least comes first, then the time; the front is always of time and memory."""
    combinations = sweep_of("dp,tp").combinations
    outcomes = {
        0: _planned(100, 50, objective_bytes=3),
        1: _planned(200, 40, objective_bytes=2),
        2: _planned(300, 60, objective_bytes=1),
    }
    by_memory = rank(combinations, outcomes, "memory")
    assert [combinations.index(row.combination) for row in by_memory] == [1, 0, 2]
    assert [row.pareto for row in by_memory] == [True, True, False]
    by_sent = rank(combinations, outcomes, "communication")
    assert [combinations.index(row.combination) for row in by_sent] == [2, 1, 0]
