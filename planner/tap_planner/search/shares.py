"""Shares: who bears how much of a term of many consumers in the relaxed model, and how shares are moved."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tap_planner.search.choices import Choices
from tap_planner.search.costing import CostedModel
from tap_planner.search.model import Model, PartKind
from tap_planner.search.terms import PARTS, Term
from tap_planner.search.views import views_of

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

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> Shares:
        """Shares from what ``rows`` gave."""
        edges: dict[str, dict[tuple[int, int], Sequence[int]]] = {}
        copies: dict[str, dict[int, Sequence[int]]] = {}
        for tensor, key, parts in rows:
            if len(key) == 1:
                copies.setdefault(tensor, {})[key[0]] = parts
            else:
                edges.setdefault(tensor, {})[key[0], key[1]] = parts
        return cls(edges=edges, copies=copies)

    def rows(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """(tensor, destination and gradient or kept state, parts), in order."""
        edges = ((tensor, key, parts) for tensor, split in self.edges.items() for key, parts in split.items())
        copies = ((tensor, (state,), parts) for tensor, kept in self.copies.items() for state, parts in kept.items())
        for tensor, key, parts in sorted((*edges, *copies), key=lambda row: row[:2]):
            yield tensor, key, tuple(parts)

    def __bool__(self) -> bool:
        return bool(self.edges or self.copies)

    def __hash__(self) -> int:
        return hash((frozenset(self.edges), frozenset(self.copies)))


NO_SHARES = Shares()
"""Equal shares of everything."""


def is_shared_out(term: Term) -> bool:
    """Whether the relaxed model replaces a term by shares."""
    return len(term.variables) > DENSE_ARITY


def wrong_shares(shares: Shares, model: Model) -> str | None:
    """What makes shares no lower bound; None if they are one.

    Whoever uses a destination pays its part: all of them together must not pay more than it costs.
    """
    parts_of = (model.part(kind, number) for kind, number in _parts(model))
    terms = {term.tensor: term for part in parts_of for term in part.terms if is_shared_out(term)}
    for tensor, key, parts in shares.rows():
        term = terms.get(tensor)
        if term is None:
            return f"shares out '{tensor}', which no several readers share"
        if len(parts) != len(term.slots) + (len(key) == 1):
            return f"shares out '{tensor}' among {len(parts)}"
        if len(key) == 1 and not 0 <= key[0] < len(term.state_bytes):
            return f"shares out a copy of '{tensor}' in a state that it has not"
        if min(parts, default=0) < 0 or sum(parts) > PARTS:
            return f"shares out more of '{tensor}' than there is"
    return None


def most_keepers(costed: CostedModel, term: Term, multiplicity: Sequence[int]) -> int:
    """The most readers that may keep a copy of a tensor, however regions recompute.

    Args:
        costed: says what regions may choose from.
        term: the tensor.
        multiplicity: how many occurrences every slot stands for.
    """
    count = sum(
        times
        for position, (slot, times) in enumerate(zip(term.slots, multiplicity, strict=True))
        if term.may_keep(position, costed.options(slot.region))
    )
    return count + (1 if term.producer_keeps else 0)


def move_shares(shares: Shares, costed: CostedModel, choices: Choices, step: float, *, with_memory: bool) -> Shares:
    """Move shares to where only users of a destination (keepers of a copy) bear its cost.

    Args:
        shares: where they are.
        costed: the model under the configuration.
        choices: an optimum under the present shares; they say who uses what.
        step: how much of the way to go.
        with_memory: whether the memory of copies matters.
    """
    edges, copies = dict(shares.edges), dict(shares.copies)
    for kind, number in _parts(costed.model):
        terms = [term for term in costed.model.part(kind, number).terms if is_shared_out(term)]
        if not terms:
            continue
        views = list(views_of(costed, choices, kind, number))
        for term in terms:
            used: dict[tuple[int, int], list[float]] = {}
            kept: dict[int, list[float]] = {}
            for view in views:
                values = [view.value(slot.variable) for slot in term.slots]
                _count_users(used, _wanted(term, values), len(term.slots), view.times)
                if with_memory and term.is_activation:
                    source = 0 if term.producer is None else view.value(term.producer)
                    keepers = term.kept_states(values, source, view.policy(term.regions))
                    _count_users(kept, keepers, len(term.slots) + 1, view.times)
            equal = [PARTS // len(term.slots)] * len(term.slots)
            edges[term.tensor] = _moved(edges.get(term.tensor, {}), used, equal, step)
            if kept:
                copies[term.tensor] = _moved(copies.get(term.tensor, {}), kept, _equal_copies(costed, term), step)
    return Shares(edges=edges, copies=copies)


def _equal_copies(costed: CostedModel, term: Term) -> list[int]:
    """Equal parts for all that may keep a copy, the producer last."""
    may = [term.may_keep(position, costed.options(slot.region)) for position, slot in enumerate(term.slots)]
    equal = PARTS // most_keepers(costed, term, [1] * len(term.slots))
    return [equal if keeps else 0 for keeps in (*may, term.producer_keeps)]


def _parts(model: Model) -> Iterator[tuple[PartKind, int]]:
    """Parts with terms of their own."""
    yield PartKind.OUTER, 0
    for number in range(len(model.links)):
        yield PartKind.LINK, number


def _wanted(term: Term, values: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """(position, (destination, gradient)) of every slot."""
    return [
        (position, (int(slot.destination[value]), int(slot.gradient[value])))
        for position, (slot, value) in enumerate(zip(term.slots, values, strict=True))
    ]


def _count_users(counted: dict[_Key, list[float]], users: Sequence[tuple[int, _Key]], width: int, times: int) -> None:
    """Add ``times`` units per key, shared equally by the positions that use it."""
    groups: dict[_Key, list[int]] = {}
    for position, key in users:
        groups.setdefault(key, []).append(position)
    for key, positions in groups.items():
        parts = counted.setdefault(key, [0.0] * width)
        for position in positions:
            parts[position] += times / len(positions)


def _moved(
    split: Mapping[_Key, Sequence[int]], used: Mapping[_Key, list[float]], equal: Sequence[int], step: float
) -> dict[_Key, Sequence[int]]:
    """A split of which the keys in use have gone ``step`` of the way towards their users."""
    moved = dict(split)
    for key, parts in used.items():
        present = split.get(key, equal)
        total = sum(parts)
        moved[key] = tuple(
            int(old * (1 - step) + PARTS * new / total * step) for old, new in zip(present, parts, strict=True)
        )
    return moved
