"""--grid: what is read, and what is refused."""

from __future__ import annotations

import pytest

import tap_planner.sweep
from tap_planner.errors import UsageError
from tap_planner.plan import PlanOptions
from tap_planner.sweep import Dimension, default_grid, parse_grid


def test_public_names_exist() -> None:
    """Every name in __all__ is there."""
    assert all(hasattr(tap_planner.sweep, name) for name in tap_planner.sweep.__all__)


def test_dimensions_with_and_without_values() -> None:
    """Entries of several options are one grid in the order in which they are named; other words are the same."""
    grid = parse_grid(["pp, tp=2|4|2", "microbatch", "zero=1|auto,optimizer_states"], PlanOptions())
    assert grid.dimensions == (
        Dimension(name="pp"),
        Dimension(name="tp", values=(2, 4)),
        Dimension(name="microbatches"),
        Dimension(name="zero", values=(1, "auto")),
        Dimension(name="optimizer-states"),
    )
    assert grid.shown == "pp,tp=2|4,microbatches,zero=1|auto,optimizer-states"


def test_what_a_setting_can_be() -> None:
    """Without values a setting takes all that fix it."""
    grid = parse_grid(["zero,recompute,optimizer-states"], PlanOptions())
    assert [dimension.sensible for dimension in grid.dimensions] == [
        (0, 1, 2, 3),
        ("none", "selective", "full"),
        ("fp32", "bf16"),
    ]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("micobatches", {}, r"'micobatches' is no dimension \(did you mean 'microbatches'\?\)"),
        ("dp,,tp", {}, "'' is no dimension"),
        ("gap=0", {}, "'gap' is no dimension"),
        ("max-memory", {}, "'max-memory' is no dimension"),
        ("dp=2|x", {}, "--grid dp: 'x' found, expected a number"),
        ("dp=0", {}, "--grid dp: '0' found, expected a number"),
        ("dp=", {}, "--grid dp: '' found, expected a number"),
        ("zero=4", {}, "--grid zero: '4' found, expected auto, 0, 1, 2, 3"),
        ("recompute=ful", {}, r"'ful' found, expected .* \(did you mean 'full'\?\)"),
        ("tp=2,tp=4", {}, "tp is named twice"),
        ("microbatch,microbatches=2", {}, "microbatches is named twice"),
        ("batch", {}, "--grid batch needs its values"),
        ("pp,dp", {"stages": "auto"}, "--grid pp varies the mesh, --stages auto says how many stages it has"),
        ("dp", {"mesh": "dp=4"}, "--grid dp varies the mesh, --mesh dp=4 fixes it"),
        ("zero", {"zero": 1}, "--grid zero varies what --zero fixes"),
        ("batch=8", {"batch": 8}, "--grid batch varies what --batch fixes"),
        ("microbatches", {"microbatches": 2}, "--grid microbatches varies what --microbatches fixes"),
        ("recompute", {"recompute": "full"}, "--grid recompute varies what --recompute fixes"),
        ("optimizer-states", {"optimizer_states": "auto"}, "varies what --optimizer-states fixes"),
        ("pp,dp,schedule", {"schedule": "zbv"}, "--grid schedule varies what --schedule fixes"),
        ("pp,dp,chunks", {"chunks": 2}, "--grid chunks varies what --chunks fixes"),
        ("dp,schedule", {}, "--grid schedule: there is one stage"),
        ("chunks", {"mesh": "dp=4"}, "--grid chunks: there is one stage"),
        ("pp,dp", {"mode": "infer"}, "--grid pp: inference has no such choice"),
        ("zero", {"mode": "infer"}, "--grid zero: inference has no such choice"),
    ],
)
def test_what_is_refused(text: str, options: dict[str, object], message: str) -> None:
    """Wrong names and values are named with a near one, and what an option fixes is not varied; all with a hint."""
    with pytest.raises(UsageError, match=message) as caught:
        parse_grid([text], PlanOptions(**options))  # type: ignore[arg-type]
    assert caught.value.hint


def test_an_axis_may_have_any_name() -> None:
    """What is like no dimension and no option is an axis."""
    assert all(dimension.is_axis for dimension in parse_grid(["dp,tp=2,ep,outer=2"], PlanOptions()).dimensions)


@pytest.mark.parametrize(
    ("options", "unlike", "names"),
    [
        ({}, False, ("pp", "dp", "tp", "microbatches")),
        ({"microbatches": 4}, False, ("pp", "dp", "tp")),
        ({"mesh": "dp=4"}, False, ("microbatches",)),
        ({"mode": "infer"}, False, ("dp", "tp")),
        ({"objective": "memory"}, False, ("dp", "tp", "microbatches")),
        ({"allow_idle": True}, False, ("dp", "tp", "microbatches")),
        ({"target": "megatron"}, False, ("dp", "tp", "microbatches")),
        ({}, True, ("dp", "tp", "microbatches")),
    ],
)
def test_the_default_grid_varies_what_is_open(options: dict[str, object], unlike: bool, names: tuple[str, ...]) -> None:
    """Stages are left out where there are none, and so is what an option fixes."""
    assert default_grid(PlanOptions(**options), unlike_nodes=unlike).names == names  # type: ignore[arg-type]


def test_nothing_open() -> None:
    """A default grid that would vary nothing is refused."""
    with pytest.raises(UsageError, match="--sweep: the options leave no mesh and no microbatches open"):
        default_grid(PlanOptions(mesh="dp=4", microbatches=2), unlike_nodes=False)
