"""A simulated step as a table of its stages, and as a picture of characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tap_planner_cli.show_text import heading, table
from tap_planner_cli.units import format_bytes, format_ns, share

if TYPE_CHECKING:
    from tap_planner.simulate import StageTimeline, Timeline

_WORK = (
    ("forward", "F", "green"),
    ("backward", "B", "blue"),
    ("input_backward", "I", "cyan"),
    ("weight_backward", "W", "magenta"),
    ("optimizer", "O", "yellow"),
)
"""Kinds of work in the main stream, with letter and colour."""
_IDLE = "."
_WIDEST = 160


def print_timeline(console: Console, timeline: Timeline) -> None:
    """Print what the time of every stage is made of, and when it does what."""
    heading(console, f"Timeline: {format_ns(timeline.step_ns)} a step, simulated")
    console.print(_shares(timeline))
    console.print()
    label = len(str(len(timeline.stages) - 1))
    columns = max(1, min(console.width, _WIDEST) - len("stage  ") - label)
    used = set[int]()
    for stage in timeline.stages:
        drawn = draw(stage, columns)
        used.update(drawn)
        line = Text(f"stage {stage.stage:>{label}} ", style="dim")
        for kind in drawn:
            letter, colour = _WORK[kind][1:] if kind >= 0 else (_IDLE, "dim")
            line.append(letter, style=colour)
        console.print(line, soft_wrap=True)
    names = [f"{letter} {kind.replace('_', ' ')}" for n, (kind, letter, _) in enumerate(_WORK) if n in used]
    per = format_ns(round(timeline.step_ns / columns))
    console.print(Text(", ".join([*names, f"{_IDLE} nothing; one character is {per}"]), style="dim"))


def draw(stage: StageTimeline, columns: int) -> tuple[int, ...]:
    """What fills most of each of ``columns`` equal parts of the step.

    Returns:
        For each part an index into the kinds of work; -1 where more than half of it is empty.
    """
    kinds = {kind: number for number, (kind, _, _) in enumerate(_WORK)}
    filled = np.zeros((len(_WORK), columns))
    edges = np.linspace(0, max(stage.step_ns, 1), columns + 1)
    for event in stage.events:
        if event.stream != "main":
            continue
        first, last = np.searchsorted(edges, (event.start_ns, event.end_ns), side="right") - 1
        part = slice(int(first), int(last) + 1)
        starts, ends = edges[:-1][part], edges[1:][part]
        inside = np.minimum(ends, event.end_ns) - np.maximum(starts, event.start_ns)
        filled[kinds[event.kind], part] += np.maximum(inside, 0)
    most = filled.argmax(axis=0)
    work = filled.sum(axis=0) * 2 >= edges[1:] - edges[:-1]
    return tuple(int(kind) if busy else -1 for kind, busy in zip(most, work, strict=True))


def _shares(timeline: Timeline) -> Table:
    step = timeline.step_ns
    kinds = list(dict.fromkeys(kind for stage in timeline.stages for kind, ns in stage.exposed_ns.items() if ns))
    rows = [
        (
            str(stage.stage),
            format_ns(stage.compute_ns),
            share(stage.compute_ns, step),
            share(stage.bubble_ns, step),
            *(share(stage.exposed_ns.get(kind, 0), step) for kind in kinds),
            share(sum(stage.hidden_ns.values()), step),
            format_bytes(stage.memory.peak_bytes),
            format_bytes(stage.memory.activation_bytes),
        )
        for stage in timeline.stages
    ]
    columns = ("stage", "compute", "share", "bubble", *kinds, "hidden", "peak memory", "activations")
    return table(columns, rows, right=columns)
