"""One weighted minimisation: links are eliminated to matrices, runs are chains of them, then the outer part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tap_planner.search.chain import Chain
from tap_planner.search.choices import Choices
from tap_planner.search.composition import compose
from tap_planner.search.elimination import Elimination, eliminate, elimination_order
from tap_planner.search.factors import INFINITE, Factor
from tap_planner.search.model import PartKind
from tap_planner.search.parts import Parts
from tap_planner.search.pricing import price_choices
from tap_planner.search.weighting import Outcome, PartTables, Weights

RELAXED_TABLE_ENTRIES = 2_000_000
"""Buckets with larger tables are split in the relaxed model."""


class Minimisation:
    """One weighted minimisation: links, chains, outer part, and the way back.

    Args:
        parts: the tables.
        weights: what is minimised.
        exact: with exact terms, or relaxed.

    Raises:
        WidthError: a table would be too large.
    """

    def __init__(self, parts: Parts, weights: Weights, exact: bool) -> None:
        self._parts = parts
        self._model = parts.model
        self._weights = weights
        self._exact = exact
        self._split_above = None if exact else RELAXED_TABLE_ENTRIES
        self._links: list[tuple[Elimination, Elimination]] = []
        """Per run, its middle link and its last one."""
        self.chains: list[Chain] = []
        """Per run, the chain of its links."""
        for number in range(len(self._model.runs)):
            self._add_chain(number)
        self._outer = self._eliminate_outer()
        self.bound = int(self._outer.table)
        """Least SCALE x weighted cost; in the relaxed model a lower bound of it."""

    # -- elimination -------------------------------------------------------------------------------------------

    def _add_chain(self, number: int) -> None:
        middle = last = self._eliminate(PartKind.LINK, number)
        if self._weights.memory and self._parts.costed.last_differs:
            last = self._eliminate(PartKind.LAST, number)
        self._links.append((middle, last))
        count = self._model.runs[number].num_links - 1
        self.chains.append(Chain(self._matrix(middle, number), self._matrix(last, number), count))

    def _eliminate(self, kind: PartKind, number: int) -> Elimination:
        tables = self._parts.tables(kind, number, self._exact)
        if tables.order is None:
            tables.order = elimination_order(tables.domains, tables.scopes, tables.keep)
        factors = tables.weighted(self._weights)
        return eliminate(tables.domains, factors, tables.keep, tables.order, self._split_above)

    def _eliminate_outer(self) -> Elimination:
        outer = self._outer_tables()
        factors = [*outer.weighted(self._weights), *(self._chain_factor(n) for n in range(len(self.chains)))]
        domains = self._outer_domains(outer)
        if outer.order is None:
            outer.order = elimination_order(domains, [factor.scope for factor in factors], ())
        return eliminate(domains, factors, (), outer.order, self._split_above)

    def _outer_tables(self) -> PartTables:
        return self._parts.tables(PartKind.OUTER, 0, self._exact)

    def _outer_domains(self, outer: PartTables) -> dict[int, int]:
        """Sizes of the variables of the outer part and of all chains."""
        domains = dict(outer.domains)
        for number in range(len(self.chains)):
            domains.update(zip(self.chain_scope(number), self.chain_shape(number), strict=True))
        return domains

    # -- chains ------------------------------------------------------------------------------------------------

    def sizes(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of the shared variables, and of the boundary variables."""
        shared = tuple(self._parts.size(v) for v in self.shared_scope(number))
        boundary = tuple(self._parts.size(v) for v in self._model.runs[number].first_boundary)
        return shared, boundary

    def shared_scope(self, number: int) -> tuple[int, ...]:
        """Variables outside a run that all its links are coupled with."""
        return self._parts.shared_keep(number, self._exact)

    def _matrix(self, link: Elimination, number: int) -> np.ndarray:
        """[s, a, b]"""
        shared, boundary = self.sizes(number)
        states = math.prod(boundary)
        return link.table.reshape(math.prod(shared), states, states)

    def chain_scope(self, number: int) -> tuple[int, ...]:
        """Variables of the outer part that a chain depends on."""
        run = self._model.runs[number]
        return (*self.shared_scope(number), *run.first_boundary, *run.last_boundary)

    def chain_shape(self, number: int) -> tuple[int, ...]:
        """Sizes of the variables of ``chain_scope``."""
        shared, boundary = self.sizes(number)
        return (*shared, *boundary, *boundary)

    def _chain_factor(self, number: int) -> Factor:
        return Factor(self.chain_scope(number), self.chains[number].table.reshape(self.chain_shape(number)))

    def outside(self, number: int) -> np.ndarray:
        """[s, a, b] least cost of everything outside a chain."""
        outer = self._outer_tables()
        others = (self._chain_factor(other) for other in range(len(self.chains)) if other != number)
        factors = [*outer.weighted(self._weights), *others]
        keep = self.chain_scope(number)
        table = eliminate(self._outer_domains(outer), factors, keep, None, self._split_above).table
        shared, boundary = self.sizes(number)
        return table.reshape(math.prod(shared), math.prod(boundary), math.prod(boundary))

    # -- the way back ------------------------------------------------------------------------------------------

    def outcome(self) -> Outcome:
        """Bound, choices and their exact price."""
        if self.bound >= int(INFINITE):
            return Outcome(bound=self.bound, choices=None, ns=0, num_bytes=0)
        choices = self._choices()
        price = price_choices(self._parts.costed, choices)
        return Outcome(
            bound=self.bound,
            choices=choices,
            ns=price.ns,
            num_bytes=price.num_bytes,
            activation_bytes=price.activation_bytes,
        )

    def _choices(self) -> Choices:
        values: dict[int, int] = {}
        self._outer.backtrack(values)
        links = [self._walk(number, values) for number in range(len(self._model.runs))]
        return compose(self._parts.domains, self._weights, values, links)

    def _walk(self, number: int, values: Mapping[int, int]) -> list[tuple[Mapping[int, int], bool]]:
        """Cheapest occurrences of a run after the first, between the boundary states of the outer part, and whether
        each is the last."""
        run = self._model.runs[number]
        shared, boundary = self.sizes(number)
        s = _ravel([values[v] for v in self.shared_scope(number)], shared)
        a = _ravel([values[v] for v in run.first_boundary], boundary)
        b = _ravel([values[v] for v in run.last_boundary], boundary)
        path = self.chains[number].path(s, a, b)
        known: dict[tuple[int, int, bool], dict[int, int]] = {}
        occurrences: list[tuple[Mapping[int, int], bool]] = []
        for occurrence in range(1, run.num_links + 1):
            key = (path[occurrence - 1], path[occurrence], occurrence == run.num_links)
            if key not in known:
                known[key] = self._link_values(number, *key, values)
            occurrences.append((known[key], key[2]))
        return occurrences

    def _link_values(self, number: int, a: int, b: int, last: bool, values: Mapping[int, int]) -> dict[int, int]:
        """Cheapest values of a link's variables between the boundary states a and b."""
        run = self._model.runs[number]
        _, boundary = self.sizes(number)
        inner = {variable: values[variable] for variable in self.shared_scope(number)}
        inner.update(zip(run.first_boundary, _unravel(a, boundary), strict=True))
        inner.update(zip(run.second_boundary, _unravel(b, boundary), strict=True))
        self._links[number][1 if last else 0].backtrack(inner)
        return inner

    # -- marginals ---------------------------------------------------------------------------------------------

    def marginals(self) -> dict[int, np.ndarray]:
        """By class of variable, the least relaxed cost of every alive value over all its occurrences."""
        result: dict[int, np.ndarray] = {}
        self._merge(result, self._outer.marginals())
        for number, chain in enumerate(self.chains):
            around = chain.outside_of_links(self.outside(number))
            free = frozenset(self._model.runs[number].shared).difference(self.shared_scope(number))
            self._merge(result, self._links[number][0].marginals(around.reshape(self.chain_shape(number))), free)
        return result

    def _merge(
        self, result: dict[int, np.ndarray], found: Mapping[int, np.ndarray], foreign: frozenset[int] = frozenset()
    ) -> None:
        """Take over what is less; ``foreign`` variables were free in the part, which says nothing of their values."""
        for variable, costs in found.items():
            if self._parts.is_set(variable) or variable in foreign:
                continue
            key = self._model.class_of_variable(variable)
            result[key] = np.minimum(result[key], costs) if key in result else costs


def _ravel(values: Sequence[int], sizes: Sequence[int]) -> int:
    index = 0
    for value, size in zip(values, sizes, strict=True):
        index = index * size + value
    return index


def _unravel(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    values: list[int] = []
    for size in reversed(sizes):
        values.append(index % size)
        index //= size
    return tuple(reversed(values))
