"""Which combinations a grid has."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.errors import UsageError
from tap_planner.plan import parse_rule
from tap_planner.sweep import Combination, Dimension, mesh_sizes
from tests.sweep.tiny_sweeps import OPTIONS, sweep_of


def _of(*grid: str, **options: object) -> tuple[Combination, ...]:
    return sweep_of(*grid, **options).combinations


@given(
    st.sampled_from([1, 2, 6, 8, 12, 36]),
    st.lists(st.one_of(st.none(), st.sets(st.integers(1, 12), min_size=1)), min_size=1, max_size=4),
    st.booleans(),
)
def test_meshes_are_all_factorisations(devices: int, given_sizes: list[set[int] | None], idle: bool) -> None:
    """Against brute force: every product of sizes that gives the devices, each once; with idle devices also less."""
    dimensions = [
        Dimension(name=f"a{index}", values=None if sizes is None else tuple(sorted(sizes)))
        for index, sizes in enumerate(given_sizes)
    ]
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    choices = [divisors if sizes is None else sorted(sizes) for sizes in given_sizes]
    products = itertools.product(*choices)
    wanted = [sizes for sizes in products if math.prod(sizes) == devices or (idle and math.prod(sizes) <= devices)]
    assert list(mesh_sizes(dimensions, devices, allow_idle=idle)) == wanted


def test_meshes_as_options() -> None:
    """Axes stand in the order of the grid, stages first; an axis of one device is left out."""
    found = [combination.options.mesh for combination in _of("tp,pp=1|2,dp")]
    assert found == ["dp=4", "pp=2,dp=2", "tp=2,dp=2", "pp=2,tp=2", "tp=4"]
    assert _of("tp,pp=4,dp")[0].arguments == ("--mesh", "pp=4")


def test_stages_alone_leave_the_mesh_of_a_stage_open() -> None:
    """Without axes beside them stages are those of ``--stages``, and one stage is none of it."""
    found = _of("pp,zero=0|1")
    assert [(c.options.mesh, c.options.stages) for c in found[::2]] == [(None, 1), (None, 2), (None, 4)]
    assert [c.arguments for c in found[::2]] == [
        ("--zero", "0"),
        ("--stages", "2", "--zero", "0"),
        ("--stages", "4", "--zero", "0"),
    ]


def test_open_stages_beside_the_grid() -> None:
    """With ``--stages auto`` each combination chooses its stages, and a schedule of the options or the grid counts."""
    found = _of("zero=0|1", stages="auto", schedule="auto")
    assert {(c.options.stages, c.options.schedule, c.staged) for c in found} == {("auto", "auto", True)}
    assert [c.options.schedule for c in _of("schedule=auto|zbv", stages="auto")] == ["auto", "zbv"]


def test_an_axis_that_rules_name_is_kept() -> None:
    """A rule about an axis can be kept on a mesh on which this axis has one device."""
    rules = (parse_rule("batch: tp", forbid=True, origin="--forbid"),)
    assert [combination.options.mesh for combination in _of("dp,tp", constraints=rules)] == [
        "tp=4",
        "dp=2,tp=2",
        "dp=4,tp=1",
    ]


def test_microbatch_counts_are_those_of_tap_plan() -> None:
    """Without stages all divisors of the batch, with stages whole rounds of them."""
    found = [dict(combination.values) for combination in _of("pp,dp=1,tp,microbatches")]
    assert [values["microbatches"] for values in found if values["pp"] == 1] == [1, 2, 4, 8]
    assert [values["microbatches"] for values in found if values["pp"] == 2] == [2, 4, 8]
    assert [values["microbatches"] for values in found if values["pp"] == 4] == [4, 8]


def test_schedules_and_chunks_are_of_pipelines() -> None:
    """With one stage there is one combination whatever they are; only interleaved has a number of chunks to choose."""
    found = [dict(combination.values) for combination in _of("pp,dp,tp=1,schedule=1f1b|interleaved,chunks")]
    assert [(values["pp"], values["schedule"], values["chunks"]) for values in found] == [
        (1, None, None),
        *((pp, *which) for pp in (2, 4) for which in (("1f1b", None), *(("interleaved", v) for v in (2, 3, 4)))),
    ]


def test_a_schedule_of_the_options_is_for_stages_only() -> None:
    """A combination with one stage is planned as without --schedule."""
    one, two = _of("pp=1|2,dp,tp=1", schedule="zbv", chunks=2)
    assert (one.options.schedule, one.options.chunks, one.staged) == ("1f1b", None, False)
    assert (two.options.schedule, two.options.chunks, two.staged) == ("zbv", 2, True)


def test_settings_and_batches() -> None:
    """Every combination of batch and settings, with the options that fix them; the mesh stays the search's."""
    found = _of("batch=4|8,zero=0|2,recompute=full", batch=None)
    assert [combination.arguments for combination in found] == [
        ("--batch", str(batch), "--zero", str(zero), "--recompute", "full") for batch in (4, 8) for zero in (0, 2)
    ]
    wanted = replace(OPTIONS, batch=4, zero=2, recompute="full")
    assert found[1].options == wanted and found[1].options.mesh is None


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("dp=3,tp", "--grid dp=3 does not divide the 4 devices"),
        ("dp=8,tp", "--grid dp=8 does not divide the 4 devices"),
        ("dp=2,tp=4", "--grid dp=2,tp=4: no mesh has 4 devices"),
        (
            f"dp,microbatches={'|'.join(map(str, range(1, 60_000)))},zero=0|1",
            "the grid of dp, microbatches, zero has more than 100,000 combinations",
        ),
    ],
)
def test_grids_without_a_mesh_or_without_end(grid: str, message: str) -> None:
    """Sizes that cannot be, and grids that nobody waits for, are refused before anything is planned."""
    with pytest.raises(UsageError, match=message):
        _of(grid)
