"""Which gradients are reduced together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

BUCKET_ELEMENTS = 40_000_000
"""Elements at which a bucket is full (the default of Megatron-LM's distributed optimizer, ``ddp_bucket_size``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketKey:
    """What the parameters of one bucket have in common."""

    axes: tuple[int, ...]
    """Data axes."""
    dtype: str
    zero_level: int
    zero_axes: tuple[int, ...]
    """Axes over which ZeRO shards; empty at level 0."""
    group: Hashable
    """From ZeRO 2 on the region of first use (gradients are reduced when its backward is done, and at ZeRO 3 its
    parameters are gathered together), else None."""


def assign_buckets(
    keys: Sequence[BucketKey | None], elements: Sequence[int], capacity: int = BUCKET_ELEMENTS
) -> tuple[int | None, ...]:
    """Bucket number of each parameter, in parameter order; None for a parameter without reduction.

    A bucket takes parameters of one key until it holds ``capacity`` elements (a ZeRO-3 group is never cut). Numbers
    count up in order of the first parameter.
    """
    open_buckets: dict[BucketKey, tuple[int, int]] = {}
    result: list[int | None] = []
    following = 0
    for key, size in zip(keys, elements, strict=True):
        if key is None:
            result.append(None)
            continue
        number, filled = open_buckets.get(key, (-1, 0))
        if number < 0 or (filled >= capacity and key.zero_level < 3):
            number, filled = following, 0
            following += 1
        open_buckets[key] = (number, filled + size)
        result.append(number)
    return tuple(result)
