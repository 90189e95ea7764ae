"""The schedules by name."""

from __future__ import annotations

from tap_planner.errors import UsageError
from tap_planner.schedule.orders import (
    FILL_DRAIN,
    INTERLEAVED,
    ONE_FORWARD_ONE_BACKWARD,
    fill_drain,
    interleaved,
    one_forward_one_backward,
)
from tap_planner.schedule.pipeline import PipelineSchedule
from tap_planner.schedule.zero_bubble import ZB_H1, ZBV, zb_h1, zbv
from tap_planner.yaml_entries import near_miss

SCHEDULES = (FILL_DRAIN, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED, ZB_H1, ZBV)
"""Names that ``make_schedule`` knows."""


def make_schedule(name: str, num_stages: int, num_microbatches: int, num_chunks: int | None = None) -> PipelineSchedule:
    """Make the schedule of a name.

    Args:
        name: one of ``SCHEDULES``.
        num_stages: p, ranks of the pipeline.
        num_microbatches: m.
        num_chunks: v, chunks of the model per rank; None for 1 (2 for ``zbv``). ``interleaved`` asks for a number.

    Raises:
        UsageError: for an unknown name, or a count that does not fit the schedule.
    """
    check_name(name)
    if name == INTERLEAVED:
        if num_chunks is None:
            raise UsageError(
                f"pipeline schedule {INTERLEAVED!r}: num_chunks is not given, expected 2 or more",
                hint="Say how many chunks of the model each rank holds.",
            )
        return interleaved(num_stages, num_microbatches, num_chunks)
    expected = 2 if name == ZBV else 1
    if num_chunks not in (None, expected):
        raise UsageError(
            f"pipeline schedule {name!r}: num_chunks is {num_chunks}, expected {expected}",
            hint=f"Leave num_chunks out, or use {INTERLEAVED!r}.",
        )
    makers = {FILL_DRAIN: fill_drain, ONE_FORWARD_ONE_BACKWARD: one_forward_one_backward, ZB_H1: zb_h1, ZBV: zbv}
    return makers[name](num_stages, num_microbatches)


def check_name(name: str) -> None:
    """Refuse a name that is none of ``SCHEDULES``.

    Raises:
        UsageError: with the nearest name.
    """
    if name not in SCHEDULES:
        raise UsageError(
            f"unknown pipeline schedule {name!r}{near_miss(name, SCHEDULES)}, expected {', '.join(SCHEDULES)}",
            hint="Choose one of these, or give an order of your own as a file.",
        )
