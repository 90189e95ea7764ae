"""Headings and plain tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tap_planner_cli.errors import printable

__all__ = ["Row", "heading", "table"]

Row = Sequence[str]


def heading(console: Console, text: str) -> None:
    """An empty line and a bold line."""
    console.print()
    console.print(Text(text, style="bold"))


def table(columns: Sequence[str], rows: Iterable[Row], right: Sequence[str] = ()) -> Table:
    """A plain table; the columns named in ``right`` are aligned right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=any(columns))
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(printable(cell) for cell in row))
    return made
