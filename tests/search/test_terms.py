"""Terms: the dense table against point prices, and shares as lower bounds of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tap_planner.search import Recompute
from tap_planner.search.factors import WidthError
from tap_planner.search.patterns import PatternTerm
from tap_planner.search.terms import PARTS, SCALE, RegionPolicy, Slot, Term
from tap_planner.search.wide import widen


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A random term under a policy."""

    term: Term
    policy: RegionPolicy
    sizes: dict[int, int]
    """Number of strategies per variable."""

    @property
    def alive(self) -> list[np.ndarray]:
        """All strategies of the term's variables."""
        return [np.arange(self.sizes[v]) for v in self.term.variables]

    def points(self) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
        """(values of the variables, exact price) of every combination."""
        term = self.term
        found: list[tuple[tuple[int, ...], tuple[int, int]]] = []
        for values in itertools.product(*(range(self.sizes[v]) for v in term.variables)):
            chosen = dict(zip(term.variables, values, strict=True))
            strategies = [(chosen[slot.variable], slot.region) for slot in term.slots]
            source = 0 if term.producer is None else chosen[term.producer]
            found.append((values, term.point(strategies, source, self.policy)))
        return found


@st.composite
def cases(draw: st.DrawFn, *, one_region: bool = False, distinct: bool = False) -> Case:
    """One to four slots, of which several may be operands of one operator, in up to three regions."""
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    states = chance.randint(1, 4)
    producer_rerun = chance.random() < 0.3
    regions = 1 if one_region or producer_rerun else 3
    count = chance.randint(1, 4)
    consumers = list(range(1, count + 1)) if distinct else [chance.randint(1, 3) for _ in range(count)]
    region_of = {v: chance.randrange(regions) for v in {0, *consumers}}
    sizes = {v: chance.randint(1, 3) for v in {0, *consumers}}
    producer = 0 if producer_rerun else draw(st.sampled_from([0, 0, None]))
    rerun_of = {v: chance.random() < 0.4 for v in consumers}
    is_activation = producer is None or draw(st.booleans())
    trains = draw(st.booleans())

    def indices(size: int) -> np.ndarray:
        return np.array([chance.randrange(states) for _ in range(size)], dtype=np.int64)

    slots = tuple(
        Slot(
            variable=v,
            destination=indices(sizes[v]),
            gradient=indices(sizes[v]) if trains and chance.random() < 0.8 else np.full(sizes[v], -1),
            kept=chance.random() < 0.5,
            region=region_of[v],
            rerun=rerun_of[v],
        )
        for v in consumers
    )
    cost = np.array([[0 if a == b else chance.randint(1, 99) for b in range(states)] for a in range(states)])
    source_size = sizes[0] if producer is not None else 1
    modes = {r: chance.choice(list(Recompute)) for r in range(regions)}
    return Case(
        term=Term(
            tensor="t",
            producer=producer,
            producer_region=region_of[0] if producer is not None else -1,
            source=indices(source_size) if producer is not None else np.zeros(1, dtype=np.int64),
            wanted=indices(source_size) if producer is not None else np.zeros(1, dtype=np.int64),
            producer_keeps=producer is not None and is_activation and chance.random() < 0.5,
            is_activation=is_activation,
            slots=slots,
            cost_ns=cost,
            state_bytes=np.array([chance.randint(1, 99) for _ in range(states)]),
            producer_rerun=producer_rerun,
        ),
        policy=RegionPolicy(modes=modes, working=frozenset(r for r in modes if chance.random() < 0.3)),
        sizes=sizes,
    )


@given(cases())
@settings(max_examples=250)
def test_the_dense_table_is_the_point_price(case: Case) -> None:
    """Every entry of the dense tables is the exact price of that combination."""
    ns, num_bytes = case.term.dense(case.alive, case.policy)
    for values, point in case.points():
        assert (int(ns[values]), int(num_bytes[values])) == (point[0] * SCALE, point[1] * SCALE)


