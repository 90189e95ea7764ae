"""Parts under given choices: what the variables of a part stand for, once for each different occurrence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tap_planner.search.choices import Choices
from tap_planner.search.configuration import Recompute
from tap_planner.search.costing import CostedModel
from tap_planner.search.model import PartKind
from tap_planner.search.terms import RegionPolicy


@dataclass(frozen=True, slots=True, eq=False)
class PartView:
    """A part where it stands in given choices.

    Args:
        costed: the model under the configuration.
        choices: what was chosen.
        kind: the part.
        number: its run.
        before: values that the occurrence before a link has, see ``Choices``.
        link: values that a link has.
        times: how often the part stands so.
    """

    costed: CostedModel
    choices: Choices
    kind: PartKind
    number: int
    before: int
    link: int
    times: int

    def value(self, variable: int) -> int:
        """Value of a variable of the part."""
        if self.kind is PartKind.OUTER:
            return self.choices.value(variable)
        return self.choices.link_value(self.number, self.before, self.link, variable)

    def zero(self, variable: int, mask: int) -> int:
        """The ZeRO setting of what is stored with a variable and has these data axes: also one that another dominates,
        if that was chosen."""
        model = self.costed.model
        group = model.zero_group(variable)
        setting = model.zero_variable(group, mask)
        given = self.choices.outer if self.kind is PartKind.OUTER else self.choices.links[self.number][self.link]
        if setting in given:
            return given[setting]
        options = self.costed.zero_options(mask, inside=self.costed.lies_in_run(group))
        return int(options[0]) if len(options) == 1 else self.value(setting)

    def recompute(self, region: int) -> Recompute:
        """How a region of the part recomputes."""
        options = self.costed.options(region)
        if len(options) == 1:
            return options[0]
        return options[self.value(self.costed.model.recompute_variable(region))]

    def policy(self, regions: Sequence[int]) -> RegionPolicy:
        """Treatment of some regions of the part."""
        return self.costed.policy({region: self.recompute(region) for region in regions}, self.kind, self.number)


def views_of(costed: CostedModel, choices: Choices, kind: PartKind, number: int) -> Iterator[PartView]:
    """A part as it stands, with all its different occurrences where it is a link."""
    if kind is PartKind.OUTER:
        yield PartView(costed, choices, kind, 0, -1, 0, 1)
        return
    for (before, link, last), times in choices.pairs(number).items():
        where = PartKind.LAST if last else PartKind.LINK
        yield PartView(costed, choices, where, number, before, link, times)
