"""The optimum of one layer is that of an independent mixed-integer program, re-evaluated in integers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from tap_planner.search import Assignment, CostedModel, Model, Weights
from tap_planner.sharding import dual_placements
from tests.search.building import configuration_of, make_model, solver_of
from tests.search.models import bound, decoder

SCALE = 12


@dataclass(slots=True)
class Program:
    """Columns with costs, and rows ``low <= sum <= high``."""

    costs: list[float] = field(default_factory=list)
    binary: list[bool] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def column(self, cost: float, *, binary: bool = False) -> int:
        """A new variable in [0, 1]."""
        self.costs.append(cost)
        self.binary.append(binary)
        return len(self.costs) - 1

    def row(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        """A new constraint."""
        self.entries.extend((len(self.low), column, value) for column, value in terms)
        self.low.append(low)
        self.high.append(high)

    def solve(self) -> np.ndarray:
        """Values of the columns at the optimum (HiGHS)."""
        rows, columns, values = (np.array(part) for part in zip(*self.entries, strict=True))
        matrix = coo_array((values, (rows, columns)), shape=(len(self.low), len(self.costs))).tocsr()
        result = milp(
            c=np.array(self.costs),
            integrality=np.array(self.binary, dtype=int),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, np.array(self.low), np.array(self.high)),  # pyright: ignore[reportArgumentType]
            options={"mip_rel_gap": 0.0, "time_limit": 300.0},
        )
        assert result.status == 0, result.message
        return result.x


class StrategyProgram:
    """One binary per strategy; per tensor a fixed charge for each (source, destination, gradient) in use."""

    def __init__(self, model: Model, costed: CostedModel) -> None:
        assert not model.shared_parameters
        self.model = model
        self.program = Program()
        self.chosen = [self._operator(costed.own(index)[0]) for index in range(model.num_operators)]
        for name in model.space.consumers:
            producer = model.producer_of(name)
            if producer is not None:
                self._tensor(name, producer)

    def _operator(self, own_ns: np.ndarray) -> list[int]:
        columns = [self.program.column(float(ns), binary=True) for ns in own_ns]
        self.program.row([(column, 1.0) for column in columns], 1.0, 1.0)
        return columns

    def _tensor(self, name: str, producer: int) -> None:
        """Every reader couples the producer's state with its own by a transport; a charge covers all readers."""
        graph, space = self.model.graph, self.model.space
        table = space.table(graph.tensors[name].type)
        position = graph.operators[producer].outputs.index(name)
        sources: dict[tuple[int, int], list[int]] = {}
        for column, strategy in zip(self.chosen[producer], space.operator(producer).strategies, strict=True):
            placements = strategy.outputs[position]
            key = (table.index[placements], table.index[dual_placements(placements)])
            sources.setdefault(key, []).append(column)
        charges: dict[tuple[tuple[int, int], tuple[int, int]], int] = {}
        for reader, operand in space.consumers[name]:
            needed = space.requires_gradient(graph.operators[reader])[operand]
            wanted: dict[tuple[int, int], list[int]] = {}
            for column, strategy in zip(self.chosen[reader], space.operator(reader).strategies, strict=True):
                placements, gradient = strategy.inputs[operand], strategy.input_gradients[operand]
                assert placements is not None and gradient is not None
                key = (table.index[placements], table.index[gradient] if needed else -1)
                wanted.setdefault(key, []).append(column)
            self._transport(sources, wanted, charges, table.cost_ns)

    def _transport(
        self,
        sources: dict[tuple[int, int], list[int]],
        wanted: dict[tuple[int, int], list[int]],
        charges: dict[tuple[tuple[int, int], tuple[int, int]], int],
        cost_ns: np.ndarray,
    ) -> None:
        program = self.program
        flow = {(s, d): program.column(0.0) for s in sources for d in wanted}
        for s, columns in sources.items():
            program.row([*((flow[s, d], 1.0) for d in wanted), *((column, -1.0) for column in columns)], 0.0, 0.0)
        for d, columns in wanted.items():
            program.row([*((flow[s, d], 1.0) for s in sources), *((column, -1.0) for column in columns)], 0.0, 0.0)
        for (s, d), column in flow.items():
            cost = int(cost_ns[s[0], d[0]]) + (int(cost_ns[d[1], s[1]]) if d[1] >= 0 else 0)
            if cost:
                charge = charges.setdefault((s, d), -1)
                if charge < 0:
                    charge = charges[s, d] = program.column(float(cost))
                program.row([(charge, 1.0), (column, -1.0)], 0.0, np.inf)

    def solve(self) -> Assignment:
        """The strategies of the optimum."""
        values = self.program.solve()
        return Assignment(operators=tuple(int(np.argmax(values[c])) for c in self.chosen), parameters={})


@functools.cache
def model_of(kind: str, shape: tuple[int, ...]) -> Model:
    """One layer."""
    kv_heads = 2 if kind == "llama" else 4
    return make_model(bound(decoder(kind, layers=1, kv_heads=kv_heads), batch=16, dims={"seq": 16}), shape)


def check(kind: str, shape: tuple[int, ...], zero: int) -> None:
    """Equal after re-evaluating the program's solution in integers."""
    model = model_of(kind, shape)
    solver = solver_of(model, configuration_of(zero=zero))
    found = solver.optimum(Weights(1, 0))
    assignment = StrategyProgram(model, solver.costed).solve()
    assert (solver.price(assignment)[0], found.bound) == (found.ns, SCALE * found.ns)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_one_layer_on_four_devices(kind: str) -> None:
    """A layer with its embedding, head and loss, on one axis of four."""
    check(kind, (4,), 0)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("zero", [0, 2])
def test_one_layer_on_two_axes(kind: str, zero: int) -> None:
    """The same on 2 x 2."""
    check(kind, (2, 2), zero)
