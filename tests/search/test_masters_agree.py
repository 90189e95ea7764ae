"""Under a memory limit the count master, the Pareto chains and elimination without folding have the same optimum."""

from __future__ import annotations

from fractions import Fraction
from unittest import mock

import pytest

from tap_planner.search import Recompute, Solver, Weights, least_memory
from tap_planner.search.limited import LimitedSearch
from tests.search.building import free_configuration, make_model, solver_of
from tests.search.test_folding_exact import graph_of, unfolded_model

NONE, _, FULL = Recompute


def closed(solver: Solver, limit_bytes: int) -> tuple[int, int]:
    """(least time, bound) within a limit, by all stages."""
    state = LimitedSearch(solver, limit_bytes)
    while not state.finished:
        state.advance(Fraction(0), None)
    assert state.best is not None
    assert state.best.num_bytes <= limit_bytes
    assert solver.price(state.best.choices) == (state.best.ns, state.best.num_bytes)  # type: ignore[arg-type]
    return state.best.ns, state.bound_ns


def check(kind: str, layers: int, shape: tuple[int, ...], *shares: float, recomputes: tuple[Recompute, ...]) -> None:
    """All ways under limits between the least memory and that of the fastest plan.

    Where all regions have one recompute setting, without folding as well (settings are variables of folded models).
    """
    graph = graph_of(kind, layers)
    configuration = free_configuration(recomputes, (0, 1), len(shape))
    model = make_model(graph, shape)
    least = least_memory(solver_of(model, configuration))[1]
    most = solver_of(model, configuration).optimum(Weights(1, 0)).num_bytes
    assert least < most
    asked = {"chain": 0, "counts": 0}
    for share in shares:
        limit = least + int(share * (most - least))
        with _counting("solve_chains", asked, "chain"):
            by_chain = closed(solver_of(model, configuration), limit)
        with mock.patch("tap_planner.search.master.MAX_LINKS", 0), _counting("CountModel", asked, "counts"):
            by_counts = closed(solver_of(model, configuration), limit)
        assert by_chain == by_counts
        if kind == "shared":  # copies that occurrences share stay a lower bound where they may recompute
            assert by_chain[1] <= by_chain[0]
        else:
            assert by_chain[0] == by_chain[1]
        if len(recomputes) == 1:
            assert closed(solver_of(unfolded_model(graph, shape, model), configuration), limit) == by_chain
    assert min(asked.values()) > 0


def _counting(name: str, asked: dict[str, int], key: str) -> mock._patch[object]:  # pyright: ignore[reportPrivateUsage]
    """Count the calls of what the master asks."""
    from tap_planner.search import master

    real = getattr(master, name)

    def called(*arguments: object) -> object:
        asked[key] += 1
        return real(*arguments)

    return mock.patch.object(master, name, called)


@pytest.mark.parametrize("kind", [pytest.param("gpt", marks=pytest.mark.full), "shared"])
def test_chains_and_counts(kind: str) -> None:
    """Two layers that choose how to recompute."""
    check(kind, 2, (2,), 0.0, 0.4, 0.8, recomputes=(NONE, FULL))


def test_without_folding() -> None:
    """Two layers that recompute in full, against elimination without folding."""
    check("gpt", 2, (2,), 0.4, recomputes=(FULL,))
