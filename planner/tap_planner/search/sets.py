"""Set variables: tensors that the occurrences of a run share, in the exact stage.

The value of a set variable says in which destinations readers want the tensor, and which of these copies are held for
backward: each reader is then coupled with the set variable only, and what the copies cost is paid once.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tap_planner.search.configuration import Recompute
from tap_planner.search.costing import CostedModel
from tap_planner.search.domains import Domains
from tap_planner.search.factors import INFINITE, WidthError
from tap_planner.search.model import PartKind
from tap_planner.search.terms import SCALE, RegionPolicy, Slot, Term
from tap_planner.search.weighting import PartTables

MAX_SET_STATES = 5
"""Destinations of a shared tensor up to which all their subsets are enumerated in the exact stage."""
MAX_SET_VALUES = 1024
"""Values that a set variable may have."""

Destination = tuple[int, int]
"""State of a tensor at a reader, and of its gradient (-1 where there is none)."""


_Owner = tuple[PartKind, int]
"""Who alone uses a destination: a region of the outer part, or one of the later occurrences of a run (a middle one, or
the last one)."""


class _Use(enum.IntEnum):
    """How a destination is used."""

    NONE = 0
    """By no reader."""
    PASSING = 1
    """By readers after whose forward it can go, and that do not run again."""
    HELD = 2
    """Until backward."""
    AGAIN = 3
    """By one region only, which makes it again when it runs again as a whole. This and all larger numbers: by which
    (``SetVariables``)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Values:
    """The values of a set variable."""

    destinations: tuple[Destination, ...]
    uses: np.ndarray
    """[values, destinations] ``_Use``, plus, where it is AGAIN, the place of the owner."""
    owners: tuple[_Owner, ...]
    source: np.ndarray
    """[values] whether the producer's own copy is held for regions that run again as a whole."""


