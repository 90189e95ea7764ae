"""Redistribution steps against what index sets say can be done, and what it moves."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tap_planner.sharding import (
    PARTIAL,
    REPLICATE,
    Placement,
    Step,
    apply_step,
    fits,
    make_step,
    shard,
    step_elements,
    step_kind,
)
from tests.sharding.index_sets import (
    Case,
    Sets,
    common,
    coordinates_of,
    elements,
    owned,
    placement_options,
    random_cases,
)


@st.composite
def allowed(draw: st.DrawFn) -> tuple[Case, Step]:
    """A tensor and a step that ``make_step`` allows."""
    case = draw(random_cases())
    targets = list(dict.fromkeys(placement_options(case.shape)))
    found = [
        step
        for axis in range(len(case.mesh))
        for target in targets
        if (step := make_step(case.shape, case.placements, case.mesh, axis, target)) is not None
    ]
    assume(found)
    return case, draw(st.sampled_from(found))


def group_of(case: Case, step: Step, coordinates: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Coordinates of the ranks that take part in a step with a rank."""
    axis = step.axis
    return [(*coordinates[:axis], c, *coordinates[axis + 1 :]) for c in range(case.mesh[axis])]


def parts(case: Case, step: Step, coordinates: tuple[int, ...]) -> tuple[list[Sets], list[Sets]]:
    """What the ranks of a group hold before and after a step."""
    after = apply_step(case.placements, step)
    group = group_of(case, step, coordinates)
    return (
        [owned(case.shape, case.placements, case.mesh, c) for c in group],
        [owned(case.shape, after, case.mesh, c) for c in group],
    )


@given(allowed())
@settings(max_examples=150)
def test_every_step_can_be_done_inside_its_group(found: tuple[Case, Step]) -> None:
    """After a step each rank holds only elements that some rank of its group held before; local ones its own."""
    case, step = found
    for coordinates in coordinates_of(case.mesh):
        before, after = parts(case, step, coordinates)
        for rank, mine in enumerate(after):
            sources = [before[rank]] if step.is_local else before
            assert sum(elements(common(mine, theirs)) for theirs in sources) >= elements(mine)


@given(allowed())
@settings(max_examples=150)
def test_steps_between_shards_move_each_element_once(found: tuple[Case, Step]) -> None:
    """An all-gather or all-to-all gives each rank every element that it holds afterwards from exactly one rank."""
    case, step = found
    if step.kind not in ("all_gather", "all_to_all"):
        return
    for coordinates in coordinates_of(case.mesh):
        before, after = parts(case, step, coordinates)
        for mine in after:
            assert sum(elements(common(mine, theirs)) for theirs in before) == elements(mine)


@given(allowed())
@settings(max_examples=150)
def test_a_reduce_scatter_leaves_every_element_with_one_rank(found: tuple[Case, Step]) -> None:
    """The parts after a reduce-scatter or slice partition what every rank of the group held before."""
    case, step = found
    if step.kind not in ("reduce_scatter", "slice"):
        return
    for coordinates in coordinates_of(case.mesh):
        before, after = parts(case, step, coordinates)
        assert all(whole == before[0] for whole in before)
        assert sum(elements(mine) for mine in after) == elements(before[0])


@given(allowed())
@settings(max_examples=150)
def test_a_step_ends_in_placements_that_fit(found: tuple[Case, Step]) -> None:
    """A step changes one axis, to placements that the tensor can have."""
    case, step = found
    after = apply_step(case.placements, step)
    assert fits(case.shape, after, case.mesh)
    assert [axis for axis in range(len(case.mesh)) if after[axis] != case.placements[axis]] == [step.axis]


def payload(case: Case, step: Step, coordinates: tuple[int, ...]) -> int:
    """Elements by the definition of "Collectives equal to the plan's", counted on index sets."""
    before, after = parts(case, step, coordinates)
    ranks = case.mesh[step.axis]
    match step.kind:
        case "all_reduce":
            return elements(before[0])
        case "all_gather":
            return max(elements(part) for part in before) * ranks
        case "reduce_scatter":
            return max(elements(part) for part in after) * ranks
        case "all_to_all":
            return max(elements(common(mine, theirs)) for mine in before for theirs in after) * ranks
        case _:
            return 0


@given(allowed())
@settings(max_examples=200)
def test_payload_on_the_rank_at_coordinate_zero(found: tuple[Case, Step]) -> None:
    """The payload is the local tensor, the padded shard x group, or the padded send buffer."""
    case, step = found
    zero = (0,) * len(case.mesh)
    assert step_elements(case.shape, case.placements, case.mesh, step) == payload(case, step, zero)


@given(allowed())
@settings(max_examples=200)
def test_payload_on_every_rank(found: tuple[Case, Step]) -> None:
    """On other ranks the payload is counted from what their group holds, and is never more than at coordinate 0."""
    case, step = found
    most = step_elements(case.shape, case.placements, case.mesh, step)
    for coordinates in coordinates_of(case.mesh):
        found_elements = step_elements(case.shape, case.placements, case.mesh, step, coordinates)
        assert found_elements == payload(case, step, coordinates)
        assert found_elements <= most


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        (PARTIAL, REPLICATE, "all_reduce"),
        (PARTIAL, shard(0), "reduce_scatter"),
        (shard(0), REPLICATE, "all_gather"),
        (shard(0), shard(1), "all_to_all"),
        (shard(0), shard(0, 2), "all_to_all"),
        (REPLICATE, shard(0), "slice"),
        (REPLICATE, PARTIAL, "keep_first"),
        (shard(0), PARTIAL, None),
        (REPLICATE, REPLICATE, None),
    ],
)
def test_kinds_of_steps(source: Placement, target: Placement, kind: str | None) -> None:
    """The steps are those that definitions.md lists."""
    assert step_kind(source, target) == kind


def test_only_the_innermost_axis_of_a_dim_can_change() -> None:
    """Of two axes on one dim the outer one cannot be gathered first: its ranks do not hold neighbouring parts."""
    both = (shard(0), shard(0))
    assert make_step((8,), both, (2, 2), 0, REPLICATE) is None
    assert make_step((8,), both, (2, 2), 1, REPLICATE) is not None


def test_uneven_all_to_all_payload_by_hand() -> None:
    """5 x 7 over 2 ranks, rows to columns: the send buffer is 3 rows x 2 chunks of 4 columns."""
    step = make_step((5, 7), (shard(0),), (2,), 0, shard(1))
    assert step is not None
    assert step_elements((5, 7), (shard(0),), (2,), step) == 24
