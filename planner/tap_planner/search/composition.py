"""From the values that the parts were given to choices for the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tap_planner.search.choices import Choices
from tap_planner.search.domains import Domains
from tap_planner.search.model import PartKind
from tap_planner.search.weighting import Weights

Found = Mapping[int, int]
"""Variable -> place among its possible values."""


def compose(domains: Domains, weights: Weights, outer: Found, links: Sequence[Sequence[tuple[Found, bool]]]) -> Choices:
    """The choices of the whole model.

    ZeRO settings that the parts did not decide are chosen here, for every group the cheapest.

    Args:
        domains: possible values of the variables.
        weights: what is minimised.
        outer: every variable of the outer part.
        links: per run, per later occurrence, the variables of the link, and whether it is the last one.
    """
    model = domains.model
    modes = (model.recompute_variable(regions[0]) for regions in model.places.run_regions)
    settings = (*modes, *domains.costed.zero_members(PartKind.OUTER, 0))
    decided = _decided(domains, model.outer.variables, settings, outer)
    _choose_zero(domains, weights, decided, PartKind.OUTER, 0)
    found: list[tuple[dict[int, int], ...]] = []
    sequences: list[tuple[int, ...]] = []
    for number, occurrences in enumerate(links):
        numbers: dict[int, int] = {}
        different: list[dict[int, int]] = []
        sequence: list[int] = []
        for inner, last in occurrences:
            if id(inner) not in numbers:
                numbers[id(inner)] = len(different)
                different.append(_link_values(domains, weights, number, inner, last))
            sequence.append(numbers[id(inner)])
        found.append(tuple(different))
        sequences.append(tuple(sequence))
    return Choices(model, decided, tuple(found), tuple(sequences))


def _link_values(domains: Domains, weights: Weights, number: int, inner: Found, last: bool) -> dict[int, int]:
    """Values of a link's own variables and settings."""
    model, kind = domains.model, PartKind.LAST if last else PartKind.LINK
    setting = model.recompute_variable(model.places.run_regions[number][1])
    settings = (setting, *domains.costed.zero_members(kind, number))
    values = _decided(domains, model.links[number].variables, settings, inner)
    _choose_zero(domains, weights, values, kind, number)
    return values


def _decided(domains: Domains, own: Iterable[int], settings: Iterable[int], found: Found) -> dict[int, int]:
    """What the places of values among the possible ones stand for; a variable without one has a single value."""
    values = {
        variable: domains.value(variable, found[variable] if len(domains.alive(variable)) > 1 else 0)
        for variable in own
    }
    values.update((setting, domains.value(setting, found[setting])) for setting in settings if setting in found)
    return values


def _choose_zero(domains: Domains, weights: Weights, values: dict[int, int], kind: PartKind, number: int) -> None:
    """Give every group of a part without a ZeRO setting the cheapest one that is possible (ties: the first)."""
    costed = domains.costed
    for setting, members in costed.zero_members(kind, number).items():
        if setting in values:
            continue
        possible = domains.alive(setting)
        total = np.zeros(len(possible), dtype=np.int64)
        for variable, mask in members if len(possible) > 1 else ():
            ns, num_bytes = costed.parameter_costs(variable)[mask]
            value = values[variable]
            total += ns[possible, value] * weights.time + num_bytes[possible, value] * weights.memory
        values[setting] = int(possible[total.argmin()])
