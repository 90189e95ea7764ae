"""Exact prices of choices, from the terms and own costs themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from tap_planner.operators import OUTPUT
from tap_planner.search.choices import Choices
from tap_planner.search.configuration import Recompute
from tap_planner.search.costing import CostedModel
from tap_planner.search.model import PartKind
from tap_planner.search.terms import Term
from tap_planner.search.views import PartView, views_of

MAX_KNOWN = 4096
"""Prices of one part that are remembered; most solutions of a search differ in few of their parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What an assignment costs."""

    ns: int
    own_bytes: int
    """Parameters and their states, and what communication takes."""
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
    own_bytes = costed.workspace_bytes + total.own_bytes + total.whole_bytes()
    return Price(ns=total.ns, own_bytes=own_bytes, activation_bytes=total.activation_bytes)


class _Total:
    """Adds up exact prices."""

    def __init__(self, costed: CostedModel) -> None:
        self._costed = costed
        self._parts = _KNOWN.setdefault(costed, {})
        self.ns = self.own_bytes = self.activation_bytes = 0
        self._level = 0
        """The highest ZeRO level met in runs."""
        self._with_room: list[tuple[int, int]] = []
        """(variable, value) of what makes room for whole copies."""

    def add_part(self, view: PartView) -> None:
        """Add the variables and terms of a part."""
        key = (view.kind, view.number)
        if key not in self._parts:
            self._parts[key] = _PartPrices(self._costed, *key)
        price = self._parts[key].of(view)
        self.ns += view.times * price.ns
        self.own_bytes += view.times * price.own_bytes
        self.activation_bytes += view.times * price.activation_bytes
        self._level = max(self._level, price.level)
        self._with_room.extend(price.with_room)

    def add_term(self, term: Term, view: PartView) -> None:
        """Add a term."""
        values = {variable: view.value(variable) for variable in term.variables}
        modes = {region: view.recompute(region) for region in term.regions}
        ns, num_bytes = _term_price(term, view, values, modes)
        self.ns += view.times * ns * self._costed.repeat
        self.activation_bytes += view.times * num_bytes * self._costed.in_flight

    def whole_bytes(self) -> int:
        """Room for whole copies, for the highest ZeRO level in runs."""
        return sum(int(self._costed.whole_bytes(variable, self._level)[value]) for variable, value in self._with_room)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartPrice:
    """What one occurrence of a part costs."""

    ns: int
    own_bytes: int
    """Without room for whole copies."""
    activation_bytes: int
    level: int
    """The highest ZeRO level, if the part lies in runs."""
    with_room: tuple[tuple[int, int], ...]
    """(variable, value) of what makes room for whole copies."""


class _PartPrices:
    """Prices of one part, by the values of the variables that it depends on.

    Args:
        costed: the model under the configuration.
        kind: which part.
        number: the run of a link.
    """

    def __init__(self, costed: CostedModel, kind: PartKind, number: int) -> None:
        part = costed.model.part(kind, number)
        self._terms = tuple((term, term.regions) for term in part.terms)
        self._variables = tuple(dict.fromkeys(_variables(costed, kind, number)))
        members = costed.zero_members(kind, number).values()
        self._stored = tuple(stored[0] for stored in members)
        """(variable, data axes) of one parameter for every ZeRO setting."""
        self._known: dict[tuple[int, ...], _PartPrice] = {}

    def of(self, view: PartView) -> _PartPrice:
        """What the part costs where it stands so."""
        values = [view.value(variable) for variable in self._variables]
        key = (*values, *[view.zero(variable, mask) for variable, mask in self._stored])
        price = self._known.get(key)
        if price is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            price = self._known[key] = self._price(view, dict(zip(self._variables, values, strict=True)))
        return price

    def _price(self, view: PartView, values: dict[int, int]) -> _PartPrice:
        costed = view.costed
        ns = activation_bytes = 0
        modes: dict[int, Recompute] = {}
        for term, regions in self._terms:
            for region in regions:
                if region not in modes:
                    modes[region] = view.recompute(region)
            term_ns, num_bytes = _term_price(term, view, values, {region: modes[region] for region in regions})
            ns += term_ns * costed.repeat
            activation_bytes += num_bytes * costed.in_flight
        own = _OwnCosts(view, values)
        return _PartPrice(
            ns=ns + own.ns,
            own_bytes=own.num_bytes,
            activation_bytes=activation_bytes,
            level=own.level,
            with_room=tuple(own.with_room),
        )


_KNOWN: WeakKeyDictionary[CostedModel, dict[tuple[PartKind, int], _PartPrices]] = WeakKeyDictionary()
"""Prices of parts, for as long as their configuration is in use."""


def _variables(costed: CostedModel, kind: PartKind, number: int) -> Iterator[int]:
    """The variables that the price of a part depends on, besides ZeRO settings."""
    model = costed.model
    part = model.part(kind, number)
    yield from part.variables
    for term in part.terms:
        yield from term.variables
    regions = {region: None for term in part.terms for region in term.regions}
    for variable in part.variables:
        if variable < model.num_operators:
            regions[int(model.region_of[variable])] = None
    yield from (model.recompute_variable(region) for region in regions if len(costed.options(region)) > 1)


class _OwnCosts:
    """Costs of the variables of a part by themselves."""

    def __init__(self, view: PartView, values: dict[int, int]) -> None:
        self._view = view
        self._costed = view.costed
        self._model = view.costed.model
        self.ns = self.num_bytes = self.level = 0
        self.with_room: list[tuple[int, int]] = []
        for variable in self._model.part(view.kind, view.number).variables:
            value = values[variable]
            if variable < self._model.num_operators:
                self._add_operator(variable, value)
            for mask, (ns, num_bytes) in self._costed.parameter_costs(variable).items():
                zero = view.zero(variable, mask)
                self.ns += int(ns[zero, value])
                self.num_bytes += int(num_bytes[zero, value])
                self._note_level(variable, value, mask, zero)
            if self._costed.makes_room(variable, view.kind):
                self.with_room.append((variable, value))

    def _add_operator(self, index: int, strategy: int) -> None:
        ns = self._costed.operator_ns(index)
        mode = 0
        if len(ns) > 1:
            mode = self._view.value(self._model.recompute_variable(int(self._model.region_of[index])))
        self.ns += int(ns[mode, strategy])
        if self._model.graph.operators[index].type == OUTPUT:
            self.num_bytes += int(self._costed.result_bytes(index)[strategy])

    def _note_level(self, variable: int, value: int, mask: int, zero: int) -> None:
        """Remember the highest level in runs."""
        if self._model.places.recomputes(self._model.first_region(variable)):
            self.level = max(self.level, self._costed.level_of(variable, value, mask, zero))


def _term_price(term: Term, view: PartView, values: dict[int, int], modes: dict[int, Recompute]) -> tuple[int, int]:
    """(ns of one microbatch, bytes) of a term.

    Args:
        term: the term.
        view: where it stands.
        values: of its variables.
        modes: how its regions recompute.
    """
    source = 0 if term.producer is None else values[term.producer]
    choices = tuple([values[slot.variable] for slot in term.slots])
    key = (term.tensor, view.kind is PartKind.LAST, source, choices, tuple(modes.values()))
    points = view.costed.model.points
    if key not in points:
        regions = zip(choices, (slot.region for slot in term.slots), strict=True)
        points[key] = term.point(tuple(regions), source, view.costed.policy(modes, view.kind, view.number))
    return points[key]
