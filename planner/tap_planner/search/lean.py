"""Solvers that leave out the values under which a memory limit cannot be kept."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from tap_planner.search.costing import CostedModel
from tap_planner.search.factors import WidthError
from tap_planner.search.memory_only import memory_solver
from tap_planner.search.minimisation import Minimisation
from tap_planner.search.solver import Solver
from tap_planner.search.terms import SCALE
from tap_planner.search.weighting import Weights

__all__ = ["lean_solver"]


def lean_solver(costed: CostedModel, limit_bytes: int) -> Solver:
    """A solver without the values whose least memory is above the limit: nothing that fits is lost.

    Where the limit is the least memory that there is, little more is left than the plans that need no more.

    Args:
        costed: the model under a configuration.
        limit_bytes: the memory limit.
    """
    weights = Weights(0, 1)
    ceiling = SCALE * limit_bytes
    memory = memory_solver(costed, every_value=True)
    if memory.minimise(weights).bound > ceiling:
        return _EmptySolver(costed)
    memory.optimum(weights)  # moves the shares to where they bound memory best
    _, marginals = memory.marginals(weights)
    kept = memory.parts.domains.within(marginals, ceiling)
    if not _is_empty(kept):
        with suppress(WidthError):
            kept |= memory.exactly(kept, lambda inside: _within(inside, weights, ceiling))
    costed.partly_exact = True
    return _EmptySolver(costed) if _is_empty(kept) else _LeanSolver(costed, kept)


def _within(solver: Solver, weights: Weights, ceiling: int) -> Mapping[int, np.ndarray]:
    """Values with which the exact model stays below a ceiling."""
    exact = Minimisation(solver.parts, weights, True)
    return solver.parts.domains.within(exact.marginals(), ceiling)


def _is_empty(kept: Mapping[int, np.ndarray]) -> bool:
    return any(len(values) == 0 for values in kept.values())


class _EmptySolver(Solver):
    """A solver of which no value is left: the least memory is above the limit."""

    is_empty = True


class _LeanSolver(Solver):
    """A solver for which the fastest recompute setting may be one that is left out."""

    is_lean = True

    @property
    def fastest(self) -> Solver:
        """The solver itself."""
        return self

    def restrict(self, alive: Mapping[int, np.ndarray], loose: frozenset[int] | None = frozenset()) -> Solver:
        """A solver of the same model whose variables keep only the given values (by class)."""
        restricted = _LeanSolver(self.costed, alive, loose)
        restricted.parts.use_shares(self.parts.shares)
        return restricted
