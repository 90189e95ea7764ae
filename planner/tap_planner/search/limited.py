"""Least time of one configuration under a memory limit, in stages that each raise the bound.

1. The relaxed model without the limit.
2. Where the limit does not bind: the exact optimum. Where it does: the least memory, and the Lagrangian bound at a
   multiplier that served another configuration.
3. Bisection of the multiplier. Assignments met on the way that fit are upper bounds.
4. The weighted model at the best multiplier, tightened and searched exactly.
5. The master (``master.py``) closes what gap is left.

The search over configurations runs the stages of the most promising one, so that most never see the later stages.
"""

from __future__ import annotations

from tap_planner.search.elimination import WidthError
from tap_planner.search.master import solve_master
from tap_planner.search.solver import Solver
from tap_planner.search.terms import SCALE
from tap_planner.search.weighting import Outcome, Weights

TIME_WEIGHT = 1024
"""Multipliers are memory weights over this: ns per 1024 bytes."""
MAX_MEMORY_WEIGHT = 1 << 22
BISECTION_PRECISION = 16
"""Bisection of the multiplier ends at this relative precision."""


class LimitedSearch:
    """The state of the search of one configuration.

    Args:
        solver: the configuration.
        limit_bytes: memory limit per device; None for none.
        divisor: activations count 1/divisor; above 1 only bounds are found, no assignments.
    """

    def __init__(self, solver: Solver, limit_bytes: int | None, divisor: int = 1) -> None:
        self._solver = solver
        self._limit = limit_bytes
        self._divisor = divisor
        self._stage = 0
        self.bound_ns = 0
        """No assignment that fits is faster."""
        self.unlimited_ns = 0
        """A lower bound of the least time without the limit."""
        self.best: Outcome | None = None
        """The fastest assignment met that fits."""
        self.multiplier = 0
        """Memory weight (over ``TIME_WEIGHT``) of the bound; 0 where the limit does not bind."""
        self.infeasible = False
        """Proven: nothing fits."""
        self.parameters_too_large = False
        """Infeasible because of the parameters alone: more microbatches or recomputation do not help."""
        self.finished = False
        """No stage is left."""
        self._fits_unlimited = False
        self._ceiling: int | None = None
        self._hint = 0
        self._probe: tuple[int, int] | None = None
        """Best Lagrangian bound met, whether or not it is the best bound, and its multiplier."""

    @property
    def only_master_left(self) -> bool:
        """Whether all stages but the last have run."""
        return self._stage >= 4

    @property
    def is_unlimited_optimum(self) -> bool:
        """Whether the limit costs nothing: the best assignment is as fast as any without the limit."""
        return self.best is not None and self.best.ns <= self.unlimited_ns

    @property
    def limit_binds(self) -> bool:
        """Whether the fastest assignments met do not fit."""
        return self._stage > 0 and (self.infeasible or self.best is None or self.multiplier > 0)

    def advance(self, multiplier: int, ceiling_ns: int | None) -> None:
        """Run the next stage.

        Args:
            multiplier: one that served another configuration; 0 for none.
            ceiling_ns: only faster assignments matter.
        """
        stages = (self._relax, self._screen, self._bisect, self._tighten, self._close)
        stage = stages[self._stage]
        self._stage += 1
        self._ceiling = ceiling_ns
        if multiplier and not self.multiplier:
            self._hint = multiplier
        stage()
        if self.best is not None and self.best.ns <= self.bound_ns:
            self.bound_ns = self.best.ns
            self.finished = True
        if self.infeasible or self._stage == len(stages):
            self.finished = True

    def virtual_bound_ns(self, multiplier: int, ceiling_ns: int | None) -> int | None:
        """Bound of the first three stages; None where nothing fits."""
        for _ in range(3):
            self.advance(multiplier, ceiling_ns)
            if self.infeasible:
                return None
            if self._fits_unlimited or (ceiling_ns is not None and self.bound_ns >= ceiling_ns):
                break
        return self.bound_ns

    def _relax(self) -> None:
        if self._limit is not None and self._solver.least_own_bytes() > self._limit:
            self.infeasible = self.parameters_too_large = True
            return
        found = self._solver.minimise(Weights(1, 0))
        self.bound_ns = self.unlimited_ns = -(-found.bound // SCALE)
        self._fits_unlimited = self._limit is None or found.divided_bytes(self._divisor) <= self._limit
        self._take(found)

    def _screen(self) -> None:
        if self.best is not None:
            fastest = self._solver.optimum(Weights(1, 0))
            self.bound_ns = self.unlimited_ns = max(self.bound_ns, -(-fastest.bound // SCALE))
            self._take(fastest)
            return
        assert self._limit is not None
        smallest = self._solver.minimise(Weights(0, 1, self._divisor))
        self._take(smallest)
        if -(-smallest.bound // SCALE) > self._limit:
            self.infeasible = True
        elif self._hint:
            self._evaluate(self._hint)

    def _take(self, found: Outcome) -> None:
        """Keep an assignment that fits, if it is faster."""
        if found.assignment is None or self._divisor > 1 or (self._limit is not None and found.num_bytes > self._limit):
            return
        if self.best is None or found.ns < self.best.ns:
            self.best = found

    def _evaluate(self, weight: int, *, exact: bool = False) -> Outcome:
        assert self._limit is not None
        weights = Weights(TIME_WEIGHT, weight, self._divisor)
        found = self._solver.optimum(weights) if exact else self._solver.minimise(weights)
        dual = -(-(found.bound - SCALE * weight * self._limit) // (SCALE * TIME_WEIGHT))
        if self._probe is None or dual > self._probe[0]:
            self._probe = (dual, weight)
        if dual > self.bound_ns:
            self.bound_ns, self.multiplier = dual, weight
        self._take(found)
        return found

    def _bisect(self) -> None:
        """Look for the multiplier at which the limit is just kept."""
        if self._limit is None:
            return
        low, high = 0, self.multiplier or self._hint or 64
        while not self._fits(high) and high < MAX_MEMORY_WEIGHT and not self._hopeless():
            low, high = high, high * 4
        if low == 0:
            low = high // 4
            while low and self._fits(low):
                low, high = low // 4, low
        while high - low > max(1, high // BISECTION_PRECISION) and not self._hopeless():
            middle = (low + high) // 2
            if self._fits(middle):
                high = middle
            else:
                low = middle

    def _fits(self, weight: int) -> bool:
        """Whether the relaxed optimum at a multiplier keeps the limit."""
        assert self._limit is not None
        return self._evaluate(weight).divided_bytes(self._divisor) <= self._limit

    def _hopeless(self) -> bool:
        """Whether nothing can come under the ceiling any more."""
        return self._ceiling is not None and self.bound_ns >= self._ceiling

    def _tighten(self) -> None:
        if self._limit is None or self._probe is None:
            return
        weight = self._probe[1]
        self._evaluate(weight, exact=True)
        for neighbour in (weight * 4 // 5, weight * 5 // 4):
            if neighbour not in (0, weight) and not self._hopeless():
                self._evaluate(neighbour)

    def _close(self) -> None:
        """Let the master close the gap between the bound and what is known."""
        if self._limit is None:
            return
        known = [ns for ns in (self.best.ns if self.best else None, self._ceiling) if ns is not None]
        ceiling = min(known) if known else 2 * self.bound_ns
        if ceiling <= self.bound_ns:
            return
        weights = Weights(TIME_WEIGHT, self.multiplier or (self._probe[1] if self._probe else 0))
        try:
            bound_ns, assignment = solve_master(self._solver, self._limit, self.bound_ns, ceiling, weights)
        except WidthError:
            return
        self.bound_ns = max(self.bound_ns, min(bound_ns, ceiling))
        if assignment is not None:
            ns, num_bytes = self._solver.price(assignment)
            self._take(Outcome(bound=0, assignment=assignment, ns=ns, num_bytes=num_bytes))


def least_memory(solver: Solver) -> tuple[int, int]:
    """(lower bound, memory of an assignment) of the least bytes per device."""
    found = solver.optimum(Weights(0, 1))
    return -(-found.bound // SCALE), found.num_bytes
