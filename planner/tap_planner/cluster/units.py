"""Quantities with written-out units, parsed strictly: ``GB/s`` is not ``Gbit/s`` and a bare number is an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

_QUANTITY = re.compile(r"(?P<sign>[+-]?)(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[A-Za-z][A-Za-z/]*)?")
_NOT_FINITE = re.compile(r"[+-]?\.?(inf|infinity|nan)\b.*", re.IGNORECASE)
_LARGEST = 10**18
"""No bandwidth, size, peak or time of a cluster is larger; keeps all integers well inside 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A kind of measure: what it is called, its units, and an example of how to write it."""

    name: str
    units: Mapping[str, Fraction]
    """Unit as written -> size in the base unit (bytes, bytes/s, FLOP/s, ns)."""
    example: str
    hint: str = ""
    """What is easily mistaken."""


def _decimal(suffix: str, prefixes: str, scale: Fraction = Fraction(1)) -> dict[str, Fraction]:
    return {prefix + suffix: scale * 1000 ** (" kMGTPE".index(prefix)) for prefix in prefixes}


def _binary(suffix: str, prefixes: str) -> dict[str, Fraction]:
    return {f"{prefix}i{suffix}": Fraction(1024 ** (" KMGTPE".index(prefix))) for prefix in prefixes}


_BIT = Fraction(1, 8)
BANDWIDTH = Quantity(
    name="a bandwidth",
    units=_decimal("B/s", "kMGT")
    | _binary("B/s", "KMGT")
    | _decimal("bit/s", "kMGT", _BIT)
    | _decimal("bps", "kMGT", _BIT),
    example="300 GB/s or 400 Gbit/s",
    hint="B is a byte; bit and bps are bits; Gi is 1024 x 1024 x 1024, G is 10^9.",
)
MEMORY = Quantity(
    name="a memory size",
    units={"B": Fraction(1)} | _decimal("B", "kMGT") | _binary("B", "KMGT"),
    example="80 GiB",
)
PEAK = Quantity(
    name="a peak rate",
    units=_decimal("FLOP/s", "MGTPE") | _decimal("OP/s", "MGTPE"),
    example="312 TFLOP/s",
)
TIME = Quantity(
    name="a time",
    units={"ns": Fraction(1), "us": Fraction(1000), "ms": Fraction(10**6), "s": Fraction(10**9)},
    example="3 us",
)


def parse_quantity(text: str, quantity: Quantity, *, zero: bool = False) -> int:
    """Read a number with a unit.

    Args:
        text: for example ``25 GB/s``.
        quantity: the kind of measure that is wanted.
        zero: whether it may be none, as ``0 B``.

    Returns:
        The value in the base unit (bytes, bytes/s, FLOP/s, ns), rounded to the nearest integer.

    Raises:
        ValueError: if the text is not a finite positive number (or zero) with a known unit; the message says why.
    """
    if _NOT_FINITE.fullmatch(text):
        raise ValueError("is not finite")
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError("is not a number with a unit")
    if match["unit"] is None:
        raise ValueError("has no unit")
    scale = quantity.units.get(match["unit"])
    if scale is None:
        raise ValueError(f"has the unknown unit {match['unit']!r}" + _unit_hint(match["unit"], quantity))
    value = Fraction(match["number"]) * scale
    if value == 0 and zero:
        return 0
    if match["sign"] == "-" or value == 0:
        raise ValueError("is negative" if zero else "is not greater than zero")
    if not 1 <= value <= _LARGEST:
        raise ValueError("is out of range")
    return round(value)


def _unit_hint(unit: str, quantity: Quantity) -> str:
    """Units that differ only in case, or the list of those that exist."""
    near = [known for known in quantity.units if known.lower() == unit.lower()]
    return f" (did you mean {near[0]!r}?)" if near else f" (known: {', '.join(quantity.units)})"
