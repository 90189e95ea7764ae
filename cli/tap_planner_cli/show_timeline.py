"""A simulated step as a table of its stages, and as a picture of characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tap_planner_cli.tables import heading, table
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
_LEFT_OUT = " ~ "
"""Between the begin and the end of a step, where what lies between is not drawn."""
_WIDEST = 160
CHARACTERS = 2
"""Least characters of the shortest kind of slot."""


def print_timeline(console: Console, timeline: Timeline) -> None:
    """Print what the time of every stage is made of, and when it does what."""
    heading(console, f"Timeline: {format_ns(timeline.step_ns)} a step, simulated")
    console.print(_shares(timeline))
    console.print()
    label = len(str(len(timeline.stages) - 1))
    columns = max(1, min(console.width, _WIDEST) - len("stage  ") - label)
    windows, per_ns = _windows(timeline, columns)
    used = set[int]()
    for stage in timeline.stages:
        line = Text(f"stage {stage.stage:>{label}} ", style="dim")
        for number, (start_ns, end_ns, width) in enumerate(windows):
            line.append(_LEFT_OUT if number else "", style="dim")
            drawn = draw(stage, width, start_ns, end_ns)
            used.update(drawn)
            for kind in drawn:
                letter, colour = _WORK[kind][1:] if kind >= 0 else (_IDLE, "dim")
                line.append(letter, style=colour)
        console.print(line, soft_wrap=True)
    names = [f"{letter} {kind.replace('_', ' ')}" for n, (kind, letter, _) in enumerate(_WORK) if n in used]
    legend = ", ".join([*names, f"{_IDLE} nothing; one character is {format_ns(round(per_ns))}"])
    if len(windows) > 1:
        shown = format_ns(round(windows[0][1] - windows[0][0]))
        legend += f"; the first and the last {shown}, --trace FILE has all of it"
    console.print(Text(legend, style="dim"))


def _windows(timeline: Timeline, columns: int) -> tuple[tuple[tuple[float, float, int], ...], float]:
    """What is drawn, as (begin, end, characters), and what a character stands for: the whole step, or, where slots are
    too short to be seen in it, its begin and its end.

    Args:
        timeline: the step.
        columns: characters of a line.
    """
    step = max(timeline.step_ns, 1)
    kinds = [kind for kind, _, _ in _WORK]
    took: dict[str, list[int]] = {}
    for event in timeline.stages[0].events:
        if event.stream == "main" and event.kind in kinds[:-1]:
            took.setdefault(event.kind, []).append(event.end_ns - event.start_ns)
    shortest = min((float(np.median(times)) for times in took.values()), default=step)
    per = shortest / CHARACTERS
    half = (columns - len(_LEFT_OUT)) // 2
    if per * columns >= step or half < 1:
        return ((0, step, columns),), step / columns
    return ((0, per * half, half), (step - per * half, step, half)), per


def draw(stage: StageTimeline, columns: int, start_ns: float = 0, end_ns: float | None = None) -> tuple[int, ...]:
    """What fills most of each of ``columns`` equal parts of the step, or of a part of it.

    Args:
        stage: what is drawn.
        columns: characters.
        start_ns: begin of the part.
        end_ns: its end; None: that of the step.

    Returns:
        For each part an index into the kinds of work; -1 where more than half of it is empty.
    """
    kinds = {kind: number for number, (kind, _, _) in enumerate(_WORK)}
    filled = np.zeros((len(_WORK), columns))
    edges = np.linspace(start_ns, max(stage.step_ns, 1) if end_ns is None else end_ns, columns + 1)
    for event in stage.events:
        if event.stream != "main" or event.end_ns <= edges[0] or event.start_ns >= edges[-1]:
            continue
        first, last = np.searchsorted(edges, (event.start_ns, event.end_ns), side="right") - 1
        part = slice(max(int(first), 0), int(last) + 1)
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