@given(cases())
@settings(max_examples=100)
def test_the_dense_table_of_what_is_alive(case: Case) -> None:
    """Restricted to alive strategies the dense tables are those rows of the whole ones."""
    ns, num_bytes = case.term.dense(case.alive, case.policy)
    kept = [values[::2] for values in case.alive]
    restricted_ns, restricted_bytes = case.term.dense(kept, case.policy)
    assert restricted_ns.tolist() == ns[np.ix_(*kept)].tolist()
    assert restricted_bytes.tolist() == num_bytes[np.ix_(*kept)].tolist()


Split = dict[tuple[int, int], list[int]]
KeptSplit = dict[int, list[int]]


def shared_prices(case: Case, split: Split, kept_split: KeptSplit) -> dict[tuple[int, ...], tuple[int, int]]:
    """Sum of the shares at every combination."""
    term, policy = case.term, case.policy
    source = np.arange(case.sizes[term.producer]) if term.producer is not None else np.zeros(1, dtype=np.int64)
    together = len({slot.region for slot in term.slots}) == 1
    keeping = sum(term.may_keep(position, list(Recompute)) for position in range(len(term.slots) + 1))
    times: list[np.ndarray] = []
    sizes: list[np.ndarray | None] = []
    for position, slot in enumerate(term.slots):
        alive = [source, np.arange(case.sizes[slot.variable])]
        times.append(term.shared_time(position, alive, policy.mode(slot.region), len(term.slots), together, split))
        sizes.append(term.shared_bytes(position, alive, policy, keeping, kept_split))
    own = term.shared_bytes(len(term.slots), [source], policy, keeping, kept_split)
    result: dict[tuple[int, ...], tuple[int, int]] = {}
    for values in itertools.product(*(range(case.sizes[v]) for v in term.variables)):
        chosen = dict(zip(term.variables, values, strict=True))
        row = 0 if term.producer is None else chosen[term.producer]
        cells = [(row, chosen[slot.variable]) for slot in term.slots]
        num_bytes = 0 if own is None else int(own[row, 0])
        num_bytes += sum(int(table[cell]) for table, cell in zip(sizes, cells, strict=True) if table is not None)
        result[values] = (sum(int(table[cell]) for table, cell in zip(times, cells, strict=True)), num_bytes)
    return result


def random_parts(chance: random.Random, count: int) -> list[int]:
    """Parts that add up to at most one."""
    cuts = sorted(chance.randint(0, PARTS) for _ in range(count))
    return [b - a for a, b in zip([0, *cuts], cuts, strict=False)]


def random_splits(case: Case, seed: int) -> tuple[Split, KeptSplit]:
    """For some destinations and some kept states random parts."""
    chance = random.Random(seed)
    split: Split = {}
    for slot in case.term.slots:
        for key in zip(slot.destination.tolist(), slot.gradient.tolist(), strict=True):
            if chance.random() < 0.5:
                split[key] = random_parts(chance, len(case.term.slots))
    states = [state for state in range(len(case.term.state_bytes)) if chance.random() < 0.5]
    return split, {state: random_parts(chance, len(case.term.slots) + 1) for state in states}


@given(cases(), st.none() | st.integers(0, 1 << 30))
@settings(max_examples=250)
def test_shares_are_a_lower_bound(case: Case, seed: int | None) -> None:
    """Summed shares never exceed the exact price, neither in time nor in memory, whatever the legal split."""
    summed = shared_prices(case, *(({}, {}) if seed is None else random_splits(case, seed)))
    for values, (ns, num_bytes) in case.points():
        assert summed[values][0] <= ns * SCALE
        assert summed[values][1] <= num_bytes * SCALE


@given(cases(one_region=True, distinct=True))
@settings(max_examples=150)
def test_shares_of_slots_that_agree_are_the_time(case: Case) -> None:
    """In one region, where all slots want the same destination and gradient, the shares add up to the exact time (where
    only some need a copy that is made again, the others bear no part of that)."""
    if case.term.producer_rerun and not all(slot.kept or slot.rerun for slot in case.term.slots):
        return
    summed = shared_prices(case, {}, {})
    for values, (ns, _) in case.points():
        chosen = dict(zip(case.term.variables, values, strict=True))
        wanted = {
            (int(slot.destination[chosen[slot.variable]]), int(slot.gradient[chosen[slot.variable]]))
            for slot in case.term.slots
        }
        if len(wanted) == 1:
            assert summed[values][0] == ns * SCALE


