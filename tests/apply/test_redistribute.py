"""Redistributions on local parts agree with cutting the whole tensor, and hand the planned payload to collectives."""

from __future__ import annotations

import itertools

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tap_planner.apply import LockstepCommunicator, RecordingCommunicator
from tap_planner.apply.placing import assemble
from tap_planner.apply.redistribute import run_step
from tap_planner.sharding import (
    PARTIAL,
    REPLICATE,
    Placement,
    Placements,
    apply_step,
    fits,
    local_indices,
    make_step,
    shard,
    step_elements,
)

_MESHES = ((2,), (3,), (2, 2), (2, 3), (4, 2), (2, 2, 2))


def _split_value(whole: torch.Tensor, placements: Placements, mesh_shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Parts of a tensor; on P axes the value is spread over the coordinates in unequal shares."""
    parts = []
    for coordinates in itertools.product(*(range(size) for size in mesh_shape)):
        part = whole
        for dim, held in enumerate(local_indices(tuple(whole.shape), placements, mesh_shape, coordinates)):
            part = part.index_select(dim, torch.from_numpy(held))
        for placement, size, coordinate in zip(placements, mesh_shape, coordinates, strict=True):
            if placement.is_partial:
                part = part * (2.0 * (coordinate + 1) / (size * (size + 1)))
        parts.append(part)
    return parts


def _options(shape: tuple[int, ...], blocks: int) -> list[Placement]:
    shards = [shard(dim, count) for dim in range(len(shape)) for count in sorted({1, blocks})]
    return [REPLICATE, PARTIAL, *shards]


@settings(max_examples=150)
@given(data=st.data())
def test_random_walk_of_steps(data: st.DataObject) -> None:
    """After every step of a random walk each rank holds its part of the same whole tensor, and coordinate 0 issued
    exactly the planned elements, the others never more."""
    mesh_shape = data.draw(st.sampled_from(_MESHES))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    options = _options(shape, data.draw(st.integers(1, 3)))
    placements: Placements = tuple(data.draw(st.sampled_from(options)) for _ in mesh_shape)
    assume(fits(shape, placements, mesh_shape))
    whole = torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    recorder = RecordingCommunicator(LockstepCommunicator(mesh_shape))
    parts = _split_value(whole, placements, mesh_shape)
    for _ in range(data.draw(st.integers(1, 6))):
        steps = [
            step
            for axis in range(len(mesh_shape))
            for target in options
            if (step := make_step(shape, placements, mesh_shape, axis, target)) is not None
            and fits(shape, apply_step(placements, step), mesh_shape)
        ]
        if not steps:
            return
        step = data.draw(st.sampled_from(steps))
        planned = step_elements(shape, placements, mesh_shape, step)
        before = len(recorder.issued[0])
        parts = run_step(recorder, parts, shape, placements, step)
        placements = apply_step(placements, step)
        for replica in assemble(parts, shape, placements, mesh_shape):
            torch.testing.assert_close(torch.from_numpy(replica), whole, rtol=1e-12, atol=0.0)
        issued = [sequence[before:] for sequence in recorder.issued]
        assert [(each.kind, each.axes, each.elements) for each in issued[0]] == (
            [] if step.is_local else [(step.kind, (step.axis,), planned)]
        )
        assert all(each.elements <= planned for sequence in issued for each in sequence)


def test_keep_first_keeps_one_copy() -> None:
    """R -> P(sum) leaves the value on coordinate 0 of the axis and zeros elsewhere, so that the sum counts it once."""
    step = make_step((3,), (REPLICATE, REPLICATE), (2, 2), 1, PARTIAL)
    assert step is not None
    parts = run_step(LockstepCommunicator((2, 2)), [torch.ones(3)] * 4, (3,), (REPLICATE, REPLICATE), step)
    assert [float(part.sum()) for part in parts] == [3.0, 0.0, 3.0, 0.0]
