"""Collectives of two matrices on a 2 x 2 mesh, counted by hand."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from onnx import TensorProto, helper

from tap_planner.errors import ApplyError
from tap_planner.operators import rule_of
from tap_planner.program import Collective, Phase, Program, collectives, lower
from tap_planner.search import Assignment, Model
from tests.search.building import configuration_of, make_model, program_of
from tests.search.models import Nodes, bound, model_file

Counted = tuple[str, str, tuple[int, ...], int, int]
"""Phase, kind, axes, elements, count."""

PLAN = {"a": ("m", "n"), "r": ("d0", "d1"), "y": ("m", "k"), "z": ("d0", "none"), "loss": ("d0", "none")}
"""Data parallel on axis 0; first matrix by column, second by row on axis 1."""


@functools.cache
def two_matrices(batch: int) -> Model:
    """x [batch, 8] through w1 [8, 16], Relu, w2 [16, 8], Relu, on 2 x 2."""
    graph = Nodes()
    graph.add("MatMul", ["x", graph.weight("w1", 8, 16)], "a")
    graph.add("Relu", ["a"], "r")
    graph.add("MatMul", ["r", graph.weight("w2", 16, 8)], "y")
    graph.add("Relu", ["y"], "z")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 8])
    proto = helper.make_graph(graph.nodes, "mlp", [x], [z], graph.initializers)
    return make_model(bound(model_file(proto), batch=batch), (2, 2))


def lowered(plan: dict[str, tuple[str, ...]], *, zero: int = 0, microbatches: int = 1) -> Program:
    """The Program with the strategies of a plan; the global batch is 8."""
    model = two_matrices(8 // microbatches)
    values = []
    for index, operator in enumerate(model.graph.operators):
        names = [s.names(rule_of(operator.signature)) for s in model.space.operator(index).strategies]
        values.append(names.index(plan[operator.id]))
    assignment = Assignment(operators=tuple(values), parameters={})
    return program_of(model, configuration_of(zero=zero, microbatches=microbatches), assignment)


def counted(found: tuple[Collective, ...]) -> list[Counted]:
    """Without the dtype."""
    return [(c.phase.value, c.kind, c.axes, c.elements, c.count) for c in found]


# y is 8 x 8 split in two rows: 4 x 8 = 32 elements to reduce. Each of w1 and w2 has 8 x 8 = 64 elements on a rank.
@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (0, [("gradient", "all_reduce", (0,), 128, 1)]),
        (1, [("gradient", "reduce_scatter", (0,), 128, 1), ("optimizer", "all_gather", (0,), 128, 1)]),
        (2, [("gradient", "reduce_scatter", (0,), 128, 1), ("optimizer", "all_gather", (0,), 128, 1)]),
    ],
)
def test_megatron_mlp(zero: int, expected: list[Counted]) -> None:
    """One all-reduce forward, none backward (x needs no gradient), and the gradients of both matrices together."""
    assert counted(collectives(lowered(PLAN, zero=zero))) == [("forward", "all_reduce", (1,), 32, 1), *expected]


def test_zero_3_gathers_forward_and_backward() -> None:
    """The parameters of the region are gathered once forward and once backward, and reduced once."""
    assert counted(collectives(lowered(PLAN, zero=3))) == [
        ("forward", "all_gather", (0,), 128, 1),
        ("forward", "all_reduce", (1,), 32, 1),
        ("backward", "all_gather", (0,), 128, 1),
        ("gradient", "reduce_scatter", (0,), 128, 1),
    ]


@pytest.mark.parametrize(("zero", "reductions", "gathers"), [(0, 1, 0), (1, 1, 1), (2, 4, 1)])
def test_microbatches(zero: int, reductions: int, gathers: int) -> None:
    """Four microbatches: four all-reduces of a quarter; ZeRO 0 and 1 reduce gradients once a step, 2 each time."""
    kind = "reduce_scatter" if zero else "all_reduce"
    expected: list[Counted] = [
        ("forward", "all_reduce", (1,), 8, 4),
        ("gradient", kind, (0,), 128, reductions),
    ]
    if gathers:
        expected.append(("optimizer", "all_gather", (0,), 128, gathers))
    assert counted(collectives(lowered(PLAN, zero=zero, microbatches=4))) == expected


def test_both_matrices_by_column() -> None:
    """With w2 by column too r is gathered (4 x 16) and its gradient reduce-scattered; z's rows stay split by column."""
    plan = {**PLAN, "y": ("m", "n"), "z": ("d0", "d1"), "loss": ("d0", "d1")}
    assert counted(collectives(lowered(plan))) == [
        ("forward", "all_gather", (1,), 64, 1),
        ("backward", "reduce_scatter", (1,), 64, 1),
        ("gradient", "all_reduce", (0,), 128, 1),
    ]


def test_data_parallel_on_both_axes_needs_the_gradients_only() -> None:
    """The batch over all four ranks: nothing but one all-reduce of all 256 parameters over both axes."""
    plan = {"a": ("m", "m"), "r": ("d0", "d0"), "y": ("m", "m"), "z": ("d0", "d0"), "loss": ("d0", "d0")}
    assert counted(collectives(lowered(plan))) == [("gradient", "all_reduce", (0, 1), 256, 1)]


def hybrid(program: Program, zero_axes: tuple[int, ...]) -> Program:
    """The same plan with ZeRO over some of the data axes."""
    decisions = program.decisions
    return lower(
        program.graph,
        replace(
            decisions,
            parameters=tuple(replace(p, zero_axes=zero_axes) for p in decisions.parameters),
            buckets=tuple(replace(b, zero_axes=zero_axes) for b in decisions.buckets),
        ),
    )


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("zero", "scatters"), [(1, 1), (2, 2), (3, 2)])
def test_hybrid_sharding(zero: int, scatters: int, axis: int) -> None:
    """All 256 parameters on 2 x 2, sharded over one axis: half of them are summed over the other once a step."""
    plan = {"a": ("m", "m"), "r": ("d0", "d0"), "y": ("m", "m"), "z": ("d0", "d0"), "loss": ("d0", "d0")}
    found = counted(collectives(hybrid(lowered(plan, zero=zero, microbatches=2), (axis,))))
    gathers: list[Counted] = (
        [("optimizer", "all_gather", (axis,), 256, 1)]
        if zero < 3
        else [("forward", "all_gather", (axis,), 256, 2), ("backward", "all_gather", (axis,), 256, 2)]
    )
    reductions: list[Counted] = [
        ("gradient", "reduce_scatter", (axis,), 256, scatters),
        ("gradient", "all_reduce", (1 - axis,), 128, 1),
    ]
    assert sorted(found) == sorted([*reductions, *gathers])


def test_zero_axes_are_data_axes() -> None:
    """ZeRO over an axis that splits the parameter is refused, with the parameter's name."""
    with pytest.raises(ApplyError, match=r"'w1': ZeRO axes \[1\], expected some of its data axes \[0\]"):
        hybrid(lowered(PLAN, zero=1), (1,))


def test_replication_needs_nothing() -> None:
    """All ranks do the same: no collective."""
    assert collectives(lowered(dict.fromkeys(PLAN, ("none", "none")))) == ()


def test_phases_are_those_of_the_definition() -> None:
    """Phases: forward, recompute, backward, gradient, optimizer."""
    assert [phase.value for phase in Phase] == ["forward", "recompute", "backward", "gradient", "optimizer"]


def test_the_loss_of_microbatches_is_divided() -> None:
    """A mean over the global batch: the loss of each of four microbatches counts a quarter."""
    assert lowered(PLAN, microbatches=4).loss_scale_denominator == 4
