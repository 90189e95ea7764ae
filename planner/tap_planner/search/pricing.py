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
        self._levels: dict[int, int] = {}
        """By run, the highest ZeRO level met."""
        self._with_room: list[tuple[int, int, int]] = []
        """(run, variable, value) of what makes room for whole copies."""

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
                self._note_level(view, variable, value, mask, zero)
            if self._costed.makes_room(variable, view.kind):
                self._with_room.append((self._run_of(variable), variable, value))
        for term in part.terms:
            self.add_term(term, view)

    def _run_of(self, variable: int) -> int:
        """The run in which what is stored with a variable is first read; -1 outside runs."""
        region = self._costed.model.first_region(variable)
        return next((n for n, regions in enumerate(self._costed.model.places.run_regions) if region in regions), -1)

    def _note_level(self, view: PartView, variable: int, value: int, mask: int, zero: int) -> None:
        """Remember the highest level of a run."""
        run = self._run_of(variable) if view.kind is PartKind.OUTER else view.number
        if run >= 0:
            level = self._costed.level_of(variable, value, mask, zero)
            self._levels[run] = max(self._levels.get(run, 0), level)

    def whole_bytes(self) -> int:
        """Room for whole copies, by the highest ZeRO level of each run."""
        return sum(
            int(self._costed.whole_bytes(variable, self._levels.get(run, 0))[value])
            for run, variable, value in self._with_room
        )

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
