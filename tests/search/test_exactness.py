"""The search's optimum is that of brute force over the lowered Program (definitions.md, "Brute force")."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from tap_planner.errors import InfeasibleError
from tap_planner.graph import Graph
from tap_planner.search import Configuration, Model, Weights, least_memory
from tests.search.brute_force import BruteForce, enumerable_model, enumerate_all
from tests.search.building import configuration_of, searched, solver_of
from tests.search.small_graphs import repeated_graphs, small_graphs

SCALE = 12
"""Tables hold twelfths."""
CHECKS = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large]
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
"""Without shrinking: an example takes a second."""
SHAPES: list[tuple[int, ...]] = [(2, 2), (4,), (2,)]
Drawn = tuple[int, str, int]
"""ZeRO level, recompute, microbatches."""

limits_drawn = st.lists(st.floats(0, 1), min_size=5, max_size=5)
"""Memory limits, between the least memory (0) and that of the fastest plan (1)."""
settings_drawn = st.tuples(st.integers(0, 3), st.sampled_from(["none", "full"]), st.sampled_from([1, 1, 2]))


def setting(graph: Graph, zero: int, recompute: str, microbatches: int) -> Configuration:
    """A configuration that is possible for the graph."""
    if graph.loss is None:
        return configuration_of(training=False)
    return configuration_of(zero=zero, recompute=recompute, microbatches=microbatches)


def check_without_limit(model: Model, configuration: Configuration, truth: BruteForce) -> None:
    """Optimum and its proof, of time and of memory."""
    found = solver_of(model, configuration).optimum(Weights(1, 0))
    assert (found.ns, found.bound) == (truth.least_ns, SCALE * truth.least_ns)
    result = searched(model, configuration, None)
    assert (result.objective_ns, result.bound_ns) == (truth.least_ns, truth.least_ns)
    bound, memory = least_memory(solver_of(model, configuration))
    assert bound <= truth.least_bytes <= memory


def check_with_limit(model: Model, configuration: Configuration, truth: BruteForce, share: float) -> None:
    """A limit between the least memory and that of the fastest plan: optimum and bound are those of brute force."""
    limit = truth.least_bytes + int(share * (truth.bytes_of_fastest - truth.least_bytes))
    best = truth.least_within(limit)
    assert best is not None
    result = searched(model, configuration, limit)
    assert result.memory_bytes <= limit
    assert (result.objective_ns, result.bound_ns) == (best, best)


def check_below_least_memory(model: Model, configuration: Configuration, truth: BruteForce) -> None:
    """Nothing fits: the search says so, and names no more than the least memory."""
    with pytest.raises(InfeasibleError) as caught:
        searched(model, configuration, truth.least_bytes - 1)
    assert caught.value.least_memory_bytes <= truth.least_bytes


def check(graph: Graph, shapes: list[tuple[int, ...]], drawn: Drawn, shares: list[float], budget: int) -> None:
    """Everything about one graph: without a limit, under each of several, and below the least memory."""
    model = enumerable_model(graph, shapes, budget)
    assume(model is not None)
    assert model is not None
    configuration = setting(graph, *drawn)
    truth = enumerate_all(model, configuration)
    check_without_limit(model, configuration, truth)
    for share in dict.fromkeys((0.0, *shares)):
        check_with_limit(model, configuration, truth, share)
    check_below_least_memory(model, configuration, truth)


@given(small_graphs(3), st.permutations(SHAPES), settings_drawn, limits_drawn)
@settings(max_examples=32, suppress_health_check=CHECKS, phases=PHASES)
def test_optimum_of_small_graphs(
    graph: Graph, shapes: list[tuple[int, ...]], drawn: Drawn, shares: list[float]
) -> None:
    """On small random graphs objective and bound are those of brute force, and a limit is honoured."""
    check(graph, shapes, drawn, shares, 600)


@given(repeated_graphs(2), settings_drawn, limits_drawn)
@settings(max_examples=8, suppress_health_check=CHECKS, phases=PHASES)
def test_optimum_of_repeated_blocks(graph: Graph, drawn: Drawn, shares: list[float]) -> None:
    """The same where a block repeats and is folded, with and without recomputation."""
    check(graph, [(2,)], drawn, shares, 1000)


@pytest.mark.full
@given(small_graphs(5), st.permutations(SHAPES), settings_drawn, limits_drawn)
@settings(max_examples=250, suppress_health_check=CHECKS, phases=PHASES)
def test_optimum_of_many_small_graphs(
    graph: Graph, shapes: list[tuple[int, ...]], drawn: Drawn, shares: list[float]
) -> None:
    """Hundreds of random graphs of up to six operators with the loss: objective and bound are those of brute force."""
    check(graph, shapes, drawn, shares, 4000)


@pytest.mark.full
@given(repeated_graphs(3), settings_drawn, limits_drawn)
@settings(max_examples=80, suppress_health_check=CHECKS, phases=PHASES)
def test_optimum_of_many_repeated_blocks(graph: Graph, drawn: Drawn, shares: list[float]) -> None:
    """Two and three repeats of a block, with and without recomputation."""
    check(graph, [(2,)], drawn, shares, 2000)
