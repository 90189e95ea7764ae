"""The search's cost tables, read from its model: the one place of the benchmarks that knows how the model is built."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tap_planner.api import PreparedSearch
from tap_planner.folding import FoldedGraph
from tap_planner.search import (
    Assignment,
    Configuration,
    CostedModel,
    Model,
    Recompute,
    Settings,
    Solver,
    Weights,
    ZeroSetting,
    build_model,
)
from tap_planner.search.graph_index import GraphIndex
from tap_planner.search.model import PartKind
from tap_planner.search.terms import SCALE, UNREACHABLE, RegionPolicy, Term
from tap_planner.sharding import block_hints

Pair = tuple[int, int]
"""Two variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One operand that reads a shared tensor."""

    variable: int
    """Number of the reader's variable."""
    destination: np.ndarray
    """[strategies of the reader] state that the operand must have."""
    gradient: np.ndarray
    """[strategies of the reader] state of the gradient that backward makes; -1 where none is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """A tensor that several variables read: each (destination, gradient) in use is paid once."""

    producer: int
    """Number of the producer's variable."""
    source: np.ndarray
    """[strategies of the producer] state in which it is made."""
    wanted: np.ndarray
    """[strategies of the producer] state in which its gradient is wanted."""
    readers: tuple[Reader, ...]
    cost_ns: np.ndarray
    """[states, states] cost of a redistribution; from ``UNREACHABLE`` on it cannot be done."""

    def charge_ns(self, source: int, wanted: int, destination: int, gradient: int) -> int | None:
        """What one (destination, gradient) costs; None where it cannot be reached."""
        forward = int(self.cost_ns[source, destination])
        backward = int(self.cost_ns[gradient, wanted]) if gradient >= 0 else 0
        return None if max(forward, backward) >= UNREACHABLE else forward + backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """All costs of a graph without its repeats folded: time only, one fixed configuration."""

    own_ns: tuple[np.ndarray, ...]
    """Per variable [strategies] ns."""
    pairs: dict[Pair, np.ndarray]
    """Two variables (the smaller first) -> [strategies, strategies] ns; below 0 where they exclude each other."""
    shared: tuple[SharedTensor, ...]
    num_operators: int
    """The first variables are the operators, in graph order; the others are storages of parameters."""

    @property
    def mean_strategies(self) -> float:
        """Strategies of an operator, on average."""
        sizes = [len(own) for own in self.own_ns[: self.num_operators]]
        return sum(sizes) / len(sizes)

    def evaluate(self, values: Sequence[int]) -> int | None:
        """Time of one choice, in integers; None where it is not possible."""
        total = sum(int(own[value]) for own, value in zip(self.own_ns, values, strict=True))
        for (first, second), table in self.pairs.items():
            cost = int(table[values[first], values[second]])
            if cost < 0:
                return None
            total += cost
        for tensor in self.shared:
            source, wanted = (int(states[values[tensor.producer]]) for states in (tensor.source, tensor.wanted))
            used = {
                (int(reader.destination[values[reader.variable]]), int(reader.gradient[values[reader.variable]]))
                for reader in tensor.readers
            }
            for destination, gradient in used:
                charge = tensor.charge_ns(source, wanted, destination, gradient)
                if charge is None:
                    return None
                total += charge
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What the folded search took, and found."""

    tables_s: float
    """Variables, terms and the first tables of every part."""
    solve_s: float
    """Elimination, chains and whatever tables come later."""
    ns: int
    bound_ns: int
    values: tuple[int, ...]
    """The assignment, numbered as ``Tables`` are."""


def model_of(prepared: PreparedSearch, *, folded: bool) -> Model:
    """The model of a prepared request with one mesh, for one microbatch."""
    request = prepared.request
    whole = request.folded(1)
    (mesh,) = request.meshes
    return build_model(
        GraphIndex(whole if folded else FoldedGraph(graph=whole.graph, runs=())),
        request.cluster,
        mesh,
        request.precision,
        request.constraints(mesh, whole.graph),
        dict(block_hints(whole.graph)),
    )


def configuration_of(prepared: PreparedSearch) -> Configuration:
    """The one configuration of a prepared request."""
    request = prepared.request
    (zero,), (recompute,) = request.zero_levels, request.recomputes
    assert recompute == "none" and request.microbatches == 1
    return Configuration(
        settings=Settings(recomputes=(Recompute.NONE,), zeros=(ZeroSetting(level=zero, axes=None),), whole_level=zero),
        microbatches=1,
        optimizer=request.optimizer,
        precision=request.precision,
        training=request.training,
    )


def own_costs(costed: CostedModel, variable: int) -> tuple[np.ndarray, np.ndarray]:
    """([strategies] ns, [strategies] bytes) of a variable by itself, without room for whole copies, where there is one
    setting only."""
    ns = np.zeros(costed.domain(variable), dtype=np.int64)
    num_bytes = np.zeros_like(ns)
    if variable < costed.model.num_operators:
        (ns,) = costed.operator_ns(variable)
        num_bytes = costed.result_bytes(variable)
    for stored_ns, stored_bytes in costed.parameter_costs(variable).values():
        ns, num_bytes = ns + stored_ns[0], num_bytes + stored_bytes[0]
    return ns, num_bytes


def variables_of(model: Model) -> tuple[int, ...]:
    """The model's own numbers of its variables: operators in graph order, then the parameters with several readers."""
    return (*range(model.num_operators), *model.shared_parameters.values())


