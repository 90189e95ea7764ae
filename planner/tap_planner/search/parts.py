"""Cost tables of the parts of a model: exact ones, and the relaxed ones in which every coupling is pairwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np

from tap_planner.operators import OUTPUT
from tap_planner.search.costing import CostedModel
from tap_planner.search.domains import Domains
from tap_planner.search.factors import WidthError
from tap_planner.search.model import PartKind
from tap_planner.search.pairs import PairTables, is_pair
from tap_planner.search.patterns import PatternTerm
from tap_planner.search.sets import SetVariables
from tap_planner.search.shares import NO_SHARES, Shares, is_shared_out, most_keepers
from tap_planner.search.terms import SCALE, RegionPolicy, Term
from tap_planner.search.weighting import PartTables
from tap_planner.search.wide import widen

MAX_DENSE_ENTRIES = 20_000
"""Largest exact table over all variables of a term of more than two; beyond, set variables stand between them."""
MAX_LOOSE = 8
"""Terms whose patterns are given up one by one where tables are too large; then all of them are."""
MAX_RELAXED_ENTRIES = 200_000
"""Largest relaxed table over a run's boundary and what its occurrences share; its powers take minutes beyond."""

_TableKey = tuple[PartKind, int, bool]
"""Part, run, whether exact."""
_Table = tuple[tuple[int, ...], np.ndarray, np.ndarray]
"""(Variables, SCALE x ns, SCALE x bytes)."""