class SetVariables:
    """The set variables of a model's shared terms.

    Args:
        costed: the model under a configuration.
        domains: possible values of its other variables.
    """

    def __init__(self, costed: CostedModel, domains: Domains) -> None:
        self._costed = costed
        self._model = costed.model
        self._domains = domains
        self._values: dict[int, _Values] = {}
        self.left_out: list[Term] = []
        """Terms without a set variable, whose costs stay shared out."""

    def prepare(self) -> None:
        """Choose the values of every set variable: what some possible values of the readers want.

        Raises:
            WidthError: some shared tensor still has too many possible destinations, and all has to be exact.
        """
        self.left_out.clear()
        for position, term in enumerate(self._model.shared_terms):
            try:
                self._values[self._model.set_variable(position)] = self._possible(term)
            except WidthError:
                if not self._costed.partly_exact:
                    raise
                self.left_out.append(term)

    def __contains__(self, variable: int) -> bool:
        """Whether a variable is a set variable whose destinations have been chosen."""
        return variable in self._values

    def size(self, variable: int) -> int:
        """Number of values: all sets but the empty one."""
        return len(self._values[variable].uses)

    def of_run(self, number: int) -> tuple[int, ...]:
        """Set variables of the tensors that a run reads."""
        variables = (self._model.set_variable(position) for position in self._model.shared_terms_of(number))
        return tuple(variable for variable in variables if variable in self._values)

    # -- values ------------------------------------------------------------------------------------------------

    def _possible(self, term: Term) -> _Values:
        uses: dict[Destination, set[_Use]] = {}
        owners: dict[Destination, set[_Owner]] = {}
        sources = {False}
        for slot in term.slots:
            values = self._domains.alive(slot.variable)
            wanted = set(zip(slot.destination[values].tolist(), slot.gradient[values].tolist(), strict=True))
            ways = [_allowed_uses(term, slot, policy) for policy in self._all_policies(slot)]
            for destination in wanted:
                uses.setdefault(destination, set()).update(*(allowed for allowed, _ in ways))
                if any(_Use.AGAIN in allowed for allowed, _ in ways):
                    owners.setdefault(destination, set()).add(self._owner_of(slot))
            sources = _both(sources, {source for _, source in ways})
        if len(uses) > MAX_SET_STATES:
            raise WidthError(f"{len(uses)} destinations of a shared tensor")
        destinations = tuple(sorted(uses))
        numbers = tuple(sorted(set().union(*owners.values()), key=lambda owner: (owner[0].value, owner[1])))
        options = [
            (
                _Use.NONE,
                *(use for use in sorted(uses[key]) if use < _Use.AGAIN),
                *(_Use.AGAIN + numbers.index(owner) for owner in owners.get(key, ())),
            )
            for key in destinations
        ]
        entries = math.prod(len(option) for option in options) * len(sources)
        if entries > MAX_SET_VALUES:
            raise WidthError(f"{entries} ways to use the destinations of a shared tensor")
        num_regions = len({slot.region for slot in term.slots})
        found = [
            (chosen, source)
            for chosen in itertools.product(*(sorted(option) for option in options))
            for source in sorted(sources)
            if any(chosen) and not _too_few(chosen, num_regions)
        ]
        uses_of = np.array([chosen for chosen, _ in found], dtype=np.int64)
        return _Values(destinations, uses_of, numbers, np.array([source for _, source in found], dtype=bool))

    def _owner_of(self, slot: Slot) -> _Owner:
        """The part that a reader stands in."""
        model = self._model
        occurrence = int(model.occurrence_of[slot.variable])
        number = int(model.run_of[slot.variable])
        if number < 0 or occurrence == 0:
            return PartKind.OUTER, slot.region
        return (PartKind.LAST if occurrence == model.runs[number].num_links else PartKind.LINK), number

    def _all_policies(self, slot: Slot) -> Iterator[RegionPolicy]:
        """Every treatment of the region of a slot, in any part."""
        for mode in self._domains.modes(slot.region):
            for working in (frozenset[int](), frozenset({slot.region})):
                yield RegionPolicy(modes={slot.region: mode}, working=working)

    # -- tables ------------------------------------------------------------------------------------------------

    def add_tables(self, tables: PartTables, kind: PartKind, number: int) -> None:
        """Add what couples the readers in a part with the set variables; in the outer part, also what sets cost."""
        for position, term in enumerate(self._model.shared_terms):
            variable = self._model.set_variable(position)
            if variable not in self._values:
                continue
            for reader in dict.fromkeys(slot.variable for slot in term.slots):
                if self._model.lies_in(reader, kind, number):
                    self._add_reader(tables, variable, term, reader, kind, number)
            if kind is PartKind.OUTER:
                self._add_costs(tables, variable, term)

    def _add_reader(
        self, tables: PartTables, variable: int, term: Term, reader: int, kind: PartKind, number: int
    ) -> None:
        slots = [slot for slot in term.slots if slot.variable == reader]
        region = slots[0].region
        owner = (kind, region if kind is PartKind.OUTER else number)
        allowed = [
            self._allowed(variable, term, slots, self._costed.policy({region: mode}, kind, number), owner)
            for mode in self._domains.modes(region)
        ]
        forbidden = np.where(np.stack(allowed), 0, int(INFINITE))
        scope: tuple[int, ...] = (self._model.recompute_variable(region), variable, reader)
        if bool((forbidden == forbidden[:1]).all()):
            scope, forbidden = scope[1:], forbidden[0]
        tables.add(scope, forbidden, np.zeros_like(forbidden))

    def _allowed(
        self, variable: int, term: Term, slots: Sequence[Slot], policy: RegionPolicy, owner: _Owner
    ) -> np.ndarray:
        """[sets, values of the reader] whether the set holds all that the reader wants."""
        sets = self._values[variable]
        values = self._domains.alive(slots[0].variable)
        allowed = np.ones((len(sets.uses), len(values)), dtype=bool)
        for slot in slots:
            keys = zip(slot.destination[values].tolist(), slot.gradient[values].tolist(), strict=True)
            column = np.array([sets.destinations.index(key) for key in keys])
            uses, source = _allowed_uses(term, slot, policy)
            possible = [int(use) for use in sorted(uses) if use < _Use.AGAIN]
            if _Use.AGAIN in uses and owner in sets.owners:
                possible.append(_Use.AGAIN + sets.owners.index(owner))
            allowed &= np.isin(sets.uses, possible)[:, column]
            if source:
                allowed &= sets.source[:, None]
        return allowed

    # -- costs -------------------------------------------------------------------------------------------------

    def _add_costs(self, tables: PartTables, variable: int, term: Term) -> None:
        """What a set costs."""
        ns = self._redistribution_ns(variable, term) * (SCALE * self._costed.repeat)
        num_bytes = self._kept_bytes(variable, term) * (SCALE * self._costed.in_flight)
        if term.producer is None:
            tables.add((variable,), ns[0], num_bytes[0])
        else:
            tables.add((term.producer, variable), ns, num_bytes)

    def _redistribution_ns(self, variable: int, term: Term) -> np.ndarray:
        """[values of the producer, sets] forward and backward time of all destinations in the set."""
        sets, values = self._values[variable], self._domains.of_producer(term)
        src, want = term.source[values], term.wanted[values]
        ns = np.zeros((len(values), len(sets.uses)), dtype=np.int64)
        for position, (destination, gradient) in enumerate(sets.destinations):
            use = sets.uses[None, :, position]
            if term.producer is not None:
                times = np.where(use >= _Use.AGAIN, 2, np.where(use == _Use.NONE, 0, 1))
                ns += term.cost_ns[src, destination][:, None] * times
            if gradient >= 0:
                ns += np.where(use == _Use.NONE, 0, term.cost_ns[gradient, want][:, None])
        return ns

    def _kept_bytes(self, variable: int, term: Term) -> np.ndarray:
        """[values of the producer, sets] bytes of the copies that are held for backward."""
        sets, values = self._values[variable], self._domains.of_producer(term)
        num_bytes = np.zeros((len(values), len(sets.uses)), dtype=np.int64)
        if not term.is_activation:
            return num_bytes
        held = sets.uses == _Use.HELD
        by_state: dict[int, np.ndarray] = {}
        for position, (destination, _) in enumerate(sets.destinations):
            by_state[destination] = by_state.get(destination, False) | held[:, position]
        for destination, chosen in by_state.items():
            num_bytes += np.where(chosen, term.state_bytes[destination], 0)[None, :]
        if term.producer is None:
            return num_bytes
        always = term.producer_keeps and self._always_counts(term.producer_region)
        for row, state in enumerate(term.source[values].tolist()):
            chosen = (sets.source | always) & ~by_state.get(state, np.zeros(len(held), dtype=bool))
            num_bytes[row] += np.where(chosen, term.state_bytes[state], 0)
        return num_bytes

    def _always_counts(self, region: int) -> bool:
        places = self._model.places
        return not places.recomputes(region) or region in places.last_regions


