"""What passes send, prepared for playing: links, times, and the slots that receive it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tap_planner.simulate.overlap import Background
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.routes import Route
from tap_planner.simulate.running import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """What a stage does, first to last."""

    passes: tuple[int, ...]
    """Per slot an index into the passes."""
    microbatches: tuple[int, ...]
    """Per slot."""
    loose: Mapping[int, tuple[Background, ...]]
    """By position in the order: background that may start in that slot and must be done at the end of the last one."""


class Out(NamedTuple):
    """What a pass sends along one route, for a program of slots that are numbered stage by stage."""

    offset_ns: int
    """From the start of the pass, where no reductions of the end of the step run behind it."""
    position: int
    """Of the ``Send`` in the pass."""
    ns: int
    link_out: int
    """Number of the link, see ``outs_of``."""
    link_in: int
    target: int
    """The stage that receives it."""
    slots: Sequence[int]
    """Per microbatch the number of the slot that receives it; -1 where there is none."""
    lead_ns: int
    """From the start of that slot to when it waits."""
    route: Route


def outs_of(passes: Sequence[Pass], runs: Sequence[Run], orders: Sequence[StageOrder]) -> list[tuple[Out, ...]]:
    """Per pass what it sends.

    Links are numbered two by two: per stage that to the next stages, and that to the ones before. Links out of stages
    and links into stages are numbered each by themselves.
    """
    slots = _receiving_slots(passes, orders)
    leads = {
        (route.operator, route.forward): run.offsets_ns[position]
        for each, run in zip(passes, runs, strict=True)
        for position, route in each.receives
    }
    found: list[tuple[Out, ...]] = []
    for each, run in zip(passes, runs, strict=True):
        outs: list[Out] = []
        for position, route in each.sends:
            source, target = route.stages
            back = 0 if route.is_next(len(orders)) else 1
            outs.append(
                Out(
                    offset_ns=run.offsets_ns[position],
                    position=position,
                    ns=route.ns,
                    link_out=2 * source + back,
                    link_in=2 * target + back,
                    target=target,
                    slots=slots[route.chunks[1], route.forward],
                    lead_ns=leads[route.operator, route.forward],
                    route=route,
                )
            )
        found.append(tuple(outs))
    return found


def _receiving_slots(passes: Sequence[Pass], orders: Sequence[StageOrder]) -> Mapping[tuple[int, bool], list[int]]:
    """Per chunk and direction, per microbatch, the slot that receives."""
    count = max((number for order in orders for number in order.microbatches), default=-1) + 1
    tables: dict[tuple[int, bool], list[int]] = {}
    of_pass: list[list[list[int]]] = []
    for each in passes:
        keys = {(each.chunk, route.forward) for _, route in each.receives}
        of_pass.append([tables.setdefault(key, [-1] * count) for key in sorted(keys)])
    number = 0
    for order in orders:
        for index, microbatch in zip(order.passes, order.microbatches, strict=True):
            for table in of_pass[index]:
                table[microbatch] = number
            number += 1
    return tables
