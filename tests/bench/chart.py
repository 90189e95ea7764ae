"""Line charts on logarithmic axes, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 44, 52
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#9a6700")
TEXT, GRID = "#24292f", "#d0d7de"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Logarithms of values onto pixels."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.start + share * (self.stop - self.start)


def line_chart(lines: Sequence[Line], *, title: str, x_label: str, y_label: str) -> str:
    """An SVG document; both axes are logarithmic, x is marked at the points' own values."""
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    marks = _marks(min(ys), max(ys))
    across = _Scale(xs[0], xs[-1], LEFT, WIDTH - RIGHT)
    up = _Scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(WIDTH / 2, 20, title, size=14),
        *(_horizontal(up.at(mark), f"{mark:g}") for mark in marks),
        *(_vertical(across.at(x), f"{x:g}") for x in xs),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label),
        _text(16, (TOP + HEIGHT - BOTTOM) / 2, y_label, turned=True),
    ]
    for number, line in enumerate(lines):
        parts.extend(_line(line, COLOURS[number % len(COLOURS)], across, up))
        parts.extend(_legend(number, line.name, COLOURS[number % len(COLOURS)]))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _marks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from the last that is at most ``low`` to the first that is at least ``high``."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    every = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    first = max(index for index, mark in enumerate(every) if mark <= low)
    last = min(index for index, mark in enumerate(every) if mark >= high and index > first)
    return every[first : last + 1]


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "middle", turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{TEXT}"{turn}>'
        f"{escape(text)}</text>"
    )


def _horizontal(y: float, mark: str) -> str:
    line = f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{GRID}"/>'
    return line + _text(LEFT - 8, y + 4, mark, anchor="end")


def _vertical(x: float, mark: str) -> str:
    line = f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="{GRID}"/>'
    return line + _text(x, HEIGHT - BOTTOM + 18, mark)


def _line(line: Line, colour: str, across: _Scale, up: _Scale) -> list[str]:
    places = [(across.at(x), up.at(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>', *dots]


def _legend(number: int, name: str, colour: str) -> list[str]:
    y = TOP + 16 + 18 * number
    return [
        f'<line x1="{LEFT + 12}" y1="{y}" x2="{LEFT + 36}" y2="{y}" stroke="{colour}" stroke-width="2"/>',
        _text(LEFT + 42, y + 4, name, anchor="start"),
    ]
