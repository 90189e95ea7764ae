"""Optimum of one configuration: relaxed elimination, min-marginal pruning, exact elimination.

The relaxed model replaces a term of many consumers by equal shares (``Term.shares``): a lower bound in which every
coupling is pairwise, so elimination is cheap. Its optimum, priced exactly, is an upper bound. Where the two differ,
values whose min-marginal lies above the upper bound are dropped, and what is left is eliminated with exact terms.
Every bound that is reported is a valid one: if the exact stage would need too large a table, the relaxed bound stands.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from tap_planner.search.chain import Chain
from tap_planner.search.elimination import (
    INFINITE,
    Elimination,
    Factor,
    WidthError,
    eliminate,
    elimination_order,
)
from tap_planner.search.model import CostedModel
from tap_planner.search.terms import PARTS, SCALE, RegionPolicy, Term

MAX_BOUNDARY_STATES = 400
"""Boundary states of a block up to which its matrix is worth having."""
DENSE_ARITY = 2
"""Terms of at most so many variables are exact in the relaxed model too."""
RELAXED_TABLE_ENTRIES = 2_000_000
"""Buckets with larger tables are split in the relaxed model."""
MAX_TIGHTENINGS = 40
"""Times that shares are moved in the relaxed model."""
MAX_STALLED = 10
"""Moves without a better bound after which tightening ends."""
FIRST_WINDOW = 10_000
"""The first window of costs above the bound that is searched exactly is the bound divided by this."""
WINDOW_GROWTH = 6
MAX_SET_STATES = 5
"""Destinations of a shared tensor up to which all their subsets are enumerated in the exact stage."""
MAX_DENSE_ENTRIES = 4_000_000


_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Weights:
    """What is minimised: ``time`` x ns + ``memory`` x bytes."""

    time: int
    memory: int
    divisor: int = 1
    """Activations count 1/divisor of their bytes: a lower bound for so many times as many microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A strategy for every operator and every shared parameter."""

    operators: tuple[int, ...]
    parameters: Mapping[int, int]
    """Parameter variable -> state."""

    def value(self, variable: int) -> int:
        """Value of any variable."""
        return self.operators[variable] if variable < len(self.operators) else self.parameters[variable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one minimisation found."""

    bound: int
    """Proven lower bound of SCALE x weighted cost."""
    assignment: Assignment | None
    """None where the constraints of the exact stage leave nothing."""
    ns: int
    num_bytes: int
    activation_bytes: int = 0
    """The activations' part of ``num_bytes``."""

    def divided_bytes(self, divisor: int) -> int:
        """Bytes with only 1/divisor of the activations."""
        return self.num_bytes - self.activation_bytes + self.activation_bytes // divisor

    def weighted(self, weights: Weights) -> int:
        """SCALE x weighted cost of the assignment."""
        return SCALE * (weights.time * self.ns + weights.memory * self.num_bytes)


@dataclass(slots=True)
class _PartTables:
    """Cost tables of a part before weighting."""

    scopes: list[tuple[int, ...]] = field(default_factory=list)
    ns: list[np.ndarray] = field(default_factory=list)
    num_bytes: list[np.ndarray] = field(default_factory=list)
    activations: list[bool] = field(default_factory=list)
    """Whether the bytes are those of activations."""
    forbidden: list[np.ndarray | None] = field(default_factory=list)
    """What can never be chosen; None where everything can."""
    domains: dict[int, int] = field(default_factory=dict)
    keep: tuple[int, ...] = ()
    order: tuple[int, ...] | None = None
    stale: bool = False

    def add(self, scope: tuple[int, ...], ns: np.ndarray, num_bytes: np.ndarray, *, activation: bool = True) -> None:
        self.scopes.append(scope)
        self.ns.append(ns)
        self.num_bytes.append(num_bytes)
        self.activations.append(activation)
        forbidden = ns >= int(INFINITE) >> 6
        self.forbidden.append(forbidden if forbidden.any() else None)

    def weighted(self, weights: Weights) -> list[Factor]:
        """The tables as factors of one weighted cost."""
        factors: list[Factor] = []
        for number, scope in enumerate(self.scopes):
            table = self.ns[number] * weights.time
            if weights.memory:
                divisor = weights.divisor if self.activations[number] else 1
                table = table + self.num_bytes[number] * weights.memory // divisor
            forbidden = self.forbidden[number]
            factors.append(Factor(scope, table if forbidden is None else np.where(forbidden, INFINITE, table)))
        return factors


