"""Shares: who bears how much of a term of many consumers in the relaxed model, and how shares are moved."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tap_planner.search.costing import CostedModel
from tap_planner.search.model import Model, PartKind
from tap_planner.search.terms import PARTS, RegionPolicy, Term
from tap_planner.search.weighting import Assignment

DENSE_ARITY = 2
"""Terms of at most so many variables are exact in the relaxed model too."""

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """By tensor, the parts (in 1/PARTS) of the readers in what they use; equal ones for what is not listed."""

    edges: Mapping[str, Mapping[tuple[int, int], Sequence[int]]] = field(default_factory=dict)
    """Per (destination, gradient), the part of every slot in the redistributions."""
    copies: Mapping[str, Mapping[int, Sequence[int]]] = field(default_factory=dict)
    """Per kept state, the part of every slot in the memory; the producer's part is last."""


def is_shared_out(term: Term) -> bool:
    """Whether the relaxed model replaces a term by shares."""
    return len(term.variables) > DENSE_ARITY


def move_shares(
    shares: Shares, costed: CostedModel, assignment: Assignment, step: float, *, with_memory: bool
) -> Shares:
    """Move shares to where only users of a destination (keepers of a copy) bear its cost.

    Args:
        shares: where they are.
        costed: the model under the configuration.
        assignment: an optimum under the present shares; it says who uses what.
        step: how much of the way to go.
        with_memory: whether the memory of copies matters.
    """
    edges, copies = dict(shares.edges), dict(shares.copies)
    for kind, number, term in _terms_shared_out(costed.model):
        policy = costed.part_policy(kind, number)
        used: dict[tuple[int, int], list[float]] = {}
        kept: dict[int, list[float]] = {}
        for shift in _occurrence_shifts(costed.model, kind, number):
            values = [assignment.value(slot.variable + shift) for slot in term.slots]
            _count_users(used, _wanted(term, values), len(term.slots))
            if with_memory and term.is_activation:
                source = _source(costed.model, term, assignment, shift)
                _count_users(kept, term.kept_states(values, source, policy), len(term.slots) + 1)
        edges[term.tensor] = _moved(edges.get(term.tensor, {}), used, PARTS // len(term.slots), step)
        if kept:
            equal = PARTS // _num_keepers(term, policy)
            copies[term.tensor] = _moved(copies.get(term.tensor, {}), kept, equal, step)
    return Shares(edges=edges, copies=copies)


def _terms_shared_out(model: Model) -> Iterator[tuple[PartKind, int, Term]]:
    """Terms that are shared out, with their part."""
    parts = [(PartKind.OUTER, 0), *((PartKind.LINK, number) for number in range(len(model.links)))]
    for kind, number in parts:
        for term in model.part(kind, number).terms:
            if is_shared_out(term):
                yield kind, number, term


def _occurrence_shifts(model: Model, kind: PartKind, number: int) -> range:
    """Distances from the second occurrence of a run to all later ones."""
    if kind is PartKind.OUTER:
        return range(1)
    run = model.runs[number]
    return range(0, run.num_links * len(run.first), len(run.first))


def _wanted(term: Term, values: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """(position, (destination, gradient)) of every slot."""
    return [
        (position, (int(slot.destination[value]), int(slot.gradient[value])))
        for position, (slot, value) in enumerate(zip(term.slots, values, strict=True))
    ]


def _source(model: Model, term: Term, assignment: Assignment, shift: int) -> int:
    """Strategy of a term's producer, in the occurrence at a distance if it lies in the run."""
    producer = term.producer
    if producer is None:
        return 0
    repeats = producer < model.num_operators and model.run_of[producer] >= 0
    return assignment.value(producer + shift if repeats else producer)


def _num_keepers(term: Term, policy: RegionPolicy) -> int:
    return len(term.kept_states([0] * len(term.slots), 0, policy))


def _count_users(counted: dict[_Key, list[float]], users: Sequence[tuple[int, _Key]], width: int) -> None:
    """Add one unit per key, shared equally by the positions that use it."""
    groups: dict[_Key, list[int]] = {}
    for position, key in users:
        groups.setdefault(key, []).append(position)
    for key, positions in groups.items():
        parts = counted.setdefault(key, [0.0] * width)
        for position in positions:
            parts[position] += 1 / len(positions)


def _moved(
    split: Mapping[_Key, Sequence[int]], used: Mapping[_Key, list[float]], equal: int, step: float
) -> dict[_Key, Sequence[int]]:
    """A split of which the keys in use have gone ``step`` of the way towards their users."""
    moved = dict(split)
    for key, parts in used.items():
        present = split.get(key, [equal] * len(parts))
        total = sum(parts)
        moved[key] = [
            int(old * (1 - step) + PARTS * new / total * step) for old, new in zip(present, parts, strict=True)
        ]
    return moved
