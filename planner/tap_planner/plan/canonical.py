"""The canonical text of a plan: schema key order, one entity a line, ASCII, integers only, final newline."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NoReturn

from tap_planner.errors import PlanFormatError, UsageError
from tap_planner.files import write_whole
from tap_planner.plan.decode import document_from_json
from tap_planner.plan.document import FORMAT_MAJOR, FORMAT_VERSION, KIND, PlanDocument
from tap_planner.plan.encode import document_to_json
from tap_planner.plan.reader import REMEDY, Value, fail

MAX_BYTES = 1 << 30
"""Largest plan file that is read."""

_VERSION = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")
_INNER_LISTS = {"blocks": ("operators",), "repeats": ("names",), "certificate": ("memory_proof", "proof")}
"""Sections whose entries are broken up further, and the keys whose items stand one a line."""


def to_text(document: PlanDocument) -> str:
    """The canonical text; equal documents have equal texts."""
    return render(document_to_json(document))


def render(document: dict[str, object]) -> str:
    """Lay out the JSON form of a plan (or of a part of it)."""
    sections = [f"  {_compact(key)}: {_section(key, value)}" for key, value in document.items()]
    return "{\n" + ",\n".join(sections) + "\n}\n"


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False)


def _section(key: str, value: object) -> str:
    if isinstance(value, list) and value:
        inner = _INNER_LISTS.get(key, ())
        lines = [_entry(item, inner) for item in value]
        return "[\n    " + ",\n    ".join(lines) + "\n  ]"
    if isinstance(value, dict) and key == "inputs":
        lines = [f"{_compact(name)}: {_compact(part)}" for name, part in value.items()]
        return "{\n    " + ",\n    ".join(lines) + "\n  }"
    return _entry(value, _INNER_LISTS.get(key, ()))


def _entry(entry: object, inner: tuple[str, ...]) -> str:
    if not isinstance(entry, dict) or not any(entry.get(key) for key in inner):
        return _compact(entry)
    parts: list[str] = []
    for key, value in entry.items():
        parts.append(f"{_compact(key)}: {_lines(value) if key in inner and value else _compact(value)}")
    return "{" + ", ".join(parts) + "}"


def _lines(value: object) -> str:
    if isinstance(value, dict):
        lines = [f"{_compact(name)}: {_compact(item)}" for name, item in value.items()]
        return "{\n      " + ",\n      ".join(lines) + "\n    }"
    assert isinstance(value, list)
    return "[\n      " + ",\n      ".join(map(_compact, value)) + "\n    ]"


def from_text(text: str) -> PlanDocument:
    """Read a plan from its text.

    Raises:
        PlanFormatError: the text is no plan, of an unknown major version, or a value is not what it must be.
    """
    root = Value(_parse(text), "")
    if not isinstance(root.data, dict) or root.data.get("kind") != KIND:
        raise PlanFormatError(
            f"the file is no plan: its kind is not {KIND!r}", hint="Give a file that tap-plan has written."
        )
    _check_version(root["format_version"])
    return document_from_json(root)


def _check_version(value: Value) -> None:
    match = _VERSION.fullmatch(value.text())
    if match is None:
        fail(value.place, value.data, f"a version like {FORMAT_VERSION}")
    if int(match[1]) != FORMAT_MAJOR:
        raise PlanFormatError(
            f"format_version: the plan has format {value.data}, this program reads {FORMAT_MAJOR}.x",
            hint="Write the plan again with this tap-plan, or use the version of tap-planner that wrote it.",
        )


def _parse(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_float=_refuse_number, parse_constant=_refuse_number)
    except json.JSONDecodeError as error:
        raise PlanFormatError(
            f"line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}", hint=REMEDY
        ) from error
    except (RecursionError, ValueError) as error:
        raise PlanFormatError(f"not a readable plan: {error}", hint=REMEDY) from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise PlanFormatError(f"the key {double!r} stands twice in one object", hint=REMEDY)
    return result


def _refuse_number(text: str) -> NoReturn:
    raise PlanFormatError(f"the number {text} is no integer; plans hold integers only", hint=REMEDY)


def read_plan(path: Path) -> PlanDocument:
    """Read a plan file.

    Raises:
        PlanFormatError: the file cannot be read or is no plan; the message begins with the path.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PlanFormatError(f"{path}: larger than {MAX_BYTES} bytes", hint="Is this a plan?")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanFormatError(
            f"{path}: the plan cannot be read: {error.strerror or error}", hint="Check the path of the plan."
        ) from error
    except UnicodeDecodeError as error:
        raise PlanFormatError(f"{path}: the file is not UTF-8 text", hint="Give a plan, not a model.") from error
    try:
        return from_text(text)
    except PlanFormatError as error:
        raise PlanFormatError(f"{path}: {error.message}", hint=error.hint) from error


def write_plan(path: Path, document: PlanDocument) -> None:
    """Write the canonical text atomically: a reader sees the old file or the whole new one.

    Raises:
        UsageError: the file cannot be written there.
    """
    write_text(path, to_text(document))


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically through a temporary file in the same folder.

    Raises:
        UsageError: the file cannot be written there.
    """
    data = text.encode("utf-8")
    write_whole(path, lambda file: file.write(data), UsageError, "Check that the folder exists.")
