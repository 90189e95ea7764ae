"""Many names or numbers written as few: ``h.{i}.ln_1`` with ``0..95``.

A series of numbers is written ``0..95``, ``0..90/10`` (with a step) or ``3,7,12..14``. A family of names (one per
occurrence of a block) is written as one name when all are equal, as a pattern with ``{i}`` and a series when they
differ in one number, else as a list of names and patterns. Names that differ in two or three numbers, as in
``layers.{i}/MatMul_{j}``, have as many series: ``0..95;14..2959/31``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

PLACEHOLDERS = ("{i}", "{j}", "{k}")
MAX_SERIES = 1 << 22
"""Longest series that is read."""

NameItem = str | dict[str, str]
"""A name, or ``{"pattern": ..., "values": ...}``."""
NameFamily = NameItem | list[NameItem]
"""JSON form of a family of names."""

_DIGITS = re.compile(r"([0-9]+)")
_LEAST_STRETCH = 3
_PART = re.compile(r"(0|[1-9][0-9]{0,17})(?:\.\.(0|[1-9][0-9]{0,17})(?:/([1-9][0-9]{0,17}))?)?")


def encode_series(values: Sequence[int]) -> str:
    """Write non-negative numbers as a series."""
    parts: list[str] = []
    start = 0
    while start < len(values):
        end = _progression_end(values, start)
        step = values[start + 1] - values[start] if end > start + 2 else 0
        if step > 0:
            parts.append(f"{values[start]}..{values[end - 1]}" + (f"/{step}" if step > 1 else ""))
            start = end
        else:
            parts.append(str(values[start]))
            start += 1
    return ",".join(parts)


def _progression_end(values: Sequence[int], start: int) -> int:
    end = start + 1
    while end < len(values) and values[end] - values[end - 1] == values[start + 1] - values[start]:
        end += 1
    return end


def decode_series(text: str) -> tuple[int, ...]:
    """Inverse of ``encode_series``.

    Raises:
        ValueError: the text is no series, or a longer one than is read.
    """
    values: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no number and no range like 0..95")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or (last - first) // step + len(values) > MAX_SERIES:
            raise ValueError(f"the range {part!r} is empty or too long")
        values.extend(range(first, last + 1, step))
    return tuple(values)


def encode_names(names: Sequence[str]) -> NameFamily:
    """Write a family of names in the shortest of its three forms."""
    if len(names) == 1:
        return list(names)
    if all(name == names[0] for name in names):
        return names[0]
    items = encode_list(names)
    return items[0] if len(items) == 1 else items


def encode_list(names: Sequence[str]) -> list[NameItem]:
    """Write names as a list in which stretches that differ only in numbers are patterns."""
    return [dict(item) if isinstance(item, dict) else item for item in _encoded(tuple(names))]


@lru_cache(maxsize=4096)  # a plan is written twice: for its digest, and into the file
def _encoded(names: tuple[str, ...]) -> tuple[NameItem, ...]:
    items: list[NameItem] = []
    start = 0
    while start < len(names):
        end = _stretch_end(names, start)
        found = find_pattern(names[start:end])
        long_enough = end - start >= _LEAST_STRETCH or (end - start == len(names) and found and len(found[1]) == 1)
        if found is None or not long_enough:
            items.append(names[start])
            start += 1
        else:
            items.append({"pattern": found[0], "values": encode_values(found[1])})
            start = end
    return tuple(items)


def encode_values(values: Sequence[Sequence[int]]) -> str:
    """Write the values of i, j and k."""
    return ";".join(map(encode_series, values))


def _stretch_end(names: Sequence[str], start: int) -> int:
    """End of the longest stretch from ``start`` whose names differ from the first in the numbers that the second does.

    Only such a stretch can be a pattern.
    """
    if start + 1 >= len(names):
        return start + 1
    first = _DIGITS.split(names[start])
    varying = _varying(first, _DIGITS.split(names[start + 1]))
    end = start + 1
    while varying and end < len(names):
        other = _DIGITS.split(names[end])
        if _varying(first, other) != varying or find_pattern((names[start], names[end])) is None:
            break
        end += 1
    return end


def _varying(first: Sequence[str], other: Sequence[str]) -> list[int]:
    if len(first) != len(other):
        return []
    return [place for place in range(len(first)) if other[place] != first[place]]


def find_pattern(names: Sequence[str]) -> tuple[str, tuple[tuple[int, ...], ...]] | None:
    """The pattern of names that differ only in numbers, and the values of i (and j, k); else None.

    A number may stand at several places.
    """
    tokens = [_DIGITS.split(name) for name in names]
    first = tokens[0]
    if any(placeholder in names[0] for placeholder in PLACEHOLDERS):
        return None
    if any(len(other) != len(first) for other in tokens):
        return None
    parts = list(first)
    series: list[tuple[str, ...]] = []
    for place in range(len(first)):
        column = tuple(other[place] for other in tokens)
        if all(token == column[0] for token in column):
            continue
        if column not in series:
            if place % 2 == 0 or len(series) == len(PLACEHOLDERS) or not all(map(_is_plain, column)):
                return None
            series.append(column)
        parts[place] = PLACEHOLDERS[series.index(column)]
    if not series:
        return None
    return "".join(parts), tuple(tuple(map(int, column)) for column in series)


def _is_plain(number: str) -> bool:
    return len(number) <= 18 and str(int(number)) == number


def decode_names(family: NameFamily, count: int) -> tuple[str, ...]:
    """Inverse of ``encode_names`` for ``count`` occurrences.

    Raises:
        ValueError: the family has another number of names, or its series is malformed.
    """
    if isinstance(family, str):
        return (family,) * count
    names = decode_list(family if isinstance(family, list) else [family])
    if len(names) != count:
        raise ValueError(f"{len(names)} names for {count} occurrences")
    return names


def decode_list(items: Sequence[NameItem]) -> tuple[str, ...]:
    """Inverse of ``encode_list``.

    Raises:
        ValueError: a series is malformed.
    """
    names: list[str] = []
    for item in items:
        if isinstance(item, str):
            names.append(item)
        else:
            names.extend(_expand_pattern(item["pattern"], item["values"]))
    return tuple(names)


def _expand_pattern(pattern: str, text: str) -> Iterator[str]:
    series = [decode_series(part) for part in text.split(";")]
    if len(series) > len(PLACEHOLDERS) or any(len(values) != len(series[0]) for values in series):
        raise ValueError(f"the series of {text!r} differ in length or are too many")
    for values in zip(*series, strict=True):
        name = pattern
        for placeholder, value in zip(PLACEHOLDERS, values, strict=False):
            name = name.replace(placeholder, str(value))
        yield name
