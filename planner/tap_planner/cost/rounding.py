"""The one place where a time becomes an integer."""

from __future__ import annotations

import math

import numpy as np

_NS_PER_S = 1e9


def to_ns(seconds: float) -> int:
    """Seconds to whole nanoseconds, rounded up.

    Args:
        seconds: finite and not negative.
    """
    return ceil_ns(seconds * _NS_PER_S)


def ceil_ns(nanoseconds: float) -> int:
    """Nanoseconds to whole nanoseconds, rounded up."""
    return math.ceil(nanoseconds)


def ceil_ns_array(nanoseconds: np.ndarray) -> np.ndarray:
    """``ceil_ns`` elementwise: float64 array to int64 array of the same shape."""
    return np.ceil(nanoseconds).astype(np.int64)