class Parts:
    """The parts of a model under one configuration, as tables over the possible values of their variables.

    Args:
        costed: the model under the configuration.
        alive: by class, the values that are possible; all where a class is missing.
        loose: classes of producers whose terms have no patterns in the exact tables, which would be too large; None: of
            all.
    """

    def __init__(
        self,
        costed: CostedModel,
        alive: Mapping[int, np.ndarray] | None = None,
        loose: frozenset[int] | None = frozenset(),
    ) -> None:
        self.costed = costed
        self.model = costed.model
        self._loose = loose
        self._patterned: dict[int, int] = {}
        """By set variable that says which consumers agree, the class of the tensor's producer."""
        self.domains = Domains(costed, alive)
        self.sets = SetVariables(costed, self.domains)
        self._shares = NO_SHARES
        self._restricted = alive is not None
        self._local_sets: dict[str, int] = {}
        """By tensor, the set variable that stands for its consumers inside a part."""
        self._set_sizes: dict[int, int] = {}
        self._tables: dict[_TableKey, PartTables] = {}
        self._fixed: dict[_TableKey, PartTables] = {}
        """What does not depend on how terms are shared out."""
        self._own: dict[int, tuple[object, np.ndarray, np.ndarray]] = {}
        """By the identity of own costs: these costs, and the tables that variables with such costs have in common."""
        self._orders: dict[_TableKey, tuple[int, ...] | None] = {}
        """Elimination orders of tables that were dropped: the structure of the new ones is mostly the same, though with
        other shares a setting may no longer matter."""

    @property
    def shares(self) -> Shares:
        """How terms of many consumers are shared out in the relaxed tables."""
        return self._shares

    def use_shares(self, shares: Shares) -> None:
        """Share terms out in another way."""
        self._shares = shares
        self._orders.update((key, tables.order) for key, tables in self._tables.items())
        self._tables.clear()

    def forget(self) -> None:
        """Free the tables: what is needed again is made again."""
        self.use_shares(self._shares)
        self._fixed.clear()
        self._own.clear()

    def looser(self, scope: Sequence[int]) -> frozenset[int] | None:
        """Classes of producers whose terms are to have no patterns, after a table over ``scope`` was too large.

        Raises:
            WidthError: none has any.
        """
        if not self._patterned:
            raise WidthError("tables without patterns")
        if self._loose is None or len(self._loose) >= MAX_LOOSE:
            return None
        inside = [variable for variable in scope if variable in self._patterned] or self._patterned
        widest = max(inside, key=lambda variable: (self._set_sizes[variable], variable))
        return self._loose | {self._patterned[widest]}

    def size(self, variable: int) -> int:
        """Number of possible values of a variable."""
        if variable in self._set_sizes:
            return self._set_sizes[variable]
        return self.sets.size(variable) if variable in self.sets else len(self.domains.alive(variable))

    def is_set(self, variable: int) -> bool:
        """Whether a variable stands for a set of demands or destinations."""
        return variable in self._set_sizes or variable in self.sets

    def shared_keep(self, number: int, exact: bool) -> tuple[int, ...]:
        """Variables outside a run that its occurrences are coupled with.

        In the relaxed model the largest are left out where the table over all of them would be too large: every
        occurrence then takes the value that suits it best, which is a lower bound.
        """
        run = self.model.runs[number]
        if exact:
            return (*run.shared, *self.sets.of_run(number))
        entries = math.prod(self.size(variable) for variable in run.first_boundary) ** 2
        kept: set[int] = set()
        for variable in sorted(run.shared, key=lambda variable: (self.size(variable), variable)):
            entries *= self.size(variable)
            if entries > MAX_RELAXED_ENTRIES:
                break
            kept.add(variable)
        return tuple(variable for variable in run.shared if variable in kept)

    # -- tables ------------------------------------------------------------------------------------------------

    def tables(self, kind: PartKind, number: int, exact: bool) -> PartTables:
        """Tables of a part.

        Args:
            kind: which part.
            number: the run of a link.
            exact: with exact terms and set variables (which must have been prepared), or relaxed.

        Raises:
            WidthError: an exact table would be too large.
        """
        key = (kind, number, exact)
        if key not in self._tables:
            tables = self._tables[key] = self._make_tables(kind, number, exact)
            known = self._orders.get(key)
            if known is not None and {*known, *tables.keep} >= {*tables.domains} >= {*known}:
                tables.order = known
        return self._tables[key]

    def _make_tables(self, kind: PartKind, number: int, exact: bool) -> PartTables:
        part = self.model.part(kind, number)
        key = (kind, number, exact)
        if key not in self._fixed:
            self._fixed[key] = self._make_fixed_tables(kind, number, exact)
        tables = self._fixed[key].copy()
        self._add_terms(tables, self._term_tables(kind, number, exact, shared_out=True))
        if exact:
            self.sets.add_tables(tables, kind, number)
        if kind is not PartKind.OUTER:
            run = self.model.runs[number]
            tables.keep = (*self.shared_keep(number, exact), *run.first_boundary, *run.second_boundary)
        scopes = (variable for scope in tables.scopes for variable in scope)
        variables = dict.fromkeys((*part.variables, *self._bordering(kind, number), *scopes, *tables.keep))
        tables.domains = {variable: self.size(variable) for variable in variables}
        return tables

    def _make_fixed_tables(self, kind: PartKind, number: int, exact: bool) -> PartTables:
        tables = PartTables()
        if kind is PartKind.OUTER and self.costed.workspace_bytes:
            workspace = np.array(self.costed.workspace_bytes * SCALE)
            tables.add((), np.zeros_like(workspace), workspace, activation=False)
        for variable in self.model.part(kind, number).variables:
            self._add_own(tables, variable, kind, exact)
        self._add_terms(tables, self._term_tables(kind, number, exact, shared_out=False))
        return tables

    def _add_terms(self, tables: PartTables, terms: Sequence[_Table]) -> None:
        for scope, ns, num_bytes in terms:
            costed = self.costed
            tables.add(
                scope,
                ns if costed.repeat == 1 else ns * costed.repeat,
                num_bytes if costed.in_flight == 1 else num_bytes * costed.in_flight,
            )

    def _bordering(self, kind: PartKind, number: int) -> tuple[int, ...]:
        """Variables on the border of a part, which count even if no table has them."""
        if kind is PartKind.OUTER:
            first = (variable for run in self.model.runs for variable in run.first_boundary)
            last = (variable for run in self.model.runs for variable in run.last_boundary)
            return (*first, *last)
        run = self.model.runs[number]
        return (*run.first_boundary, *run.second_boundary, *run.shared)

    # -- own costs ---------------------------------------------------------------------------------------------

    def _add_own(self, tables: PartTables, variable: int, kind: PartKind, exact: bool) -> None:
        """Compute of an operator, and what is stored with a variable."""
        if variable < self.model.num_operators:
            setting = self.model.recompute_variable(int(self.model.region_of[variable]))
            ns, num_bytes = self._operator_table(variable, setting)
            tables.add((setting, variable)[2 - ns.ndim :], ns, num_bytes, activation=False)
        if self.costed.makes_room(variable, kind):
            whole = self.costed.whole_bytes(variable, self.costed.configuration.settings.whole_level)
            whole = whole[self.domains.alive(variable)] * SCALE
            tables.add((variable,), np.zeros_like(whole), whole, activation=False)
        for mask, costs in self.costed.parameter_costs(variable).items():
            setting = self.model.zero_variable(self.model.zero_group(variable), mask)
            ns, num_bytes = self._stored_table(variable, setting, costs)
            if exact and len(ns) > 1:
                scope, both = _without_equal_dims((setting,), np.stack([ns, num_bytes], axis=1))
                ns, num_bytes = np.moveaxis(both, len(scope), 0)
                tables.add((*scope, variable), ns, num_bytes, activation=False)
            else:
                tables.add_options((variable,), ns, num_bytes)

    def _operator_table(self, index: int, setting: int) -> tuple[np.ndarray, np.ndarray]:
        """([recompute settings, strategies], or [strategies] where they do not matter) SCALE x ns, and SCALE x bytes.

        Occurrences of a run have one table, unless their costs differ.
        """
        costs = self.costed.operator_ns(index)
        known = self._own.get(id(costs))
        if known is None:
            values = self.domains.alive(index)
            modes = self.domains.alive(setting) if len(costs) > 1 else np.zeros(1, dtype=np.int64)
            _, ns = _without_equal_dims((setting,), costs[modes[:, None], values] * SCALE)
            if self.model.graph.operators[index].type == OUTPUT:
                num_bytes = np.broadcast_to(self.costed.result_bytes(index)[values] * SCALE, ns.shape)
            else:
                num_bytes = np.zeros_like(ns)
            known = self._own[id(costs)] = (costs, ns, num_bytes)
        return known[1:]

    def _stored_table(
        self, variable: int, setting: int, costs: tuple[np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """[ZeRO settings, values] SCALE x ns, and SCALE x bytes, of what is stored with a variable."""
        known = self._own.get(id(costs))
        if known is None:
            values, zeros = self.domains.alive(variable), self.domains.alive(setting)
            ns, num_bytes = (table[zeros[:, None], values] * SCALE for table in costs)
            known = self._own[id(costs)] = (costs, ns, num_bytes)
        return known[1:]

    # -- terms -------------------------------------------------------------------------------------------------

    def _term_tables(self, kind: PartKind, number: int, exact: bool, *, shared_out: bool) -> list[_Table]:
        """Tables of the terms of a part, for one run of the graph; common ones are made once for all configurations.

        Args:
            kind: which part.
            number: the run of a link.
            exact: as in ``tables``.
            shared_out: those of terms that are shared out, or the others.
        """
        make = self._make_shared_tables if shared_out else self._make_term_tables
        if exact or self._restricted or (shared_out and self._shares):
            return make(kind, number, exact)
        key = (kind, number, self.costed.recomputes, shared_out)
        if key not in self.model.tables:
            self.model.tables[key] = make(kind, number, exact)
        return cast("list[_Table]", self.model.tables[key])

    def _make_term_tables(self, kind: PartKind, number: int, exact: bool) -> list[_Table]:
        tables: list[_Table] = []
        for term in self.model.part(kind, number).terms:
            if exact or not is_shared_out(term):
                self._add_term(tables, term, kind, number, exact)
        return tables

    def _make_shared_tables(self, kind: PartKind, number: int, exact: bool) -> list[_Table]:
        tables: list[_Table] = []
        for term in self.model.part(kind, number).terms:
            if is_shared_out(term) and not exact:
                self._share_out(tables, term, kind, number)
        self._add_shared_terms(tables, kind, number, self.sets.left_out if exact else self.model.shared_terms)
        return tables

    def _share_out(self, tables: list[_Table], term: Term, kind: PartKind, number: int) -> None:
        """A lower bound of a term in which every coupling is pairwise."""
        together = len({slot.region for slot in term.slots}) == 1
        self._add_shares(tables, term, [1] * len(term.slots), together, kind, number)
        self._add_producer_share(tables, term, [1] * len(term.slots), kind, number)

    def _policies(self, regions: Sequence[int], kind: PartKind, number: int) -> list[RegionPolicy]:
        """The treatment of regions under all their possible settings, the last region's changing fastest."""
        options = [self.domains.modes(region) for region in regions]
        return [
            self.costed.policy(dict(zip(regions, modes, strict=True)), kind, number)
            for modes in itertools.product(*options)
        ]

    def _over_settings(
        self,
        regions: Sequence[int],
        kind: PartKind,
        number: int,
        make: Callable[[RegionPolicy], tuple[np.ndarray, np.ndarray]],
        case: Callable[[RegionPolicy], Hashable] | None = None,
    ) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
        """(settings that matter, SCALE x ns, SCALE x bytes) of what ``make`` gives under all settings of regions.

        Args:
            regions: which ones.
            kind: the part.
            number: its run.
            make: SCALE x ns and SCALE x bytes, of one shape.
            case: what ``make`` depends on, so that it is asked once for each; None: it is asked for every setting.
        """
        regions = [region for region in regions if self.model.places.recomputes(region)]
        policies = self._policies(regions, kind, number)
        cases = [place if case is None else case(policy) for place, policy in enumerate(policies)]
        found = {key: make(policy) for key, policy in dict(zip(cases, policies, strict=True)).items()}
        if len(found) == 1:
            return (), *found[cases[0]]
        first, _ = found[cases[0]]
        both = np.empty((len(cases), 2, *first.shape), dtype=np.int64)
        for place, key in enumerate(cases):
            both[place, 0], both[place, 1] = found[key]
        both = both.reshape(*(len(self.domains.modes(region)) for region in regions), *both.shape[1:])
        settings = tuple(self.model.recompute_variable(region) for region in regions)
        settings, both = _without_equal_dims(settings, both)
        ns, num_bytes = np.moveaxis(both, len(settings), 0)
        return settings, ns, num_bytes

    def _add_term(self, tables: list[_Table], term: Term, kind: PartKind, number: int, exact: bool) -> None:
        alive = [self.domains.alive(variable) for variable in term.variables]
        entries = math.prod(len(values) for values in alive)
        if exact and entries > MAX_DENSE_ENTRIES and is_shared_out(term):
            for add in (self._add_pattern_term, self._add_wide_term):
                try:
                    add(tables, term, kind, number)
                except WidthError:
                    continue
                return
            self._share_out(tables, term, kind, number)  # what is left open here stays a lower bound
            return
        if is_pair(term):
            pair = PairTables(term, alive)
            found = self._over_settings(
                term.regions, kind, number, lambda policy: pair.of(pair.case(policy)), pair.case
            )
        else:
            found = self._over_settings(term.regions, kind, number, lambda policy: term.dense(alive, policy))
        scope, ns, num_bytes = found
        tables.append(((*scope, *term.variables), ns, num_bytes))

    def _add_pattern_term(self, tables: list[_Table], term: Term, kind: PartKind, number: int) -> None:
        """A term of few consumers, by way of a variable that says which of them agree.

        Raises:
            WidthError: there are too many patterns.
        """
        made_by = -1 if term.producer is None else self.model.class_of_variable(term.producer)
        if self._loose is None or made_by in self._loose:
            raise WidthError("patterns make tables too large")
        readers = dict.fromkeys(slot.variable for slot in term.slots)
        found = PatternTerm(term, [(variable, self.domains.alive(variable)) for variable in readers])
        values = self.domains.of_producer(term)
        regions = term.regions

        def over(make: Callable[[RegionPolicy], tuple[np.ndarray, np.ndarray]], *scope: int) -> _Table:
            settings, ns, num_bytes = self._over_settings(regions, kind, number, make)
            if term.producer is None:
                return (*settings, *scope), ns[..., 0, :], num_bytes[..., 0, :]
            return (*settings, term.producer, *scope), ns, num_bytes

        settings, ns, num_bytes = over(partial(found.savings, values))
        variable = self._local_set(term, found.num_patterns)
        self._patterned[variable] = made_by
        made: list[_Table] = [((*settings, variable), ns, num_bytes)]
        made.extend(over(partial(found.alone, reader, values), reader) for reader in readers)
        if term.producer is not None:
            made.append(over(partial(found.producers_copy, values)))
        for reader in readers:
            forbidden = found.allowed(reader)
            made.append(((variable, reader), forbidden, np.zeros_like(forbidden)))
        tables.extend(made)

    def _add_wide_term(self, tables: list[_Table], term: Term, kind: PartKind, number: int) -> None:
        """A term of many consumers, by way of a set variable.

        Raises:
            WidthError: there are too many sets.
        """
        if term.producer is None:
            raise WidthError("a graph input of many readers")
        readers = dict.fromkeys(slot.variable for slot in term.slots)
        wide = widen(term, [(variable, self.domains.alive(variable)) for variable in readers])
        values = self.domains.alive(term.producer)
        variable = self._local_set(term, wide.num_sets)
        scope, ns, num_bytes = self._over_settings(
            term.regions, kind, number, lambda policy: wide.costs(values, policy)
        )
        tables.append(((*scope, term.producer, variable), ns, num_bytes))
        for reader, forbidden in wide.consumers:
            tables.append(((variable, reader), forbidden, np.zeros_like(forbidden)))

    def _local_set(self, term: Term, num_sets: int) -> int:
        """The set variable of a term inside a part."""
        if term.tensor not in self._local_sets:
            self._local_sets[term.tensor] = self.model.set_variable(len(self.model.shared_terms)) + len(
                self._local_sets
            )
        variable = self._local_sets[term.tensor]
        self._set_sizes[variable] = num_sets
        return variable

    def _add_shared_terms(self, tables: list[_Table], kind: PartKind, number: int, terms: Sequence[Term]) -> None:
        """Shares that the readers in a part bear of terms that occurrences share."""
        for term in terms:
            slots = tuple(slot for slot in term.slots if self.model.multiplicity(slot.variable))
            multiplicity = [self.model.multiplicity(slot.variable) for slot in slots]
            reduced = replace(term, slots=slots)
            self._add_shares(tables, reduced, multiplicity, False, kind, number, only_inside=True)
            if kind is PartKind.OUTER:
                self._add_producer_share(tables, reduced, multiplicity, kind, number)

    def _add_shares(
        self,
        tables: list[_Table],
        term: Term,
        multiplicity: Sequence[int],
        together: bool,
        kind: PartKind,
        number: int,
        *,
        only_inside: bool = False,
    ) -> None:
        """What every slot bears of a term."""
        edges = self._shares.edges.get(term.tensor, {})
        copies = self._shares.copies.get(term.tensor, {})
        total, keeping = sum(multiplicity), most_keepers(self.costed, term, multiplicity)
        for index, slot in enumerate(term.slots):
            if only_inside and not self.model.lies_in(slot.variable, kind, number):
                continue
            alive = (self.domains.of_producer(term), self.domains.alive(slot.variable))

            def make(
                policy: RegionPolicy, position: int = index, alive: Sequence[np.ndarray] = alive
            ) -> tuple[np.ndarray, np.ndarray]:
                region = term.slots[position].region
                ns = term.shared_time(position, alive, policy.mode(region), total, together, edges)
                num_bytes = term.shared_bytes(position, alive, policy, keeping, copies)
                return ns, np.zeros_like(ns) if num_bytes is None else num_bytes

            def case(policy: RegionPolicy, position: int = index) -> Hashable:
                return term.share_case(position, policy, together)

            scope, ns, num_bytes = self._over_settings((slot.region,), kind, number, make, case)
            if term.producer is None:
                ns, num_bytes = ns[..., 0, :], num_bytes[..., 0, :]
                scope = (*scope, slot.variable)
            else:
                scope = (*scope, term.producer, slot.variable)
            tables.append((scope, ns, num_bytes))

    def _add_producer_share(
        self, tables: list[_Table], term: Term, multiplicity: Sequence[int], kind: PartKind, number: int
    ) -> None:
        """What the producer bears of the copy that it keeps."""
        if term.producer is None or not term.producer_keeps or not term.is_activation:
            return
        copies = self._shares.copies.get(term.tensor, {})
        keeping = most_keepers(self.costed, term, multiplicity)
        alive = (self.domains.of_producer(term),)
        size = len(alive[0])

        def make(policy: RegionPolicy) -> tuple[np.ndarray, np.ndarray]:
            found = term.shared_bytes(len(term.slots), alive, policy, keeping, copies)
            none = np.zeros(size, dtype=np.int64)
            return none, none if found is None else found[:, 0]

        scope, ns, num_bytes = self._over_settings((term.producer_region,), kind, number, make)
        tables.append(((*scope, term.producer), ns, num_bytes))


def _without_equal_dims(settings: tuple[int, ...], table: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
    """A table whose leading dims are settings, without those along which nothing changes."""
    kept: list[int] = []
    for setting in settings:
        axis = len(kept)
        first = table.take([0], axis=axis)
        if table.shape[axis] == 1 or bool((table == first).all()):
            table = table.take(0, axis=axis)
        else:
            kept.append(setting)
    return tuple(kept), table
