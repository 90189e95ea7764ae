"""Set variables: tensors that the occurrences of a run share, in the exact stage.

The value of a set variable says in which destinations readers want the tensor, and which of these copies are held for
backward: each reader is then coupled with the set variable only, and what the copies cost is paid once.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

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
"""Where a reader stands: a region of the outer part, or the later occurrences of a run (the middle ones, or the last
one)."""


class _Use(enum.IntEnum):
    """How a destination is used."""

    NONE = 0
    """By no reader."""
    PASSING = 1
    """By readers after whose forward it can go, and that do not run again as a whole."""
    HELD = 2
    """Until backward, by readers that do not run again as a whole."""
    SHARED = 3
    """Until backward, by readers in several regions, some of which run again as a whole and find it there."""
    AGAIN = 4
    """By one region only, which makes it again when it runs again as a whole."""
    BOTH = 5
    """The same in the working region: what it makes again is held as well."""


_TIMES = np.array([0, 1, 1, 1, 2, 2], dtype=np.int64)
"""By use, how often a step makes the destination."""
_IS_HELD = np.array([False, False, True, True, False, True])
"""By use, whether the copy is held for backward."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """An operand that may use a destination."""

    owner: _Owner
    variable: int
    operand: int
    """Which of the variable's operands that read the tensor."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How one destination is used, and by whom."""

    use: _Use
    owner: _Owner | None = None
    """The only one, of AGAIN and BOTH."""
    witnesses: tuple[_Reader, ...] = ()
    """Two of SHARED in different regions, that use it; none where the tables cannot hold them to it."""

    @property
    def owners(self) -> tuple[_Owner, ...]:
        """Places that are known to use the destination."""
        return tuple(reader.owner for reader in self.witnesses) if self.owner is None else (self.owner,)


_UNUSED = _Way(_Use.NONE)


