"""The optimum of one or two layers is that of an independent mixed-integer program, with and without memory limits.

The program is written from the strategies, the redistribution costs and the rules of the cost model (``docs/``), not
from the search's terms; its solution is priced in integers over the lowered Program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from tap_planner.graph import Graph, Operator, Tensor, TensorKind
from tap_planner.search import Assignment, Configuration, CostedModel, Model, Recompute, Weights
from tap_planner.sharding import dual_placements
from tap_planner.simulate import price_program
from tests.bench.one_hot import OneHot, Solved, one_hot, solve_cp_sat, solve_highs
from tests.bench.tables import Tables, own_costs, tables_of
from tests.search.building import cluster_of, configuration_of, make_model, program_of, searched, solver_of
from tests.search.models import bound, decoder

SCALE = 12
FP32_BYTES = 4
Terms = Sequence[tuple[int, float]]
"""(column, coefficient)"""
Key = tuple[int, int]
"""(placement of an operand, placement of its gradient or -1)"""


@dataclass(slots=True)
class Program:
    """Columns with a time and a memory, and rows ``low <= sum <= high``."""

    ns: list[float] = field(default_factory=list)
    num_bytes: list[float] = field(default_factory=list)
    binary: list[bool] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def column(self, ns: float = 0.0, num_bytes: float = 0.0, *, binary: bool = False) -> int:
        """A new variable in [0, 1]."""
        self.ns.append(ns)
        self.num_bytes.append(num_bytes)
        self.binary.append(binary)
        return len(self.ns) - 1

    def row(self, terms: Iterable[tuple[int, float]], low: float, high: float) -> None:
        """A new constraint."""
        self.entries.extend((len(self.low), column, value) for column, value in terms)
        self.low.append(low)
        self.high.append(high)

    def at_least(self, column: int, terms: Terms, less: float = 0.0) -> None:
        """``column >= sum of terms - less``"""
        self.row([(column, 1.0), *((other, -value) for other, value in terms)], -less, np.inf)

    def solve(self, *, memory: bool, limit_bytes: int | None) -> np.ndarray:
        """Values of the columns at the optimum (HiGHS).

        Args:
            memory: minimise memory instead of time.
            limit_bytes: memory limit.
        """
        entries, low, high = list(self.entries), list(self.low), list(self.high)
        if limit_bytes is not None:
            unit = int(np.gcd.reduce(np.array(self.num_bytes, dtype=np.int64)))  # small numbers are kept exactly
            entries.extend((len(low), column, value / unit) for column, value in enumerate(self.num_bytes) if value)
            low.append(-np.inf)
            high.append(float(limit_bytes // unit))
        rows, columns, values = (np.array(part) for part in zip(*entries, strict=True))
        matrix = coo_array((values, (rows, columns)), shape=(len(low), len(self.ns))).tocsr()
        result = milp(
            c=np.array(self.num_bytes if memory else self.ns),
            integrality=np.array(self.binary, dtype=int),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, np.array(low), np.array(high)),  # pyright: ignore[reportArgumentType]
            options={"mip_rel_gap": 0.0, "time_limit": 600.0},
        )
        assert result.status == 0, result.message
        return result.x


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """Where recomputation happens: in every occurrence of a run, if it happens at all."""

    region_of: Sequence[int]
    """Per operator."""
    last: frozenset[int]
    """The last occurrence of every run."""
    recomputed: frozenset[int]

    def held(self, region: int) -> bool:
        """Whether what backward reads in a region is held from forward; the last one stands for the working set."""
        return region not in self.recomputed or region in self.last


def regions_of(model: Model, configuration: Configuration) -> Regions:
    """Regions of the folded graph under a setting that holds for all of them."""
    region_of = [int(region) for region in model.region_of]
    recomputed: set[int] = set()
    last: set[int] = set()
    for run in model.runs_in_use:
        end = run.start + run.count * run.period
        last.add(region_of[end - 1])
        if configuration.settings.recomputes == (Recompute.FULL,):
            recomputed.update(region_of[run.start : end])
    return Regions(region_of=region_of, last=frozenset(last), recomputed=frozenset(recomputed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One operand that reads a tensor."""

    region: int
    kept: bool
    """Whether the operator's backward reads the operand."""
    columns: dict[Key, list[int]]
    """The strategies that want the operand and its gradient in given placements."""


