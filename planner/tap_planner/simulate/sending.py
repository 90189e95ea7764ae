"""What passes send, prepared for playing: links, times, and the slots that receive it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tap_planner.schedule import Work
from tap_planner.simulate.devices import Channels
from tap_planner.simulate.overlap import Background, Levels
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
    links: tuple[int, ...]
    """Numbers of the links that it occupies, see ``outs_of``."""
    turn: int
    """What is sent at the same time comes by turn and number of the transfer, which are added up."""
    target: int
    """The stage that receives it."""
    slots: Sequence[int]
    """Per microbatch the number of the slot that receives it; -1 where there is none."""
    lead_ns: int
    """From the start of that slot to when it waits."""
    route: Route
    direction: str
    """``next`` or ``previous`` where each has links of its own; else empty."""
    levels: Levels
    """Whose links it uses together with what its two stages do; none where it stands still for nothing: over channels,
    and where its stage waits for it."""


def outs_of(
    passes: Sequence[Pass], runs: Sequence[Run], orders: Sequence[StageOrder], channels: Channels | None = None
) -> list[tuple[Out, ...]]:
    """Per pass what it sends.

    A transfer occupies its channels. Without channels each stage has, for each of the two directions along the
    pipeline, one link out and one link in: links are numbered two by two, per stage that to the next stages and that to
    the ones before, first those out of stages, then those into stages.

    Args:
        passes: what slots do.
        runs: per pass, when.
        orders: per stage.
        channels: where stages are devices of a cluster.
    """
    slots = _receiving_slots(passes, orders)
    leads = {
        (route.operator, route.forward): run.offsets_ns[position]
        for each, run in zip(passes, runs, strict=True)
        for position, route in each.receives
    }
    turns = [0] * len(passes) if channels is None else _turns(passes)
    found: list[tuple[Out, ...]] = []
    for each, run, turn in zip(passes, runs, turns, strict=True):
        outs: list[Out] = []
        for position, route in each.sends if channels is None else _by_device(each.sends, channels):
            source, target = route.stages
            if channels is not None:
                links, direction = channels.between(source, target), ""
            else:
                back = 0 if route.is_next(len(orders)) else 1
                links = (2 * source + back, 2 * (len(orders) + target) + back)
                direction = ("next", "previous")[back]
            outs.append(
                Out(
                    offset_ns=run.offsets_ns[position],
                    position=position,
                    ns=route.ns,
                    links=links,
                    turn=turn,
                    target=target,
                    slots=slots[route.chunks[1], route.forward],
                    lead_ns=leads[route.operator, route.forward],
                    route=route,
                    direction=direction,
                    levels=frozenset() if channels is not None or is_waited_for(each, position) else route.levels,
                )
            )
        found.append(tuple(outs))
    return found


def is_waited_for(given: Pass, position: int) -> bool:
    """Whether the main stream of a pass waits for what it sends at a position."""
    return any(piece.ns for piece in given.main[position])


def _turns(passes: Sequence[Pass]) -> list[int]:
    """Per pass when the program has it, whichever stage it is of: chunks forward, then back again; far enough apart for
    all transfers of one to come before the next."""
    forward = [each.works[0][0] is Work.FORWARD for each in passes]
    ranked = sorted(range(len(passes)), key=lambda i: (0, passes[i].chunk) if forward[i] else (1, -passes[i].chunk))
    turns = [0] * len(passes)
    for turn, index in enumerate(ranked):
        turns[index] = turn << 32
    return turns


def _by_device(sends: Sequence[tuple[int, Route]], channels: Channels) -> Sequence[tuple[int, Route]]:
    """Tensor by tensor, and each to devices by their ranks: so the placement library plays what is sent at a time."""
    if len(sends) < 2:
        return sends
    first: dict[str, int] = {}
    for position, route in sends:
        first.setdefault(route.tensor, position)
    return sorted(sends, key=lambda sent: (first[sent[1].tensor], channels.devices[sent[1].stages[1]]))


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
