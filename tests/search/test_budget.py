"""Chains over a grid of bytes against CP-SAT: their bound lies between the optimum and that of a slightly larger limit,
and their solutions fit."""

from __future__ import annotations

from fractions import Fraction
from unittest import mock

import numpy as np
import pytest

from tap_planner.search import Recompute, Weights, budget, least_memory, master
from tap_planner.search.budget import GridAnswer, LongRun, roundings, solve_on_grid
from tap_planner.search.counts import Counted, CountModel
from tap_planner.search.limited import LimitedSearch
from tests.search.building import free_configuration, make_model, solver_of
from tests.search.test_folding_exact import graph_of

RECOMPUTES = (Recompute.NONE, Recompute.FULL)
TOLERANCES = (100, 10_000, 1_000_000)


class _Compared:
    """Every window that the master closes by counts, with what grids say of it."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, int, list[tuple[int, GridAnswer]]]] = []
        """Upper end, the optimum (the end where there is none below), and the answers, each with the optimum under the
        limit that rounding makes of it."""

    def close(self, layers: int, share: float) -> None:
        """Close a limit between the least memory and that of the fastest plan."""
        model, configuration = make_model(graph_of("gpt", layers), (2,)), free_configuration(RECOMPUTES, (0, 1), 1)
        least = least_memory(solver_of(model, configuration))[1]
        most = solver_of(model, configuration).optimum(Weights(1, 0)).num_bytes
        state = LimitedSearch(solver_of(model, configuration), least + int(share * (most - least)))
        with (
            mock.patch.object(master, "MAX_LINKS", 0),
            mock.patch.object(master, "GRIDS", ()),
            mock.patch.object(master._Master, "_counted", self._counted(master._Master)),  # pyright: ignore[reportPrivateUsage]
        ):
            while not state.finished:
                state.advance(Fraction(0), None)

    def _counted(self, cls: type) -> object:
        windows = self.windows

        def counted(self: master._Master, reach_ns: int) -> tuple[Counted | None, int]:  # pyright: ignore[reportPrivateUsage]
            found, bound = CountModel(self.outer, self.runs, self.limit_bytes).solve(reach_ns)
            run = LongRun(points=self.runs[0], chain=self.minimisation.chains[0], outer=self.outer, sizes=self._sizes())
            answers: list[tuple[int, GridAnswer]] = []
            for tolerance in TOLERANCES if self.weights.memory else ():
                answer = solve_on_grid(run, self.weights, self.limit_bytes, self._ceiling, tolerance)
                hidden = tolerance * self.weights.time // self.weights.memory + roundings(run)
                _, least = CountModel(self.outer, self.runs, self.limit_bytes + hidden).solve(reach_ns)
                if answer is not None:
                    answers.append((least, answer))
            windows.append((reach_ns, bound, answers))
            return found, bound

        return counted


@pytest.mark.parametrize("layers", [2, pytest.param(5, marks=pytest.mark.full)])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_grids_bound_the_optimum(layers: int, share: float) -> None:
    """In every window the bound lies between the optimum under the limit with what rounding hides, and the optimum."""
    compared = _Compared()
    compared.close(layers, share)
    assert any(answers for *_, answers in compared.windows)
    for reach, optimum, answers in compared.windows:
        for least, answer in answers:
            assert least - 1 <= answer.bound_ns
            assert answer.bound_ns <= optimum or optimum == reach  # beyond the window there may be something, or not
            assert answer.found is None or answer.ns >= min(optimum, reach)


@pytest.mark.parametrize("name", ["MAX_TABLE_BYTES", "MAX_WORK"])
def test_grids_that_are_too_fine_are_given_up(name: str) -> None:
    """Where tables would hold more than they may, or take too long, there is no answer, and the master counts."""
    compared = _Compared()
    with mock.patch.object(budget, name, 1):
        compared.close(2, 0.5)
    assert compared.windows
    assert not any(answer for *_, answers in compared.windows for _, answer in answers)


def test_tables_count_together() -> None:
    """What tables hold is bounded for all links together, not for each."""
    table = [None, budget._Row(3, np.zeros(600, dtype=np.int64))]  # pyright: ignore[reportPrivateUsage]
    effort = budget._Effort()  # pyright: ignore[reportPrivateUsage]
    with mock.patch.object(budget, "MAX_TABLE_BYTES", 2 * 4800):
        effort.keep(table)
        effort.keep(table)
        with pytest.raises(budget._TooFineError):  # pyright: ignore[reportPrivateUsage]
            effort.keep(table)
