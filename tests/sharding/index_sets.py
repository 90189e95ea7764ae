"""Which indices a rank holds, written down from the definitions, and random placements to try them on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import strategies as st

from tap_planner.sharding import PARTIAL, REPLICATE, Placement, Placements, fits, shard

Sets = tuple[frozenset[int], ...]
"""Indices held, per dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tensor on a mesh."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: Placements


def coordinates_of(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Coordinates of all ranks, row-major."""
    return list(itertools.product(*(range(size) for size in mesh)))


def owned(shape: tuple[int, ...], placements: Placements, mesh: tuple[int, ...], coordinates: tuple[int, ...]) -> Sets:
    """Definition "Uneven shard": per block count the axes chunk what lies inside a block, outermost axis first."""
    result: list[frozenset[int]] = []
    for dim, size in enumerate(shape):
        held = set(range(size))
        for blocks in {p.blocks for p in placements if p.is_shard and p.dim == dim}:
            low, high = 0, size // blocks
            for axis, placement in enumerate(placements):
                if placement == shard(dim, blocks):
                    chunk = -(-(high - low) // mesh[axis])
                    low, high = (
                        min(high, low + coordinates[axis] * chunk),
                        min(high, low + (coordinates[axis] + 1) * chunk),
                    )
            held = {index for index in held if low <= index % (size // blocks) < high}
        result.append(frozenset(held))
    return tuple(result)


def elements(sets: Sets) -> int:
    """Number of elements of a part."""
    count = 1
    for dim in sets:
        count *= len(dim)
    return count


def common(left: Sets, right: Sets) -> Sets:
    """What two parts have in common."""
    return tuple(a & b for a, b in zip(left, right, strict=True))


def placement_options(shape: tuple[int, ...]) -> list[Placement]:
    """R, P and every shard in up to four equal blocks."""
    whole = [(dim, size) for dim, size in enumerate(shape) if size > 1]
    shards = [shard(dim, blocks) for dim, size in whole for blocks in (1, 2, 3, 4) if size % blocks == 0]
    return [REPLICATE, PARTIAL, *shards, *shards]


@st.composite
def random_cases(draw: st.DrawFn, max_axes: int = 3) -> Case:
    """Placements that fit a random tensor, uneven ones and blocks among them."""
    shape = tuple(draw(st.lists(st.integers(1, 24), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(2, 4), min_size=1, max_size=max_axes)))
    options = placement_options(shape)
    placements: Placements = ()
    for axis in range(len(mesh)):
        chosen = draw(st.sampled_from(options))
        fitting = fits(shape, (*placements, chosen), mesh[: axis + 1])
        placements = (*placements, chosen if fitting else REPLICATE)
    return Case(shape=shape, mesh=mesh, placements=placements)
