"""Many names or numbers written as few: ``h.{i}.ln_1`` with ``0..95``.

A series of numbers is written ``0..95``, ``0..90/10`` (with a step) or ``3,7,12..14``. A family of names (one per
occurrence of a block) is written as one name when all are equal, as a pattern with ``{i}`` and a series when they
differ in one number, else as a list of names and patterns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PLACEHOLDER = "{i}"
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
    """Write names as a list in which stretches that differ in one number are patterns."""
    items: list[NameItem] = []
    start = 0
    while start < len(names):
        end = _stretch_end(names, start)
        found = find_pattern(names[start:end]) if end - start >= _LEAST_STRETCH or end - start == len(names) else None
        if found is None:
            items.append(names[start])
            start += 1
        else:
            items.append({"pattern": found[0], "values": encode_series(found[1])})
            start = end
    return items


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


def find_pattern(names: Sequence[str]) -> tuple[str, tuple[int, ...]] | None:
    """The pattern and numbers of names that differ in one number (it may stand at several places), else None."""
    tokens = [_DIGITS.split(name) for name in names]
    first = tokens[0]
    if PLACEHOLDER in names[0] or any(len(other) != len(first) for other in tokens):
        return None
    varying = [place for place in range(len(first)) if any(other[place] != first[place] for other in tokens)]
    if not varying or any(place % 2 == 0 for place in varying):
        return None
    numbers = [other[varying[0]] for other in tokens]
    for other, number in zip(tokens, numbers, strict=True):
        if len(number) > 18 or str(int(number)) != number or any(other[place] != number for place in varying):
            return None
    chosen = set(varying)
    pattern = "".join(PLACEHOLDER if place in chosen else token for place, token in enumerate(first))
    return pattern, tuple(int(number) for number in numbers)


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
            pattern = item["pattern"]
            names.extend(pattern.replace(PLACEHOLDER, str(value)) for value in decode_series(item["values"]))
    return tuple(names)
