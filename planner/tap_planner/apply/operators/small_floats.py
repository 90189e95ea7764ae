"""Floats of 8 and 4 bits: values rounded to the numbers that a type has, held in a wider type."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TORCH = {
    "float8e4m3fn": torch.float8_e4m3fn,
    "float8e4m3fnuz": torch.float8_e4m3fnuz,
    "float8e5m2": torch.float8_e5m2,
    "float8e5m2fnuz": torch.float8_e5m2fnuz,
}
_LARGEST = {
    "float8e4m3fn": 448.0,
    "float8e4m3fnuz": 240.0,
    "float8e5m2": 57344.0,
    "float8e5m2fnuz": 57344.0,
    "float4e2m1": 6.0,
    "float8e8m0": 2.0**127,
}
SMALL_FLOATS = frozenset(_LARGEST)
"""Types whose numbers are fewer than those that they are computed in."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rounded(value: Tensor, dtype: str, *, saturate: bool = True) -> Tensor:
    """The nearest numbers of a small float type (ties to even), in the type of ``value``.

    Args:
        value: any floats.
        dtype: one of ``SMALL_FLOATS``.
        saturate: whether what is too large becomes the largest number, rather than infinity or no number.
    """
    largest = _LARGEST[dtype]
    limited = torch.where(value.isnan(), value, value.clamp(-largest, largest))
    if dtype == "float4e2m1":
        return _nearest_e2m1(limited)
    narrow = limited.to(torch.float32).to(_TORCH[dtype]).to(value.dtype)
    if saturate:
        return narrow
    # What rounds to the largest number still counts as it: half a unit above it does not.
    unit = largest / (14 if "e5m2" in dtype else 28 if dtype == "float8e4m3fn" else 30) * 2
    beyond = value.abs() >= largest + unit / 2
    return torch.where(beyond, _overflow(value, dtype), narrow)


def _overflow(value: Tensor, dtype: str) -> Tensor:
    if dtype == "float8e5m2":
        return torch.sign(value) * math.inf
    return torch.full_like(value, math.nan)


def _nearest_e2m1(value: Tensor) -> Tensor:
    """Numbers of the type are few: the nearest by distance, of two the one with an even last bit."""
    table = torch.tensor(_E2M1, dtype=value.dtype, device=value.device)
    middles = (table[1:] + table[:-1]) / 2
    size = value.abs().nan_to_num(nan=0.0)
    up = torch.bucketize(size, middles, right=True)
    down = torch.bucketize(size, middles, right=False)
    index = torch.where(up == down, up, torch.where(up % 2 == 0, up, down))
    # The type has no NaN: ONNX's reference gives a negative zero.
    return torch.where(value.isnan(), -0.0, torch.copysign(table[index], value))


def power_of_two(value: Tensor, mode: str, *, saturate: bool = True) -> Tensor:
    """The power of two (float8e8m0) that a size is rounded to: ``up``, ``down`` or ``nearest`` (halves go up)."""
    mantissa, exponent = torch.frexp(value.abs())
    limit = {"up": 0.5, "down": 1.0, "nearest": 0.75}[mode]
    raised = mantissa >= limit if mode == "nearest" else mantissa > limit
    power = exponent - 1 + raised.to(exponent.dtype)
    power = torch.where(value == 0, torch.full_like(power, -127), power)
    result = torch.ldexp(torch.ones_like(value), power.clamp(-127, 127))
    unknown = value.isnan() | (value.isinf() | (power > 127) if not saturate else value.isnan())
    return torch.where(unknown, math.nan, torch.where(value.isinf(), 2.0**127, result))
