"""The best cuts of segments by each objective."""

from __future__ import annotations

import numpy as np

from tap_planner.device_placement.segments import FAR_ENOUGH, Cut, Segments
from tap_planner.device_placement.sweep import Sweep

__all__ = ["least_busiest", "least_sum", "least_sum_within"]


def least_busiest(segments: Segments) -> Cut | None:
    """The cut whose longest segment, its tasks with what it receives and sends, is shortest; None if none fits.

    Segments are limited to little more than the least that the longest can take, then to more, until something is
    found: so most starts never come into question.
    """
    whole = int(segments.compute_ns[:, -1].max()) + int(np.abs(segments.steps.weight_ns).sum())
    shortest = max(1, segments.shortest())
    guess = shortest + shortest // 16
    while True:
        found = Sweep(segments, segments.busy_row, min(guess, whole)).busiest()
        if found is not None or guess >= whole:
            return found
        guess += 4 * (guess - shortest) + 1


def least_sum_within(segments: Segments, limit_ns: int) -> Cut | None:
    """The cut with the least sum of all tasks and of what every segment receives, no segment longer than a limit."""
    return Sweep(segments, [*segments.total_row, *segments.busy_row], limit_ns).total()


def least_sum(segments: Segments, below_ns: int = FAR_ENOUGH) -> Cut | None:
    """The cut with the least sum of all tasks and of what every segment receives.

    Args:
        segments: of an order.
        below_ns: some cut is known to take no longer.
    """
    single = segments.single()
    if single is not None:
        if single.objective_ns <= segments.rest_ns[0]:
            return single
        below_ns = min(below_ns, single.objective_ns)
    return Sweep(segments, segments.total_row, None, below_ns).total()
