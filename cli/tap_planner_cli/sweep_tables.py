"""The table of a sweep, as text, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tap_planner.plan import options_to_json
from tap_planner_cli.errors import printable
from tap_planner_cli.units import format_bytes, format_ns, format_rate

if TYPE_CHECKING:
    from tap_planner.sweep import Outcome, RankedRow, Sweep

__all__ = ["FORMATS", "print_table", "render"]

FORMATS = ("text", "csv", "json")
WIDE = 110
"""Columns from which figures are shown that not everybody needs."""
_NARROW = {"microbatches": "mb", "optimizer-states": "states"}
"""Headings where there are fewer columns."""
_ON_FRONT = "*"
_FRONT = "none is faster without more memory, or needs less without more time"
_FILE_WIDTH = 160
_MOST_WIDTH = 1000
"""No table needs more."""
_FIGURES = (
    *("batch", "mesh", "microbatches", "schedule", "step_ns", "samples_per_s", "tokens_per_s", "objective_ns"),
    *("objective_bytes", "bound_ns", "gap_basis_points", "memory_bytes", "decisions", "least_memory_bytes"),
    *("limit_bytes", "reason", "seconds"),
)
"""Figures of a row, in the order of the CSV's columns."""


def render(sweep: Sweep, kind: str, top: int | None) -> str:
    """The table as a text.

    Args:
        sweep: what was found.
        kind: one of ``FORMATS``.
        top: of a text, rows of each part that are shown; None: all.
    """
    if kind == "json":
        return _json(sweep)
    if kind == "csv":
        return _csv(sweep)
    text = io.StringIO()
    print_table(Console(file=text, width=_FILE_WIDTH, color_system=None, highlight=False, markup=False), sweep, top)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


# -- for programs ------------------------------------------------------------------------------------------------


def _row(row: RankedRow) -> dict[str, object]:
    """What there is to say of a row beside its values."""
    outcome = row.outcome
    found = {**outcome.to_json(), **_rates(outcome)}
    return {key: found[key] for key in _FIGURES if key in found}


def _rates(outcome: Outcome) -> dict[str, object]:
    """What one step after the other gets through."""
    if not outcome.step_ns:
        return {}
    counts = {"samples_per_s": outcome.batch, "tokens_per_s": outcome.tokens}
    return {name: round(count * 1e9 / outcome.step_ns, 3) for name, count in counts.items() if count}


def _json(sweep: Sweep) -> str:
    request = sweep.request
    rows = [
        {
            "rank": row.rank,
            "pareto": row.pareto,
            "values": dict(row.combination.values),
            "status": row.outcome.status.value,
            **_row(row),
            "arguments": list(row.combination.arguments),
        }
        for row in sweep.rows
    ]
    document = {
        "kind": "tap-planner sweep",
        "format_version": "1.0",
        "model": request.model.name,
        "cluster": sweep.cluster.name,
        "num_devices": sweep.cluster.num_devices,
        "options": options_to_json(request.options),
        "grid": {each.name: None if each.values is None else list(each.values) for each in request.grid.dimensions},
    }
    head = json.dumps(document, indent=2)[:-2]
    lines = ",\n    ".join(json.dumps(row) for row in rows)
    return f'{head},\n  "rows": [\n    {lines}\n  ]\n}}\n' if rows else f'{head},\n  "rows": []\n}}\n'


def _csv(sweep: Sweep) -> str:
    names = sweep.request.grid.names
    figures = [name for name in _FIGURES if name not in names]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rank", "pareto", *names, "status", *figures])
    for row in sweep.rows:
        found = _row(row)
        values = [_cell(value) for _, value in row.combination.values]
        pareto = int(row.pareto) if row.rank is not None else ""
        writer.writerow(
            [_cell(row.rank), pareto, *values, row.outcome.status.value, *(_cell(found.get(name)) for name in figures)]
        )
    return text.getvalue()


def _cell(value: object) -> object:
    return "" if value is None else value


# -- for people --------------------------------------------------------------------------------------------------


def print_table(console: Console, sweep: Sweep, top: int | None) -> None:
    """The plans, the best first; then what does not fit, and what is not possible.

    Args:
        console: where to.
        sweep: what was found.
        top: rows of each part that are shown; None: all.
    """
    from tap_planner.sweep import Status

    rows = {status: [row for row in sweep.rows if row.outcome.status is status] for status in Status}
    parts = (
        _planned(rows[Status.PLANNED], sweep, console.width >= WIDE),
        _unfit(rows[Status.INFEASIBLE], sweep),
        _reasons("No plan that fits was found, and it is not proven that there is none", rows[Status.NOT_FOUND], sweep),
        _grouped(rows[Status.IMPOSSIBLE]),
        _reasons("Failed", rows[Status.FAILED], sweep),
    )
    is_first = True
    for title, columns, left, cells in parts:
        if not cells:
            continue
        if not is_first:
            console.print()
        is_first = False
        if title:
            console.print(Text(title))
        shown = cells if top is None else cells[:top]
        _print_whole(console, _table(columns, shown, left, narrow=console.width < WIDE))
        if len(shown) < len(cells):
            console.print(Text(f"... and {len(cells) - len(shown)} more", style="dim"))
        if any(cell[0] == _ON_FRONT for cell in cells):
            console.print(Text(f"{_ON_FRONT} Pareto: {_FRONT}", style="dim"))


