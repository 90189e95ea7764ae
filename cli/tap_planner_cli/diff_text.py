"""A plan diff as text: a verdict, a legend, tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tap_planner.plan import ChangeKind, CollectiveChange, EntityChange, PlanDiff, ValueChange, Verdict
from tap_planner_cli.errors import printable
from tap_planner_cli.units import format_ns, format_percent, format_quantity, format_signed, title

SYMBOLS = {ChangeKind.ADDED: "+", ChangeKind.REMOVED: "-", ChangeKind.CHANGED: "~"}
STYLES = {"+": "green", "-": "red", "~": "yellow", " ": ""}
VERDICTS = {
    Verdict.IDENTICAL: "the plans are identical",
    Verdict.SAME_DECISIONS: "same decisions: what runs is the same",
    Verdict.DECISIONS_CHANGED: "decisions changed",
}
ALWAYS_SHOWN = ("step_ns", "memory_bytes")


def print_diff(console: Console, diff: PlanDiff) -> None:
    """Print a diff."""
    console.print(Text(VERDICTS[diff.verdict], style="bold"))
    if diff.verdict is Verdict.IDENTICAL:
        return
    console.print(Text("legend: + added  - removed  ~ changed; old -> new", style="dim"))
    _print_predicted(console, diff)
    for name, changes in value_sections(diff):
        _print_values(console, name, changes)
    for name, entities in entity_sections(diff):
        _print_entities(console, name, entities)
    if diff.collectives:
        _print_collectives(console, diff.collectives)


def value_sections(diff: PlanDiff) -> Iterable[tuple[str, tuple[ValueChange, ...]]]:
    """The sections of plain values that differ."""
    sections = (
        ("Mesh", diff.mesh),
        ("Options", diff.options),
        ("Model", diff.model),
        ("Cluster", diff.cluster),
        ("Certificate", diff.certificate),
    )
    return [(name, changes) for name, changes in sections if changes]


def entity_sections(diff: PlanDiff) -> Iterable[tuple[str, tuple[EntityChange, ...]]]:
    """The sections of entities that differ."""
    sections = (
        ("Operators", diff.operators),
        ("Parameters", diff.parameters),
        ("Redistributions", diff.redistributions),
    )
    return [(name, entities) for name, entities in sections if entities]


def shown(change: ValueChange, value: int | str | None) -> str:
    """A value with its unit, shortened where it is long."""
    if value is None:
        return "none"
    text = format_quantity(change.name.rpartition(".")[2], value) if isinstance(value, int) else printable(value)
    return text if len(text) <= 60 else text[:57] + "..."


def arrow(change: ValueChange, kind: ChangeKind = ChangeKind.CHANGED) -> str:
    """``old -> new``, or the one value of what was added or removed."""
    if kind is ChangeKind.ADDED:
        return shown(change, change.new)
    if kind is ChangeKind.REMOVED:
        return shown(change, change.old)
    return f"{shown(change, change.old)} -> {shown(change, change.new)}"


def occurrences(entity: EntityChange) -> str:
    """``h.{i}.fc  (i = 0..95)``."""
    name = printable(entity.name)
    values = ", ".join(f"{letter} = {part}" for letter, part in zip("ijk", entity.values.split(";"), strict=False))
    return f"{name}  ({values})" if entity.values else name


def brief_fields(entity: EntityChange) -> tuple[ValueChange, ...]:
    """All fields of a change; of what was added or removed only the features that say what it is."""
    if entity.kind is ChangeKind.CHANGED:
        return entity.fields
    wanted = ("type", "strategy", "placement", "zero", "recompute", "from", "to", "forward", "backward")
    return tuple(
        change
        for change in entity.fields
        if change.name.split(".")[0] in wanted and not (change.old in (None, "none") and change.new in (None, "none"))
    )


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _table(*columns: str, right: int = 0) -> Table:
    table = Table(box=None, show_header=bool(any(columns)), pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index >= len(columns) - right else "left", overflow="fold")
    return table


def _symbol(symbol: str) -> Text:
    return Text(symbol, style=STYLES[symbol])


def _print_predicted(console: Console, diff: PlanDiff) -> None:
    _heading(console, "Prediction")
    table = _table("", "", "old", "new", "change", "", right=4)
    for change in diff.predicted:
        if not change.delta and change.name not in ALWAYS_SHOWN:
            continue
        table.add_row(
            _symbol("~" if change.delta else " "),
            title(change.name),
            format_quantity(change.name, change.old),
            format_quantity(change.name, change.new),
            format_signed(change.name, change.delta) if change.delta else "=",
            format_percent(change.basis_points) if change.delta else "",
        )
    console.print(table)


def _print_values(console: Console, name: str, changes: tuple[ValueChange, ...]) -> None:
    _heading(console, name)
    table = _table("", "", "")
    for change in changes:
        symbol = "+" if change.old is None else "-" if change.new is None else "~"
        table.add_row(_symbol(symbol), printable(change.name), arrow(change))
    console.print(table)


def _print_entities(console: Console, name: str, entities: tuple[EntityChange, ...]) -> None:
    _heading(console, f"{name}: {sum(entity.count for entity in entities)} differ")
    for entity in entities:
        symbol = SYMBOLS[entity.kind]
        console.print(Text(f"{symbol} {occurrences(entity)}", style=STYLES[symbol]))
        table = _table("", "", "")
        for change in brief_fields(entity):
            table.add_row("   ", printable(change.name), arrow(change, entity.kind))
        if table.row_count:
            console.print(table)


def _print_collectives(console: Console, changes: tuple[CollectiveChange, ...]) -> None:
    _heading(console, "Collectives per step")
    table = _table("", "phase", "kind", "axes", "algorithm", "bytes each", "count", "time", right=3)
    for change in changes:
        symbol = "+" if not change.old_count else "-" if not change.new_count else "~"
        table.add_row(
            _symbol(symbol),
            change.phase,
            change.kind,
            ",".join(change.axes),
            change.algorithm,
            format_quantity("bytes_bytes", change.bytes),
            f"{change.old_count} -> {change.new_count}",
            f"{format_ns(change.old_ns)} -> {format_ns(change.new_ns)}",
        )
    console.print(table)
