"""Elimination and chains against enumeration."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tap_planner.search.chain import Chain, min_plus
from tap_planner.search.elimination import Elimination, eliminate
from tap_planner.search.factors import INFINITE, Factor, WidthError, join


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A random factor graph."""

    domains: dict[int, int]
    factors: tuple[Factor, ...]
    keep: tuple[int, ...]

    def total(self, values: tuple[int, ...]) -> int:
        """Cost of a whole assignment (variables are 0, 1, ...)."""
        cost = sum(int(factor.table[tuple(values[v] for v in factor.scope)]) for factor in self.factors)
        return min(cost, int(INFINITE))

    def everything(self) -> list[tuple[int, ...]]:
        """All assignments."""
        return list(itertools.product(*(range(size) for size in self.domains.values())))

    def least(self, fixed: dict[int, int]) -> int:
        """Least cost of the assignments that agree with ``fixed``."""
        agreeing = (a for a in self.everything() if all(a[v] == value for v, value in fixed.items()))
        return min(self.total(a) for a in agreeing)


@st.composite
def problems(draw: st.DrawFn, *, keep: bool = True) -> Problem:
    """Up to six variables, factors of up to three, a tenth of the entries forbidden."""
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    count = draw(st.integers(1, 6))
    domains = {v: chance.randint(1, 3) for v in range(count)}
    factors: list[Factor] = []
    for _ in range(draw(st.integers(1, 9))):
        scope = tuple(chance.sample(range(count), min(count, chance.randint(1, 3))))
        shape = tuple(domains[v] for v in scope)
        size = int(np.prod(shape))
        values = [int(INFINITE) if chance.random() < 0.1 else chance.randint(0, 50) for _ in range(size)]
        factors.append(Factor(scope, np.array(values, dtype=np.int64).reshape(shape)))
    kept = tuple(chance.sample(range(count), chance.randint(0, min(2, count)))) if keep else ()
    return Problem(domains=domains, factors=tuple(factors), keep=kept)


def solved(problem: Problem, split_above: int | None = None) -> Elimination:
    """The problem eliminated."""
    return eliminate(problem.domains, problem.factors, problem.keep, split_above=split_above)


@given(problems())
@settings(max_examples=150)
def test_the_table_is_the_least_cost_of_every_kept_assignment(problem: Problem) -> None:
    """Each entry over the kept variables is the least cost of all the others."""
    table = solved(problem).table
    for values in itertools.product(*(range(problem.domains[v]) for v in problem.keep)):
        assert int(table[values]) == problem.least(dict(zip(problem.keep, values, strict=True)))


@given(problems())
@settings(max_examples=150)
def test_backtracking_finds_an_assignment_of_that_cost(problem: Problem) -> None:
    """From every kept assignment that is allowed, backtracking reaches one whose cost is the table's entry."""
    elimination = solved(problem)
    for values in itertools.product(*(range(problem.domains[v]) for v in problem.keep)):
        if int(elimination.table[values]) >= int(INFINITE):
            continue
        assignment = dict(zip(problem.keep, values, strict=True))
        elimination.backtrack(assignment)
        whole = tuple(assignment[v] for v in problem.domains)
        assert problem.total(whole) == int(elimination.table[values])


@given(problems())
@settings(max_examples=150)
def test_min_marginals_are_exact(problem: Problem) -> None:
    """Every variable's marginal is the least total cost with it fixed, for every value."""
    marginals = solved(problem).marginals()
    for variable, size in problem.domains.items():
        assert [int(cost) for cost in marginals[variable]] == [
            problem.least({variable: value}) for value in range(size)
        ]


@given(problems(), st.integers(0, 1 << 30))
@settings(max_examples=100)
def test_min_marginals_with_costs_outside(problem: Problem, seed: int) -> None:
    """A cost added to each kept assignment enters every marginal."""
    shape = tuple(problem.domains[v] for v in problem.keep)
    outside = np.random.default_rng(seed).integers(0, 50, shape)
    added = Problem(
        domains=problem.domains, factors=(*problem.factors, Factor(problem.keep, outside)), keep=problem.keep
    )
    marginals = solved(problem).marginals(outside)
    for variable, size in problem.domains.items():
        assert [int(cost) for cost in marginals[variable]] == [added.least({variable: v}) for v in range(size)]


@given(problems(keep=False), st.integers(3, 12))
@settings(max_examples=150)
def test_split_buckets_give_lower_bounds(problem: Problem, split_above: int) -> None:
    """With buckets split, neither the optimum nor any marginal is above the true one."""
    elimination = solved(problem, split_above)
    assert int(elimination.table) <= problem.least({})
    for variable, costs in elimination.marginals().items():
        assert all(int(cost) <= problem.least({variable: value}) for value, cost in enumerate(costs))


@given(problems(keep=False))
@settings(max_examples=50)
def test_a_split_that_nothing_needs_changes_nothing(problem: Problem) -> None:
    """Where every bucket is small enough the bound is the optimum."""
    assert int(solved(problem, 10_000).table) == problem.least({})


