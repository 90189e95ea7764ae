"""The model with all times left out: for minimising memory alone.

Strategies that need the same memory whatever the rest does are one value here, so that fewer and smaller tables are
left, and exact ones where those of times would be too large. What memory there is stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

import numpy as np

from tap_planner.search.costing import CostedModel
from tap_planner.search.model import Model, Part
from tap_planner.search.solver import Solver
from tap_planner.search.terms import UNREACHABLE, Slot, Term

__all__ = ["memory_solver"]

_KEY = "without times"


def memory_solver(costed: CostedModel, *, every_value: bool = False) -> Solver:
    """A solver that knows the memory of plans and nothing of their times: for ``Weights(0, 1)`` only.

    Args:
        costed: the model under a configuration.
        every_value: whether strategies that need the same memory stay values of their own.
    """
    model = costed.model
    if _KEY not in model.tables:
        model.tables[_KEY] = _without_times(model)
    repeat = None if costed.has_own_graph else costed.repeat
    bare = CostedModel(cast(Model, model.tables[_KEY]), costed.configuration, repeat)
    bare.partly_exact = True
    return Solver(bare, None if every_value else _representatives(bare))


def _without_times(model: Model) -> Model:
    bare = copy.copy(model)
    bare.tables, bare.points = {}, {}
    bare.outer = Part(model.outer.variables, _bare_terms(model.outer))
    bare.links = tuple(Part(link.variables, _bare_terms(link)) for link in model.links)
    bare.shared_terms = list(map(_bare, model.shared_terms))
    return bare


def _bare_terms(part: Part) -> tuple[Term, ...]:
    """Terms of a part, but for those of nothing that is held or told apart."""
    return tuple(term for term in map(_bare, part.terms) if term.slots or term.producer_keeps)


def _bare(term: Term) -> Term:
    """A term whose redistributions cost nothing, as far as there are any.

    Where only one region reads the tensor and there is a way between all placements, two things no longer matter: in
    which placement a gradient arrives, and where readers want the tensor of which nothing is held for their sake. Of
    what several regions read a copy that they share is held when they run again, and destination and gradient tell
    which they share.
    """
    reachable = term.cost_ns < UNREACHABLE
    bare = replace(term, cost_ns=np.where(reachable, 0, term.cost_ns))
    regions = {slot.region for slot in term.slots}
    if len(regions) != 1 or not reachable.all():
        return bare
    bare = replace(bare, wanted=np.zeros_like(term.wanted), slots=tuple(_bare_slots(term)))
    if term.producer_keeps or regions != {term.producer_region}:
        return bare
    nowhere = np.zeros(1, dtype=np.int64)  # its own copy is held for nobody
    return replace(bare, producer=None, source=nowhere, wanted=nowhere)


def _bare_slots(term: Term) -> Iterator[Slot]:
    """The readers that may hold a copy; of others only that they run again in another region than the producer."""
    for slot in term.slots:
        holds = slot.kept or slot.rerun or term.producer is None
        if not holds and slot.region == term.producer_region:
            continue
        yield replace(
            slot,
            destination=slot.destination if holds else np.zeros_like(slot.destination),
            gradient=np.full_like(slot.gradient, -1),
        )


def _representatives(costed: CostedModel) -> Mapping[int, np.ndarray]:
    """By class of variable, the first of the values that are alike in all that has to do with memory."""
    model = costed.model
    columns: dict[int, list[np.ndarray]] = {}
    for variable, column in _columns(costed):
        columns.setdefault(model.class_of_variable(variable), []).append(column)
    found: dict[int, np.ndarray] = {}
    for key, stacked in columns.items():
        _, first = np.unique(np.stack(stacked), axis=1, return_index=True)
        found[key] = np.sort(first)
    return found


def _columns(costed: CostedModel) -> Iterator[tuple[int, np.ndarray]]:
    """(variable, [values] something that memory depends on), for all variables but settings."""
    model = costed.model
    level = costed.configuration.settings.whole_level
    for part in (model.outer, *model.links):
        for variable in part.variables:
            if variable < model.num_operators:
                yield variable, costed.result_bytes(variable)
            yield variable, costed.whole_bytes(variable, level)
            for _, num_bytes in costed.parameter_costs(variable).values():
                yield from ((variable, row) for row in num_bytes)
    for term in (*model.shared_terms, *(term for part in (model.outer, *model.links) for term in part.terms)):
        if term.producer is not None:
            yield term.producer, term.source
            yield term.producer, term.wanted
        for slot in term.slots:
            yield slot.variable, slot.destination
            yield slot.variable, slot.gradient
