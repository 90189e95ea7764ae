"""Runs whose tables would be too large: coupling is left out of the relaxed model, or the run is taken apart."""

from __future__ import annotations

import functools

import pytest

from tap_planner.search import Model, Weights
from tap_planner.search import model as model_module
from tap_planner.search import parts as parts_module
from tests.search.building import configuration_of, make_model, random_assignments, solver_of
from tests.search.models import bound, decoder

SCALE = 12
SHAPE = (2, 4)


def shared_model() -> Model:
    """Four layers that share one mask, with a gradient, and a tied embedding."""
    graph = bound(decoder("gpt", layers=4, learned_mask=True, tied=True), batch=32, dims={"seq": 16})
    return make_model(graph, SHAPE)


@functools.cache
def truth(recompute: str) -> int:
    """The proven least time."""
    found = solver_of(shared_model(), configuration_of(recompute=recompute)).optimum(Weights(1, 0))
    assert found.bound == SCALE * found.ns
    return found.ns


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_shared_variables_left_out_leave_a_lower_bound(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any shared variable in the tables of links, bounds stay below and answers above the optimum."""
    least = truth(recompute)
    monkeypatch.setattr(parts_module, "MAX_RELAXED_ENTRIES", 1)
    model = shared_model()
    assert any(run.shared for run in model.runs), "the case has shared variables"
    solver = solver_of(model, configuration_of(recompute=recompute))
    assert all(solver.parts.shared_keep(number, False) == () for number in range(len(model.runs)))
    relaxed = solver.minimise(Weights(1, 0))
    assert relaxed.bound <= SCALE * least <= SCALE * relaxed.ns
    found = solver.optimum(Weights(1, 0))
    assert found.bound <= SCALE * least <= SCALE * found.ns
    assert found.assignment is not None and solver.price(found.assignment) == (found.ns, found.num_bytes)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_min_marginals_without_shared_variables(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a value costs at least is no more than any assignment with that value costs."""
    monkeypatch.setattr(parts_module, "MAX_RELAXED_ENTRIES", 1)
    model = shared_model()
    solver = solver_of(model, configuration_of(recompute=recompute))
    outcome, marginals = solver.marginals(Weights(1, 0))
    assert outcome.assignment is not None
    assignments = [outcome.assignment, *random_assignments(model, 1, 20, per_class=True)]
    for assignment in assignments:
        price = SCALE * solver.price(assignment)[0]
        for index, value in enumerate(assignment.operators):
            assert marginals[int(model.class_of[index])][value] <= price


def test_runs_of_wide_boundaries_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with too many boundary states is no chain; unfolded, the optimum is the same."""
    least = truth("none")
    monkeypatch.setattr(model_module, "MAX_BOUNDARY_STATES", 1)
    model = shared_model()
    assert model.runs == () and model.graph.operators
    found = solver_of(model, configuration_of()).optimum(Weights(1, 0))
    assert found.ns == least and found.bound <= SCALE * least
