"""The orders of the named schedules, against published figures and what the papers say of them."""

from __future__ import annotations

import pytest

import tap_planner.schedule
from tap_planner.errors import UsageError
from tap_planner.schedule import SCHEDULES, ChunkOrder, PipelineSchedule, make_schedule
from tests.schedule.pipelines import KINDS, schedules, slots, stage_of


def test_fill_drain_runs_all_forwards_first() -> None:
    """Huang et al. 2019, figure 2c."""
    assert make_schedule("fill-drain", 3, 4).orders == (slots("F0 F1 F2 F3 B0 B1 B2 B3"),) * 3


def test_one_forward_one_backward_of_figure_4() -> None:
    """Narayanan et al. 2021, figure 4, above: devices 1 and 4 of 4, with 8 microbatches."""
    orders = make_schedule("1f1b", 4, 8).orders
    assert orders[0] == slots("F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7")
    assert orders[3] == slots("F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7")


def test_interleaved_of_figure_4() -> None:
    """Narayanan et al. 2021, figure 4, below: device 1 of 4, with 8 microbatches and 2 chunks."""
    assert make_schedule("interleaved", 4, 8, 2).orders[0] == slots(
        "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 F5.0 F6.0 B0.1 F7.0 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0.0 F7.1"
        " B1.0 B2.0 B3.0 B4.1 B5.1 B6.1 B7.1 B4.0 B5.0 B6.0 B7.0"
    )


def test_zb_h1_of_figure_3() -> None:
    """Qi et al. 2024 (ICLR), figure 3, above: devices 1 and 4 of 4, with 8 microbatches."""
    orders = make_schedule("zb-h1", 4, 8).orders
    assert orders[0] == slots("F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7")
    assert orders[3] == slots("F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7")


@pytest.mark.parametrize("schedule", schedules(range(1, 5), range(1, 7)), ids=lambda s: f"{s.name}-{s.num_stages}")
def test_virtual_stages_and_ranks_are_inverse(schedule: PipelineSchedule) -> None:
    """Every virtual stage lies where a walk through the model passes."""
    for rank in range(schedule.num_stages):
        for chunk in range(schedule.num_chunks):
            stage = schedule.virtual_stage(rank, chunk)
            assert stage == stage_of(schedule, rank, chunk)
            assert schedule.rank_and_chunk(stage) == (rank, chunk)


@pytest.mark.parametrize(("name", "v"), KINDS)
def test_orders_are_deterministic(name: str, v: int) -> None:
    """The same arguments give equal schedules, and every name is a schedule of that name."""
    first, second = (make_schedule(name, 4, 12, v) for _ in range(2))
    assert first == second
    assert first.name == name


def test_default_chunks() -> None:
    """Without a number of chunks zbv has two in a vee, the others one."""
    found = {name: make_schedule(name, 2, 4) for name in SCHEDULES if name != "interleaved"}
    assert {name: schedule.num_chunks for name, schedule in found.items()} == {
        "fill-drain": 1,
        "1f1b": 1,
        "zb-h1": 1,
        "zbv": 2,
    }
    assert [name for name, schedule in found.items() if schedule.chunk_order is ChunkOrder.VEE] == ["zbv"]


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("1f1B", 4, 8), "unknown pipeline schedule '1f1B' (did you mean '1f1b'?), expected fill-drain, 1f1b", "file"),
        (("1f1b", 4, 0), "'1f1b': num_microbatches is 0, expected at least 1", "1 or more"),
        (("zbv", 0, 8), "'zbv': num_stages is 0, expected at least 1", "1 or more"),
        (("zb-h1", 4, 8, 2), "'zb-h1': num_chunks is 2, expected 1", "Leave num_chunks out"),
        (("zbv", 4, 8, 3), "'zbv': num_chunks is 3, expected 2", "Leave num_chunks out"),
        (("interleaved", 4, 8), "'interleaved': num_chunks is not given, expected 2 or more", "how many chunks"),
        (("interleaved", 4, 8, 1), "'interleaved': num_chunks is 1, expected at least 2", "or use '1f1b'"),
        (
            ("interleaved", 4, 10, 2),
            "'interleaved': num_microbatches is 10, expected a multiple of the 4 pipeline ranks",
            "Choose 12 microbatches",
        ),
    ],
)
def test_wrong_arguments(arguments: tuple[str, int, int], message: str, hint: str) -> None:
    """A count that does not fit is named, with its value and a remedy."""
    with pytest.raises(UsageError) as caught:
        make_schedule(*arguments)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_public_names() -> None:
    """Every name in __all__ is there."""
    assert all(hasattr(tap_planner.schedule, name) for name in tap_planner.schedule.__all__)
