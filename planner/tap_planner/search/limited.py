"""Least time of one configuration under a memory limit, in stages that each raise the bound.

1. The relaxed model without the limit.
2. Where the limit does not bind: the exact optimum. Where it does: the least memory, and the Lagrangian bound at a
   multiplier that served another configuration.
3. The best multiplier: where the lines of two solutions, one that fits and one that does not, cross. The two are mixed,
   occurrence by occurrence, to a solution that just fits.
4. The weighted model at the best multiplier, tightened and searched exactly.
5. The master (``master.py``) over the values that the solutions so far use, for a better solution.
6. The master over all values near the bound, which closes what gap is left.

The search over configurations runs the stages of the most promising one, so that most never see the later stages.
"""

from __future__ import annotations

import enum
import math
from fractions import Fraction

import numpy as np

from tap_planner.search.configuration import Configuration
from tap_planner.search.crossing import STEP, Crossing
from tap_planner.search.factors import WidthError
from tap_planner.search.master import FIRST_WINDOW, improve, solve_master
from tap_planner.search.mixing import mix
from tap_planner.search.plain import plainest
from tap_planner.search.proof import Proof, ProofKind
from tap_planner.search.shares import Shares
from tap_planner.search.solver import Solver
from tap_planner.search.terms import SCALE
from tap_planner.search.weighting import Outcome, Weights

CLIMB = 8
"""By how much a multiplier is raised where the limit is the least memory."""
NEAR_THE_BOUND = 16
"""Better solutions are looked for up to this part of the bound above it."""
MAX_MISSES = 2
"""How often that may be in vain."""
LEAST_RISE = 10_000
"""A bound that can rise by no more than this part of itself is good enough."""
MAX_EXACT_CROSSINGS = 12
"""Multipliers that are tried again in the tightened model, where the relaxed one is far from it."""
MAX_CROSSINGS = 40
"""Multipliers that are tried for one configuration."""
GUESS = 10
"""The first multiplier of all is the least time without the limit over so many times the limit; those that end a search
have been half as much to four times as much. Where the optimum is asked for the way from the smallest solution is
better: it leaves shares that prove more."""
ROUGH = 64
"""A bound that cannot exclude a configuration need not be nearer to the best of its kind than this part of it."""
FAR = 64
"""One that stays this part of itself below the ceiling need not be near at all."""
NEAR = Fraction(5, 4)
"""A multiplier of the tightened model is that much nearer to the best one than that of the relaxed one."""
LOOSE = 1000
"""A relaxed bound within this part of a solution is taken to be tight."""


class _Depth(enum.Enum):
    """How much is done about what the relaxed model leaves open."""

    RELAXED = enum.auto()
    BRIEF = enum.auto()
    """Shares are moved while that raises the bound much, and what is near it is searched exactly."""
    FULL = enum.auto()
    """The same, but shares are moved as long as that raises the bound."""


