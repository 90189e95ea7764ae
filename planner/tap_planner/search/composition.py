"""From the values that the parts were given to an assignment of the whole graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tap_planner.search.domains import Domains
from tap_planner.search.weighting import Assignment


def compose(domains: Domains, values: Mapping[int, int], links: Sequence[Sequence[Mapping[int, int]]]) -> Assignment:
    """The assignment of the whole graph.

    Args:
        domains: possible values of the variables.
        values: index among the possible values of every variable of the outer part.
        links: per run, per later occurrence, the same for every variable of the link.
    """
    model = domains.model
    operators = [-1] * model.num_operators
    parameters: dict[int, int] = {}
    for variable in model.outer.variables:
        chosen = domains.value(variable, values[variable])
        if variable < model.num_operators:
            operators[variable] = chosen
        else:
            parameters[variable] = chosen
    for number in range(len(model.runs)):
        _fill_run(domains, number, links[number], operators, parameters)
    return Assignment(operators=tuple(operators), parameters=parameters)


def _fill_run(
    domains: Domains,
    number: int,
    occurrences: Sequence[Mapping[int, int]],
    operators: list[int],
    parameters: dict[int, int],
) -> None:
    """Fill in the later occurrences of a run; many of them are one and the same mapping, which is read once."""
    model = domains.model
    run = model.runs[number]
    period = len(run.first)
    inside = model.links[number].variables[period:]
    known: dict[int, list[int]] = {}
    for occurrence, inner in enumerate(occurrences, start=1):
        if id(inner) not in known:
            known[id(inner)] = [domains.value(variable, inner[variable]) for variable in run.second]
        start = run.first.start + occurrence * period
        operators[start : start + period] = known[id(inner)]
        for variable in inside:
            at_occurrence = model.parameters.at_occurrence(variable, occurrence)
            parameters[at_occurrence] = domains.value(variable, inner[variable])
