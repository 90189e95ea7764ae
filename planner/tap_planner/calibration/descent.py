"""Fitting a handful of positive constants to measurements: a pattern search along the coordinates.

Hooke, Jeeves, "Direct search solution of numerical and statistical problems", JACM 8(2), 1961, on logarithms: each
constant is multiplied and divided by a factor as long as that helps, then the factor shrinks; before that each is tried
all over its range, and pairs that make up for each other (a rate and a latency) all over theirs together. It needs no
gradient (the cheapest of several algorithms has kinks) and is deterministic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_FACTORS = (2.0, 1.4, 1.18, 1.09, 1.04, 1.02, 1.01)
_MOST_SWEEPS = 25
_RANGES = 2
_SPREAD = 9
"""Values of a range that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A constant to be found."""

    name: str
    start: float
    least: float
    """Greater than 0."""
    most: float


def descend(
    constants: Sequence[Constant],
    loss: Callable[[Mapping[str, float]], float],
    pairs: Sequence[tuple[str, str]] = (),
) -> dict[str, float]:
    """Values in range at which no step along one constant lowers the loss.

    Args:
        constants: what is to be found, each with a start in its range.
        loss: what is to be least, at given values; ties keep the earlier value.
        pairs: names of constants that make up for each other.
    """
    named = {constant.name: constant for constant in constants}
    values = {constant.name: constant.start for constant in constants}
    best = loss(values)
    for _ in range(_RANGES):
        for constant in constants:
            best = _jump((constant,), values, best, loss)
        for first, second in pairs:
            best = _jump((named[first], named[second]), values, best, loss)
        for constant in constants:
            best = _move(constant, _FACTORS[1], values, best, loss)
    for factor in _FACTORS:
        for _ in range(_MOST_SWEEPS):
            before = best
            for constant in constants:
                best = _move(constant, factor, values, best, loss)
            if best >= before:
                break
    return values


def _jump(
    constants: Sequence[Constant],
    values: dict[str, float],
    best: float,
    loss: Callable[[Mapping[str, float]], float],
) -> float:
    """Take the best of values spread over the constants' ranges, if that lowers the loss."""
    for moved in itertools.product(*(_spread(constant) for constant in constants)):
        tried = {constant.name: value for constant, value in zip(constants, moved, strict=True)}
        found = loss({**values, **tried})
        if found < best:
            values.update(tried)
            best = found
    return best


def _spread(constant: Constant) -> list[float]:
    """Values all over a constant's range, in equal steps of their logarithms."""
    ratio = (constant.most / constant.least) ** (1 / (_SPREAD - 1))
    return [min(constant.least * ratio**step, constant.most) for step in range(_SPREAD)]


def _move(
    constant: Constant,
    factor: float,
    values: dict[str, float],
    best: float,
    loss: Callable[[Mapping[str, float]], float],
) -> float:
    """Change one value as long as that helps, upwards or else downwards; the loss then reached."""
    for step in (factor, 1 / factor):
        moved = False
        while True:
            value = min(max(values[constant.name] * step, constant.least), constant.most)
            if value == values[constant.name]:
                break
            found = loss({**values, constant.name: value})
            if found >= best:
                break
            values[constant.name], best, moved = value, found, True
        if moved:
            break
    return best
