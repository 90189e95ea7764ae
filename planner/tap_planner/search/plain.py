"""Of ZeRO settings that cost the same, the lowest level: what saves memory that is not needed.

A higher level reduces more often and in smaller pieces. Objective A does not see that (latencies of buckets are not
additive over parameters), so a level that only saves memory ties with a lower one; the prediction sees it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tap_planner.search.choices import Choices, Values
from tap_planner.search.costing import CostedModel
from tap_planner.search.model import PartKind
from tap_planner.search.pricing import price_choices
from tap_planner.search.weighting import Outcome


def plainest(costed: CostedModel, found: Outcome, limit_bytes: int | None) -> Outcome:
    """The outcome with the lowest ZeRO level of equal cost for every group of parameters, where all of that fits.

    Args:
        costed: the model under the configuration.
        found: a solution.
        limit_bytes: per device; None for none.
    """
    choices = found.choices
    if choices is None:
        return found
    links = tuple(
        tuple(_lowered(costed, values, PartKind.LINK, number) for values in of_run)
        for number, of_run in enumerate(choices.links)
    )
    lowered = Choices(choices.model, _lowered(costed, choices.outer, PartKind.OUTER, 0), links, choices.sequences)
    price = price_choices(costed, lowered)
    num_bytes = price.own_bytes + price.activation_bytes
    if price.ns > found.ns or (limit_bytes is not None and num_bytes > limit_bytes):
        return found
    return replace(found, choices=lowered, ns=price.ns, num_bytes=num_bytes, activation_bytes=price.activation_bytes)


def _lowered(costed: CostedModel, values: Values, kind: PartKind, number: int) -> dict[int, int]:
    """Values of a part with other ZeRO settings."""
    lowered = dict(values)
    for setting, members in costed.zero_members(kind, number).items():
        if setting not in values:
            continue
        total = np.sum(
            [costed.parameter_costs(variable)[mask][0][:, values[variable]] for variable, mask in members], 0
        )
        places = costed.sharding_places(setting)
        alike = [int(place) for place in places if total[place] <= total[values[setting]]]
        lowered[setting] = min([values[setting], *alike], key=lambda place: (costed.zeros[place].level, place))
    return lowered
