"""Exact prices of choices, from the terms and own costs themselves."""

from __future__ import annotations

from dataclasses import dataclass

from tap_planner.search.choices import Choices
from tap_planner.search.costing import CostedModel
from tap_planner.search.model import PartKind
from tap_planner.search.terms import Term
from tap_planner.search.views import PartView, views_of


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


def price_choices(costed: CostedModel, choices: Choices) -> Price:
    """Exact price of choices; equal links are priced once."""
    model = costed.model
    total = _Total(costed)
    for view in views_of(costed, choices, PartKind.OUTER, 0):
        total.add_part(view)
        for term in model.shared_terms:
            total.add_term(term, view)
    for number in range(len(model.runs)):
        for view in views_of(costed, choices, PartKind.LINK, number):
            total.add_part(view)
    own_bytes = total.own_bytes + total.whole_bytes()
    return Price(ns=total.ns, own_bytes=own_bytes, activation_bytes=total.activation_bytes)


class _Total:
    """Adds up exact prices."""

    def __init__(self, costed: CostedModel) -> None:
        self._costed = costed
        self.ns = self.own_bytes = self.activation_bytes = 0
        self._level = 0
        """The highest ZeRO level met in runs."""
        self._with_room: list[tuple[int, int]] = []
        """(variable, value) of what makes room for whole copies."""

    def add_part(self, view: PartView) -> None:
        """Add the variables and terms of a part."""
        model = self._costed.model
        part = model.part(view.kind, view.number)
        for variable in part.variables:
            value = view.value(variable)
            if variable < model.num_operators:
                ns = self._costed.operator_ns(variable)
                mode = 0
                if len(ns) > 1:
                    mode = view.value(model.recompute_variable(int(model.region_of[variable])))
                self.ns += view.times * int(ns[mode, value])
                self.own_bytes += view.times * int(self._costed.result_bytes(variable)[value])
            for mask, (ns, num_bytes) in self._costed.parameter_costs(variable).items():
                zero = view.zero(variable, mask)
                self.ns += view.times * int(ns[zero, value])
                self.own_bytes += view.times * int(num_bytes[zero, value])
                self._note_level(variable, value, mask, zero)
            if self._costed.makes_room(variable, view.kind):
                self._with_room.append((variable, value))
        for term in part.terms:
            self.add_term(term, view)

    def _note_level(self, variable: int, value: int, mask: int, zero: int) -> None:
        """Remember the highest level in runs."""
        model = self._costed.model
        if model.places.recomputes(model.first_region(variable)):
            self._level = max(self._level, self._costed.level_of(variable, value, mask, zero))

    def whole_bytes(self) -> int:
        """Room for whole copies, for the highest ZeRO level in runs."""
        return sum(int(self._costed.whole_bytes(variable, self._level)[value]) for variable, value in self._with_room)

    def add_term(self, term: Term, view: PartView) -> None:
        """Add a term."""
        source = 0 if term.producer is None else view.value(term.producer)
        choices = tuple(view.value(slot.variable) for slot in term.slots)
        policy = view.policy(term.regions)
        last = view.kind is PartKind.LAST
        key = (term.tensor, last, source, choices, tuple(policy.modes.values()))
        points = self._costed.model.points
        if key not in points:
            regions = zip(choices, (slot.region for slot in term.slots), strict=True)
            points[key] = term.point(tuple(regions), source, policy)
        ns, num_bytes = points[key]
        self.ns += view.times * ns * self._costed.repeat
        self.activation_bytes += view.times * num_bytes
