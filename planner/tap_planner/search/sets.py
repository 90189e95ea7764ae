"""Set variables: tensors that the occurrences of a run share, in the exact stage.

The value of a set variable is the set of destinations in which readers want the tensor: each reader is then coupled
with the set variable only, and what the set costs is paid once.
"""

from __future__ import annotations

import numpy as np

from tap_planner.search.configuration import Recompute
from tap_planner.search.costing import CostedModel
from tap_planner.search.domains import Domains
from tap_planner.search.elimination import INFINITE, WidthError
from tap_planner.search.model import PartKind
from tap_planner.search.terms import SCALE, Term
from tap_planner.search.weighting import PartTables

MAX_SET_STATES = 5
"""Destinations of a shared tensor up to which all their subsets are enumerated in the exact stage."""

Destination = tuple[int, int]
"""State of a tensor at a reader, and of its gradient (-1 where there is none)."""


class SetVariables:
    """The set variables of a model's shared terms; value v stands for the destinations whose bits are set in v + 1.

    Args:
        costed: the model under a configuration.
        domains: possible values of its other variables.
    """

    def __init__(self, costed: CostedModel, domains: Domains) -> None:
        self._costed = costed
        self._model = costed.model
        self._domains = domains
        self._states: dict[int, tuple[Destination, ...]] = {}

    def prepare(self) -> None:
        """Choose the destinations of every set variable: those that some possible value wants.

        Raises:
            WidthError: some shared tensor still has too many possible destinations.
        """
        for position, term in enumerate(self._model.shared_terms):
            found: set[Destination] = set()
            for slot in term.slots:
                values = self._domains.alive(slot.variable)
                found.update(zip(slot.destination[values].tolist(), slot.gradient[values].tolist(), strict=True))
            if len(found) > MAX_SET_STATES:
                raise WidthError(f"{len(found)} destinations of a shared tensor")
            self._states[self._model.set_variable(position)] = tuple(sorted(found))

    def __contains__(self, variable: int) -> bool:
        """Whether a variable is a set variable whose destinations have been chosen."""
        return variable in self._states

    def size(self, variable: int) -> int:
        """Number of values: all sets but the empty one."""
        return (1 << len(self._states[variable])) - 1

    def of_run(self, number: int) -> tuple[int, ...]:
        """Set variables of the tensors that a run reads."""
        variables = (self._model.set_variable(position) for position in self._model.shared_terms_of(number))
        return tuple(variable for variable in variables if variable in self._states)

    def add_tables(self, tables: PartTables, kind: PartKind, number: int) -> None:
        """Add what couples the readers in a part with the set variables; in the outer part, also what sets cost."""
        for position, term in enumerate(self._model.shared_terms):
            variable = self._model.set_variable(position)
            for reader in dict.fromkeys(slot.variable for slot in term.slots):
                if self._model.lies_in(reader, kind, number):
                    forbidden = np.where(self._allowed(variable, term, reader), 0, int(INFINITE))
                    tables.add((variable, reader), forbidden, np.zeros_like(forbidden))
            if kind is PartKind.OUTER:
                self._add_costs(tables, variable, term)

    def _bits(self, variable: int) -> np.ndarray:
        """[sets] the destinations in every set, as bits."""
        return np.arange(1, 1 << len(self._states[variable]))

    def _allowed(self, variable: int, term: Term, reader: int) -> np.ndarray:
        """[sets, values of the reader] whether the set holds all that the reader wants."""
        states, bits = self._states[variable], self._bits(variable)
        values = self._domains.alive(reader)
        allowed = np.ones((len(bits), len(values)), dtype=bool)
        for slot in term.slots:
            if slot.variable == reader:
                keys = zip(slot.destination[values].tolist(), slot.gradient[values].tolist(), strict=True)
                bit = np.array([states.index(key) for key in keys])
                allowed &= (bits[:, None] >> bit[None, :] & 1).astype(bool)
        return allowed

    def _add_costs(self, tables: PartTables, variable: int, term: Term) -> None:
        """What a set of destinations costs: a lower bound where a destination might serve one region only."""
        ns = self._redistribution_ns(variable, term) * (SCALE * self._costed.repeat)
        num_bytes = self._kept_bytes(variable, term) * SCALE
        if term.producer is None:
            tables.add((variable,), ns[0], num_bytes[0])
        else:
            tables.add((term.producer, variable), ns, num_bytes)

    def _redistribution_ns(self, variable: int, term: Term) -> np.ndarray:
        """[values of the producer, sets] forward and backward time of all destinations in the set."""
        bits, values = self._bits(variable), self._domains.of_producer(term)
        src, want = term.source[values], term.wanted[values]
        ns = np.zeros((len(values), len(bits)), dtype=np.int64)
        for position, (destination, gradient) in enumerate(self._states[variable]):
            used = (bits >> position & 1).astype(bool)[None, :]
            cost = np.zeros(len(values), dtype=np.int64)
            if term.producer is not None:
                cost = cost + term.cost_ns[src, destination]
            if gradient >= 0:
                cost = cost + term.cost_ns[gradient, want]
            ns += np.where(used, cost[:, None], 0)
        return ns

    def _kept_bytes(self, variable: int, term: Term) -> np.ndarray:
        """[values of the producer, sets] bytes of the copies that backward keeps for certain, whatever the settings."""
        states, bits = self._states[variable], self._bits(variable)
        values = self._domains.of_producer(term)
        num_bytes = np.zeros((len(values), len(bits)), dtype=np.int64)
        destinations = sorted({destination for destination, _ in states})
        if not term.is_activation or not self._certain(term, len(states), len(destinations)):
            return num_bytes
        for destination in destinations:
            chosen = (bits & _mask(states, destination)) > 0
            num_bytes += np.where(chosen, term.state_bytes[destination], 0)[None, :]
        if term.producer is not None and term.producer_keeps and self._always_counts(term.producer_region):
            for row, state in enumerate(term.source[values].tolist()):
                chosen = (bits & _mask(states, state)) > 0
                num_bytes[row] += np.where(chosen, 0, term.state_bytes[state])
        return num_bytes

    def _certain(self, term: Term, num_states: int, num_destinations: int) -> bool:
        """Whether every destination in the set is held, whichever readers use it and however their regions recompute.

        A region that recomputes in full holds the producer's copy of what only it reads, so there the copies are
        certain only where all regions read one and the same.
        """
        keeping = [slot.kept for slot in term.slots]
        if Recompute.FULL in self._costed.recomputes:
            return num_states == 1 and any(keeping) and len({slot.region for slot in term.slots}) > 1
        return all(keeping) or (any(keeping) and num_destinations == 1)

    def _always_counts(self, region: int) -> bool:
        places = self._model.places
        return not places.recomputes(region) or region in places.last_regions


def _mask(states: tuple[Destination, ...], wanted: int) -> int:
    """Bits of the destinations that are state ``wanted``, whatever their gradient."""
    return sum(1 << position for position, (destination, _) in enumerate(states) if destination == wanted)
