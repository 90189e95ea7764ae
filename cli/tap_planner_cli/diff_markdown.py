"""A plan diff as Markdown: the comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tap_planner.plan import PlanDiff, QuantityChange, Verdict
from tap_planner_cli.diff_text import (
    ALWAYS_SHOWN,
    SYMBOLS,
    VERDICTS,
    arrow,
    brief_fields,
    entity_sections,
    occurrences,
    value_sections,
)
from tap_planner_cli.errors import printable
from tap_planner_cli.units import format_bytes, format_ns, format_percent, format_quantity, format_signed, title

TAG = "<!-- tap-diff -->"
"""By this a bot finds its earlier comment."""
MAX_CHARACTERS = 60_000
_CUT = "\n\n*(cut here: the diff is longer than a comment may be; run `tap-diff` for all of it)*\n"
_CLOSE = "\n</details>\n"


def diff_to_markdown(diff: PlanDiff) -> str:
    """The comment, at most ``MAX_CHARACTERS`` long."""
    lines = [TAG, f"### tap-diff: {VERDICTS[diff.verdict]}", ""]
    if diff.verdict is not Verdict.IDENTICAL:
        lines += _predicted(diff.predicted)
        for name, changes in value_sections(diff):
            rows = [(code(change.name), code(arrow(change))) for change in changes]
            lines += ["", f"**{name}**", "", *_table(("key", "old -> new"), rows)]
        lines += _entities(diff)
        lines += _collectives(diff)
    return _cut("\n".join(lines) + "\n")


def code(text: str) -> str:
    """Text as inline code that no name can break out of (also not inside a table)."""
    clean = " ".join(printable(text).split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", clean)), default=0))
    space = " " if clean.startswith("`") or clean.endswith("`") or not clean else ""
    return f"{fence}{space}{clean}{space}{fence}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> list[str]:
    rule = ["---"] * (len(header) - right) + ["---:"] * right
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]


def _predicted(changes: Iterable[QuantityChange]) -> list[str]:
    rows = [
        (
            title(change.name),
            format_quantity(change.name, change.old),
            format_quantity(change.name, change.new),
            f"{format_signed(change.name, change.delta)} ({format_percent(change.basis_points)})"
            if change.delta
            else "=",
        )
        for change in changes
        if change.delta or change.name in ALWAYS_SHOWN
    ]
    return _table(("prediction", "old", "new", "change"), rows, right=3)


def _entities(diff: PlanDiff) -> list[str]:
    lines: list[str] = []
    for name, entities in entity_sections(diff):
        count = sum(entity.count for entity in entities)
        lines += ["", f"<details><summary>{name}: {count} differ (+ added, - removed, ~ changed)</summary>", ""]
        rows = [
            (
                SYMBOLS[entity.kind],
                code(occurrences(entity)),
                "<br>".join(f"{change.name}: {code(arrow(change, entity.kind))}" for change in brief_fields(entity)),
            )
            for entity in entities
        ]
        lines += [*_table(("", "name", "decisions"), rows), "", "</details>"]
    return lines


def _collectives(diff: PlanDiff) -> list[str]:
    if not diff.collectives:
        return []
    rows = [
        (
            change.phase,
            code(f"{change.kind}({', '.join(change.axes)})"),
            change.algorithm,
            format_bytes(change.bytes),
            f"{change.old_count} -> {change.new_count}",
            f"{format_ns(change.old_ns)} -> {format_ns(change.new_ns)}",
        )
        for change in diff.collectives
    ]
    header = ("phase", "collective", "algorithm", "bytes each", "count", "time")
    opening = f"<details><summary>Collectives per step: {len(rows)} differ</summary>"
    return ["", opening, "", *_table(header, rows, right=3), "", "</details>"]


def _cut(text: str) -> str:
    """Cut at the end of a line and close what is open."""
    if len(text) <= MAX_CHARACTERS:
        return text
    room = MAX_CHARACTERS - len(_CUT) - len(_CLOSE)
    kept = text[: text.rfind("\n", 0, room)]
    is_open = kept.count("<details>") > kept.count("</details>")
    return kept + ("\n" + _CLOSE if is_open else "")[: len(_CLOSE)] + _CUT