class StrategyProgram:
    """One binary per strategy; per tensor a fixed charge for each (source, destination, gradient) in use, and one for
    each placement in which a copy is held for backward."""

    def __init__(self, model: Model, costed: CostedModel) -> None:
        assert not model.shared_parameters
        self.model = model
        self.graph: Graph = model.graph
        self.regions = regions_of(model, costed.configuration)
        self.program = Program()
        self.workspace_bytes = costed.workspace_bytes
        """The same for every assignment."""
        self._copies: dict[tuple[str, int], int] = {}
        (self.zero,) = (zero.level for zero in costed.configuration.settings.zeros)
        self.chosen = [self._operator(index, *own_costs(costed, index)) for index in range(model.num_operators)]
        outputs = [name for operator in self.graph.operators for name in operator.outputs]
        for name in dict.fromkeys((*outputs, *model.space.index.consumers)):
            if self.graph.tensors[name].kind in (TensorKind.ACTIVATION, TensorKind.INPUT):
                self._tensor(name)

    def _operator(self, index: int, own_ns: np.ndarray, own_bytes: np.ndarray) -> list[int]:
        pairs = zip(own_ns.tolist(), (own_bytes + self._unsharded_bytes(index)).tolist(), strict=True)
        columns = [self.program.column(ns, num_bytes, binary=True) for ns, num_bytes in pairs]
        self.program.row([(column, 1.0) for column in columns], 1.0, 1.0)
        return columns

    def _unsharded_bytes(self, index: int) -> np.ndarray:
        """[strategies] bytes of whole copies beside ZeRO's shards: of parameters that the last occurrence of a run
        reads, its gradients at level 2 and 3 and itself at level 3. (No parameter here is as large as a bucket.)"""
        space = self.model.space
        total = np.zeros(len(space.operator(index).strategies), dtype=np.int64)
        each = FP32_BYTES * ((self.zero >= 2) + (self.zero >= 3))
        if self.regions.region_of[index] not in self.regions.last:
            return total
        for position, name in enumerate(self.graph.operators[index].inputs):
            read = None if name is None else self.graph.tensors[name].read
            if read is None or not space.trainable(read.parameter):
                continue
            shape = next(p.type.shape for p in self.graph.parameters if p.name == read.parameter)
            states = (self.model.stored(index, position, strategy) for strategy in range(len(total)))
            total += [each * space.local_elements(shape, s.placement) if s.data_axes else 0 for s in states]
        return total

    def _tensor(self, name: str) -> None:
        space, tensor = self.model.space, self.graph.tensors[name]
        table = space.table(tensor.type)
        producer = self.model.producer_of(name)
        uses = [self._use(index, operand, tensor) for index, operand in space.index.consumers.get(name, ())]
        held: dict[int, list[Terms]] = {}
        sources: dict[Key, list[int]] = {}
        if producer is not None:
            sources = self._sources(producer, name, tensor)
            _, kept = space.kept(self.graph.operators[producer])
            position = self.graph.operators[producer].outputs.index(name)
            if position in kept and self.regions.held(self.regions.region_of[producer]):
                _hold_sources(held, sources)
            self._redistribute(sources, uses, table.cost_ns)
        region = -1 if producer is None else self.regions.region_of[producer]
        for use in uses:
            if use.kept and self.regions.held(use.region):
                _hold_destinations(held, use)
            if use.region in self.regions.recomputed and use.region != region:
                # the boundary of a recomputed region
                _hold_destinations(held, use) if producer is None else _hold_sources(held, sources)
        for state, causes in held.items():
            column = self._copy(name, state)
            for terms in causes:
                self.program.at_least(column, terms)
        self._hold_across_regions(name, uses)

    def _copy(self, name: str, state: int) -> int:
        """A column for a copy of a tensor that is held once in a placement."""
        key = (name, state)
        if key not in self._copies:
            tensor = self.graph.tensors[name]
            states = self.model.space.table(tensor.type).states
            self._copies[key] = self.program.column(0.0, self.model.space.tensor_bytes(tensor, states[state]))
        return self._copies[key]

    def _hold_across_regions(self, name: str, uses: Sequence[Use]) -> None:
        """A redistributed copy that several regions read is held where one of them is recomputed."""
        for number, use in enumerate(uses):
            for other in uses[:number]:
                if use.region == other.region or not self.regions.recomputed & {use.region, other.region}:
                    continue
                for key in use.columns.keys() & other.columns.keys():
                    both = [(column, 1.0) for column in (*use.columns[key], *other.columns[key])]
                    self.program.at_least(self._copy(name, key[0]), both, less=1.0)

    def _sources(self, producer: int, name: str, tensor: Tensor) -> dict[Key, list[int]]:
        """(placement made, placement in which the gradient is wanted) -> strategies."""
        table = self.model.space.table(tensor.type)
        position = self.graph.operators[producer].outputs.index(name)
        sources: dict[Key, list[int]] = {}
        strategies = self.model.space.operator(producer).strategies
        for column, strategy in zip(self.chosen[producer], strategies, strict=True):
            placements = strategy.outputs[position]
            key = (table.index[placements], table.index[dual_placements(placements)])
            sources.setdefault(key, []).append(column)
        return sources

    def _use(self, index: int, operand: int, tensor: Tensor) -> Use:
        space, operator = self.model.space, self.graph.operators[index]
        table = space.table(tensor.type)
        needed = space.requires_gradient(operator)[operand]
        columns: dict[Key, list[int]] = {}
        for column, strategy in zip(self.chosen[index], space.operator(index).strategies, strict=True):
            placements, gradient = strategy.inputs[operand], strategy.input_gradients[operand]
            assert placements is not None and gradient is not None
            key = (table.index[placements], table.index[gradient] if needed else -1)
            columns.setdefault(key, []).append(column)
        return Use(region=self.regions.region_of[index], kept=self._is_kept(operator, operand), columns=columns)

    def _is_kept(self, operator: Operator, operand: int) -> bool:
        return operand in self.model.space.kept(operator)[0]

    def _redistribute(self, sources: dict[Key, list[int]], uses: Sequence[Use], cost_ns: np.ndarray) -> None:
        """Every use couples the producer's state with its own by a transport; a charge covers all uses."""
        flows = [self._transport(sources, use) for use in uses]
        for source in sources:
            for key in {key: None for use in uses for key in use.columns}:
                forward = float(cost_ns[source[0], key[0]])
                backward = float(cost_ns[key[1], source[1]]) if key[1] >= 0 else 0.0
                reading = [
                    (use.region, flow[source, key]) for use, flow in zip(uses, flows, strict=True) if key in use.columns
                ]
                if forward + backward:
                    charge = self.program.column(forward + backward)
                    for _, column in reading:
                        self.program.at_least(charge, [(column, 1.0)])
                if forward:
                    self._repeat(forward, reading)

    def _repeat(self, forward: float, reading: Sequence[tuple[int, int]]) -> None:
        """What only one region reads, and that region is recomputed, is redistributed again with it."""
        for region in {region: None for region, _ in reading if region in self.regions.recomputed}:
            again = self.program.column(forward)
            others = [(column, -1.0) for other, column in reading if other != region]
            for other, column in reading:
                if other == region:
                    self.program.at_least(again, [(column, 1.0), *others])

    def _transport(self, sources: dict[Key, list[int]], use: Use) -> dict[tuple[Key, Key], int]:
        program = self.program
        flow = {(source, key): program.column() for source in sources for key in use.columns}
        for source, columns in sources.items():
            ends = [(flow[source, key], 1.0) for key in use.columns]
            program.row([*ends, *((column, -1.0) for column in columns)], 0.0, 0.0)
        for key, columns in use.columns.items():
            ends = [(flow[source, key], 1.0) for source in sources]
            program.row([*ends, *((column, -1.0) for column in columns)], 0.0, 0.0)
        return flow

    def solve(self, *, memory: bool = False, limit_bytes: int | None = None) -> Assignment:
        """The strategies of the optimum."""
        left = None if limit_bytes is None else limit_bytes - self.workspace_bytes
        values = self.program.solve(memory=memory, limit_bytes=left)
        return Assignment(operators=tuple(int(np.argmax(values[c])) for c in self.chosen), parameters={})


