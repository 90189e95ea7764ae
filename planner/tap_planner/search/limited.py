"""Least time under a memory limit, for one configuration.

Lagrangian relaxation of the limit gives a lower bound at every multiplier; the assignments met on the way that fit
give upper bounds. What gap is left is closed by the master (``master.py``).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from tap_planner.search.elimination import WidthError
from tap_planner.search.master import solve_master
from tap_planner.search.solver import Assignment, Outcome, Solver, Weights
from tap_planner.search.terms import SCALE

TIME_WEIGHT = 1024
"""Multipliers are memory weights over this: ns per 1024 bytes."""
MAX_MEMORY_WEIGHT = 1 << 22
BISECTION_PRECISION = 64
"""Bisection of the multiplier ends at this relative precision."""


class LimitedStatus(enum.Enum):
    """What is known of a configuration under the limit."""

    SOLVED = "solved"
    """An assignment that fits, with its bound."""
    INFEASIBLE = "infeasible"
    """Proven: nothing fits."""
    DOMINATED = "dominated"
    """Proven: nothing that fits is faster than the incumbent."""
    UNKNOWN = "unknown"
    """Nothing that fits was found, and it is not proven that nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedOutcome:
    """Least time of a configuration under the limit."""

    status: LimitedStatus
    bound_ns: int
    """No assignment that fits is faster."""
    assignment: Assignment | None = None
    ns: int = 0
    num_bytes: int = 0
    multiplier: int = 0
    """Memory weight (over ``TIME_WEIGHT``) of the Lagrangian bound; 0 where the limit does not bind."""
    unlimited_ns: int = 0
    """Lower bound of the least time without the limit."""

    parameters_too_large: bool = False
    """Infeasible because of the parameters alone: more microbatches or recomputation do not help."""

    @property
    def is_unlimited_optimum(self) -> bool:
        """Whether the limit costs nothing: the assignment is as fast as any without the limit."""
        return self.status is LimitedStatus.SOLVED and self.ns <= self.unlimited_ns


def solve_limited(solver: Solver, limit_bytes: int | None, incumbent_ns: int | None) -> LimitedOutcome:
    """Least time of the solver's configuration with at most ``limit_bytes`` per device.

    Args:
        solver: the configuration.
        limit_bytes: memory limit; None for none.
        incumbent_ns: time of a plan that is already known; only faster ones matter.
    """
    return _Limited(solver, limit_bytes, incumbent_ns).outcome()


def least_memory(solver: Solver) -> tuple[int, int]:
    """(lower bound, memory of an assignment) of the least bytes per device."""
    found = solver.optimum(Weights(0, 1))
    return -(-found.bound // SCALE), found.num_bytes


class _Limited:
    def __init__(self, solver: Solver, limit_bytes: int | None, incumbent_ns: int | None) -> None:
        self._solver = solver
        self._limit = limit_bytes
        self._incumbent = incumbent_ns
        self._best: Outcome | None = None
        self._bound = 0
        self._multiplier = 0
        self._unlimited = 0

    def outcome(self) -> LimitedOutcome:
        first = self._solver.minimise(Weights(1, 0))
        self._unlimited = self._bound = -(-first.bound // SCALE)
        if self._dominated():
            return self._result(LimitedStatus.DOMINATED)
        fastest = self._solver.optimum(Weights(1, 0))
        self._bound = self._unlimited = max(self._bound, -(-fastest.bound // SCALE))
        self._take(fastest)
        if self._dominated():
            return self._result(LimitedStatus.DOMINATED)
        if self._limit is None or self._closed():
            return self._result(LimitedStatus.SOLVED)
        smallest = self._solver.minimise(Weights(0, 1))
        self._take(smallest)
        if -(-smallest.bound // SCALE) > self._limit:
            return self._result(LimitedStatus.INFEASIBLE)
        for _ in self._bisect():
            if self._dominated():
                return self._result(LimitedStatus.DOMINATED)
            if self._closed():
                return self._result(LimitedStatus.SOLVED)
        self._evaluate(self._solver.optimum(Weights(TIME_WEIGHT, self._multiplier)), self._multiplier)
        if not self._dominated() and not self._closed():
            self._close()
        if self._best is None:
            return self._result(LimitedStatus.DOMINATED if self._dominated() else LimitedStatus.UNKNOWN)
        return self._result(LimitedStatus.SOLVED)

    def _take(self, found: Outcome) -> None:
        """Keep an assignment that fits, if it is faster."""
        if found.assignment is None or (self._limit is not None and found.num_bytes > self._limit):
            return
        if self._best is None or found.ns < self._best.ns:
            self._best = found

    def _evaluate(self, found: Outcome, weight: int) -> None:
        assert self._limit is not None
        dual = -(-(found.bound - SCALE * weight * self._limit) // (SCALE * TIME_WEIGHT))
        if dual > self._bound:
            self._bound, self._multiplier = dual, weight
        self._take(found)

    def _bisect(self) -> Iterator[None]:
        """Look for the multiplier at which the limit is just kept."""
        assert self._limit is not None
        low, high = 0, 64
        while high < MAX_MEMORY_WEIGHT:
            found = self._solver.minimise(Weights(TIME_WEIGHT, high))
            self._evaluate(found, high)
            yield
            if found.num_bytes <= self._limit:
                break
            low, high = high, high * 4
        while high - low > max(1, high // BISECTION_PRECISION):
            middle = (low + high) // 2
            found = self._solver.minimise(Weights(TIME_WEIGHT, middle))
            self._evaluate(found, middle)
            yield
            if found.num_bytes <= self._limit:
                high = middle
            else:
                low = middle

    def _dominated(self) -> bool:
        return self._incumbent is not None and self._bound >= self._incumbent

    def _closed(self) -> bool:
        return self._best is not None and self._best.ns <= self._bound

    def _close(self) -> None:
        """Let the master close the gap between the bound and what is known."""
        assert self._limit is not None
        ceiling = min(
            self._best.ns if self._best is not None else 2 * self._bound,
            self._incumbent if self._incumbent is not None else 1 << 60,
        )
        try:
            bound_ns, assignment = solve_master(
                self._solver, self._limit, self._bound, ceiling, Weights(TIME_WEIGHT, self._multiplier)
            )
        except WidthError:
            return
        self._bound = max(self._bound, min(bound_ns, ceiling))
        if assignment is not None:
            ns, num_bytes = self._solver.price(assignment)
            self._take(Outcome(bound=0, assignment=assignment, ns=ns, num_bytes=num_bytes))

    def _result(self, status: LimitedStatus) -> LimitedOutcome:
        found = self._best if status is LimitedStatus.SOLVED else None
        bound = self._bound if found is None else min(self._bound, found.ns)
        return LimitedOutcome(
            status=status,
            bound_ns=bound,
            assignment=None if found is None else found.assignment,
            ns=0 if found is None else found.ns,
            num_bytes=0 if found is None else found.num_bytes,
            multiplier=self._multiplier,
            unlimited_ns=self._unlimited,
        )
