"""Placements: what a tensor is along one mesh axis, and which part of it a rank holds."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

import numpy as np

from tap_planner.errors import PlanFormatError


class PlacementKind(enum.Enum):
    """The three kinds of placement."""

    REPLICATE = "R"
    SHARD = "S"
    PARTIAL = "P"


_ORDER = {PlacementKind.REPLICATE: 0, PlacementKind.SHARD: 1, PlacementKind.PARTIAL: 2}


@dataclass(frozen=True, slots=True)
class Placement:
    """What a tensor is along one axis: ``R``, ``S(dim)``, ``S(dim, blocks=n)`` or ``P(sum)``."""

    kind: PlacementKind
    dim: int = -1
    """Tensor dim for ``SHARD``, else -1."""
    blocks: int = 1
    """The dim is split inside each of so many equal blocks."""
    _hash: int = field(init=False, repr=False, compare=False)
    """Placements are keys of every table: their hash is made once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((_ORDER[self.kind], self.dim, self.blocks)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if self.kind is PlacementKind.REPLICATE:
            return "R"
        if self.kind is PlacementKind.PARTIAL:
            return "P(sum)"
        return f"S({self.dim})" if self.blocks == 1 else f"S({self.dim}, blocks={self.blocks})"

    @property
    def is_replicate(self) -> bool:
        """Whether every rank holds the whole value."""
        return self.kind is PlacementKind.REPLICATE

    @property
    def is_shard(self) -> bool:
        """Whether ranks hold different parts."""
        return self.kind is PlacementKind.SHARD

    @property
    def is_partial(self) -> bool:
        """Whether the value is the sum over the ranks."""
        return self.kind is PlacementKind.PARTIAL


REPLICATE = Placement(PlacementKind.REPLICATE)
PARTIAL = Placement(PlacementKind.PARTIAL)

Placements = tuple[Placement, ...]
"""One placement per mesh axis, in mesh order."""


@cache
def shard(dim: int, blocks: int = 1) -> Placement:
    """The placement ``S(dim, blocks)``."""
    return Placement(PlacementKind.SHARD, dim, blocks)


_PATTERN = re.compile(r"S\((\d+)(?:, blocks=(\d+))?\)")


def parse_placement(text: str) -> Placement:
    """Inverse of ``str(placement)``.

    Raises:
        PlanFormatError: the text is no placement.
    """
    if text == "R":
        return REPLICATE
    if text == "P(sum)":
        return PARTIAL
    match = _PATTERN.fullmatch(text)
    if match is None or (match[2] is not None and int(match[2]) < 2):
        raise PlanFormatError(
            f"placement {text!r} is unknown, expected R, S(dim), S(dim, blocks=n) or P(sum)",
            hint="write the plan with tap-plan instead of by hand",
        )
    return shard(int(match[1]), int(match[2] or 1))


def dual(placement: Placement) -> Placement:
    """Placement of the gradient that the producer of a value wants: S -> S, P -> R, R -> R."""
    return REPLICATE if placement.is_partial else placement


def dual_placements(placements: Placements) -> Placements:
    """``dual`` on every axis."""
    return tuple(dual(placement) for placement in placements)


@dataclass(frozen=True, slots=True)
class Segment:
    """A factor of a dim between two block boundaries, split by some axes (outermost first)."""

    size: int
    axes: tuple[int, ...]


@cache
def dim_segments(
    size: int, placements: Placements, dim: int, mesh_shape: tuple[int, ...], extra_blocks: tuple[int, ...] = ()
) -> tuple[Segment, ...] | None:
    """Split a dim into segments at the block counts in use.

    A dim with placements of block counts k1 < k2 < ... is seen as (k1, k2/k1, ..., size/k_last); axes with block
    count k split the segment that follows the boundary k. ``extra_blocks`` adds boundaries.

    Returns:
        The segments, outermost first, or None where the placements do not fit the dim: block counts that do not
        nest, or a segment other than the last that its axes do not divide evenly.
    """
    splits = tuple((axis, p.blocks) for axis, p in enumerate(placements) if p.is_shard and p.dim == dim)
    return cut_dim(size, splits, mesh_shape, extra_blocks)


@cache
def cut_dim(
    size: int, splits: tuple[tuple[int, int], ...], mesh_shape: tuple[int, ...], extra_blocks: tuple[int, ...] = ()
) -> tuple[Segment, ...] | None:
    """``dim_segments`` of a dim by what splits it: (axis, block count), outermost axis first."""
    by_blocks: dict[int, list[int]] = {blocks: [] for blocks in extra_blocks}
    for axis, blocks in splits:
        by_blocks.setdefault(blocks, []).append(axis)
    counts = sorted(by_blocks)
    if not counts:
        return (Segment(size, ()),)
    segments: list[Segment] = [Segment(counts[0], ())] if counts[0] > 1 else []
    for blocks, following in zip(counts, [*counts[1:], size], strict=True):
        if blocks == 0 or following % blocks or size % blocks:
            return None
        axes = tuple(by_blocks[blocks])
        length = following // blocks
        if blocks != counts[-1] and length % math.prod(mesh_shape[axis] for axis in axes):
            return None
        segments.append(Segment(length, axes))
    return tuple(segments)


def chunk_range(length: int, parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Range of a dim of ``length`` after nested chunking, definitions.md "Uneven shard".

    Args:
        length: size of what is chunked.
        parts: (number of ranks, coordinate) per axis, outermost first.

    Returns:
        First index and end; the range may be empty.
    """
    start, end = 0, length
    for ranks, coordinate in parts:
        chunk = -(-(end - start) // ranks)
        first = min(end, start + coordinate * chunk)
        start, end = first, min(end, first + chunk)
    return start, end


def segment_length(segment: Segment, mesh_shape: tuple[int, ...], coordinates: Sequence[int] | None = None) -> int:
    """Local length of a segment at the given mesh coordinates (default: coordinate 0 of every axis)."""
    length = segment.size
    if coordinates is None:
        for axis in segment.axes:
            length = -(-length // mesh_shape[axis])
        return length
    start, end = chunk_range(length, [(mesh_shape[axis], coordinates[axis]) for axis in segment.axes])
    return end - start


@lru_cache(maxsize=1 << 18)
def local_shape(
    shape: tuple[int, ...],
    placements: Placements,
    mesh_shape: tuple[int, ...],
    coordinates: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """Shape of a rank's part (default: the rank at coordinate 0 of every axis, whose part is the largest).

    Raises:
        ValueError: the placements do not fit the shape (see ``fits``).
    """
    result: list[int] = []
    for dim, size in enumerate(shape):
        segments = dim_segments(size, placements, dim, mesh_shape)
        if segments is None:
            raise ValueError(f"placements {[str(p) for p in placements]} do not fit dim {dim} of {shape}")
        length = 1
        for segment in segments:
            length *= segment_length(segment, mesh_shape, coordinates)
        result.append(length)
    return tuple(result)


def local_elements(shape: tuple[int, ...], placements: Placements, mesh_shape: tuple[int, ...]) -> int:
    """Elements of the largest part, that of the rank at coordinate 0 of every axis (see ``local_shape``)."""
    return math.prod(local_shape(shape, placements, mesh_shape))


@lru_cache(maxsize=1 << 18)
def fits(shape: tuple[int, ...], placements: Placements, mesh_shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can have these placements."""
    for dim, size in enumerate(shape):
        if dim_segments(size, placements, dim, mesh_shape) is None:
            return False
    return all(p.dim < len(shape) for p in placements if p.is_shard)


def local_indices(
    shape: tuple[int, ...], placements: Placements, mesh_shape: tuple[int, ...], coordinates: Sequence[int]
) -> tuple[np.ndarray, ...]:
    """Global indices, per dim, of the part that the rank at ``coordinates`` holds.

    ``full[np.ix_(*local_indices(...))]`` is that part.
    """
    result: list[np.ndarray] = []
    for dim, size in enumerate(shape):
        segments = dim_segments(size, placements, dim, mesh_shape)
        if segments is None:
            raise ValueError(f"placements {[str(p) for p in placements]} do not fit dim {dim} of {shape}")
        indices = np.zeros(1, dtype=np.int64)
        for segment in segments:
            start, end = chunk_range(segment.size, [(mesh_shape[axis], coordinates[axis]) for axis in segment.axes])
            indices = (indices[:, None] * segment.size + np.arange(start, end)[None, :]).reshape(-1)
        result.append(indices)
    return tuple(result)