@dataclass(frozen=True, slots=True, eq=False)
class _Values:
    """The values of a set variable."""

    destinations: tuple[Destination, ...]
    ways: tuple[_Way, ...]
    chosen: np.ndarray
    """[values, destinations] place of the way in which the destination is used."""
    source: np.ndarray
    """[values] whether the producer's own copy is held for regions that run again as a whole."""

    @property
    def uses(self) -> np.ndarray:
        """[values, destinations] ``_Use``."""
        return np.array([way.use for way in self.ways], dtype=np.int64)[self.chosen]


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
        return len(self._values[variable].chosen)

    def of_run(self, number: int) -> tuple[int, ...]:
        """Set variables of the tensors that a run reads."""
        variables = (self._model.set_variable(position) for position in self._model.shared_terms_of(number))
        return tuple(variable for variable in variables if variable in self._values)

    # -- values ------------------------------------------------------------------------------------------------

    def _possible(self, term: Term) -> _Values:
        users = _Users()
        for reader, slot in self._readers(term):
            values = self._domains.alive(slot.variable)
            wanted = set(zip(slot.destination[values].tolist(), slot.gradient[values].tolist(), strict=True))
            policies = [self._policy(slot.region, mode, reader.owner) for mode in self._domains.modes(slot.region)]
            demands = [_demand(term, slot, policy) for policy in policies]
            users.add(reader, wanted, demands, is_one=self._is_one(reader.owner))
        if len(users.destinations) > MAX_SET_STATES:
            raise WidthError(f"{len(users.destinations)} destinations of a shared tensor")
        num_regions = len({slot.region for slot in term.slots})
        for with_witnesses in (True, False):
            found = list(itertools.islice(users.choices(num_regions, with_witnesses), MAX_SET_VALUES + 1))
            if len(found) * len(users.sources) <= MAX_SET_VALUES:
                break
        else:
            raise WidthError("too many ways to use the destinations of a shared tensor")
        ways = tuple(dict.fromkeys(way for chosen in found for way in chosen))
        places = {way: place for place, way in enumerate(ways)}
        sources = sorted(users.sources)
        return _Values(
            destinations=users.destinations,
            ways=ways,
            chosen=np.array([[places[way] for way in chosen] for chosen in found for _ in sources], dtype=np.int64),
            source=np.array(sources * len(found), dtype=bool),
        )

    def _readers(self, term: Term) -> Iterator[tuple[_Reader, Slot]]:
        """The operands that read a tensor; the second occurrence of a run stands for all later ones."""
        operands: dict[int, int] = {}
        for slot in term.slots:
            number, occurrence = int(self._model.run_of[slot.variable]), int(self._model.occurrence_of[slot.variable])
            operand = operands[slot.variable] = operands.get(slot.variable, -1) + 1
            if number < 0 or occurrence == 0:
                yield _Reader((PartKind.OUTER, slot.region), slot.variable, operand), slot
            elif occurrence == 1:
                yield _Reader((PartKind.LAST, number), slot.variable, operand), slot
                if self._model.runs[number].num_links > 1:
                    yield _Reader((PartKind.LINK, number), slot.variable, operand), slot

    def _policy(self, region: int, mode: Recompute, owner: _Owner) -> RegionPolicy:
        return self._costed.policy({region: mode}, *owner)

    def _is_one(self, owner: _Owner) -> bool:
        """Whether the readers at a place are no more than one occurrence's."""
        kind, number = owner
        return kind is not PartKind.LINK or self._model.runs[number].num_links == 2

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
            self._allowed(variable, term, slots, self._policy(region, mode, owner), owner)
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
        allowed = np.ones((len(sets.chosen), len(values)), dtype=bool)
        for operand, slot in enumerate(slots):
            keys = zip(slot.destination[values].tolist(), slot.gradient[values].tolist(), strict=True)
            column = np.array([sets.destinations.index(key) for key in keys])
            demand = _demand(term, slot, policy)
            possible = [way.use in demand.uses and way.owner in (None, owner) for way in sets.ways]
            allowed &= np.array(possible, dtype=bool)[sets.chosen][:, column]
            reader = _Reader(owner, slot.variable, operand)
            named = np.array([reader in way.witnesses for way in sets.ways], dtype=bool)[sets.chosen]
            allowed &= ~named.any(axis=1, keepdims=True) | named[:, column]
            if demand.source:
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
        uses = sets.uses
        ns = np.zeros((len(values), len(uses)), dtype=np.int64)
        for position, (destination, gradient) in enumerate(sets.destinations):
            use = uses[None, :, position]
            if term.producer is not None:
                ns += term.cost_ns[src, destination][:, None] * _TIMES[use]
            if gradient >= 0:
                ns += np.where(use == _Use.NONE, 0, term.cost_ns[gradient, want][:, None])
        return ns

    def _kept_bytes(self, variable: int, term: Term) -> np.ndarray:
        """[values of the producer, sets] bytes of the copies that are held for backward."""
        sets, values = self._values[variable], self._domains.of_producer(term)
        num_bytes = np.zeros((len(values), len(sets.chosen)), dtype=np.int64)
        if not term.is_activation:
            return num_bytes
        held = _IS_HELD[sets.uses]
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


@dataclass(frozen=True, slots=True)
class _Demand:
    """What a reader asks of the set variable."""

    uses: frozenset[_Use]
    """How the destination that it wants may be used; AGAIN and BOTH only by its own region."""
    source: bool
    """Whether the producer's own copy has to be held."""


_PASSES = frozenset({_Use.PASSING, _Use.HELD, _Use.SHARED})
_HOLDS = frozenset({_Use.HELD, _Use.SHARED})
_RUNS_AGAIN = frozenset({_Use.SHARED, _Use.AGAIN, _Use.BOTH})
_RUNS_AGAIN_AND_HOLDS = frozenset({_Use.SHARED, _Use.BOTH})


def _demand(term: Term, slot: Slot, policy: RegionPolicy) -> _Demand:
    """What a reader asks under a treatment of its region, as ``Term.point`` counts it.

    Of what several regions read, one of which runs again as a whole, the copy is held; of what only one reads, the
    producer's. Of graph inputs, which cost no time, no difference is made.
    """
    mode = policy.mode(slot.region)
    full = mode is Recompute.FULL
    holds = (slot.kept and policy.counts(slot.region)) or (mode is Recompute.SELECTIVE and slot.rerun)
    if term.producer is None:
        return _Demand(_HOLDS if holds or full else _PASSES, False)
    if full:
        return _Demand(_RUNS_AGAIN_AND_HOLDS if holds else _RUNS_AGAIN, slot.region != term.producer_region)
    return _Demand(_HOLDS if holds else _PASSES, False)


