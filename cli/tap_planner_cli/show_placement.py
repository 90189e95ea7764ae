"""A device placement as tables: what lies on which device, and what other orders would have made."""

from __future__ import annotations

from rich.console import Console

from tap_planner.plan import PlacementSection, PlanDocument, expand
from tap_planner_cli.tables import heading, table
from tap_planner_cli.units import format_bytes, format_count, format_ns, share

__all__ = ["fullest_text", "placement_text", "print_placement", "print_stretches"]

MAX_STRETCHES = 100
"""That are listed."""


def place_text(place: tuple[int, ...]) -> str:
    """``node 0, device 3``; levels beyond the node by their distance from it."""
    names = ["device", "node", *(f"level {number}" for number in range(2, len(place)))]
    return ", ".join(f"{name} {index}" for name, index in zip(names[: len(place)][::-1], place, strict=True))


def _dotted(place: tuple[int, ...]) -> str:
    """``0.3``: device 3 of node 0."""
    return ".".join(map(str, place))


def placement_text(document: PlanDocument, placement: PlacementSection) -> str:
    """``3 of 4 devices, lexico-topo by earliest-finish improved``."""
    total = len(document.mesh.ranks) + document.mesh.num_left_out
    by = f"{placement.order} by {placement.placer}" if placement.order else placement.placer
    return f"{format_count(len(placement.devices))} of {format_count(total)} devices, {by}"


def fullest_text(document: PlanDocument, placement: PlacementSection) -> str:
    """What the device that is nearest to its limit holds."""
    total = document.predicted.total_memory_bytes
    load = next(load for load in placement.devices if dict(load.memory_bytes) == dict(document.predicted.memory_bytes))
    of = "" if load.limit_bytes is None else f", {share(total, load.limit_bytes)} of {format_bytes(load.limit_bytes)}"
    return f"{format_bytes(total)} on {place_text(load.place)} ({load.kind}){of}, the fullest"


def print_placement(console: Console, document: PlanDocument, placement: PlacementSection) -> None:
    """What each device does, and what each order made."""
    heading(console, f"Placement: {placement_text(document, placement)}")
    busiest = max(document.predicted.step_ns, 1)
    rows = [
        (
            _dotted(load.place),
            load.kind,
            format_count(load.operators),
            format_ns(load.compute_ns),
            share(load.compute_ns, busiest),
            format_bytes(load.sent_bytes),
            format_bytes(load.total_memory_bytes),
            "-" if load.limit_bytes is None else share(load.total_memory_bytes, load.limit_bytes),
        )
        for load in placement.devices
    ]
    columns = ("device", "kind", "ops", "computes", "busy", "sends", "memory", "used")
    console.print(table(columns, rows, right=columns[2:]))
    _print_orders(console, placement)


def print_stretches(console: Console, document: PlanDocument, placement: PlacementSection) -> None:
    """Which operators run on which device, in the order in which they do."""
    if len(placement.devices) == 1:
        return
    stages = document.pipeline.stages
    heading(console, f"{len(stages)} stretches of operators, in the order in which they run forward")
    numbers = _num_operators(document)
    rows = [
        (_dotted(placement.devices[one.stage].place), format_count(count), one.first, one.last)
        for one, count in zip(stages[:MAX_STRETCHES], numbers, strict=False)
    ]
    console.print(table(("device", "ops", "from", "to"), rows, right=("ops",)))
    more = f"and {len(stages) - MAX_STRETCHES} more; " if len(stages) > MAX_STRETCHES else ""
    console.print(f"{more}tap-show --program lists every operator")


def _num_operators(document: PlanDocument) -> list[int]:
    """Of each stretch."""
    decisions = expand(document)
    place = {operator.id: index for index, operator in enumerate(decisions.operators)}
    return [place[one.last] - place[one.first] + 1 for one in document.pipeline.stages]


def _print_orders(console: Console, placement: PlacementSection) -> None:
    heading(console, "What each order made before it was improved")
    best = min(outcome.makespan_ns for outcome in placement.orders)
    rows = [
        (
            outcome.order or "one device",
            outcome.placer if outcome.order else "-",
            format_ns(outcome.makespan_ns),
            f"+{share(outcome.makespan_ns - best, max(best, 1))}" if outcome.makespan_ns > best else "the best",
            "yes" if outcome.fits else "no",
        )
        for outcome in placement.orders
    ]
    columns = ("order", "placer", "makespan", "behind", "fits")
    console.print(table(columns, rows, right=("makespan", "behind")))
