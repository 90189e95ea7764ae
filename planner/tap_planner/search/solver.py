"""Optimum of one configuration: relaxed elimination, min-marginal pruning, exact elimination.

The relaxed model replaces a term of many consumers by equal shares (``Term.shares``): a lower bound in which every
coupling is pairwise, so elimination is cheap. Its optimum, priced exactly, is an upper bound. Where the two differ,
values whose min-marginal lies above the upper bound are dropped, and what is left is eliminated with exact terms.
Every bound that is reported is a valid one: if the exact stage would need too large a table, the relaxed bound stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from tap_planner.search.choices import Assignment, Choices, fold_assignment
from tap_planner.search.costing import CostedModel
from tap_planner.search.factors import WidthError
from tap_planner.search.minimisation import Minimisation
from tap_planner.search.parts import Parts
from tap_planner.search.pricing import price_choices
from tap_planner.search.shares import Shares, move_shares
from tap_planner.search.weighting import Outcome, Weights

MAX_TIGHTENINGS = 40
"""Times that shares are moved in the relaxed model."""
MAX_STALLED = 3
"""Moves without a better bound after which tightening ends."""
STALLED_SHARE = 20_000
"""A bound that rises by no more than this part of itself counts as no better."""
BRIEF_SHARE = 2_000
"""The same, where it ends after the first such move: where the multiplier is not yet the best one."""
FIRST_STEP = 0.5
"""How much of the way shares go at the first move."""
FIRST_WINDOW = 10_000
"""The first window of costs above the bound that is searched exactly is the bound divided by this."""
WINDOW_GROWTH = 6
FARTHEST = 50
"""A solution so many windows above the bound is the end of the next window: it is often the best one."""

Found = TypeVar("Found")


class Solver:
    """Minimises weighted costs of one configuration.

    Args:
        costed: the model under the configuration.
        alive: by class of variable, the values that are possible; all where a class is missing.
        loose: see ``Parts``.
    """

    is_lean = False
    """Whether values are left out under which the memory limit cannot be kept."""
    is_empty = False
    """Whether these are all."""

    def __init__(
        self,
        costed: CostedModel,
        alive: Mapping[int, np.ndarray] | None = None,
        loose: frozenset[int] | None = frozenset(),
    ) -> None:
        self.costed = costed
        self.model = costed.model
        self.parts = Parts(costed, alive, loose)
        self._alive = alive
        self._loose = loose
        self.loosened = loose
        """As ``loose``, of the last exact minimisation that raised a bound."""
        self._moves = 0
        """How often shares were moved."""

    @property
    def fastest(self) -> Solver:
        """The same with only the recompute setting that takes the least time: where memory has no weight."""
        return self if self._faster is None else self._faster

    @cached_property
    def _faster(self) -> Solver | None:
        """``fastest``, unless that is this one: a solver that held itself would keep its tables."""
        configuration = self.costed.configuration
        settings = configuration.settings
        if len(settings.recomputes) == 1:
            return None
        fast = replace(configuration, settings=settings.fastest)
        return Solver(self.costed.under(fast), self._alive)

    def forget(self) -> None:
        """Free the tables: what is needed again is made again."""
        self.parts.forget()
        self.__dict__.pop("_faster", None)

    # -- values ------------------------------------------------------------------------------------------------

    def alive(self, variable: int) -> np.ndarray:
        """Values of a variable that are still possible."""
        return self.parts.domains.alive(variable)

    def restrict(self, alive: Mapping[int, np.ndarray], loose: frozenset[int] | None = frozenset()) -> Solver:
        """A solver of the same model whose variables keep only some values.

        Args:
            alive: by class, the values.
            loose: see ``Parts``.
        """
        restricted = Solver(self.costed, alive, loose)
        if self.parts.shares:
            restricted.parts.use_shares(self.parts.shares)
        return restricted

    def make_exact(self) -> None:
        """Take terms that larger windows have loosened as exact again."""
        self._loose = frozenset()

    def prepare_sets(self) -> None:
        """Choose the set variables of the exact stage.

        Raises:
            WidthError: some shared tensor still has too many possible destinations.
        """
        self.parts.sets.prepare()

    # -- minimisation ------------------------------------------------------------------------------------------

    def minimise(self, weights: Weights, exact: bool = False) -> Outcome:
        """Least weighted cost; with ``exact`` False a lower bound and the true cost of its assignment.

        Raises:
            WidthError: a table would be too large.
        """
        if not weights.memory and self.fastest is not self:
            return self.fastest.minimise(weights, exact)
        return Minimisation(self.parts, weights, exact).outcome()

    def marginals(self, weights: Weights) -> tuple[Outcome, dict[int, np.ndarray]]:
        """Relaxed minimisation and, by class, the least relaxed cost of every alive value."""
        minimisation = Minimisation(self.parts, weights, False)
        return minimisation.outcome(), minimisation.marginals()

    def within(self, weights: Weights, ceiling: int) -> Mapping[int, np.ndarray]:
        """By class, the values that may belong to an assignment whose SCALE x weighted cost is at most ``ceiling``."""
        return self.parts.domains.within(self.marginals(weights)[1], ceiling)

    def optimum(self, weights: Weights, enough: int | None = None, *, brief: bool = False) -> Outcome:
        """Least weighted cost, proven: ``bound`` equals the assignment's cost unless tables grew too large.

        Args:
            weights: what is minimised.
            enough: a bound as large as this need not be raised further.
            brief: whether shares are moved only as long as that raises the bound much.
        """
        if not weights.memory and self.fastest is not self:
            return self.fastest.optimum(weights, enough)
        best = self._tighten(weights, enough, *((1, BRIEF_SHARE) if brief else (MAX_STALLED, STALLED_SHARE)))
        if enough is not None and best.bound >= enough:
            return best
        if best.weighted(weights) > best.bound:
            best = self._search_windows(weights, best, enough)
        return replace(best, bound=min(best.bound, best.weighted(weights)))

    def share_out(self, weights: Weights, shares: Shares) -> None:
        """Use shares in the place of equal ones, with the elimination orders of these, on which the bound depends where
        buckets are split: searches begin so."""
        if shares:
            self.minimise(weights)
        self.parts.use_shares(shares)

    def proves(self, weights: Weights, bound: int, shares: Shares, loose: frozenset[int] | None) -> bool:
        """Whether no SCALE x weighted cost is below a bound: what a search has found, in one step.

        Args:
            weights: what is minimised; bytes count.
            bound: the claim.
            shares: with which it was found.
            loose: the same; see ``Parts``.
        """
        self.share_out(weights, shares)
        self._loose = loose
        relaxed, marginals = self.marginals(weights)
        if relaxed.bound >= bound:
            return True
        try:
            return self._search_within(weights, marginals, bound).bound >= bound
        except WidthError:
            return False

    def _search_windows(self, weights: Weights, best: Outcome, enough: int | None) -> Outcome:
        """Search what lies within a window above the relaxed bound exactly.

        The window grows until what it holds proves itself: every assignment cheaper than bound + window lies inside.

        Args:
            weights: what is minimised.
            best: the best assignment known.
            enough: a bound as large as this need not be raised further.
        """
        relaxed, marginals = self.marginals(weights)
        bound = proven = relaxed.bound
        window = max(bound // FIRST_WINDOW, 1)
        while proven < (wanted := min(best.weighted(weights), best.weighted(weights) if enough is None else enough)):
            window = min(window, wanted - bound)
            ceiling = bound + window
            try:
                found = self._search_within(weights, marginals, ceiling)
            except WidthError:
                break
            if found.choices is not None and found.weighted(weights) < best.weighted(weights):
                best = found
            if min(ceiling, found.bound) > proven:
                proven, self.loosened = min(ceiling, found.bound), self._loose
            if ceiling >= best.weighted(weights) or found.bound <= ceiling:
                break
            reach = wanted - bound
            window = reach if reach <= window * FARTHEST else window * WINDOW_GROWTH
        return replace(best, bound=proven)

    def _search_within(self, weights: Weights, marginals: Mapping[int, np.ndarray], ceiling: int) -> Outcome:
        """Exact minimisation over the values whose min-marginal is at most ``ceiling``."""
        alive = self.parts.domains.within(marginals, ceiling)
        if any(len(values) == 0 for values in alive.values()):
            return Outcome(bound=ceiling + 1, choices=None, ns=0, num_bytes=0)
        return self.exactly(alive, lambda inside: inside.minimise(weights, exact=True))

    def exactly(self, alive: Mapping[int, np.ndarray], solve: Callable[[Solver], Found]) -> Found:
        """What ``solve`` makes of the given values with exact tables.

        Where these are too large, terms are exact no more, one after the other, which leaves a lower bound; and they
        stay so, as windows only grow.

        Args:
            alive: by class of variable, the values.
            solve: something with a solver whose set variables are prepared.

        Raises:
            WidthError: the tables are too large all the same, or something else is.
        """
        while True:
            inside = self.restrict(alive, self._loose)
            inside.prepare_sets()
            try:
                return solve(inside)
            except WidthError as error:
                if not error.scope:
                    raise
                self._loose = inside.parts.looser(error.scope)

    def _tighten(self, weights: Weights, enough: int | None, max_stalled: int, share: int) -> Outcome:
        """Relaxed minimisation, with the shares moved to those who use a destination, while that raises the bound.

        A subgradient method on the shares, whose steps shorten from one move to the next; the shares of the best bound
        are kept.

        Args:
            weights: what is minimised.
            enough: a bound as large as this need not be raised further.
            max_stalled: after so many moves in a row without a better bound it ends.
            share: a bound that rises by no more than this part of itself is no better.

        Returns:
            The cheapest assignment met and the best bound.
        """
        best = found = self.minimise(weights)
        kept = self.parts.shares
        stalled = 0
        for _ in range(MAX_TIGHTENINGS):
            if best.weighted(weights) <= best.bound or stalled >= max_stalled or found.choices is None:
                break
            if enough is not None and best.bound >= enough:
                break
            self._moves += 1
            self._move_shares(found.choices, weights, FIRST_STEP / math.sqrt(self._moves))
            found = self.minimise(weights)
            stalled += 1
            if found.bound > best.bound:
                stalled = 0 if found.bound > best.bound + best.bound // share else stalled
                kept = self.parts.shares
            cheaper = found if found.weighted(weights) < best.weighted(weights) else best
            best = replace(cheaper, bound=max(best.bound, found.bound))
        if self.parts.shares is not kept:
            self.parts.use_shares(kept)
        return best

    def _move_shares(self, choices: Choices, weights: Weights, step: float) -> None:
        with_memory = weights.memory > 0
        self.parts.use_shares(move_shares(self.parts.shares, self.costed, choices, step, with_memory=with_memory))

    # -- prices ------------------------------------------------------------------------------------------------

    def least_own_bytes(self) -> int:
        """A lower bound of the memory: what parameters need at least, by themselves."""
        return self.costed.least_own_bytes()

    def price(self, choices: Choices | Assignment) -> tuple[int, int]:
        """Exact (ns, bytes) of choices."""
        if isinstance(choices, Assignment):
            choices = fold_assignment(self.model, choices)
        price = price_choices(self.costed, choices)
        return price.ns, price.num_bytes
