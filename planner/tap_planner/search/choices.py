"""What was chosen: values of all variables, written out, or folded as the model is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tap_planner.search.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A strategy for every operator, a storage for every shared parameter, and the settings of all regions."""

    operators: tuple[int, ...]
    parameters: Mapping[int, int]
    """Parameter variable -> state."""
    recompute: Mapping[int, int] = field(default_factory=dict)
    """Region -> place among the recompute settings that it may choose from; 0 where it is missing."""
    zero: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """(Group of parameters, their data axes as bits) -> place among the ZeRO settings; 0 where it is missing."""


Values = Mapping[int, int]
"""Variable -> value."""


@dataclass(frozen=True, slots=True)
class ChosenValues:
    """Values of all variables of a model, whichever object it is.

    Args:
        outer: values of the outer part's variables.
        links: per run, different values of the link's variables.
        sequences: per run, per occurrence after the first, which of them it has.
    """

    outer: Values
    links: tuple[tuple[Values, ...], ...]
    sequences: tuple[tuple[int, ...], ...]

    def of(self, model: Model) -> Choices:
        """The same for one that is alike."""
        return Choices(model, self.outer, self.links, self.sequences)


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Values of the outer part, and of the links of every run.

    Args:
        model: the variables.
        outer, links, sequences: see ``ChosenValues``.
    """

    model: Model
    outer: Values
    links: tuple[tuple[Values, ...], ...]
    sequences: tuple[tuple[int, ...], ...]

    @property
    def values(self) -> ChosenValues:
        """Without the model."""
        return ChosenValues(self.outer, self.links, self.sequences)

    def pairs(self, number: int) -> Counter[tuple[int, int, bool]]:
        """(link before, link, whether it is the last) with how often it occurs; before -1 is the first occurrence."""
        sequence = self.sequences[number]
        before = [-1, *sequence]
        counted = Counter((a, b, False) for a, b in zip(before, sequence[:-1], strict=False))
        counted[before[-2], before[-1], True] += 1
        return counted

    def link_value(self, number: int, before: int, link: int, variable: int) -> int:
        """Value of a variable seen from a link.

        Args:
            number: the run.
            before: which values the occurrence before has; -1: it is the first.
            link: which values the occurrence has.
            variable: any; those of the first and second occurrence stand for those of the two.
        """
        model = self.model
        run = model.runs[number]
        inside = self.links[number][link]
        if variable in inside:
            return inside[variable]
        if before >= 0:
            earlier = None
            if variable in run.first:
                earlier = variable + len(run.first)
            elif variable == model.recompute_variable(model.places.run_regions[number][0]):
                earlier = model.recompute_variable(model.places.run_regions[number][1])
            if earlier is not None:
                return self.links[number][before].get(earlier, 0)
        return self.value(variable)

    def value(self, variable: int) -> int:
        """Value of a variable of the outer part, or of an operator of any occurrence."""
        found = self.outer.get(variable)
        if found is not None:
            return found
        model = self.model
        if variable < model.num_operators:
            number, occurrence = int(model.run_of[variable]), int(model.occurrence_of[variable])
            run = model.runs[number]
            inside = self.links[number][self.sequences[number][occurrence - 1]]
            return inside[variable - (occurrence - 1) * len(run.first)]
        return self._setting(variable)

    def _setting(self, variable: int) -> int:
        """Value of a setting that is not among those of the outer part; 0 where there is no choice."""
        model = self.model
        if not model.is_recompute(variable):
            return 0
        region = model.region_of_setting(variable)
        for number, regions in enumerate(model.places.run_regions):
            if regions[0] < region <= regions[-1]:
                inside = self.links[number][self.sequences[number][region - regions[0] - 1]]
                return inside.get(model.recompute_variable(regions[1]), 0)
        return 0

    def add_used(self, used: dict[int, set[int]]) -> None:
        """Add the values in use, by class of variable."""
        model = self.model
        for values in (self.outer, *(link for links in self.links for link in links)):
            for variable, value in values.items():
                used.setdefault(model.class_of_variable(variable), set()).add(value)

    def expand(self) -> Assignment:
        """Everything written out."""
        model = self.model
        operators = [-1] * model.num_operators
        parameters: dict[int, int] = {}
        recompute: dict[int, int] = {}
        zero: dict[tuple[int, int], int] = {}
        for variable, value in self.outer.items():
            if variable < model.num_operators:
                operators[variable] = value
            elif model.is_recompute(variable):
                recompute[model.region_of_setting(variable)] = value
            elif model.is_zero(variable):
                zero[model.group_of_setting(variable)] = value
            elif variable in model.parameter_variables:
                parameters[variable] = value
        for number in range(len(model.runs)):
            self._expand_run(number, operators, parameters, recompute, zero)
        return Assignment(operators=tuple(operators), parameters=parameters, recompute=recompute, zero=zero)

    def _expand_run(
        self,
        number: int,
        operators: list[int],
        parameters: dict[int, int],
        recompute: dict[int, int],
        zero: dict[tuple[int, int], int],
    ) -> None:
        model = self.model
        run, regions = model.runs[number], model.places.run_regions[number]
        period = len(run.first)
        inside = model.links[number].variables[period:]
        lists = [[values[variable] for variable in run.second] for values in self.links[number]]
        for occurrence, link in enumerate(self.sequences[number], start=1):
            values = self.links[number][link]
            start = run.first.start + occurrence * period
            operators[start : start + period] = lists[link]
            for variable in inside:
                parameters[model.parameters.at_occurrence(variable, occurrence)] = values[variable]
            for variable, value in values.items():
                if model.is_recompute(variable):
                    recompute[regions[occurrence]] = value
                elif model.is_zero(variable):
                    zero[regions[occurrence], model.group_of_setting(variable)[1]] = value


def fold_assignment(model: Model, assignment: Assignment) -> Choices:
    """Choices of a model from an assignment that is written out."""
    outer: dict[int, int] = {v: value for v, value in enumerate(assignment.operators) if model.lies_outside_links(v)}
    outer.update((v, value) for v, value in assignment.parameters.items() if model.parameters.home(v) is None)
    outer.update((model.recompute_variable(region), value) for region, value in assignment.recompute.items())
    outer.update((model.zero_variable(*group), value) for group, value in assignment.zero.items())
    links: list[tuple[Values, ...]] = []
    for number, run in enumerate(model.runs):
        regions, period = model.places.run_regions[number], len(run.first)
        inside = model.links[number].variables[period:]
        found: list[Values] = []
        for occurrence in range(1, run.num_links + 1):
            shift = (occurrence - 1) * period
            values = {v: assignment.operators[v + shift] for v in run.second}
            for variable in inside:
                values[variable] = assignment.parameters[model.parameters.at_occurrence(variable, occurrence)]
            values[model.recompute_variable(regions[1])] = assignment.recompute.get(regions[occurrence], 0)
            for (group, mask), value in assignment.zero.items():
                if group == regions[occurrence]:
                    values[model.zero_variable(regions[1], mask)] = value
            found.append(values)
        links.append(tuple(found))
    return Choices(model, outer, tuple(links), tuple(tuple(range(len(values))) for values in links))