class Solver:
    """Minimises weighted costs of one configuration.

    Args:
        costed: the model under the configuration.
        use_runs: fold repeats (False: eliminate the whole graph, for comparison).
    """

    def __init__(self, costed: CostedModel) -> None:
        self.costed = costed
        self.model = costed.model
        self.policy = costed.policy
        self._alive: dict[int, np.ndarray] = {}
        self._alive_of: dict[int, np.ndarray] = {}
        self._parts: dict[tuple[str, int, bool], _PartTables] = {}
        self._set_states: dict[int, tuple[tuple[int, int], ...]] = {}
        self._splits: dict[str, dict[tuple[int, int], list[int]]] = {}
        self._kept_splits: dict[str, dict[int, list[int]]] = {}

    # -- domains -----------------------------------------------------------------------------------------------

    def alive(self, variable: int) -> np.ndarray:
        """Values of a variable that are still possible."""
        known = self._alive_of.get(variable)
        if known is None:
            key = self.model.class_of_variable(variable)
            if key not in self._alive:
                self._alive[key] = np.arange(self.model.domain(key))
            known = self._alive_of[variable] = self._alive[key]
        return known

    def restrict(self, alive: Mapping[int, np.ndarray]) -> Solver:
        """A solver of the same model whose variables keep only the given values (by class)."""
        restricted = Solver(self.costed)
        restricted._alive = dict(alive)
        return restricted

    # -- tables ------------------------------------------------------------------------------------------------

    def _link_policy(self, number: int, last: bool) -> RegionPolicy:
        region = int(self.model.region_of[self.model.runs[number].second.start])
        working = self.policy.working - {region} if not last else self.policy.working | {region}
        return RegionPolicy(recomputed=self.policy.recomputed, working=frozenset(working) & self.policy.recomputed)

    def tables(self, kind: str, number: int, exact: bool) -> _PartTables:
        key = (kind, number, exact)
        known = self._parts.get(key)
        if known is None or known.stale:
            self._parts[key] = self._make_tables(kind, number, exact)
            if known is not None:
                self._parts[key].order = known.order
        return self._parts[key]

    def _make_tables(self, kind: str, number: int, exact: bool) -> _PartTables:
        part = self.model.outer if kind == "outer" else self.model.links[number]
        policy = self.policy if kind == "outer" else self._link_policy(number, kind == "last")
        tables = _PartTables()
        for variable in part.variables:
            ns, num_bytes = self.costed.own(variable)
            values = self.alive(variable)
            tables.add((variable,), ns[values] * SCALE, num_bytes[values] * SCALE, activation=False)
        for term in part.terms:
            self._add_term(tables, term, policy, exact)
        if kind == "outer":
            parts = self.model.runs
            extra = [v for run in parts for v in self._boundary(run.first, run.boundary)]
            extra += [v for run in parts for v in self._boundary(run.last, run.boundary)]
        else:
            run = self.model.runs[number]
            extra = [*self._boundary(run.first, run.boundary), *self._boundary(run.second, run.boundary), *run.shared]
            tables.keep = (
                *self._shared_keep(number, exact),
                *self._boundary(run.first, run.boundary),
                *self._boundary(run.second, run.boundary),
            )
        self._add_shared(tables, kind, number, policy, exact)
        for variable in (*part.variables, *extra, *(v for scope in tables.scopes for v in scope), *tables.keep):
            if variable not in tables.domains:
                tables.domains[variable] = self.size(variable)
        return tables

    def size(self, variable: int) -> int:
        if variable in self._set_states:
            return (1 << len(self._set_states[variable])) - 1
        return len(self.alive(variable))

    @staticmethod
    def _boundary(occurrence: range, offsets: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(occurrence.start + offset for offset in offsets)

    def _shared_keep(self, number: int, exact: bool) -> tuple[int, ...]:
        keep = list(self.model.runs[number].shared)
        if exact:
            for position, term in enumerate(self.model.shared_terms):
                variable = self._set_variable(position)
                if variable in self._set_states and any(self.model.run_of[s.variable] == number for s in term.slots):
                    keep.append(variable)
        return tuple(keep)

    def _add_term(self, tables: _PartTables, term: Term, policy: RegionPolicy, exact: bool) -> None:
        variables = term.variables
        sizes = 1
        for v in variables:
            sizes *= len(self.alive(v))
        if len(variables) <= DENSE_ARITY or (exact and sizes <= MAX_DENSE_ENTRIES):
            if exact and sizes > MAX_DENSE_ENTRIES:
                raise WidthError(f"a term of {sizes} entries")
            ns, num_bytes = term.dense([self.alive(v) for v in variables], policy)
            tables.add(variables, ns * self.costed.repeat, num_bytes)
            return
        if exact:
            raise WidthError(f"a term of {sizes} entries")
        regions = {slot.region for slot in term.slots}
        self._add_shares(tables, term, policy, [1] * len(term.slots), len(regions) == 1)

    def _add_shares(
        self, tables: _PartTables, term: Term, policy: RegionPolicy, multiplicity: Sequence[int], together: bool
    ) -> None:
        first = [] if term.producer is None else [self.alive(term.producer)]
        alive = [*(first or [np.zeros(1, dtype=np.int64)]), *(self.alive(slot.variable) for slot in term.slots)]
        split = self._splits.get(term.tensor, {})
        kept = self._kept_splits.get(term.tensor, {})
        for index, ns, num_bytes in term.shares(alive, policy, multiplicity, together, split, kept):
            scope = (term.slots[index].variable,)
            if term.producer is None:
                ns, num_bytes = ns[0], num_bytes[0]
            else:
                scope = (term.producer, *scope)
            tables.add(scope, ns * self.costed.repeat, num_bytes)

    # -- tensors that occurrences share -------------------------------------------------------------------------

    def _set_variable(self, position: int) -> int:
        return self.model.num_operators + len(self.model.graph.parameters) + position

    def _multiplicity(self, variable: int) -> int:
        """How many slots a slot of the skeleton stands for; 0 for those that others stand for."""
        run = int(self.model.run_of[variable])
        occurrence = int(self.model.occurrence_of[variable])
        if run < 0 or occurrence == 0:
            return 1
        return self.model.runs[run].num_links if occurrence == 1 else 0

    def _add_shared(self, tables: _PartTables, kind: str, number: int, policy: RegionPolicy, exact: bool) -> None:
        """Shares of the shared terms in the slots of a part (relaxed), or their set variables (exact)."""
        for position, term in enumerate(self.model.shared_terms):
            if exact:
                self._add_set(tables, position, term, kind, number)
                continue
            multiplicity = [self._multiplicity(slot.variable) for slot in term.slots]
            first = [] if term.producer is None else [self.alive(term.producer)]
            alive = [*(first or [np.zeros(1, dtype=np.int64)]), *(self.alive(slot.variable) for slot in term.slots)]
            represented = [i for i, m in enumerate(multiplicity) if m]
            small = replace(term, slots=tuple(term.slots[i] for i in represented))
            shares = small.shares(
                [alive[0], *(alive[i + 1] for i in represented)],
                policy,
                [multiplicity[i] for i in represented],
                False,
                {},
                {},
            )
            for index, ns, num_bytes in shares:
                slot = small.slots[index]
                if not self._belongs(slot.variable, kind, number):
                    continue
                scope = (slot.variable,) if term.producer is None else (term.producer, slot.variable)
                if term.producer is None:
                    ns, num_bytes = ns[0], num_bytes[0]
                tables.add(scope, ns * self.costed.repeat, num_bytes)

    def _belongs(self, variable: int, kind: str, number: int) -> bool:
        run, occurrence = int(self.model.run_of[variable]), int(self.model.occurrence_of[variable])
        if kind == "outer":
            return run < 0 or occurrence == 0
        return run == number and occurrence == 1

    def prepare_sets(self) -> None:
        """Choose the set variables of the exact stage.

        Raises:
            WidthError: some shared tensor still has too many possible destinations.
        """
        for position, term in enumerate(self.model.shared_terms):
            pairs: set[tuple[int, int]] = set()
            for slot in term.slots:
                values = self.alive(slot.variable)
                pairs.update(zip(slot.destination[values].tolist(), slot.gradient[values].tolist(), strict=True))
            if len(pairs) > MAX_SET_STATES:
                raise WidthError(f"{len(pairs)} destinations of a shared tensor")
            self._set_states[self._set_variable(position)] = tuple(sorted(pairs))

    def _add_set(self, tables: _PartTables, position: int, term: Term, kind: str, number: int) -> None:
        """The set variable's value v stands for the destinations whose bits are set in v + 1."""
        variable = self._set_variable(position)
        states = self._set_states[variable]
        bits = np.arange(1, 1 << len(states))
        for slot in dict.fromkeys(s.variable for s in term.slots if self._belongs(s.variable, kind, number)):
            allowed = np.ones((len(bits), len(self.alive(slot))), dtype=bool)
            for reader in term.slots:
                if reader.variable == slot:
                    values = self.alive(slot)
                    keys = zip(reader.destination[values].tolist(), reader.gradient[values].tolist(), strict=True)
                    bit = np.array([states.index(key) for key in keys])
                    allowed &= (bits[:, None] >> bit[None, :] & 1).astype(bool)
            forbidden = np.where(allowed, 0, int(INFINITE))
            tables.add((variable, slot), forbidden, np.zeros_like(forbidden))
        if kind == "outer":
            self._add_set_costs(tables, variable, term, bits)

    def _add_set_costs(self, tables: _PartTables, variable: int, term: Term, bits: np.ndarray) -> None:
        """What a set of destinations costs: a lower bound where a destination might serve one region only."""
        states = self._set_states[variable]
        values = np.zeros(1, dtype=np.int64) if term.producer is None else self.alive(term.producer)
        ns = np.zeros((len(values), len(bits)), dtype=np.int64)
        num_bytes = np.zeros_like(ns)
        counted = any(slot.kept and self.policy.counts(slot.region) for slot in term.slots)
        everywhere = all(slot.kept and self.policy.counts(slot.region) for slot in term.slots)
        src, want = term.source[values], term.wanted[values]
        for position, (destination, gradient) in enumerate(states):
            used = (bits >> position & 1).astype(bool)[None, :]
            cost = np.zeros(len(values), dtype=np.int64)
            if term.producer is not None:
                cost = cost + term.cost_ns[src, destination]
            if gradient >= 0:
                cost = cost + term.cost_ns[gradient, want]
            ns += np.where(used, cost[:, None], 0)
        if term.is_activation and (everywhere or (counted and len({d for d, _ in states}) == 1)):
            for destination in sorted({d for d, _ in states}):
                mask = sum(1 << p for p, (d, _) in enumerate(states) if d == destination)
                num_bytes += np.where((bits & mask) > 0, term.state_bytes[destination], 0)[None, :]
            if term.producer is not None and term.producer_keeps and self.policy.counts(term.producer_region):
                for row, state in enumerate(src.tolist()):
                    mask = sum(1 << p for p, (d, _) in enumerate(states) if d == state)
                    num_bytes[row] += np.where((bits & mask) > 0, 0, term.state_bytes[state])
        scale = SCALE * self.costed.repeat
        if term.producer is None:
            tables.add((variable,), ns[0] * scale, num_bytes[0] * SCALE)
        else:
            tables.add((term.producer, variable), ns * scale, num_bytes * SCALE)

    # -- minimisation ------------------------------------------------------------------------------------------

    def minimise(self, weights: Weights, exact: bool = False) -> Outcome:
        """Least weighted cost; with ``exact`` False a lower bound and the true cost of its assignment.

        Raises:
            WidthError: a table would be too large.
        """
        return Minimisation(self, weights, exact).outcome()

    def optimum(self, weights: Weights) -> Outcome:
        """Least weighted cost, proven: ``bound`` equals the assignment's cost unless tables grew too large.

        Values whose min-marginal lies within a window above the relaxed bound are searched exactly; the window grows
        until what it holds proves itself (every assignment cheaper than bound + window lies inside it).
        """
        best = self._tighten(weights)
        if best.weighted(weights) <= best.bound:
            return replace(best, bound=best.weighted(weights))
        relaxed, marginals = self.marginals(weights)
        best = replace(best, bound=relaxed.bound)
        proven = best.bound
        window = max(proven // FIRST_WINDOW, 1)
        while best.weighted(weights) > proven:
            window = min(window, best.weighted(weights) - best.bound)
            alive = {key: self._alive[key][costs <= best.bound + window] for key, costs in marginals.items()}
            if any(len(values) == 0 for values in alive.values()):
                proven = best.bound + window
                window *= WINDOW_GROWTH
                continue
            try:
                inside = self.restrict(alive)
                inside.prepare_sets()
                found = inside.minimise(weights, exact=True)
            except WidthError:
                break
            exhausted = best.bound + window
            if found.assignment is not None and found.weighted(weights) < best.weighted(weights):
                best = replace(found, bound=best.bound)
            proven = max(proven, min(exhausted, found.bound))
            if window >= best.weighted(weights) - best.bound or found.bound <= exhausted:
                break
            window *= WINDOW_GROWTH
        return replace(best, bound=min(proven, best.weighted(weights)))

    def _tighten(self, weights: Weights) -> Outcome:
        """Relaxed minimisation, with the shares moved to those who use a destination, while that raises the bound.

        A subgradient method on the shares; the shares of the best bound are kept. The outcome holds the cheapest
        assignment met and the best bound.
        """
        best = found = self.minimise(weights)
        kept = (self._splits, self._kept_splits)
        stalled = 0
        for round_number in range(1, MAX_TIGHTENINGS + 1):
            if best.weighted(weights) <= best.bound or stalled >= MAX_STALLED or found.assignment is None:
                break
            self._move_shares(found.assignment, 0.5 / math.sqrt(round_number), with_memory=weights.memory > 0)
            found = self.minimise(weights)
            stalled += 1
            if found.bound > best.bound:
                stalled = 0 if found.bound > best.bound + best.bound // 100_000 else stalled
                kept = (self._splits, self._kept_splits)
            cheaper = found if found.weighted(weights) < best.weighted(weights) else best
            best = replace(cheaper, bound=max(best.bound, found.bound))
        if self._splits is not kept[0]:
            self._splits, self._kept_splits = kept
            self._forget_shares()
        return best

    def _forget_shares(self) -> None:
        for tables in self._parts.values():
            tables.stale = True

    def _move_shares(self, assignment: Assignment, step: float, *, with_memory: bool) -> None:
        """Move shares by ``step`` of the way to where only users of a destination (keepers of a copy) bear its cost."""
        splits = {tensor: dict(split) for tensor, split in self._splits.items()}
        kept_splits = {tensor: dict(split) for tensor, split in self._kept_splits.items()}
        for term, number in self._relaxed_terms():
            policy = self.policy if number is None else self._link_policy(number, False)
            used: dict[tuple[int, int], list[float]] = {}
            kept: dict[int, list[float]] = {}
            for shift in self._occurrence_shifts(number):
                values = [assignment.value(slot.variable + shift) for slot in term.slots]
                keys = [
                    (int(slot.destination[value]), int(slot.gradient[value]))
                    for slot, value in zip(term.slots, values, strict=True)
                ]
                _count_users(used, list(enumerate(keys)), len(term.slots))
                if with_memory and term.is_activation:
                    source = 0 if term.producer is None else assignment.value(self._shifted(term.producer, shift))
                    _count_users(kept, term.kept_states(values, source, policy), len(term.slots) + 1)
            readers = len(term.slots)
            _move_towards(splits.setdefault(term.tensor, {}), used, PARTS // readers, step)
            if kept:
                keepers = len(term.kept_states([0] * readers, 0, policy))
                _move_towards(kept_splits.setdefault(term.tensor, {}), kept, PARTS // keepers, step)
        self._splits, self._kept_splits = splits, kept_splits
        self._forget_shares()

    def _shifted(self, producer: int, shift: int) -> int:
        return (
            producer + shift if producer < self.model.num_operators and self.model.run_of[producer] >= 0 else producer
        )

    def _relaxed_terms(self) -> Iterator[tuple[Term, int | None]]:
        """Terms that are shared out, with the run of their link."""
        for number, part in [(None, self.model.outer), *enumerate(self.model.links)]:
            for term in part.terms:
                if len(term.variables) > DENSE_ARITY and all(
                    slot.variable < self.model.num_operators for slot in term.slots
                ):
                    yield term, number

    def _occurrence_shifts(self, number: int | None) -> range:
        """Distances from the second occurrence of a run to all later ones."""
        if number is None:
            return range(1)
        run = self.model.runs[number]
        return range(0, run.num_links * len(run.first), len(run.first))

    def marginals(self, weights: Weights) -> tuple[Outcome, dict[int, np.ndarray]]:
        """Relaxed minimisation and, by class, the least relaxed cost of every alive value."""
        minimisation = Minimisation(self, weights, False)
        return minimisation.outcome(), minimisation.marginals()

    def bound(self, weights: Weights) -> int:
        """A lower bound of SCALE x the least weighted cost (relaxed model)."""
        return Minimisation(self, weights, False).bound

    def least_own_bytes(self) -> int:
        """A lower bound of the memory: what parameters need at least, by themselves."""
        model = self.model
        total = sum(int(self.costed.own(v)[1].min()) for v in model.outer.variables)
        for number, run in enumerate(model.runs):
            total += run.num_links * sum(int(self.costed.own(v)[1].min()) for v in model.links[number].variables)
        return total

    # -- exact prices ------------------------------------------------------------------------------------------

    def price(self, assignment: Assignment) -> tuple[int, int]:
        """Exact (ns, bytes) of an assignment."""
        ns, own_bytes, activation_bytes = self.price_parts(assignment)
        return ns, own_bytes + activation_bytes

    def price_parts(self, assignment: Assignment) -> tuple[int, int, int]:
        """Exact (ns, bytes of parameters and their states, bytes of activations) of an assignment."""
        model = self.model
        total = _Total(self.costed)
        for variable in model.outer.variables:
            total.add_own(variable, assignment.value(variable), 1)
        for term in (*model.outer.terms, *model.shared_terms):
            source = 0 if term.producer is None else assignment.value(term.producer)
            choices = [(assignment.value(slot.variable), slot.region) for slot in term.slots]
            total.add_term(term, choices, source, self.policy, 1)
        for number, run in enumerate(model.runs):
            counted: dict[tuple[tuple[int, ...], tuple[int, ...], bool], int] = {}
            period = len(run.first)
            for occurrence in range(1, run.num_links + 1):
                begin = run.first.start + occurrence * period
                previous = assignment.operators[begin - period : begin]
                current = assignment.operators[begin : begin + period]
                key = (previous, current, occurrence == run.num_links)
                counted[key] = counted.get(key, 0) + 1
            for (previous, current, last), times in counted.items():
                self._price_link(total, number, (previous, current), last, assignment, times)
        return total.ns, total.own_bytes, total.activation_bytes

    def _price_link(
        self,
        total: _Total,
        number: int,
        occurrences: tuple[tuple[int, ...], tuple[int, ...]],
        last: bool,
        assignment: Assignment,
        times: int,
    ) -> None:
        run = self.model.runs[number]
        policy = self._link_policy(number, last)

        def value(variable: int) -> int:
            if variable in run.first:
                return occurrences[0][variable - run.first.start]
            if variable in run.second:
                return occurrences[1][variable - run.second.start]
            return assignment.value(variable)

        for variable in self.model.links[number].variables:
            total.add_own(variable, value(variable), times)
        for term in self.model.links[number].terms:
            source = 0 if term.producer is None else value(term.producer)
            total.add_term(term, [(value(slot.variable), slot.region) for slot in term.slots], source, policy, times)


class _Total:
    """Adds up exact prices."""

    def __init__(self, costed: CostedModel) -> None:
        self._costed = costed
        self.ns = self.own_bytes = self.activation_bytes = 0

    def add_own(self, variable: int, value: int, times: int) -> None:
        ns, num_bytes = self._costed.own(variable)
        self.ns += times * int(ns[value])
        self.own_bytes += times * int(num_bytes[value])

    def add_term(
        self, term: Term, choices: list[tuple[int, int]], source: int, policy: RegionPolicy, times: int
    ) -> None:
        ns, num_bytes = term.point(choices, source, policy)
        self.ns += times * ns * self._costed.repeat
        self.activation_bytes += times * num_bytes


class Minimisation:
    """One weighted minimisation: links, chains, outer part, and the way back."""

    def __init__(self, solver: Solver, weights: Weights, exact: bool) -> None:
        self._solver = solver
        self._weights = weights
        self._exact = exact
        self._split_above = None if exact else RELAXED_TABLE_ENTRIES
        self._links: list[tuple[Elimination, Elimination]] = []
        self.chains: list[Chain] = []
        model = solver.model
        outer = solver.tables("outer", 0, exact)
        factors = outer.weighted(weights)
        for number, run in enumerate(model.runs):
            middle = self._eliminate(solver.tables("link", number, exact))
            differs = weights.memory and solver.policy.recomputed
            last = self._eliminate(solver.tables("last", number, exact)) if differs else middle
            self._links.append((middle, last))
            chain = Chain(self._matrix(middle, number), self._matrix(last, number), run.num_links - 1)
            self.chains.append(chain)
            factors.append(Factor(self.chain_scope(number), chain.table.reshape(self.chain_shape(number))))
        domains = dict(outer.domains)
        for factor in factors[len(outer.scopes) :]:
            for variable, size in zip(factor.scope, factor.table.shape, strict=True):
                domains.setdefault(variable, size)
        if outer.order is None:
            outer.order = elimination_order(domains, [f.scope for f in factors], ())
        self._outer = eliminate(domains, factors, (), outer.order, self._split_above)
        self.bound = int(self._outer.table)

    def _eliminate(self, tables: _PartTables) -> Elimination:
        if tables.order is None:
            tables.order = elimination_order(tables.domains, tables.scopes, tables.keep)
        factors = tables.weighted(self._weights)
        return eliminate(tables.domains, factors, tables.keep, tables.order, self._split_above)

    def sizes(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of the shared variables, and of the boundary variables."""
        solver = self._solver
        run = solver.model.runs[number]
        shared = tuple(solver.size(v) for v in solver._shared_keep(number, self._exact))
        boundary = tuple(solver.size(v) for v in solver._boundary(run.first, run.boundary))
        return shared, boundary

    def _matrix(self, link: Elimination, number: int) -> np.ndarray:
        shared, boundary = self.sizes(number)
        states = _product(boundary)
        if states > MAX_BOUNDARY_STATES:
            raise WidthError(f"{states} boundary states")
        return link.table.reshape(_product(shared), states, states)

    def chain_scope(self, number: int) -> tuple[int, ...]:
        solver = self._solver
        run = solver.model.runs[number]
        return (
            *solver._shared_keep(number, self._exact),
            *solver._boundary(run.first, run.boundary),
            *solver._boundary(run.last, run.boundary),
        )

    def chain_shape(self, number: int) -> tuple[int, ...]:
        shared, boundary = self.sizes(number)
        return (*shared, *boundary, *boundary)

    def outcome(self) -> Outcome:
        """Bound, assignment and its exact price."""
        if self.bound >= int(INFINITE):
            return Outcome(bound=self.bound, assignment=None, ns=0, num_bytes=0)
        assignment = self._assignment()
        ns, own_bytes, activation_bytes = self._solver.price_parts(assignment)
        return Outcome(
            bound=self.bound,
            assignment=assignment,
            ns=ns,
            num_bytes=own_bytes + activation_bytes,
            activation_bytes=activation_bytes,
        )

    def _assignment(self) -> Assignment:
        values: dict[int, int] = {}
        self._outer.backtrack(values)
        links = [self._walk(number, run.num_links, values) for number, run in enumerate(self._solver.model.runs)]
        return self.compose(values, links)

    def compose(self, values: Mapping[int, int], links: Sequence[Sequence[Mapping[int, int]]]) -> Assignment:
        """The assignment of the whole graph.

        Args:
            values: alive index of every variable of the outer part.
            links: per run, per later occurrence, alive index of every variable of the link.
        """
        solver, model = self._solver, self._solver.model
        operators = [-1] * model.num_operators
        parameters: dict[int, int] = {}
        for variable in model.outer.variables:
            chosen = int(solver.alive(variable)[values[variable]])
            if variable < model.num_operators:
                operators[variable] = chosen
            else:
                parameters[variable] = chosen
        for number, run in enumerate(model.runs):
            period = len(run.first)
            inside = model.links[number].variables[period:]
            chosen_in: dict[int, list[int]] = {}
            for occurrence, inner in enumerate(links[number], start=1):
                if id(inner) not in chosen_in:
                    chosen_in[id(inner)] = [int(solver.alive(v)[inner[v]]) for v in run.second]
                start = run.first.start + occurrence * period
                operators[start : start + period] = chosen_in[id(inner)]
                for variable in inside:
                    parameters[self._parameter_at(variable, occurrence)] = int(solver.alive(variable)[inner[variable]])
        return Assignment(operators=tuple(operators), parameters=parameters)

    def _walk(self, number: int, num_links: int, values: Mapping[int, int]) -> list[dict[int, int]]:
        """Cheapest occurrences of a run after the first, between the boundary states of the outer part."""
        solver, run = self._solver, self._solver.model.runs[number]
        shared, boundary = self.sizes(number)
        keep_shared = solver._shared_keep(number, self._exact)
        first, last = solver._boundary(run.first, run.boundary), solver._boundary(run.last, run.boundary)
        s = _ravel([values[v] for v in keep_shared], shared)
        a, b = (_ravel([values[v] for v in vs], boundary) for vs in (first, last))
        path = self.chains[number].path(s, a, b)
        second = solver._boundary(run.second, run.boundary)
        known: dict[tuple[int, int, bool], dict[int, int]] = {}
        occurrences: list[dict[int, int]] = []
        for occurrence in range(1, num_links + 1):
            key = (path[occurrence - 1], path[occurrence], occurrence == num_links)
            if key not in known:
                inner = dict(zip(keep_shared, (values[v] for v in keep_shared), strict=True))
                inner.update(zip(first, _unravel(key[0], boundary), strict=True))
                inner.update(zip(second, _unravel(key[1], boundary), strict=True))
                self._links[number][1 if key[2] else 0].backtrack(inner)
                known[key] = inner
            occurrences.append(known[key])
        return occurrences

    def _parameter_at(self, variable: int, occurrence: int) -> int:
        """The parameter variable of a later occurrence that corresponds to one of the second."""
        model = self._solver.model
        index, position = model.space.consumers[model.space.parameter_reads[model.parameter_of(variable)][0]][0]
        run = model.runs[int(model.run_of[index])]
        name = model.graph.operators[index + (occurrence - 1) * len(run.first)].inputs[position]
        assert name is not None
        read = model.graph.tensors[name].read
        assert read is not None
        return model.shared_parameters[read.parameter]

    def marginals(self) -> dict[int, np.ndarray]:
        """By class of variable, the least relaxed cost of every alive value over all its occurrences."""
        solver, model = self._solver, self._solver.model
        result: dict[int, np.ndarray] = {}

        def merge(found: Mapping[int, np.ndarray]) -> None:
            for variable, costs in found.items():
                if variable >= solver._set_variable(0) and variable in solver._set_states:
                    continue
                key = model.class_of_variable(variable)
                result[key] = np.minimum(result[key], costs) if key in result else costs

        merge(self._outer.marginals())
        for number in range(len(model.runs)):
            outside = self.outside(number)
            around = self.chains[number].outside_of_links(outside)
            shared, boundary = self.sizes(number)
            merge(self._links[number][0].marginals(around.reshape(*shared, *boundary, *boundary)))
        return result

    def outside(self, number: int) -> np.ndarray:
        """[s, a, b] least cost of everything outside a chain."""
        _solver, outer = self._solver, self._solver.tables("outer", 0, self._exact)
        factors = outer.weighted(self._weights)
        domains = dict(outer.domains)
        for other in range(len(self.chains)):
            scope, shape = self.chain_scope(other), self.chain_shape(other)
            domains.update(dict(zip(scope, shape, strict=True)))
            if other != number:
                factors.append(Factor(scope, self.chains[other].table.reshape(shape)))
        keep = self.chain_scope(number)
        shared, boundary = self.sizes(number)
        table = eliminate(domains, factors, keep, None, self._split_above).table
        return table.reshape(_product(shared), _product(boundary), _product(boundary))


def _count_users(counted: dict[_Key, list[float]], users: list[tuple[int, _Key]], width: int) -> None:
    """Add one unit per key, shared equally by the positions that use it."""
    groups: dict[_Key, list[int]] = {}
    for position, key in users:
        groups.setdefault(key, []).append(position)
    for key, positions in groups.items():
        parts = counted.setdefault(key, [0.0] * width)
        for position in positions:
            parts[position] += 1 / len(positions)


def _move_towards(split: dict[_Key, list[int]], used: dict[_Key, list[float]], equal: int, step: float) -> None:
    for key, parts in used.items():
        present = split.get(key, [equal] * len(parts))
        total = sum(parts)
        split[key] = [
            int(old * (1 - step) + PARTS * new / total * step) for old, new in zip(present, parts, strict=True)
        ]


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _ravel(values: Sequence[int], sizes: Sequence[int]) -> int:
    index = 0
    for value, size in zip(values, sizes, strict=True):
        index = index * size + value
    return index


def _unravel(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    values: list[int] = []
    for size in reversed(sizes):
        values.append(index % size)
        index //= size
    return tuple(reversed(values))
