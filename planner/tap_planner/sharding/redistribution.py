"""Redistributions: the per-axis steps that turn one placement of a tensor into another.

The steps are those of definitions.md; each changes the placement on one axis:

    all_reduce      P -> R
    reduce_scatter  P -> S
    all_gather      S -> R
    all_to_all      S -> S'
    slice           R -> S   (local)
    keep_first      R -> P   (local: coordinate 0 keeps the value, the others hold zeros)

On a dim that several axes split with the same block count only the innermost of them can be changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tap_planner.sharding.placement import (
    Placement,
    Placements,
    Segment,
    cut_dim,
    local_shape,
    segment_length,
)

LOCAL_KINDS = frozenset({"slice", "keep_first"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a redistribution: the placement on ``axis`` becomes ``target``."""

    kind: str
    axis: int
    source: Placement
    target: Placement

    @property
    def is_local(self) -> bool:
        """Whether no data moves between ranks."""
        return self.kind in LOCAL_KINDS


def step_kind(source: Placement, target: Placement) -> str | None:
    """Name of the step from one placement to another on one axis, or None if there is none."""
    if source == target:
        return None
    if source.is_partial:
        return "all_reduce" if target.is_replicate else "reduce_scatter"
    if source.is_replicate:
        return "keep_first" if target.is_partial else "slice"
    if target.is_partial:
        return None
    return "all_gather" if target.is_replicate else "all_to_all"


@dataclass(frozen=True, slots=True)
class SegmentedShape:
    """A tensor's dims cut into segments, as a step sees them."""

    dims: tuple[tuple[Segment, ...], ...]
    positions: tuple[tuple[int, int], ...]
    """For each shard placement asked for: (dim, index of the segment that it splits)."""


@lru_cache(maxsize=1 << 17)
def segmented(
    shape: tuple[int, ...], placements: Placements, mesh_shape: tuple[int, ...], wanted: tuple[Placement, ...]
) -> SegmentedShape | None:
    """Cut the dims at the block counts of ``placements`` and of the ``wanted`` shards; None if that is impossible."""
    splits: dict[int, list[tuple[int, int]]] = {}
    for axis, placement in enumerate(placements):
        if placement.is_shard:
            splits.setdefault(placement.dim, []).append((axis, placement.blocks))
    extra: dict[int, set[int]] = {}
    for placement in wanted:
        if placement.is_shard:
            extra.setdefault(placement.dim, set()).add(placement.blocks)
    dims: list[tuple[Segment, ...]] = []
    for dim, size in enumerate(shape):
        segments = cut_dim(size, tuple(splits.get(dim, ())), mesh_shape, tuple(sorted(extra.get(dim, ()))))
        if segments is None:
            return None
        dims.append(segments)
    positions = tuple((p.dim, _boundary_position(dims[p.dim], p.blocks)) for p in wanted if p.is_shard)
    return SegmentedShape(tuple(dims), positions)


def _boundary_position(segments: tuple[Segment, ...], blocks: int) -> int:
    outer = 1
    for position, segment in enumerate(segments):
        if outer == blocks:
            return position
        outer *= segment.size
    raise AssertionError(f"no boundary {blocks} in {segments}")


def _is_simple(placements: Placements, axis: int, source: Placement, target: Placement) -> bool:
    """Whether a step only touches dims that no other axis splits, without blocks: each is a single segment."""
    for placement in (source, target):
        if placement.is_shard and (
            placement.blocks > 1
            or any(p.is_shard and p.dim == placement.dim and a != axis for a, p in enumerate(placements))
        ):
            return False
    return not (source.is_shard and target.is_shard and source.dim == target.dim)


@lru_cache(maxsize=1 << 17)
def make_step(
    shape: tuple[int, ...], placements: Placements, mesh_shape: tuple[int, ...], axis: int, target: Placement
) -> Step | None:
    """The step that changes ``axis`` to ``target``, or None where the listed collectives cannot do it."""
    source = placements[axis]
    kind = step_kind(source, target)
    if kind is None:
        return None
    if _is_simple(placements, axis, source, target):
        return Step(kind=kind, axis=axis, source=source, target=target)
    inner = placements[axis + 1 :]
    if any(placement.is_shard and placement in inner for placement in (source, target)):
        return None
    after = (*placements[:axis], target, *inner)
    before_cut = segmented(shape, placements, mesh_shape, (source, target))
    if before_cut is None or segmented(shape, after, mesh_shape, (source, target)) is None:
        return None
    if kind == "all_to_all":
        (source_dim, source_segment), (target_dim, target_segment) = before_cut.positions
        if (source_dim, source_segment) == (target_dim, target_segment):
            return None
    return Step(kind=kind, axis=axis, source=source, target=target)


def step_elements(
    shape: tuple[int, ...],
    placements: Placements,
    mesh_shape: tuple[int, ...],
    step: Step,
    coordinates: tuple[int, ...] | None = None,
) -> int:
    """Logical payload of a step in elements, as definitions.md "Comparing execution with the plan" counts it.

    all_reduce: the local tensor; all_gather and reduce_scatter: the padded shard x group; all_to_all: the padded send
    buffer. Default: the rank at coordinate 0 of every axis.
    """
    if step.is_local:
        return 0
    ranks = mesh_shape[step.axis]
    if coordinates is None and _is_simple(placements, step.axis, step.source, step.target):
        return _simple_elements(shape, placements, mesh_shape, step)
    cut = segmented(shape, placements, mesh_shape, (step.source, step.target))
    assert cut is not None
    lengths = [[segment_length(s, mesh_shape, coordinates) for s in dim] for dim in cut.dims]
    padded = [list(dim) for dim in lengths]
    if step.kind == "all_gather" or step.kind == "all_to_all":
        dim, position = cut.positions[0]
        segment = cut.dims[dim][position]
        parent = _parent_length(segment, step.axis, mesh_shape, coordinates)
        padded[dim][position] = -(-parent // ranks) * (ranks if step.kind == "all_gather" else 1)
    if step.kind == "reduce_scatter" or step.kind == "all_to_all":
        dim, position = cut.positions[-1]
        padded[dim][position] = -(-padded[dim][position] // ranks) * ranks
    count = 1
    for dim in padded:
        for length in dim:
            count *= length
    return count


def _simple_elements(shape: tuple[int, ...], placements: Placements, mesh_shape: tuple[int, ...], step: Step) -> int:
    """``step_elements`` at coordinate 0 where every dim that the step touches is split by this axis alone."""
    ranks = mesh_shape[step.axis]
    lengths = list(local_shape(shape, placements, mesh_shape))
    if step.kind == "all_gather":
        lengths[step.source.dim] *= ranks
    elif step.kind in ("reduce_scatter", "all_to_all"):
        lengths[step.target.dim] = -(-lengths[step.target.dim] // ranks) * ranks
    count = 1
    for length in lengths:
        count *= length
    return count


def _parent_length(
    segment: Segment, axis: int, mesh_shape: tuple[int, ...], coordinates: tuple[int, ...] | None
) -> int:
    """Length of a segment before the split over its innermost axis ``axis``."""
    assert segment.axes and segment.axes[-1] == axis
    return segment_length(Segment(segment.size, segment.axes[:-1]), mesh_shape, coordinates)


def apply_step(placements: Placements, step: Step) -> Placements:
    """Placements after a step."""
    return (*placements[: step.axis], step.target, *placements[step.axis + 1 :])
