"""Inference: outputs are whole sums, caches stay where they are left, and what is held counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from tap_planner.cost import CollectiveModel, ComputeModel, operator_times_ns
from tap_planner.graph import BindOptions, Graph, ModelFile, bind
from tap_planner.search import Assignment, Weights
from tap_planner.simulate import price_program
from tests.graph.decoders import decoder_step
from tests.search.brute_force import enumerate_all
from tests.search.building import cluster_of, configuration_of, make_model, program_of, searched, solver_of
from tests.search.models import Nodes, bound, model_file
from tests.search.test_exactness import check_below_least_memory, check_with_limit, check_without_limit
from tests.search.test_folding_exact import SCALE, unfolded_model

INFERENCE = configuration_of(training=False)
SMALL: dict[str, Any] = {"d": 32, "heads": 4, "kv_heads": 2, "ff": 48, "vocabulary": 40}


def graph_of(nodes: Nodes, inputs: dict[str, tuple[int, ...]], outputs: tuple[str, ...], *, batch: int) -> Graph:
    """A graph bound for inference."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)) for name, shape in inputs.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    proto = helper.make_graph(nodes.nodes, "step", values, results, nodes.initializers)
    return bound(model_file(proto), batch=batch, training=False)


def appended() -> Graph:
    """A cache of six positions to which two are appended, and a product with all of it."""
    nodes = Nodes()
    nodes.add("MatMul", ["x", nodes.weight("w", 4, 2)], "new")
    nodes.add("Concat", ["past", "new"], "present", axis=1)
    nodes.add("MatMul", ["present", nodes.weight("u", 8, 4)], "y")
    return graph_of(nodes, {"x": (4, 4), "past": (4, 6)}, ("y", "present"), batch=4)


def handed_on() -> Graph:
    """A cache that is read and handed on as it is: it may be split along any dim."""
    nodes = Nodes()
    nodes.add("MatMul", ["past", nodes.weight("w", 8, 4)], "y")
    nodes.add("Identity", ["past"], "present")
    nodes.add("Mul", ["y", "x"], "z")
    return graph_of(nodes, {"x": (4, 4), "past": (4, 8)}, ("z", "present"), batch=4)


def many_inputs() -> Graph:
    """An input that two operators read in placements of their own, and one that is an output."""
    nodes = Nodes()
    nodes.add("MatMul", ["x", nodes.weight("w", 4, 4)], "a")
    nodes.add("Mul", ["a", "x"], "b")
    return graph_of(nodes, {"x": (4, 4), "z": (4, 6)}, ("b", "z"), batch=4)


@pytest.mark.parametrize("shape", [(2,), (4,)], ids=str)
@pytest.mark.parametrize("make", [appended, handed_on, many_inputs])
def test_optimum_and_memory_are_those_of_brute_force(make: Callable[[], Graph], shape: tuple[int, ...]) -> None:
    """Time and memory of every assignment, over the Program: the optimum, with and without a limit, is the search's."""
    model = make_model(make(), shape)
    truth = enumerate_all(model, INFERENCE)
    check_without_limit(model, INFERENCE, truth)
    for share in (0.0, 0.5, 1.0):
        check_with_limit(model, INFERENCE, truth, share)
    check_below_least_memory(model, INFERENCE, truth)