def test_ties_go_to_the_smallest_value() -> None:
    """Among equally cheap values the one of smallest index is chosen."""
    elimination = eliminate({0: 3}, [Factor((0,), np.array([5, 2, 2]))])
    assignment: dict[int, int] = {}
    elimination.backtrack(assignment)
    assert assignment == {0: 1}


def test_too_large_a_table_is_refused() -> None:
    """A table above the limit raises instead of taking the memory."""
    with pytest.raises(WidthError, match="entries"):
        join([], tuple(range(9)), dict.fromkeys(range(9), 10))


# -- chains ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """A random chain of equal links and a last one."""

    link: np.ndarray
    last: np.ndarray
    count: int

    @property
    def size(self) -> int:
        """Boundary states."""
        return self.link.shape[1]

    def matrices(self) -> list[np.ndarray]:
        """Links in order."""
        return [self.link] * self.count + [self.last]

    def cost(self, s: int, states: list[int]) -> int:
        """Cost of a walk through boundary states."""
        matrices = self.matrices()
        walk = zip(matrices, states, states[1:], strict=False)
        return min(sum(int(matrix[s, a, b]) for matrix, a, b in walk), int(INFINITE))

    def walks(self, a: int, b: int) -> list[list[int]]:
        """All walks from a to b."""
        return [[a, *inner, b] for inner in itertools.product(range(self.size), repeat=self.count)]


def _matrix(chance: random.Random, batch: int, size: int) -> np.ndarray:
    values = [int(INFINITE) if chance.random() < 0.1 else chance.randint(0, 50) for _ in range(batch * size * size)]
    return np.array(values, dtype=np.int64).reshape(batch, size, size)


@st.composite
def chains(draw: st.DrawFn, *, equal: bool = False) -> Links:
    """Up to six links of up to three states."""
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    batch, size, count = chance.randint(1, 2), chance.randint(1, 3), draw(st.integers(0, 5))
    link = _matrix(chance, batch, size)
    return Links(link=link, last=link if equal else _matrix(chance, batch, size), count=count)


@given(chains())
@settings(max_examples=60)
def test_a_chain_costs_its_cheapest_walk(links: Links) -> None:
    """The table is the least cost over all walks, for every shared assignment and pair of ends."""
    table = np.minimum(Chain(links.link, links.last, links.count).table, INFINITE)
    for s, a, b in np.ndindex(table.shape):
        assert int(table[s, a, b]) == min(links.cost(s, walk) for walk in links.walks(a, b))


@given(chains())
@settings(max_examples=60)
def test_a_path_costs_what_the_table_says(links: Links) -> None:
    """The path between two ends has one state per boundary and the table's cost."""
    chain = Chain(links.link, links.last, links.count)
    for s, a, b in np.ndindex(chain.table.shape):
        if int(chain.table[s, a, b]) >= int(INFINITE):
            continue
        path = chain.path(s, a, b)
        assert (path[0], path[-1], len(path)) == (a, b, links.count + 2)
        assert links.cost(s, path) == int(chain.table[s, a, b])


@given(chains(equal=True), st.integers(0, 1 << 30))
@settings(max_examples=60)
def test_outside_of_links_is_the_rest_of_the_cheapest_whole(links: Links, seed: int) -> None:
    """With a link's cost added it is the least whole cost among walks that pass some link from a to b."""
    chain = Chain(links.link, links.last, links.count)
    outside = np.random.default_rng(seed).integers(0, 50, links.link.shape)
    found = chain.outside_of_links(outside)
    expected = np.full_like(found, INFINITE)
    for s, a, b in np.ndindex(links.link.shape):
        for walk in links.walks(a, b):
            for position, (start, end) in enumerate(itertools.pairwise(walk)):
                others = [
                    int(m[s, x, y])
                    for number, (m, x, y) in enumerate(zip(links.matrices(), walk, walk[1:], strict=False))
                    if number != position
                ]
                rest = min(sum(others) + int(outside[s, a, b]), int(INFINITE))
                expected[s, start, end] = min(int(expected[s, start, end]), rest)
    assert found.tolist() == expected.tolist()


def test_a_million_links_by_hand() -> None:
    """Powers are taken by squaring: a million links of cost 3 cost 3,000,000, and one changes state once."""
    link = np.array([[[3, 5], [7, 4]]], dtype=np.int64)
    table = Chain(link, link, 999_999).table
    assert table[0].tolist() == [[3_000_000, 3_000_002], [3_000_004, 3_000_006]]


def test_min_plus_by_hand() -> None:
    """Two products worked out on paper."""
    left = np.array([[[0, 4], [2, 1]]], dtype=np.int64)
    right = np.array([[[5, 1], [0, 9]]], dtype=np.int64)
    assert min_plus(left, right)[0].tolist() == [[4, 1], [1, 3]]
