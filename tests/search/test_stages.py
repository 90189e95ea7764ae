"""Configurations of several pipeline stages: times of all passes of 1F1B, activations of the first stage."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tap_planner.cluster import Cluster
from tap_planner.graph import Graph
from tap_planner.program import Compute, Phase, Program, Redistribute
from tap_planner.search import CostedModel, Pipeline, Recompute, Weights, fold_assignment
from tap_planner.search.limited import LimitedSearch
from tap_planner.search.pricing import price_choices
from tap_planner.simulate import Durations, price_program
from tests.search.brute_force import enumerable_model, priced_all
from tests.search.building import (
    cluster_of,
    configuration_of,
    free_configuration,
    make_model,
    program_of,
    random_assignments,
    solver_of,
)
from tests.search.small_graphs import repeated_graphs, small_graphs
from tests.search.test_free_settings import CHECKS, PHASES, SCALE

STAGES = st.sampled_from([(2, 1), (2, 3), (4, 2), (4, 8)])
"""(Stages, microbatches)."""


def staged(program: Program, cluster: Cluster, num_stages: int, microbatches: int) -> tuple[int, int]:
    """What a plan costs with stages, by its program without: (ns, bytes) of all stages together.

    Forwards, and what goes between operators, count once for each microbatch; backwards, and what runs again for them,
    with the bubble. Every device has the buffers of one communicator more, of two where it had that of a single axis.
    """
    price, durations = price_program(program, cluster), Durations(program, cluster)
    ns = price.gradient_ns + price.optimizer_ns
    for instruction in program.microbatch:
        once = sum(busy.ns for busy in durations.collectives(instruction))
        match instruction:
            case Compute(phase=phase):
                later = phase is not Phase.FORWARD
                passes = microbatches + num_stages - 1 if later else max(microbatches, num_stages)
                ns += passes * (durations.compute_ns(instruction) + once)
            case Redistribute():
                ns += max(microbatches, num_stages) * once
            case _:
                pass
    axes = sum(size > 1 for size in program.decisions.mesh_shape)
    buffers = (2 if axes == 1 else 1) * cluster.collective_buffers_bytes
    activations = price.activation_bytes * (min(num_stages, microbatches) - 1)
    workspace = num_stages * (price.workspace_bytes + buffers) - price.workspace_bytes
    return ns, price.memory_bytes + activations + workspace


@given(repeated_graphs(3), STAGES, st.integers(0, 1 << 30))
@settings(max_examples=15, suppress_health_check=CHECKS, phases=PHASES)
def test_prices(graph: Graph, stages: tuple[int, int], seed: int) -> None:
    """Choices cost what their Program costs, with the bubble, and with as many activations as are in flight."""
    assume(graph.loss is not None)
    model, (count, microbatches) = make_model(graph, (2, 2)), stages
    alone = replace(free_configuration(tuple(Recompute), (0, 1, 2, 3), 2), microbatches=microbatches)
    costed = CostedModel(model, replace(alone, pipeline=Pipeline(num_stages=count, schedule="1f1b")))
    for assignment in random_assignments(model, seed, 4, per_class=False):
        found = price_choices(costed, fold_assignment(model, assignment))
        program = program_of(model, alone, assignment)
        assert (found.ns, found.num_bytes) == staged(program, cluster_of((2, 2)), count, microbatches)


@given(small_graphs(3), STAGES, st.floats(0, 1))
@settings(max_examples=25, suppress_health_check=CHECKS, phases=PHASES)
def test_optimum(graph: Graph, stages: tuple[int, int], share: float) -> None:
    """The optimum with and without a limit is that of all assignments."""
    model, (count, microbatches) = enumerable_model(graph, [(2,)], 600), stages
    assume(graph.loss is not None and model is not None)
    assert model is not None
    alone = configuration_of(microbatches=microbatches)
    configuration = replace(alone, pipeline=Pipeline(num_stages=count, schedule="1f1b"))
    truth = priced_all(model, alone, lambda program, cluster: staged(program, cluster, count, microbatches))
    least, fastest = min(num_bytes for _, num_bytes in truth), min(truth)
    found = solver_of(model, configuration).optimum(Weights(1, 0))
    assert (found.ns, found.bound) == (fastest[0], SCALE * fastest[0])
    limit = least + int(share * (fastest[1] - least))
    state = LimitedSearch(solver_of(model, configuration), limit)
    while not state.finished:
        state.advance(Fraction(0), None)
    assert state.best is not None
    assert state.best.ns == state.bound_ns == min(ns for ns, num_bytes in truth if num_bytes <= limit)