def test_three_consumers_of_one_destination_pay_once() -> None:
    """One resharded tensor with three consumers is paid once, forward and backward."""
    cost = np.array([[0, 7], [5, 0]])
    slots = tuple(
        Slot(variable=v, destination=np.array([1]), gradient=np.array([1]), kept=True, region=0) for v in (1, 2, 3)
    )
    term = Term(
        tensor="t",
        producer=0,
        producer_region=0,
        source=np.array([0]),
        wanted=np.array([0]),
        producer_keeps=False,
        is_activation=True,
        slots=slots,
        cost_ns=cost,
        state_bytes=np.array([16, 4]),
    )
    policy = RegionPolicy(modes={}, working=frozenset())
    assert term.point([(0, 0)] * 3, 0, policy) == (7 + 5, 4)
    recomputed = RegionPolicy(modes={0: Recompute.FULL}, working=frozenset())
    assert term.point([(0, 0)] * 3, 0, recomputed) == (7 + 7 + 5, 0)


@given(cases())
@settings(max_examples=150)
def test_a_set_variable_stands_for_all_consumers(case: Case) -> None:
    """Least over the sets that hold all demands, the cost of the set is the exact price (a set that holds more may cost
    less where regions recompute, never where there is one region)."""
    term = case.term
    if term.producer is None:
        return
    readers = dict.fromkeys(slot.variable for slot in term.slots)
    if term.producer in readers:
        return
    wide = widen(term, [(v, np.arange(case.sizes[v])) for v in readers], most=16)
    ns, num_bytes = wide.costs(np.arange(case.sizes[term.producer]), case.policy)
    for values, point in case.points():
        chosen = dict(zip(term.variables, values, strict=True))
        held = np.sum([table[:, chosen[reader]] for reader, table in wide.consumers], axis=0)
        smallest = min((bin(number + 1).count("1"), number) for number in range(wide.num_sets) if held[number] == 0)[1]
        row = chosen[term.producer]
        assert (int(ns[row, smallest]), int(num_bytes[row, smallest])) == (point[0] * SCALE, point[1] * SCALE)


@given(cases())
@settings(max_examples=400)
def test_a_pattern_variable_stands_for_all_consumers(case: Case) -> None:
    """Least over the patterns that readers allow, what readers cost alone less what agreeing saves is the exact price,
    in time and in memory at once; and no allowed pattern costs less."""
    term, policy = case.term, case.policy
    readers = tuple(dict.fromkeys(slot.variable for slot in term.slots))
    if term.producer in readers:
        return
    source = np.arange(1 if term.producer is None else case.sizes[term.producer])
    found = PatternTerm(term, [(v, np.arange(case.sizes[v])) for v in readers])
    try:
        savings = np.stack(found.savings(source, policy))
    except WidthError:
        full = [slot for slot in term.slots if policy.mode(slot.region) is Recompute.FULL]
        assert full and len({slot.region for slot in term.slots}) > 1
        return
    assert (savings <= 0).all()
    copy = np.stack(found.producers_copy(source, policy))
    alone = {reader: np.stack(found.alone(reader, source, policy)) for reader in readers}
    allowed = {reader: found.allowed(reader) for reader in readers}
    for values, point in case.points():
        chosen = dict(zip(term.variables, values, strict=True))
        row = 0 if term.producer is None else chosen[term.producer]
        fixed = copy[:, row] + sum(alone[reader][:, row, chosen[reader]] for reader in readers)
        legal = sum(allowed[reader][:, chosen[reader]] for reader in readers) == 0
        costs = fixed[:, None] + savings[:, row, :][:, legal]
        exact = (point[0] * SCALE, point[1] * SCALE)
        assert tuple(costs.min(axis=1)) == exact
        assert any(tuple(column) == exact for column in costs.T)