def _print_whole(console: Console, made: Table) -> None:
    """Print a table; where it needs more columns than there are the terminal breaks its lines, and nothing is cut."""
    wraps = any(not column.no_wrap for column in made.columns)
    needed = 0 if wraps else console.measure(made, options=console.options.update(width=_MOST_WIDTH)).maximum
    width = console.width
    console.width = max(width, needed)
    console.print(made)
    console.width = width


def _table(columns: Sequence[str], rows: Sequence[tuple[str, ...]], left: Sequence[str], *, narrow: bool) -> Table:
    """A plain table in which only reasons are broken into lines."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        heading = _NARROW.get(column, column) if narrow else column
        wraps = column == "why"
        made.add_column(heading, justify="left" if column in left else "right", no_wrap=not wraps, overflow="fold")
    for row in rows:
        made.add_row(*(printable(cell) for cell in row))
    return made


_Part = tuple[str, Sequence[str], Sequence[str], list[tuple[str, ...]]]
"""Title, columns, those that are aligned left, cells."""


def _values(row: RankedRow) -> Iterator[str]:
    for _, value in row.combination.values:
        yield "-" if value is None else str(value)


def _planned(rows: Sequence[RankedRow], sweep: Sweep, wide: bool) -> _Part:
    """The plans; what the grid does not name but the planner chose is shown too."""
    request = sweep.request
    names, options = request.grid.names, request.options
    columns: list[str] = ["", *names]
    chosen: list[str] = []
    if options.mesh is None and not request.grid.of_mesh:
        chosen.append("mesh")
    if options.microbatches == "auto" and "microbatches" not in names and options.mode == "train":
        chosen.append("microbatches")
    with_tokens = any(row.outcome.tokens for row in rows)
    sent = options.objective == "communication"
    figures = ["step", "tokens/s" if with_tokens else "samples/s", *(["sent"] if sent else []), "memory", "gap"]
    more = ["objective"] if wide else []
    cells: list[tuple[str, ...]] = []
    for row in rows:
        outcome = row.outcome
        step = outcome.step_ns or 0
        by_name = {
            "mesh": outcome.mesh,
            "microbatches": str(outcome.microbatches),
            "step": format_ns(step),
            "samples/s": format_rate(outcome.batch or 0, step),
            "tokens/s": format_rate(outcome.tokens or 0, step),
            "sent": format_bytes(outcome.objective_bytes or 0),
            "memory": format_bytes(outcome.memory_bytes or 0),
            "gap": f"{(outcome.gap_basis_points or 0) / 100:.2f} %",
            "objective": format_ns(outcome.objective_ns or 0),
        }
        shown = (by_name[name] for name in (*chosen, *figures, *more))
        cells.append((_ON_FRONT if row.pareto else "", *_values(row), *shown))
    return "", [*columns, *chosen, *figures, *more], ["", "mesh", *_words(sweep)], cells


def _words(sweep: Sweep) -> list[str]:
    """Dimensions whose values are no numbers."""
    return [name for name in sweep.request.grid.names if name in ("schedule", "recompute", "optimizer-states")]


def _unfit(rows: Sequence[RankedRow], sweep: Sweep) -> _Part:
    cells: list[tuple[str, ...]] = []
    for row in rows:
        least, limit = row.outcome.least_memory_bytes or 0, row.outcome.limit_bytes or 0
        cells.append((*_values(row), format_bytes(least), format_bytes(max(least - limit, 0))))
    limits = {row.outcome.limit_bytes or 0 for row in rows}
    limit = f" of {format_bytes(limits.pop())}" if len(limits) == 1 else ""
    return (
        f"Proven not to fit the limit{limit} per device",
        [*sweep.request.grid.names, "needs at least", "missing"],
        _words(sweep),
        cells,
    )


def _reasons(title: str, rows: Sequence[RankedRow], sweep: Sweep) -> _Part:
    cells = [(*_values(row), row.outcome.reason.partition(";")[0]) for row in rows]
    return title, [*sweep.request.grid.names, "why"], [*_words(sweep), "why"], cells


def _grouped(rows: Sequence[RankedRow]) -> _Part:
    """Reasons with the number of combinations that have them."""
    counts = Counter(row.outcome.reason for row in rows)
    return "Not possible", ["combinations", "why"], ["why"], [(str(count), why) for why, count in counts.items()]
