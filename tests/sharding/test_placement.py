"""Placements against index sets written down from the definitions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tap_planner.errors import PlanFormatError
from tap_planner.sharding import (
    PARTIAL,
    REPLICATE,
    Placement,
    Placements,
    chunk_range,
    dual,
    fits,
    local_indices,
    local_shape,
    parse_placement,
    shard,
)
from tests.sharding.index_sets import Case, coordinates_of, owned, random_cases


@given(random_cases())
@settings(max_examples=200)
def test_local_indices_are_those_of_the_definition(case: Case) -> None:
    """Each rank holds, in ascending order, the indices that definitions.md gives it."""
    for coordinates in coordinates_of(case.mesh):
        found = local_indices(case.shape, case.placements, case.mesh, coordinates)
        expected = owned(case.shape, case.placements, case.mesh, coordinates)
        assert [dim.tolist() for dim in found] == [sorted(dim) for dim in expected]


@given(random_cases())
@settings(max_examples=200)
def test_a_replica_group_holds_every_element_once(case: Case) -> None:
    """Ranks that differ only on sharding axes hold each element of the tensor exactly once together."""
    sharding = [axis for axis, p in enumerate(case.placements) if p.is_shard]
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for coordinates in coordinates_of(case.mesh):
        key = tuple(c for axis, c in enumerate(coordinates) if axis not in sharding)
        held = local_indices(case.shape, case.placements, case.mesh, coordinates)
        groups.setdefault(key, []).extend(itertools.product(*(dim.tolist() for dim in held)))
    everything = list(itertools.product(*(range(size) for size in case.shape)))
    assert all(sorted(held) == everything for held in groups.values())


@given(random_cases())
@settings(max_examples=200)
def test_local_shape_counts_the_local_indices(case: Case) -> None:
    """The local shape is the number of indices held, on every rank."""
    for coordinates in coordinates_of(case.mesh):
        indices = local_indices(case.shape, case.placements, case.mesh, coordinates)
        assert local_shape(case.shape, case.placements, case.mesh, coordinates) == tuple(len(dim) for dim in indices)


@given(random_cases())
@settings(max_examples=200)
def test_coordinate_zero_holds_the_largest_part(case: Case) -> None:
    """No rank's part is larger, in any dim, than that at coordinate 0, which is the default."""
    largest = local_shape(case.shape, case.placements, case.mesh)
    assert largest == local_shape(case.shape, case.placements, case.mesh, (0,) * len(case.mesh))
    for coordinates in coordinates_of(case.mesh):
        part = local_shape(case.shape, case.placements, case.mesh, coordinates)
        assert all(mine <= most for mine, most in zip(part, largest, strict=True))


@pytest.mark.parametrize(
    ("length", "parts", "expected"),
    [
        (10, [(4, 0)], (0, 3)),
        (10, [(4, 3)], (9, 10)),
        (5, [(4, 3)], (5, 5)),
        (10, [(2, 1), (2, 0)], (5, 8)),
        (10, [(2, 1), (2, 1)], (8, 10)),
        (3, [(2, 1), (2, 1)], (3, 3)),
    ],
)
def test_uneven_chunks_are_those_of_the_definition(
    length: int, parts: list[tuple[int, int]], expected: tuple[int, int]
) -> None:
    """Rank i of m gets [i c, min(n, (i+1) c)) with c = ceil(n/m), and each chunk is chunked again."""
    assert chunk_range(length, parts) == expected


def test_blocks_shard_inside_each_block() -> None:
    """A fused projection of 12 columns in 3 blocks gives rank 1 of 2 the second half of each block."""
    (indices,) = local_indices((12,), (shard(0, 3),), (2,), (1,))
    assert indices.tolist() == [2, 3, 6, 7, 10, 11]


def test_the_outer_axis_of_a_dim_is_split_first() -> None:
    """Of two axes on one dim the first in mesh order splits outermost."""
    held = [local_indices((8,), (shard(0), shard(0)), (2, 2), c)[0].tolist() for c in coordinates_of((2, 2))]
    assert held == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("shape", "placements", "mesh"),
    [
        ((10,), (shard(0, 3),), (2,)),
        ((12,), (shard(0, 2), shard(0, 3)), (2, 2)),
        ((12,), (shard(0), shard(0, 3)), (2, 2)),
        ((4,), (shard(1),), (2,)),
    ],
)
def test_placements_that_do_not_fit_are_refused(
    shape: tuple[int, ...], placements: Placements, mesh: tuple[int, ...]
) -> None:
    """Blocks that do not divide or nest, an uneven outer segment and a dim that is not there do not fit."""
    assert not fits(shape, placements, mesh)


@given(st.sampled_from([REPLICATE, PARTIAL]) | st.builds(shard, st.integers(0, 9), st.integers(1, 99)))
def test_text_round_trip(placement: Placement) -> None:
    """A placement is what its text parses to."""
    assert parse_placement(str(placement)) == placement


@pytest.mark.parametrize("text", ["", "r", "S", "S()", "S(-1)", "S(0, blocks=1)", "S(0,blocks=2)", "P", "P(max)"])
def test_unknown_text_is_refused(text: str) -> None:
    """What no placement writes is refused by name."""
    with pytest.raises(PlanFormatError, match="placement"):
        parse_placement(text)


@given(random_cases())
def test_dual_is_idempotent_and_keeps_shards(case: Case) -> None:
    """The wanted gradient of S is S, of P and R is R."""
    assume(case.placements)
    for placement in case.placements:
        assert dual(placement) == (placement if placement.is_shard else REPLICATE)