def _allowed_uses(term: Term, slot: Slot, policy: RegionPolicy) -> tuple[frozenset[_Use], bool]:
    """How the destination of a reader may be used, and whether the reader needs the producer's own copy to be held.

    Of what several regions read, one of which runs again as a whole, the copy is held; of what only one reads, the
    producer's. Two cases make the tables a lower bound: where the one region is the working one its copy is held as
    well as made again, and the time of that is left out; and several middle occurrences of a run may each pass for the
    only one.
    """
    mode = policy.mode(slot.region)
    full = mode is Recompute.FULL
    holds = (slot.kept and policy.counts(slot.region)) or (mode is Recompute.SELECTIVE and slot.rerun)
    if term.producer is None:
        return frozenset({_Use.HELD} if holds or full else {_Use.PASSING, _Use.HELD}), False
    if holds or full:
        source = full and slot.region != term.producer_region
        return frozenset({_Use.HELD} if holds else {_Use.HELD, _Use.AGAIN}), source
    return frozenset({_Use.PASSING, _Use.HELD}), False


def _both(first: set[bool], second: set[bool]) -> set[bool]:
    """What is possible where one reader leaves ``first`` possible, another one ``second``: a need of one is a need."""
    return {a or b for a in first for b in second}


def _too_few(chosen: Sequence[int], num_regions: int) -> bool:
    """Whether every destination in use serves one region only, and they are fewer than the regions that read."""
    used = [use for use in chosen if use]
    return min(used) >= _Use.AGAIN and len(used) < num_regions
