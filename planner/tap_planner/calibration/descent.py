"""Fitting a handful of positive constants to measurements: a pattern search along the coordinates.

Hooke, Jeeves, "Direct search solution of numerical and statistical problems", JACM 8(2), 1961, on logarithms: each
constant is multiplied and divided by a factor as long as that helps, then the factor shrinks; before that each is tried
all over its range, twice. It needs no gradient (the cheapest of several algorithms has kinks) and is deterministic.
"""

from __future__ import annotations

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


def descend(constants: Sequence[Constant], loss: Callable[[Mapping[str, float]], float]) -> dict[str, float]:
    """Values in range at which no step along one constant lowers the loss.

    Args:
        constants: what is to be found, each with a start in its range.
        loss: what is to be least, at given values; ties keep the earlier value.
    """
    values = {constant.name: constant.start for constant in constants}
    best = loss(values)
    for _ in range(_RANGES):
        for constant in constants:
            best = _jump(constant, values, best, loss)
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
    constant: Constant, values: dict[str, float], best: float, loss: Callable[[Mapping[str, float]], float]
) -> float:
    """Take the best of values spread over a constant's range, if that lowers the loss."""
    ratio = (constant.most / constant.least) ** (1 / (_SPREAD - 1))
    for step in range(_SPREAD):
        value = min(constant.least * ratio**step, constant.most)
        found = loss({**values, constant.name: value})
        if found < best:
            values[constant.name], best = value, found
    return best


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
