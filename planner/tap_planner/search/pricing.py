"""Exact prices of assignments, from the terms and own costs themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tap_planner.search.costing import CostedModel
from tap_planner.search.model import Part, PartKind
from tap_planner.search.terms import RegionPolicy, Term
from tap_planner.search.weighting import Assignment

_Values = Callable[[int], int]
"""Variable -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What an assignment costs."""

    ns: int
    own_bytes: int
    """Parameters and their states."""
    activation_bytes: int

    @property
    def num_bytes(self) -> int:
        """All memory."""
        return self.own_bytes + self.activation_bytes


def price_assignment(costed: CostedModel, assignment: Assignment) -> Price:
    """Exact price of an assignment; equal links are priced once."""
    model = costed.model
    total = _Total(costed)
    total.add_part(model.outer, assignment.value, costed.policy, 1)
    for term in model.shared_terms:
        total.add_term(term, assignment.value, costed.policy, 1)
    for number in range(len(model.runs)):
        for (previous, current, kind), times in _links(costed, number, assignment).items():
            values = _values_of_link(costed, number, (previous, current), assignment)
            total.add_part(model.links[number], values, costed.part_policy(kind, number), times)
    return Price(ns=total.ns, own_bytes=total.own_bytes, activation_bytes=total.activation_bytes)


def _links(
    costed: CostedModel, number: int, assignment: Assignment
) -> Counter[tuple[tuple[int, ...], tuple[int, ...], PartKind]]:
    """Different links of a run (strategies of the occurrence before, of its own, kind), with their number."""
    run = costed.model.runs[number]
    period = len(run.first)
    counted: Counter[tuple[tuple[int, ...], tuple[int, ...], PartKind]] = Counter()
    for occurrence in range(1, run.num_links + 1):
        begin = run.first.start + occurrence * period
        previous = assignment.operators[begin - period : begin]
        current = assignment.operators[begin : begin + period]
        kind = PartKind.LAST if occurrence == run.num_links else PartKind.LINK
        counted[previous, current, kind] += 1
    return counted


def _values_of_link(
    costed: CostedModel, number: int, occurrences: tuple[tuple[int, ...], tuple[int, ...]], assignment: Assignment
) -> _Values:
    """Values of a link's variables where it stands between two given occurrences."""
    run = costed.model.runs[number]

    def value(variable: int) -> int:
        if variable in run.first:
            return occurrences[0][variable - run.first.start]
        if variable in run.second:
            return occurrences[1][variable - run.second.start]
        return assignment.value(variable)

    return value


class _Total:
    """Adds up exact prices."""

    def __init__(self, costed: CostedModel) -> None:
        self._costed = costed
        self.ns = self.own_bytes = self.activation_bytes = 0

    def add_part(self, part: Part, value: _Values, policy: RegionPolicy, times: int) -> None:
        """Add the variables and terms of a part."""
        for variable in part.variables:
            ns, num_bytes = self._costed.own(variable)
            self.ns += times * int(ns[value(variable)])
            self.own_bytes += times * int(num_bytes[value(variable)])
        for term in part.terms:
            self.add_term(term, value, policy, times)

    def add_term(self, term: Term, value: _Values, policy: RegionPolicy, times: int) -> None:
        """Add a term."""
        source = 0 if term.producer is None else value(term.producer)
        choices = [(value(slot.variable), slot.region) for slot in term.slots]
        ns, num_bytes = term.point(choices, source, policy)
        self.ns += times * ns * self._costed.repeat
        self.activation_bytes += times * num_bytes