def unfolded_tables(prepared: PreparedSearch) -> tuple[Tables, float]:
    """Tables of every operator of every layer, and the seconds that making them took."""
    started = time.perf_counter()
    model = model_of(prepared, folded=False)
    tables = tables_of(CostedModel(model, configuration_of(prepared)))
    return tables, time.perf_counter() - started


def tables_of(costed: CostedModel) -> Tables:
    """Tables of an unfolded model without recomputation."""
    model = costed.model
    assert not model.runs and not model.shared_terms
    numbers = {variable: number for number, variable in enumerate(variables_of(model))}
    pairs: dict[Pair, np.ndarray] = {}
    shared: list[SharedTensor] = []
    own = [own_costs(costed, variable)[0].copy() for variable in numbers]
    cache: dict[tuple[object, ...], np.ndarray] = {}
    for term in model.outer.terms:
        variables = [numbers[variable] for variable in term.variables]
        if term.producer is None or len(variables) == 1:  # a graph input, or an output that only backward reads
            assert all((slot.gradient < 0).all() for slot in term.slots)
            continue
        if len(variables) > 2:
            shared.append(_shared_tensor(term, numbers))
            continue
        _add_pair(pairs, (variables[0], variables[1]), _dense_ns(term, costed.policy({}, PartKind.OUTER, 0), cache))
    return Tables(own_ns=tuple(own), pairs=pairs, shared=tuple(shared), num_operators=model.num_operators)


def _dense_ns(term: Term, policy: RegionPolicy, cache: dict[tuple[object, ...], np.ndarray]) -> np.ndarray:
    """[producer strategies, reader strategies] ns; below 0 where it cannot be. Equal layers have equal tables."""
    slots = tuple((id(slot.destination), id(slot.gradient)) for slot in term.slots)
    key = (id(term.source), id(term.wanted), id(term.cost_ns), slots)
    if key not in cache:
        sizes = (len(term.source), len(term.slots[0].destination))
        ns, _ = term.dense([np.arange(size) for size in sizes], policy)
        ns = ns // SCALE
        cache[key] = np.where(ns >= UNREACHABLE, -1, ns)
    return cache[key]


def _add_pair(pairs: dict[Pair, np.ndarray], pair: Pair, table: np.ndarray) -> None:
    if pair[0] > pair[1]:
        pair, table = (pair[1], pair[0]), table.T
    if pair in pairs:
        other = pairs[pair]
        table = np.where((table < 0) | (other < 0), -1, table + other)
    pairs[pair] = table


def _shared_tensor(term: Term, numbers: dict[int, int]) -> SharedTensor:
    assert term.producer is not None
    return SharedTensor(
        producer=numbers[term.producer],
        source=term.source,
        wanted=term.wanted,
        readers=tuple(
            Reader(variable=numbers[slot.variable], destination=slot.destination, gradient=slot.gradient)
            for slot in term.slots
        ),
        cost_ns=term.cost_ns,
    )


def folded_search(prepared: PreparedSearch, runs: int) -> Folded:
    """Tables and solution of the folded model: the median times of several runs.

    Tables that the solution needs later (exact ones, and relaxed ones whose shares have moved) count as solving.
    """
    attempts = [_solve_folded(prepared) for _ in range(runs)]
    assert len({(attempt.ns, attempt.bound_ns, attempt.values) for attempt in attempts}) == 1
    middle: Callable[[list[float]], float] = statistics.median
    return Folded(
        tables_s=middle([attempt.tables_s for attempt in attempts]),
        solve_s=middle([attempt.solve_s for attempt in attempts]),
        ns=attempts[0].ns,
        bound_ns=attempts[0].bound_ns,
        values=attempts[0].values,
    )


def _solve_folded(prepared: PreparedSearch) -> Folded:
    started = time.perf_counter()
    model = model_of(prepared, folded=True)
    solver = Solver(CostedModel(model, configuration_of(prepared)))
    solver.parts.tables(PartKind.OUTER, 0, False)
    for number in range(len(model.runs)):
        solver.parts.tables(PartKind.LINK, number, False)
        solver.parts.tables(PartKind.LAST, number, False)
    made = time.perf_counter()
    outcome = solver.optimum(Weights(1, 0))
    ended = time.perf_counter()
    assignment = outcome.assignment
    assert assignment is not None
    return Folded(
        tables_s=made - started,
        solve_s=ended - made,
        ns=outcome.ns,
        bound_ns=-(-outcome.bound // SCALE),
        values=_values(model, assignment),
    )


def _values(model: Model, assignment: Assignment) -> tuple[int, ...]:
    return (*assignment.operators, *(assignment.parameters[v] for v in model.shared_parameters.values()))
