"""Parameters whose gradients are reduced together, as decisions of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tap_planner.plan.decisions import BucketDecision
from tap_planner.schedule import BucketKey, assign_buckets

__all__ = ["bucketed"]


def bucketed(
    keys: Sequence[BucketKey | None], elements: Sequence[int], names: Sequence[str], mesh_shape: Sequence[int]
) -> tuple[tuple[int | None, ...], tuple[BucketDecision, ...]]:
    """Put parameters in buckets.

    Args:
        keys: per parameter, what all of its bucket have in common; None: in no bucket.
        elements: per parameter, those that a rank holds.
        names: per parameter.
        mesh_shape: sizes of the axes.

    Returns:
        Per parameter the number of its bucket, and the buckets: with ZeRO their elements are padded to whole shards.
    """
    numbers = assign_buckets(keys, elements)
    members: dict[int, list[int]] = {}
    for position, number in enumerate(numbers):
        if number is not None:
            members.setdefault(number, []).append(position)
    buckets: list[BucketDecision] = []
    for number, positions in sorted(members.items()):
        key = keys[positions[0]]
        assert key is not None
        total = sum(elements[position] for position in positions)
        shards = math.prod(mesh_shape[axis] for axis in key.zero_axes) if key.zero_level else 1
        buckets.append(
            BucketDecision(
                id=number,
                axes=key.axes,
                dtype=key.dtype,
                zero_level=key.zero_level,
                zero_axes=key.zero_axes,
                parameters=tuple(names[position] for position in positions),
                elements=-(-total // shards) * shards,
            )
        )
    return numbers, tuple(buckets)
