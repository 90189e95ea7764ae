"""Matrix products as the device computes them: rows, columns and terms filled up to whole tiles.

Tile quantisation: NVIDIA, "Matrix multiplication background user's guide", section 2.2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tap_planner.operators import FactorRule

__all__ = ["padded_points"]


def padded_points(rule: FactorRule, factor_sizes: Sequence[int], padding: int) -> int:
    """Points of a contraction's loops, the three sides of its products filled up to multiples of ``padding``.

    No part of an even split has fewer than its share of the whole's: p x ceil(n / p) filled up is a multiple of
    ``padding`` and at least n.

    Args:
        rule: the contraction's rule.
        factor_sizes: local size of each of its factors.
        padding: 1 leaves the sides as they are.
    """
    batch, *sides = _sides(rule)
    points = math.prod(factor_sizes[factor] for factor in batch)
    for side in sides:
        size = math.prod(factor_sizes[factor] for factor in side)
        points *= -(-size // padding) * padding
    return points


@functools.lru_cache(maxsize=4096)
def _sides(rule: FactorRule) -> tuple[tuple[int, ...], ...]:
    """Factors of (batch, rows, columns, terms): of both operands and the result, of the first and it, of the second
    and it, of no result."""
    operands = [operand for operand in rule.inputs if operand is not None][:2]
    first, second = (_factors(operand) for operand in (*operands, (), ())[:2])
    result = _factors(rule.outputs[0])
    found: tuple[list[int], ...] = ([], [], [], [])
    for factor in range(len(rule.factors)):
        if factor in rule.layout:
            continue
        if factor not in result:
            found[3].append(factor)
        elif factor in first and factor in second:
            found[0].append(factor)
        else:
            found[2 if factor in second else 1].append(factor)
    return tuple(map(tuple, found))


def _factors(dims: Sequence[Sequence[int]]) -> frozenset[int]:
    return frozenset(factor for dim in dims for factor in dim)
