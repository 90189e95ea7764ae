"""Space as a factor of the search: brute force agrees, and big images on few devices are split in space."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from onnx import TensorProto, helper

from tap_planner.graph import Graph
from tap_planner.program import Phase, collectives, lower
from tap_planner.simulate import price_program
from tests.search.brute_force import enumerate_all, space_size
from tests.search.building import cluster_of, configuration_of, make_model, program_of, random_assignments, searched
from tests.search.models import Nodes, bound, model_file
from tests.search.test_exactness import check_without_limit

_SAME = {"kernel_shape": [3, 3], "pads": [1] * 4}
_HALVED = {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [2, 2]}


def network(layers: Sequence[str], *, size: int, channels: int, batch: int = 1, training: bool = False) -> Graph:
    """A chain of ``conv``, ``down`` (stride 2), ``point`` (1x1) and ``pool`` on square images."""
    graph, name, width = Nodes(), "x", 4
    for number, layer in enumerate(layers):
        if layer == "pool":
            name = graph.add("MaxPool", [name], f"t{number}", **_HALVED)
            continue
        kernel = 1 if layer == "point" else 3
        weight = graph.weight(f"w{number}", channels, width, kernel, kernel)
        attributes = {"conv": _SAME, "down": _HALVED, "point": {}}[layer]
        name, width = graph.add("Conv", [name, weight], f"t{number}", **attributes), channels
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4, size, size])]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)]
    return bound(
        model_file(helper.make_graph(graph.nodes, "cnn", inputs, outputs, graph.initializers)),
        batch=batch,
        training=training,
    )


@pytest.mark.parametrize(
    ("layers", "shape", "channels", "training"),
    [
        (("conv", "pool"), (2, 2), 1, False),
        (("conv", "down"), (2,), 4, True),
        (("conv", "conv"), (4,), 2, True),
    ],
)
def test_brute_force(layers: tuple[str, ...], shape: tuple[int, ...], channels: int, training: bool) -> None:
    """Objective and bound are those of every assignment priced over its Program."""
    graph = network(layers, size=8, channels=channels, training=training)
    model = make_model(graph, shape)
    assert space_size(model) < 4000
    configuration = configuration_of(training=training)
    check_without_limit(model, configuration, enumerate_all(model, configuration))


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_one_big_image_is_split_in_space(shape: tuple[int, ...]) -> None:
    """Inference of one image of 1024x1024 splits every convolution in space; the price is that of the Program."""
    graph = network(("conv", "conv", "down", "conv", "point", "pool", "conv"), size=1024, channels=32)
    result = searched(make_model(graph, shape), configuration_of(training=False), None)
    assert result.objective_ns == result.bound_ns
    program = lower(graph, result.decisions)
    assert price_program(program, cluster_of(shape)).objective_ns == result.objective_ns
    chosen = {operator.id: operator.strategy for operator in result.decisions.operators if operator.type != "Output"}
    assert all(name in ("s0", "s1") for names in chosen.values() for name in names), chosen
    kinds = {entry.kind for entry in collectives(program)}
    assert "halo_exchange" in kinds and kinds <= {"halo_exchange", "all_gather"}


def test_search_and_program_price_exchanges_alike() -> None:
    """Random assignments: what the tables charge for forward and backward is what the Program's instructions cost."""
    graph = network(("conv", "down", "conv", "pool"), size=16, channels=4, batch=2, training=True)
    model = make_model(graph, (2, 2))
    configuration = configuration_of()
    phases: set[Phase] = set()
    for assignment in random_assignments(model, 0, 40, per_class=False):
        program = program_of(model, configuration, assignment)
        price = price_program(program, cluster_of((2, 2)))
        operators = sum(
            int(model.space.operator(index).forward_ns[choice] + model.space.operator(index).backward_ns[choice])
            for index, choice in enumerate(assignment.operators)
        )
        exchanged = [entry for entry in collectives(program) if entry.kind == "halo_exchange"]
        moved = sum(
            model.space.collectives.cost(entry.kind, entry.axes, 4 * entry.elements).ns * entry.count
            for entry in exchanged
        )
        assert operators == price.compute_ns + moved
        phases |= {entry.phase for entry in exchanged}
    assert phases == {Phase.FORWARD, Phase.BACKWARD}