def _hold_sources(held: dict[int, list[Terms]], sources: dict[Key, list[int]]) -> None:
    for (state, _), columns in sources.items():
        held.setdefault(state, []).append([(column, 1.0) for column in columns])


def _hold_destinations(held: dict[int, list[Terms]], use: Use) -> None:
    for (state, _), columns in use.columns.items():
        held.setdefault(state, []).append([(column, 1.0) for column in columns])


@functools.cache
def model_of(kind: str, shape: tuple[int, ...], layers: int = 1) -> Model:
    """A few layers."""
    kv_heads = 2 if kind == "llama" else 4
    return make_model(bound(decoder(kind, layers=layers, kv_heads=kv_heads), batch=16, dims={"seq": 16}), shape)


def priced(model: Model, configuration: Configuration, assignment: Assignment) -> tuple[int, int]:
    """(ns, bytes) of an assignment over its lowered Program."""
    program = program_of(model, configuration, assignment)
    price = price_program(program, cluster_of(model.space.mesh_shape))
    return price.objective_ns, price.memory_bytes


def check(kind: str, shape: tuple[int, ...], zero: int) -> None:
    """Equal after re-evaluating the program's solution in integers."""
    model = model_of(kind, shape)
    configuration = configuration_of(zero=zero)
    solver = solver_of(model, configuration)
    found = solver.optimum(Weights(1, 0))
    assignment = StrategyProgram(model, solver.costed).solve()
    assert (priced(model, configuration, assignment)[0], found.bound) == (found.ns, SCALE * found.ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model under settings that hold for all of it, and limits as shares of the way from the least memory to that of
    the fastest plan."""

    kind: str
    shape: tuple[int, ...]
    layers: int = 1
    zero: int = 0
    recompute: str = "none"
    shares: tuple[float, ...] = (0.0, 0.3, 0.7)


def check_limits(case: Case) -> None:
    """Under every limit, objective and bound of the search are those of the program, re-evaluated in integers."""
    model = model_of(case.kind, case.shape, case.layers)
    configuration = configuration_of(zero=case.zero, recompute=case.recompute)
    program = StrategyProgram(model, solver_of(model, configuration).costed)
    _, least = priced(model, configuration, program.solve(memory=True))
    free_ns, most = priced(model, configuration, program.solve())
    assert searched(model, configuration, None).objective_ns == free_ns
    assert least < most
    for limit in dict.fromkeys(least + int(share * (most - least)) for share in case.shares):
        ns, num_bytes = priced(model, configuration, program.solve(limit_bytes=limit))
        result = searched(model, configuration, limit)
        assert num_bytes <= limit and result.memory_bytes <= limit
        assert (result.objective_ns, result.bound_ns) == (ns, ns)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_one_layer_on_four_devices(kind: str) -> None:
    """A layer with its embedding, head and loss, on one axis of four."""
    check(kind, (4,), 0)


def test_one_layer_within_limits() -> None:
    """A GPT block on one axis of four, at and above the least memory that any plan needs."""
    check_limits(Case(kind="gpt", shape=(4,)))


@functools.cache
def one_hot_of_two_layers(tied: bool) -> tuple[int, OneHot, Tables]:
    """Optimum of the folded search, and Alpa's program on the unfolded tables of the same model."""
    graph = bound(decoder("gpt", layers=2, tied=tied), batch=16, dims={"seq": 16})
    found = solver_of(make_model(graph, (2,)), configuration_of(zero=1)).optimum(Weights(1, 0))
    assert found.bound == SCALE * found.ns
    tables = tables_of(CostedModel(make_model(graph, (2,), folded=False), configuration_of(zero=1)))
    return found.ns, one_hot(tables), tables


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("solve", [solve_highs, solve_cp_sat])
def test_one_hot_program_of_alpa(solve: Callable[[OneHot, float], Solved], tied: bool) -> None:
    """Two layers, unfolded, in Alpa's formulation: the folded search has the same optimum, by either solver."""
    optimum, program, tables = one_hot_of_two_layers(tied)
    solved = solve(program, 300.0)
    assert solved.finished and solved.values is not None
    assert tables.evaluate(solved.values) == optimum


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("zero", [0, 2])
def test_one_layer_on_two_axes(kind: str, zero: int) -> None:
    """The same on 2 x 2."""
    check(kind, (2, 2), zero)


LIMITED = [
    *(Case(kind="gpt", shape=(4,), zero=zero) for zero in (1, 2, 3)),
    Case(kind="llama", shape=(4,)),
    Case(kind="gpt", shape=(2, 2), shares=(0.3,)),
    *(Case(kind="gpt", shape=(4,), layers=2, zero=zero, recompute="full") for zero in (0, 3)),
    Case(kind="gpt", shape=(4,), layers=2),
]


@pytest.mark.full
@pytest.mark.parametrize("case", LIMITED, ids=str)
def test_limits_under_every_setting(case: Case) -> None:
    """The same with ZeRO, with recomputation of two layers, and on two axes."""
    check_limits(case)