class LimitedSearch:
    """The state of the search of one configuration.

    Args:
        solver: the configuration.
        limit_bytes: memory limit per device; None for none.
        divisor: activations count 1/divisor; above 1 only bounds are found, no solutions.
        gap: a bound this near the best solution known need come no nearer.
        unlimited_ns: a lower bound of the least time without the limit, if one is known: its own is looked for only
            where a multiplier that served another configuration is too large.
    """

    def __init__(
        self,
        solver: Solver,
        limit_bytes: int | None,
        divisor: int = 1,
        *,
        gap: Fraction = Fraction(0),
        unlimited_ns: int = 0,
    ) -> None:
        self._solver = solver
        self._limit = limit_bytes
        self._divisor = divisor
        self._gap = gap
        self._stage = 0
        self.bound_ns = 0
        """No solution that fits is faster."""
        self.unlimited_ns = unlimited_ns
        """A lower bound of the least time without the limit."""
        self.unlimited = Proof(kind=ProofKind.RELAXED, bound_ns=0)
        """How that is proven."""
        self.best: Outcome | None = None
        """The fastest solution met that fits."""
        self.multiplier = Fraction(0)
        """Of the bound, in ns per byte; 0 where the limit does not bind."""
        self.proof = Proof(kind=ProofKind.RELAXED, bound_ns=0)
        """The best bound of elimination."""
        self.infeasible = False
        """Proven: nothing fits."""
        self.parameters_too_large = False
        """Infeasible because of the parameters alone: more microbatches or recomputation do not help."""
        self.finished = False
        """No stage is left."""
        self._fits_unlimited = False
        self._ceiling: int | None = None
        self._hint = Fraction(0)
        self._probe: tuple[int, Fraction] | None = None
        """Best Lagrangian bound met, whether or not it is the best bound, and its multiplier."""
        self._crossing = Crossing(limit_bytes, divisor, solver.costed.dearest)
        self._has_borrowed = False
        self._probe_is_optimum = False
        """Whether that bound is as good as it can be under its multiplier."""

    @property
    def configuration(self) -> Configuration:
        """What regions may choose from, and what holds for the whole plan."""
        return self._solver.costed.configuration

    @property
    def has_crossed(self) -> bool:
        """Whether the best multiplier has been looked for."""
        return self._stage >= 3

    @property
    def can_borrow(self) -> bool:
        """Whether it is time to ``borrow``."""
        return 1 <= self._stage <= 3 and not (self._has_borrowed or self.infeasible or self._solver.is_lean)

    @property
    def stage(self) -> int:
        """How many stages have run."""
        return self._stage

    @property
    def only_master_left(self) -> bool:
        """Whether all stages but the last have run."""
        return self._stage >= 4

    @property
    def is_unlimited_optimum(self) -> bool:
        """Whether the limit costs nothing: the best solution is as fast as any without the limit."""
        return self.best is not None and self.best.ns <= self.unlimited_ns

    @property
    def limit_binds(self) -> bool:
        """Whether the fastest solutions met do not fit."""
        return self._stage > 0 and (self.infeasible or self.best is None or self.multiplier > 0)

    def advance(self, multiplier: Fraction, ceiling_ns: int | None) -> None:
        """Run the next stage.

        Args:
            multiplier: one that served another configuration; 0 for none.
            ceiling_ns: only faster solutions matter.
        """
        stages = (self._relax, self._screen, self._cross, self._tighten, self._close)
        stage = stages[self._stage]
        self._stage += 1
        self._ceiling = ceiling_ns
        if multiplier:
            self._hint = multiplier
        stage()
        if self.best is not None and self.best.ns <= self.bound_ns:
            self.bound_ns = self.best.ns
            self.finished = True
        if self.infeasible or self._stage == len(stages):
            self.finished = True

    def virtual_bound_ns(self, multiplier: Fraction, ceiling_ns: int | None) -> int | None:
        """Bound of the first three stages; None where nothing fits."""
        for _ in range(3):
            self.advance(multiplier, ceiling_ns)
            if self.infeasible:
                return None
            if self._fits_unlimited or self._hopeless():
                break
        return self.bound_ns

    def bound_under(self, multiplier: Fraction, ceiling_ns: int) -> bool:
        """Whether the bound under a multiplier comes up to the ceiling."""
        self._ceiling = ceiling_ns
        if not self._has_room():
            return False
        self._evaluate(self._rounded(multiplier))
        return self._hopeless()

    def borrow(self, multiplier: Fraction, shares: Shares, ceiling_ns: int | None) -> bool:
        """Take what bounds a sibling best, another ZeRO level of the same graph; whether that is enough.

        Args:
            multiplier: the sibling's.
            shares: the sibling's.
            ceiling_ns: only faster solutions matter.
        """
        self._ceiling = ceiling_ns
        self._has_borrowed = True
        self._solver.parts.use_shares(shares)
        self._evaluate(self._rounded(multiplier), _Depth.BRIEF)
        return self._hopeless()

    def polish(self) -> None:
        """Look once more for a better solution, where nothing was searched exactly so far."""
        if self._limit is None or self._probe is None or self._probe_is_optimum or self.finished:
            return
        self._evaluate(self._probe[1], _Depth.FULL)
        self._mix()

    def plainest(self, found: Outcome) -> Outcome:
        """A solution of this search with the lowest ZeRO levels that cost no more, where they fit."""
        return plainest(self._solver.costed, found, self._limit)

    def forget(self) -> None:
        """Free what stages can make again."""
        self._solver.forget()

    # -- stages ------------------------------------------------------------------------------------------------

    def _relax(self) -> None:
        if not self._has_room():
            self.infeasible = True
            self.proof = Proof(kind=ProofKind.INFEASIBLE, bound_ns=0)
            return
        if self.unlimited_ns and self._hint:
            self._evaluate(self._hint)
            if self._hopeless() or self._crossing.too_large is not None:  # what is faster does not fit either
                return
        found = self._solver.minimise(Weights(1, 0))
        self.unlimited_ns = -(-found.bound // SCALE)
        self.bound_ns = max(self.bound_ns, self.unlimited_ns)
        self.unlimited = Proof(kind=ProofKind.RELAXED, bound_ns=self.unlimited_ns)
        self._prove(self.unlimited)
        self._crossing.envelope.add_value(0.0, self.unlimited_ns)
        self._fits_unlimited = self._crossing.fits(found)
        self._crossing.add(found)
        self._take(found)

    def _has_room(self) -> bool:
        """Whether what parameters need by themselves leaves any."""
        if not self._crossing.tried:
            self.parameters_too_large = self._limit is not None and self._solver.least_own_bytes() > self._limit
        return not (self.parameters_too_large or self._solver.is_empty)

    def _screen(self) -> None:
        if self._fits_unlimited and self._divisor == 1:
            fastest = self._solver.optimum(Weights(1, 0))
            self.bound_ns = self.unlimited_ns = max(self.bound_ns, -(-fastest.bound // SCALE))
            self.unlimited = Proof(kind=ProofKind.TIGHTENED, bound_ns=self.unlimited_ns)
            self._prove(self.unlimited)
            self._take(fastest)
            return
        assert self._limit is not None
        hint = self._hint
        if not hint and self._gap and self.unlimited_ns and not self._solver.is_lean:
            hint = self._rounded(Fraction(self.unlimited_ns, max(self._limit, 1) * GUESS))
        if hint:
            if hint not in self._crossing.tried:
                self._evaluate(hint)
            if self._crossing.small is None and not self._hopeless():
                self._evaluate(self._rounded(hint * STEP))
            if self._hopeless():
                return
        if self._crossing.small is not None:
            return
        smallest = self._solver.minimise(Weights(0, 1, self._divisor))
        self._take(smallest)
        if -(-smallest.bound // SCALE) > self._limit:
            self.infeasible = True
            self.proof = Proof(kind=ProofKind.INFEASIBLE, bound_ns=0)
        elif self._crossing.fits(smallest):
            self._crossing.add(smallest)

    def _cross(self) -> None:
        """Look for the multiplier at which the limit is just kept."""
        if self._limit is None or self._hopeless():
            return
        for _ in range(MAX_CROSSINGS):
            weight = self._crossing.next_multiplier(self.unlimited_ns)
            if weight is None or weight in self._crossing.tried or self._hopeless() or self._is_settled():
                break
            if self._evaluate(weight):
                break
        self._mix()

    def _is_settled(self) -> bool:
        """Whether a bound of this kind cannot come up to the ceiling, and is nearly as good as it can be."""
        found = self._crossing.envelope.peak()
        if self._divisor == 1 or self._ceiling is None or found is None:
            return False
        most = found[0]
        return most < self._ceiling and (most - self.bound_ns < most / ROUGH or self._ceiling - most > most / FAR)

    def _rounded(self, weight: Fraction) -> Fraction:
        return self._crossing.rounded(weight, self.unlimited_ns)

    def _mix(self) -> None:
        """Mix the two solutions around the limit."""
        if self._divisor > 1 or self._crossing.too_large is None or self._crossing.small is None:
            return
        assert self._limit is not None
        found = mix(self._solver.costed, self._crossing.too_large, self._crossing.small, self._limit)
        if found is not None:
            self._take(found)

    def _tighten(self) -> None:
        if self._limit is None or self._probe is None:
            return
        if self._solver.is_lean:
            self._climb(self._probe[1])
        elif self._is_almost_there():
            return
        else:
            self._cross_tightened(self._served(self._probe[1]), _Depth.BRIEF)
            self._combine()
            if self._hopeless() or self._probe_is_optimum or self._is_almost_there():
                return
            self._cross_tightened(self._probe[1], _Depth.FULL)
        self._combine()

    def _is_almost_there(self) -> bool:
        """Whether what the bound lacks is so little that the master has it in its first window: with shares that a
        sibling has moved it need not be tightened first."""
        known = self._best_known()
        if known is None or not self._solver.parts.shares:
            return False
        return math.ceil(known / (1 + self._gap)) - self.bound_ns <= self.bound_ns // FIRST_WINDOW

    def _combine(self) -> None:
        """Make better solutions of those met."""
        self._mix()
        if not self._is_near(self._ceiling):
            self._improve()

    def _served(self, multiplier: Fraction) -> Fraction:
        """A multiplier, or one near it that has served another configuration in the tightened model."""
        near = self._hint and multiplier / NEAR <= self._hint <= multiplier * NEAR
        return self._rounded(self._hint) if near else multiplier

    def _climb(self, weight: Fraction) -> None:
        """Raise the multiplier while that raises the bound: where the limit is the least memory that there is the bound
        of the exact model never falls, only what tables leave open makes it."""
        self._evaluate(weight, _Depth.FULL)
        assert self._probe is not None
        misses = 0
        for _ in range(MAX_EXACT_CROSSINGS):
            before, higher = self._probe[0], self._rounded(weight * CLIMB)
            if higher <= weight or misses == MAX_MISSES or self._is_closed():
                break
            self._evaluate(higher, _Depth.FULL)
            weight, misses = higher, 0 if self._probe[0] > before else misses + 1

    def _is_closed(self) -> bool:
        """Whether the best solution meets the bound."""
        return self.best is not None and self.best.ns <= self.bound_ns

    def _cross_tightened(self, weight: Fraction, depth: _Depth) -> None:
        """Look for the best multiplier again, now in the tightened model, where the relaxed one may be far from it: the
        shares that one multiplier has moved serve the next.

        Every solution met is a line over the multiplier, and the least of them all at some multiplier an upper bound of
        what can be proven there; where that is largest is tried next (Kelley's cutting planes).
        """
        self._evaluate(weight, depth)
        tried = {weight}
        for _ in range(MAX_EXACT_CROSSINGS):
            found = self._crossing.highest()
            if self._hopeless() or found is None or self.bound_ns >= found[0] - found[0] // LEAST_RISE:
                break
            weight = self._rounded(found[1])
            if weight in tried:
                break
            tried.add(weight)
            self._evaluate(weight, depth)

    def _improve(self) -> None:
        """Let the master combine the values that the best solutions met so far use, with any settings; outside runs,
        where not much depends on them, with all that may belong to a better one."""
        if self._limit is None or not self._crossing.pool:
            return
        ceiling = self._known_ceiling()
        if ceiling <= self.bound_ns:
            return
        weights = self._weights(self.multiplier or (self._probe[1] if self._probe else Fraction(0)))
        if self._solver.is_lean:  # what is known may be very slow
            ceiling = min(ceiling, self.bound_ns + self.bound_ns // NEAR_THE_BOUND)
        alive = self._few(weights, ceiling)
        found = improve(self._solver.restrict(alive), self._limit, self.bound_ns, ceiling, weights)
        if found is not None:
            ns, num_bytes = self._solver.price(found)
            self._take(Outcome(bound=0, choices=found, ns=ns, num_bytes=num_bytes))

    def _few(self, weights: Weights, ceiling_ns: int) -> dict[int, np.ndarray]:
        """By class, few values that solutions better than a ceiling may be made of; all where a class is missing."""
        assert self._limit is not None
        solver, used = self._solver, dict[int, set[int]]()
        fitting = [self._crossing.small.choices] if solver.is_lean and self._crossing.small is not None else []
        for choices in (*self._crossing.pool, *fitting):
            if choices is not None:
                choices.add_used(used)
        if not solver.is_lean:
            most = SCALE * (weights.time * ceiling_ns + weights.memory * self._limit)
            for key, values in solver.within(weights, most).items():
                if key in solver.model.classes_outside_runs:
                    used.setdefault(key, set()).update(values.tolist())
            used = {key: values for key, values in used.items() if not solver.model.is_setting(key)}
        return {key: np.array(sorted(values), dtype=np.int64) for key, values in used.items()}

    def _best_known(self) -> int | None:
        known = [ns for ns in (self.best.ns if self.best else None, self._ceiling) if ns is not None]
        return min(known, default=None)

    def _known_ceiling(self) -> int:
        return self._best_known() or 2 * self.bound_ns

    def _close(self) -> None:
        """Let the master close the gap between the bound and what is known."""
        if self._limit is None:
            return
        if self.best is None:  # at the least memory that there is, all but the exact minimisation may miss it
            self._take(self._solver.optimum(Weights(0, 1)))
        ceiling = self._known_ceiling()
        if ceiling <= self.bound_ns:
            return
        weights = self._weights(self.multiplier or (self._probe[1] if self._probe else Fraction(0)))
        try:
            bound_ns, choices = solve_master(self._solver, self._limit, self.bound_ns, ceiling, weights, self._gap)
        except WidthError:
            return
        self.bound_ns = max(self.bound_ns, min(bound_ns, ceiling))
        if choices is not None:
            ns, num_bytes = self._solver.price(choices)
            self._take(Outcome(bound=0, choices=choices, ns=ns, num_bytes=num_bytes))

    # -- steps -------------------------------------------------------------------------------------------------

    def _take(self, found: Outcome) -> None:
        """Keep a solution that fits, if it is faster."""
        if found.choices is None or self._divisor > 1 or (self._limit is not None and found.num_bytes > self._limit):
            return
        if self.best is None or found.ns < self.best.ns:
            self.best = found

    def _prove(self, proof: Proof) -> None:
        """Remember how elimination gives the best bound."""
        if proof.bound_ns > self.proof.bound_ns:
            self.proof = proof

    def _weights(self, multiplier: Fraction) -> Weights:
        return Weights(multiplier.denominator, multiplier.numerator, self._divisor)

    def _evaluate(self, multiplier: Fraction, depth: _Depth = _Depth.RELAXED) -> bool:
        """Minimise under a multiplier; whether that is the best one, up to what the relaxed model leaves open."""
        assert self._limit is not None
        self._crossing.tried.add(multiplier)
        weights = self._weights(multiplier)
        if depth is _Depth.RELAXED:
            found = self._solver.minimise(weights)
        else:
            brief, known_ns = depth is _Depth.BRIEF, self._best_known()
            if not brief and self.best is not None and self.best.ns == known_ns:
                known_ns = None  # what may be the answer is taken as far as it goes
            found = self._solver.optimum(weights, self._enough(weights, known_ns), brief=brief)
        dual = -(-(found.bound - SCALE * weights.memory * self._limit) // (SCALE * weights.time))
        kind = ProofKind.RELAXED if depth is _Depth.RELAXED else ProofKind.TIGHTENED
        self._prove(
            Proof(
                kind=kind,
                bound_ns=dual,
                multiplier=multiplier,
                shares=self._solver.parts.shares,
                loose=frozenset() if depth is _Depth.RELAXED else self._solver.loosened,
            )
        )
        if depth is _Depth.RELAXED and not self._solver.parts.shares:
            self._crossing.envelope.add_value(float(multiplier), dual)
        if self._probe is None or dual > self._probe[0]:
            self._probe = (dual, multiplier)
            self._probe_is_optimum = depth is not _Depth.RELAXED and found.bound >= found.weighted(weights)
        if dual > self.bound_ns:
            self.bound_ns, self.multiplier = dual, multiplier
        known = self._crossing.weighted(weights)
        self._crossing.add_at(multiplier, found)
        self._take(found)
        least = min((*known, found.weighted(weights)))
        return len(known) == 2 and found.weighted(weights) >= min(known) and least - found.bound < least // LOOSE

    def _enough(self, weights: Weights, known_ns: int | None) -> int | None:
        """The SCALE x weighted bound by which nothing here can be much better than a plan that is known."""
        if known_ns is None:
            return None
        return SCALE * (math.ceil(known_ns / (1 + self._gap)) * weights.time + weights.memory * (self._limit or 0))

    def _hopeless(self) -> bool:
        """Whether nothing can come under the best solution known by more than the gap."""
        return self._is_near(self._best_known())

    def _is_near(self, known: int | None) -> bool:
        """Whether the bound is within the gap of a solution."""
        return known is not None and self.bound_ns >= known / (1 + self._gap)


def least_memory(solver: Solver) -> tuple[int, int]:
    """(lower bound, memory of a solution) of the least bytes per device."""
    found = solver.optimum(Weights(0, 1))
    return -(-found.bound // SCALE), found.num_bytes
