"""Cost tables of the parts of a model: exact ones, and the relaxed ones in which every coupling is pairwise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tap_planner.search.costing import CostedModel
from tap_planner.search.domains import Domains
from tap_planner.search.elimination import WidthError
from tap_planner.search.model import PartKind
from tap_planner.search.sets import SetVariables
from tap_planner.search.shares import Shares, is_shared_out
from tap_planner.search.terms import SCALE, RegionPolicy, Term
from tap_planner.search.weighting import PartTables

MAX_DENSE_ENTRIES = 4_000_000
"""Largest exact table of a term."""
MAX_RELAXED_ENTRIES = 200_000
"""Largest relaxed table over a run's boundary and what its occurrences share; its powers take minutes beyond."""

_TableKey = tuple[PartKind, int, bool]
"""Part, run, whether exact."""


class Parts:
    """The parts of a model under one configuration, as tables over the possible values of their variables.

    Args:
        costed: the model under the configuration.
        alive: by class, the values that are possible; all where a class is missing.
    """

    def __init__(self, costed: CostedModel, alive: Mapping[int, np.ndarray] | None = None) -> None:
        self.costed = costed
        self.model = costed.model
        self.domains = Domains(costed.model, alive)
        self.sets = SetVariables(costed, self.domains)
        self._shares = Shares()
        self._tables: dict[_TableKey, PartTables] = {}
        self._orders: dict[_TableKey, tuple[int, ...] | None] = {}
        """Elimination orders of tables that were dropped: the structure of the new ones is the same."""

    @property
    def shares(self) -> Shares:
        """How terms of many consumers are shared out in the relaxed tables."""
        return self._shares

    def use_shares(self, shares: Shares) -> None:
        """Share terms out in another way."""
        self._shares = shares
        self._orders.update((key, tables.order) for key, tables in self._tables.items())
        self._tables.clear()

    def size(self, variable: int) -> int:
        """Number of possible values of a variable."""
        return self.sets.size(variable) if variable in self.sets else len(self.domains.alive(variable))

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
            self._tables[key] = self._make_tables(kind, number, exact)
            self._tables[key].order = self._orders.get(key)
        return self._tables[key]

    def _make_tables(self, kind: PartKind, number: int, exact: bool) -> PartTables:
        part, policy = self.model.part(kind, number), self.costed.part_policy(kind, number)
        tables = PartTables()
        for variable in part.variables:
            ns, num_bytes = self.costed.own(variable)
            values = self.domains.alive(variable)
            tables.add((variable,), ns[values] * SCALE, num_bytes[values] * SCALE, activation=False)
        for term in part.terms:
            self._add_term(tables, term, policy, exact)
        if exact:
            self.sets.add_tables(tables, kind, number)
        else:
            self._add_shared_terms(tables, kind, number, policy)
        if kind is not PartKind.OUTER:
            run = self.model.runs[number]
            tables.keep = (*self.shared_keep(number, exact), *run.first_boundary, *run.second_boundary)
        scopes = (variable for scope in tables.scopes for variable in scope)
        variables = dict.fromkeys((*part.variables, *self._bordering(kind, number), *scopes, *tables.keep))
        tables.domains = {variable: self.size(variable) for variable in variables}
        return tables

    def _bordering(self, kind: PartKind, number: int) -> tuple[int, ...]:
        """Variables on the border of a part, which count even if no table has them."""
        if kind is PartKind.OUTER:
            first = (variable for run in self.model.runs for variable in run.first_boundary)
            last = (variable for run in self.model.runs for variable in run.last_boundary)
            return (*first, *last)
        run = self.model.runs[number]
        return (*run.first_boundary, *run.second_boundary, *run.shared)

    def _add_term(self, tables: PartTables, term: Term, policy: RegionPolicy, exact: bool) -> None:
        if is_shared_out(term) and not exact:
            regions = {slot.region for slot in term.slots}
            for scope, ns, num_bytes in self._shared_out(term, policy, [1] * len(term.slots), len(regions) == 1):
                tables.add(scope, ns, num_bytes)
            return
        alive = [self.domains.alive(variable) for variable in term.variables]
        entries = math.prod(len(values) for values in alive)
        if exact and entries > MAX_DENSE_ENTRIES:
            raise WidthError(f"a term of {entries} entries")
        ns, num_bytes = term.dense(alive, policy)
        tables.add(term.variables, ns * self.costed.repeat, num_bytes)

    def _add_shared_terms(self, tables: PartTables, kind: PartKind, number: int, policy: RegionPolicy) -> None:
        """Shares that the readers in a part bear of the terms that occurrences share."""
        for term in self.model.shared_terms:
            slots = tuple(slot for slot in term.slots if self.model.multiplicity(slot.variable))
            multiplicity = [self.model.multiplicity(slot.variable) for slot in slots]
            for scope, ns, num_bytes in self._shared_out(replace(term, slots=slots), policy, multiplicity, False):
                if self.model.lies_in(scope[-1], kind, number):
                    tables.add(scope, ns, num_bytes)

    def _shared_out(
        self, term: Term, policy: RegionPolicy, multiplicity: Sequence[int], together: bool
    ) -> Iterator[tuple[tuple[int, ...], np.ndarray, np.ndarray]]:
        """Per slot (scope, SCALE x ns, SCALE x bytes): the slot's variable is last in the scope."""
        alive = [self.domains.of_producer(term), *(self.domains.alive(slot.variable) for slot in term.slots)]
        edges = self._shares.edges.get(term.tensor, {})
        copies = self._shares.copies.get(term.tensor, {})
        for index, ns, num_bytes in term.shares(alive, policy, multiplicity, together, edges, copies):
            reader = term.slots[index].variable
            if term.producer is None:
                yield (reader,), ns[0] * self.costed.repeat, num_bytes[0]
            else:
                yield (term.producer, reader), ns * self.costed.repeat, num_bytes