def test_a_sum_is_done_before_it_is_returned() -> None:
    """A product of 1 x k x 1 can only be split along k: its optimum pays for the sum, or does not split."""
    nodes = Nodes()
    size = 1 << 26
    nodes.add("MatMul", ["x", nodes.weight("w", size, 1)], "y")
    graph = graph_of(nodes, {"x": (1, size)}, ("y",), batch=1)
    cluster = cluster_of((2,))
    model = make_model(graph, (2,))
    compute = ComputeModel(cluster.device, "fp32")
    product = graph.operators[0].signature

    def time_ns(part: int) -> int:
        times = operator_times_ns(
            compute,
            product,
            factor_sizes=(part,),
            input_elements=(part, part),
            output_elements=(1,),
            requires_gradient=(False, False),
        )
        return times[0]

    sum_ns = CollectiveModel(cluster, model.space.mesh).cost("all_reduce", (0,), 4).ns
    result = searched(model, INFERENCE, None)
    assert sum_ns > 0 and time_ns(size // 2) + sum_ns < time_ns(size)
    assert result.objective_ns == time_ns(size // 2) + sum_ns
    assert str(result.decisions.operators[-1].inputs[0].placement[0]) == "R"  # type: ignore[union-attr]


def test_a_cache_that_is_read_elsewhere_is_redistributed() -> None:
    """Stored split and read whole, it costs the all-gather of the cache that the step found."""
    graph = appended()
    model = make_model(graph, (2,))
    solver = solver_of(model, INFERENCE)
    index = {operator.id: number for number, operator in enumerate(graph.operators)}
    end = index["present__output"]

    def assignment(stored: str) -> Assignment:
        chosen = [0] * model.num_operators  # the first strategy of each is "none"
        names = [str(strategy.outputs[0][0]) for strategy in model.space.operator(end).strategies]
        chosen[end] = names.index(stored)
        return Assignment(operators=tuple(chosen), parameters={})

    gather_ns = CollectiveModel(cluster_of((2,)), model.space.mesh).cost("all_gather", (0,), 4 * 6 * 4).ns
    whole, split = (solver.price(assignment(stored)) for stored in ("R", "S(0)"))
    assert split[0] - whole[0] == gather_ns > 0
    assert whole[1] - split[1] == 4 * 8 * 4 // 2
    program = program_of(model, INFERENCE, assignment("S(0)"))
    moved = {r.tensor: (str(r.source[0]), str(r.to[0]), r.consumers) for r in program.decisions.redistributions}
    assert moved["past"] == ("S(0)", "R", ("present",))


def test_the_dim_in_which_a_cache_grows_is_never_split() -> None:
    """Parts of the past would not be parts of the present."""
    model = make_model(appended(), (2,))
    end = next(number for number, operator in enumerate(model.graph.operators) if operator.id == "present__output")
    assert {str(strategy.outputs[0][0]) for strategy in model.space.operator(end).strategies} == {"R", "S(0)"}
    model = make_model(handed_on(), (2,))
    end = next(number for number, operator in enumerate(model.graph.operators) if operator.id == "present__output")
    placements = {(s.inputs[1], s.outputs[0]) for s in model.space.operator(end).strategies}
    assert {str(past[0]) for past, _ in placements if past} == {"R", "S(0)", "S(1)"}
    assert all(past == present for past, present in placements)


def step_graph(layers: int, caches: str, batch: int = 4) -> Graph:
    """A step of a decoder bound for inference."""
    model = decoder_step(layers=layers, caches=caches, **SMALL)
    file = ModelFile(path=model_file(onnx.GraphProto()).path, proto=model, sha256="0" * 64, opset=23)
    return bind(file, BindOptions(batch=batch, dims={"past": 7}, ends=True))


@pytest.mark.parametrize("caches", ["attention", "concat"])
@pytest.mark.parametrize("layers", [2, pytest.param(5, marks=pytest.mark.full)])
@pytest.mark.parametrize("shape", [(2, 2), pytest.param((2, 4), marks=pytest.mark.full)], ids=str)
def test_folding_decoders_loses_nothing(layers: int, caches: str, shape: tuple[int, ...]) -> None:
    """Layers with caches are one run; its optimum is that of unfolded elimination, priced over the Program too."""
    graph = step_graph(layers, caches)
    model = make_model(graph, shape)
    assert [run.count for run in model.runs_in_use] == [layers]
    folded = solver_of(model, INFERENCE).optimum(Weights(1, 0))
    unfolded = solver_of(unfolded_model(graph, shape, model), INFERENCE).optimum(Weights(1, 0))
    assert (folded.bound, unfolded.bound) == (SCALE * folded.ns, SCALE * unfolded.ns)
    assert folded.ns == unfolded.ns
    assert folded.assignment is not None
    price = price_program(program_of(model, INFERENCE, folded.assignment), cluster_of(shape))
    assert (price.objective_ns, price.memory_bytes) == (folded.ns, folded.num_bytes)


def test_memory_by_kind() -> None:
    """Replicated, a device holds each cache once as it is after the step, inputs once, and every output."""
    graph = step_graph(2, "concat")
    model = make_model(graph, (2,))
    whole = Assignment(
        operators=(0,) * model.num_operators, parameters=dict.fromkeys(model.shared_parameters.values(), 0)
    )
    price = price_program(program_of(model, INFERENCE, whole), cluster_of((2,)))
    assert price.cache_bytes == 2 * 2 * (4 * 2 * 8 * 8) * 4
    assert price.input_bytes == 4 * 1 * 8 + 2 * (4 * 1 * 4) * 4
    assert price.output_bytes == 4 * 1 * 40 * 4
    assert price.activation_bytes == 0
