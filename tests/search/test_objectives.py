"""Other objectives than time: least memory and least bytes sent are those of brute force over lowered Programs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tap_planner.cost import PriceList
from tap_planner.errors import InfeasibleError
from tap_planner.graph import Graph
from tap_planner.program import lower
from tap_planner.search import CostedModel, Recompute, fold_assignment, search_smallest
from tap_planner.search.memory_only import memory_solver
from tap_planner.search.pricing import price_choices
from tap_planner.simulate import price_program
from tests.search.building import cluster_of, free_configuration, make_model, random_assignments, request_of
from tests.search.models import Nodes, bound, model_file
from tests.search.small_graphs import repeated_graphs, small_graphs
from tests.search.test_free_settings import CHECKS, DRAWN, FULL, GRAPHS, NONE, PHASES, Case, Drawn, case_of

ALL_GRAPHS = st.one_of(repeated_graphs(2), GRAPHS, small_graphs(3))


def sharing(operators: str, operand: str, repeats: int) -> Graph:
    """Repeats of a block on vectors of products with what all of them read, and of ReLUs.

    Args:
        operators: a letter for each operator of the block: p or r.
        operand: ``learned``, or ``made`` from a learned one.
        repeats: how many blocks.
    """
    graph, name = Nodes(), "x"
    shared = graph.weight("w", 4)
    if operand == "made":
        shared = graph.add("Relu", [shared], "made")
    name = graph.add("Mul", [name, graph.weight("first", 4)], "scaled")
    for repeat in range(repeats):
        for place, operator in enumerate(operators):
            inputs = [name, shared] if operator == "p" else [name]
            name = graph.add("Mul" if operator == "p" else "Relu", inputs, f"t{repeat}_{place}")
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)]
    return bound(model_file(helper.make_graph(graph.nodes, "sharing", inputs, outputs, graph.initializers)), batch=4)


SHARED = st.builds(
    sharing, st.sampled_from(["prr", "ppr", "prp"]), st.sampled_from(["learned", "made"]), st.integers(2, 3)
)
RERUN = DRAWN.map(lambda drawn: replace(drawn, recomputes=drawn.recomputes if FULL in drawn.recomputes else (FULL,)))
REMADE = Drawn(
    shape=(2, 2), recomputes=(NONE, FULL), levels=(0, 1, 2, 3), hybrid=False, microbatches=1, share=0.26, seed=1831
)


def drawn_case(graph: Graph, drawn: Drawn, budget: int, prices: PriceList) -> Case:
    """A graph with as many strategies as can be enumerated."""
    case = case_of(graph, drawn, budget, prices)
    assume(case is not None)
    assert case is not None
    return case


def check_smallest(case: Case) -> None:
    """The least memory, exactly, and the least time in it; one byte less is too little."""
    model, truth = case.model, case.truth
    request = request_of(model, case.configuration, None, case.rules)
    result = search_smallest((request,), lambda cluster: None)
    assert result.smallest is not None
    assert (result.memory_bytes, result.smallest.bound_bytes) == (truth.least_bytes, truth.least_bytes)
    assert result.bound_ns == result.objective_ns == truth.least_ns_of_smallest
    price = price_program(lower(model.graph, result.decisions), cluster_of(model.space.mesh_shape))
    assert (price.objective_ns, price.memory_bytes) == (result.objective_ns, result.memory_bytes)
    with pytest.raises(InfeasibleError) as caught:
        search_smallest((request,), lambda cluster: truth.least_bytes - 1)
    assert (caught.value.least_memory_bytes, caught.value.limit_bytes) == (truth.least_bytes, truth.least_bytes - 1)


@given(ALL_GRAPHS, DRAWN)
@settings(max_examples=12, suppress_health_check=CHECKS, phases=PHASES)
def test_least_bytes_sent(graph: Graph, drawn: Drawn) -> None:
    """Optimum and bound of the bytes that a device sends, without a limit and under limits."""
    drawn_case(graph, drawn, 300, PriceList.VOLUME).check(drawn.share)


@given(ALL_GRAPHS, DRAWN)
@settings(max_examples=12, suppress_health_check=CHECKS, phases=PHASES)
def test_least_memory(graph: Graph, drawn: Drawn) -> None:
    """The least memory, and the fastest plan that needs no more."""
    check_smallest(drawn_case(graph, drawn, 300, PriceList.TIME))


@given(SHARED, RERUN, st.sampled_from(PriceList))
@example(sharing("prr", "learned", 2), REMADE, PriceList.VOLUME)
@settings(max_examples=6, suppress_health_check=CHECKS, phases=PHASES)
def test_what_repeats_share_and_run_again(graph: Graph, drawn: Drawn, prices: PriceList) -> None:
    """A copy that several repeats use is made once, one that a single repeat uses again when it runs again: the exact
    tables know which it is, so that the bound meets the price under every limit."""
    drawn_case(graph, drawn, 800, prices).check(drawn.share)


@pytest.mark.full
@given(SHARED, RERUN, st.sampled_from(PriceList))
@settings(max_examples=100, suppress_health_check=CHECKS, phases=PHASES)
def test_much_that_repeats_share_and_run_again(graph: Graph, drawn: Drawn, prices: PriceList) -> None:
    """The same of many more, with the least memory."""
    case = drawn_case(graph, drawn, 800, prices)
    case.check(drawn.share)
    if prices is PriceList.TIME:
        check_smallest(case)


@given(st.one_of(repeated_graphs(3), GRAPHS), st.integers(0, 1 << 30), st.sampled_from([(2, 2), (4,)]))
@settings(max_examples=15, suppress_health_check=CHECKS, phases=PHASES)
def test_the_model_without_times_knows_all_memory(graph: Graph, seed: int, shape: tuple[int, ...]) -> None:
    """Of random plans, under random settings, the memory is the same with times and without."""
    model = make_model(graph, shape)
    training = graph.loss is not None
    configuration = free_configuration(tuple(Recompute), (0, 1, 2, 3), len(shape), training=training)
    costed = CostedModel(model, configuration)
    bare = memory_solver(costed).costed
    chance = random.Random(seed)
    regions = sorted({int(region) for region in model.region_of[model.run_of >= 0]}) if training else []
    for assignment in random_assignments(model, seed, 5, per_class=False):
        modes = {region: chance.randrange(len(Recompute)) for region in regions}
        choices = fold_assignment(model, replace(assignment, recompute=modes))
        assert price_choices(bare, choices).num_bytes == price_choices(costed, choices).num_bytes


@pytest.mark.full
@given(st.one_of(repeated_graphs(3), GRAPHS, small_graphs(4)), DRAWN)
@settings(max_examples=80, suppress_health_check=CHECKS, phases=PHASES)
def test_least_bytes_sent_of_many(graph: Graph, drawn: Drawn) -> None:
    """The same of many more plans."""
    drawn_case(graph, drawn, 800, PriceList.VOLUME).check(drawn.share)


@pytest.mark.full
@given(st.one_of(repeated_graphs(3), GRAPHS, small_graphs(4)), DRAWN)
@settings(max_examples=80, suppress_health_check=CHECKS, phases=PHASES)
def test_least_memory_of_many(graph: Graph, drawn: Drawn) -> None:
    """The same of many more plans."""
    check_smallest(drawn_case(graph, drawn, 800, PriceList.TIME))