class _Users:
    """Who may use the destinations of a shared tensor, and how.

    Where middle occurrences of a run are more than one, the tables are a lower bound: each of them may pass for the
    only one that uses a destination, or for one of several.
    """

    def __init__(self) -> None:
        self._uses: dict[Destination, set[_Use]] = {}
        self._readers: dict[Destination, list[_Reader]] = {}
        self._again: dict[Destination, dict[tuple[_Use, _Owner], None]] = {}
        self._unclear: set[Destination] = set()
        """Destinations that several middle occurrences of a run may use."""
        self._operands: dict[_Owner, int] = {}
        """How many operands read the tensor at a place where there is one occurrence."""
        self.sources = {False}
        """Whether the producer's own copy has to be held, in the cases there are."""

    def add(self, reader: _Reader, wanted: set[Destination], demands: Sequence[_Demand], *, is_one: bool) -> None:
        """Add a reader.

        Args:
            reader: which one.
            wanted: destinations that it may want.
            demands: what it asks under the treatments of its region that are possible.
            is_one: whether it stands for one operand.
        """
        self.sources = {one or demand.source for one in self.sources for demand in demands}
        if is_one:
            self._operands[reader.owner] = self._operands.get(reader.owner, 0) + 1
        for destination in wanted:
            uses = self._uses.setdefault(destination, set())
            for demand in demands:
                uses.update(demand.uses & _PASSES)
                for use in (_Use.AGAIN, _Use.BOTH):
                    if use in demand.uses:
                        self._again.setdefault(destination, {})[use, reader.owner] = None
                        break
            self._readers.setdefault(destination, []).append(reader)
            if not is_one:
                self._unclear.add(destination)

    @cached_property
    def destinations(self) -> tuple[Destination, ...]:
        """Everything that some reader may want."""
        return tuple(sorted(self._uses))

    def choices(self, num_regions: int, with_witnesses: bool) -> Iterator[tuple[_Way, ...]]:
        """How all destinations together may be used: a way for each, of which some are used.

        Args:
            num_regions: regions that read the tensor.
            with_witnesses: whether those that several regions use name two of them.
        """
        options = [(_UNUSED, *self._ways(destination, with_witnesses)) for destination in self.destinations]
        for chosen in self._combined(options, ()):
            used = [way for way in chosen if way.use]
            if used and not (all(way.owner is not None for way in used) and len(used) < num_regions):
                yield chosen

    def _combined(self, options: Sequence[Sequence[_Way]], chosen: tuple[_Way, ...]) -> Iterator[tuple[_Way, ...]]:
        """Ways of the remaining destinations: every operand uses one destination."""
        if not options:
            yield chosen
            return
        witnesses = {reader for way in chosen for reader in way.witnesses}
        busy = Counter(owner for way in chosen for owner in way.owners)
        for way in options[0]:
            can = all(busy[owner] < self._operands.get(owner, len(self._uses)) for owner in way.owners)
            if can and witnesses.isdisjoint(way.witnesses):
                yield from self._combined(options[1:], (*chosen, way))

    def _ways(self, destination: Destination, with_witnesses: bool) -> Iterator[_Way]:
        uses, again = self._uses[destination], self._again.get(destination, {})
        yield from (_Way(use) for use in sorted(uses & {_Use.PASSING, _Use.HELD}))
        if again:
            if with_witnesses and destination not in self._unclear:
                pairs = itertools.combinations(self._readers[destination], 2)
                yield from (_Way(_Use.SHARED, witnesses=pair) for pair in pairs if pair[0].owner != pair[1].owner)
            else:
                yield _Way(_Use.SHARED)
        yield from (_Way(use, owner=owner) for use, owner in again)
