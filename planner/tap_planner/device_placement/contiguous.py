"""Contiguous placement: an order is cut into segments, one for each device, by dynamic programming.

Two objectives, since neither is the makespan (that depends on what runs at the same time):

``sequential``
    The sum of all tasks and of what every segment receives: the makespan of a step in which nothing runs at the same
    time as anything else.
``bottleneck``
    The longest segment: its tasks, what it receives and what it sends (each tensor once, however many read it). Of the
    cuts that are as good, the one with the least ``sequential``.

Both count tensors that cross borders exactly, also of orders that are not topological and of gradients, which go
backwards. What a device receives is priced on the link from the device before it in the sequence (the first: from the
second), what it sends on the link to the device after it (the last: to the one before). Under these prices each cut is
the best of its order and of the sequences of devices that are tried: memory (with shared parameters counted once per
device) and constraints hold, and devices may stay empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tap_planner.device_placement.cutting import least_busiest, least_sum, least_sum_within
from tap_planner.device_placement.problem import Placement, Problem
from tap_planner.device_placement.segments import Cut, Segments
from tap_planner.device_placement.sequences import device_sequences
from tap_planner.device_placement.traffic import Traffic, traffic_of

__all__ = ["Contiguous", "contiguous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contiguous:
    """The best cut by one objective."""

    objective: str
    """``sequential`` or ``bottleneck``."""
    objective_ns: int
    placement: Placement


def contiguous(
    problem: Problem, order: Sequence[int], *, traffic: Traffic | None = None, devices: Sequence[int] | None = None
) -> tuple[Contiguous, ...]:
    """The best cuts of an order, ``bottleneck`` first; none where no cut fits.

    Of sequences of devices that are as good, the first is taken; a placement that both objectives choose is given
    twice.

    Args:
        problem: what is placed.
        order: all groups.
        traffic: of the problem; made if it is not given.
        devices: where segments go; None: to all.
    """
    known = traffic_of(problem) if traffic is None else traffic
    best: dict[str, tuple[tuple[int, int], Cut]] = {}
    for sequence in device_sequences(problem, devices):
        segments = Segments(problem, known, order, sequence)
        busiest = least_busiest(segments)
        if busiest is None:
            continue  # no cut fits, by whatever objective
        tied = least_sum_within(segments, busiest.objective_ns)
        assert tied is not None
        total = least_sum(segments, tied.objective_ns)
        assert total is not None
        for objective, key, cut in (
            ("bottleneck", (busiest.objective_ns, tied.objective_ns), tied),
            ("sequential", (total.objective_ns, 0), total),
        ):
            if objective not in best or key < best[objective][0]:
                best[objective] = key, cut
    return tuple(
        Contiguous(objective=objective, objective_ns=key[0], placement=_placement(order, cut))
        for objective, (key, cut) in best.items()
    )


def _placement(order: Sequence[int], cut: Cut) -> Placement:
    devices = [0] * len(order)
    ends = [*(start for _, start in cut.starts[1:]), len(order)]
    for (device, start), end in zip(cut.starts, ends, strict=True):
        for group in order[start:end]:
            devices[group] = device
    return tuple(devices)
