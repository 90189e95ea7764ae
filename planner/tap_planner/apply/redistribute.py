"""Redistributions on local parts: a tensor's placement on one axis becomes another.

A dim that is split in blocks is viewed as segments (``sharding.segmented``); the step then works on one segment.
Uneven chunks are padded to the largest so that a collective sees equal sizes, and cut to their true length after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tap_planner.apply.communicator import Communicator, Coordinates, Parts
from tap_planner.sharding import (
    Placements,
    Segment,
    SegmentedShape,
    Step,
    apply_step,
    chunk_range,
    local_shape,
    segment_length,
    segmented,
)


def redistribute(
    communicator: Communicator,
    parts: Sequence[Tensor],
    shape: tuple[int, ...],
    placements: Placements,
    steps: Sequence[Step],
) -> Parts:
    """Run ``steps`` on the local parts of a tensor of global ``shape`` that has ``placements``."""
    result = list(parts)
    for step in steps:
        result = run_step(communicator, result, shape, placements, step)
        placements = apply_step(placements, step)
    return result


def run_step(
    communicator: Communicator, parts: Sequence[Tensor], shape: tuple[int, ...], placements: Placements, step: Step
) -> Parts:
    """Run one step; returns the parts under ``apply_step(placements, step)``."""
    if step.kind == "keep_first":
        return [
            part if rank[step.axis] == 0 else torch.zeros_like(part)
            for rank, part in zip(communicator.ranks, parts, strict=True)
        ]
    if step.kind == "all_reduce":
        return communicator.all_reduce(parts, (step.axis,))
    mesh_shape = communicator.mesh_shape
    cut = segmented(shape, placements, mesh_shape, (step.source, step.target))
    if cut is None:
        raise AssertionError(f"step {step} does not fit placements {placements} of shape {shape}")
    views = [_Cut(cut, mesh_shape, rank, step.axis) for rank in communicator.ranks]
    parts = [part.reshape(view.lengths) for view, part in zip(views, parts, strict=True)]
    if step.kind == "slice":
        moved = [view.own_chunk(part, view.dim(0)) for view, part in zip(views, parts, strict=True)]
    elif step.kind == "all_gather":
        moved = _all_gather(communicator, views, parts)
    elif step.kind == "reduce_scatter":
        moved = _reduce_scatter(communicator, views, parts)
    else:
        moved = _all_to_all(communicator, views, parts)
    after = apply_step(placements, step)
    return [
        part.reshape(local_shape(shape, after, mesh_shape, rank))
        for rank, part in zip(communicator.ranks, moved, strict=True)
    ]


class _Cut:
    """How one rank sees a tensor that is cut into segments."""

    def __init__(self, cut: SegmentedShape, mesh_shape: tuple[int, ...], coordinates: Coordinates, axis: int) -> None:
        self._cut = cut
        self._mesh_shape = mesh_shape
        self._coordinates = coordinates
        self.axis = axis
        self.ranks = mesh_shape[axis]
        self.lengths = tuple(
            segment_length(segment, mesh_shape, coordinates) for segments in cut.dims for segment in segments
        )
        """Local length of every segment; the shape of the view."""

    def dim(self, which: int) -> int:
        """Dim of the view that holds the source (0) or the target (-1) segment."""
        dim, position = self._cut.positions[which]
        return sum(len(segments) for segments in self._cut.dims[:dim]) + position

    def whole_length(self, which: int) -> int:
        """Length of a split segment once the split over the axis is undone."""
        dim, position = self._cut.positions[which]
        segment = self._cut.dims[dim][position]
        assert segment.axes and segment.axes[-1] == self.axis
        return segment_length(Segment(segment.size, segment.axes[:-1]), self._mesh_shape, self._coordinates)

    def own_chunk(self, part: Tensor, dim: int) -> Tensor:
        """This rank's chunk of a dim that all ranks of the axis hold whole."""
        start, end = chunk_range(part.shape[dim], [(self.ranks, self._coordinates[self.axis])])
        return part.narrow(dim, start, end - start)

    def own_length(self, length: int) -> int:
        """True length of this rank's chunk of ``length``."""
        start, end = chunk_range(length, [(self.ranks, self._coordinates[self.axis])])
        return end - start


def _padded(part: Tensor, dim: int, length: int) -> Tensor:
    missing = length - part.shape[dim]
    if missing == 0:
        return part
    shape = (*part.shape[:dim], missing, *part.shape[dim + 1 :])
    return torch.cat([part, part.new_zeros(shape)], dim)


def _chunk(length: int, ranks: int) -> int:
    return -(-length // ranks)


def _slots(part: Tensor, dim: int, ranks: int) -> Tensor:
    """Dim ``dim`` of ``ranks`` equal chunks (padded) with the chunk number moved to a new dim 0."""
    chunk = _chunk(part.shape[dim], ranks)
    part = _padded(part, dim, chunk * ranks)
    return part.unflatten(dim, (ranks, chunk)).movedim(dim, 0)


def _merged(part: Tensor, dim: int, length: int) -> Tensor:
    """Inverse of ``_slots``: dim 0 goes back in front of ``dim`` and the padding is cut off."""
    return part.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, length)


def _all_gather(communicator: Communicator, views: list[_Cut], parts: Sequence[Tensor]) -> Parts:
    axis = views[0].axis
    padded = [
        _padded(part, view.dim(0), _chunk(view.whole_length(0), view.ranks))
        for view, part in zip(views, parts, strict=True)
    ]
    gathered = communicator.all_gather(padded, (axis,))
    return [_merged(part, view.dim(0), view.whole_length(0)) for view, part in zip(views, gathered, strict=True)]


def _reduce_scatter(communicator: Communicator, views: list[_Cut], parts: Sequence[Tensor]) -> Parts:
    axis = views[0].axis
    slots = [_slots(part, view.dim(-1), view.ranks) for view, part in zip(views, parts, strict=True)]
    scattered = communicator.reduce_scatter(slots, (axis,))
    return [
        part.narrow(view.dim(-1), 0, view.own_length(view.lengths[view.dim(-1)]))
        for view, part in zip(views, scattered, strict=True)
    ]


def _all_to_all(communicator: Communicator, views: list[_Cut], parts: Sequence[Tensor]) -> Parts:
    axis = views[0].axis
    slots: Parts = []
    for view, part in zip(views, parts, strict=True):
        part = _padded(part, view.dim(0), _chunk(view.whole_length(0), view.ranks))
        slots.append(_slots(part, view.dim(-1), view.ranks))
    exchanged = communicator.all_to_all(slots, (axis,))
    return [
        _merged(part, view.dim(0), view.whole_length(0)).narrow(
            view.dim(-1), 0, view.own_length(view.lengths[view.dim(-1)])
        )
        for view, part in zip(views, exchanged, strict=True)
    ]
