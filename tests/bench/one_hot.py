"""The one-hot integer program of Alpa (Zheng et al., OSDI 2022, section 4.2) over unfolded tables, and its solvers.

One binary per (operator, strategy), of which each operator has exactly one; one binary per (edge, pair of strategies),
with sum 1 and row and column sums that are at most the operators' binaries; the objective is linear in both.

Alpa charges every edge by itself. Here a tensor that several operators read is paid once for each (destination,
gradient placement) in use, so for such a tensor there is one more binary per (state of the producer, destination,
gradient) that costs anything, at least as large as the sum of the edge binaries that lead to it, for every reader. The
charge lies on it instead of on the edges. For a fixed state of the producer these are the distinct destinations in
use, so the optimum is that of the search. Edges on which nothing costs anything are left out.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from tests.bench.tables import Pair, SharedTensor, Tables

GRACE_S = 120.0
"""A solver that does not keep its own limit is ended so long after it."""
BUILD_S = 3600.0
"""Time that building a solver's model may take; it is not measured."""
MEMORY_BYTES = 16 << 30
"""Address space that a solver may take; beyond it, it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneHot:
    """Binary columns with integer costs, and rows ``low <= sum <= high`` with coefficients 1 and -1."""

    costs: np.ndarray
    """[columns] ns."""
    constant: int
    """What every choice costs."""
    upper: np.ndarray
    """[columns] 0 for what excludes itself, else 1."""
    rows: csr_array
    low: np.ndarray
    high: np.ndarray
    starts: np.ndarray
    """[variables + 1] first column of each variable's strategies."""

    def values_of(self, solution: np.ndarray) -> tuple[int, ...]:
        """The strategy of each variable."""
        pieces = zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True)
        return tuple(int(np.argmax(solution[start:stop])) for start, stop in pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What a solver did."""

    seconds: float
    """Solving alone."""
    finished: bool
    """Whether it proved its solution optimal."""
    failed: bool = False
    """Whether it ended without an answer before its time (out of memory)."""
    values: tuple[int, ...] | None
    """The best choice found."""


@dataclass(slots=True)
class _Builder:
    """Collects columns and rows."""

    costs: list[np.ndarray] = field(default_factory=list)
    upper: list[np.ndarray] = field(default_factory=list)
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    """(row, column, coefficient)"""
    low: list[np.ndarray] = field(default_factory=list)
    high: list[np.ndarray] = field(default_factory=list)
    num_columns: int = 0
    num_rows: int = 0

    def columns(self, costs: np.ndarray, upper: np.ndarray | None = None) -> int:
        """Add columns; returns the number of the first."""
        self.costs.append(costs)
        self.upper.append(np.ones(len(costs)) if upper is None else upper)
        self.num_columns += len(costs)
        return self.num_columns - len(costs)

    def new_rows(self, count: int, low: float, high: float) -> int:
        """Add rows; returns the number of the first."""
        self.low.append(np.full(count, low))
        self.high.append(np.full(count, high))
        self.num_rows += count
        return self.num_rows - count

    def put(self, rows: np.ndarray, columns: np.ndarray, coefficient: int) -> None:
        """Set coefficients."""
        self.entries.append((rows, columns, np.full(len(rows), coefficient, dtype=np.int64)))


def one_hot(tables: Tables) -> OneHot:
    """The integer program of the tables."""
    builder = _Builder()
    constant = sum(int(own.min()) for own in tables.own_ns)
    starts = [builder.columns(own - own.min()) for own in tables.own_ns]
    sizes = [len(own) for own in tables.own_ns]
    for start, size in zip(starts, sizes, strict=True):
        row = builder.new_rows(1, 1.0, 1.0)
        builder.put(np.full(size, row), np.arange(start, start + size), 1)
    edges: dict[Pair, int] = {}
    for pair, table in tables.pairs.items():
        if table.any():
            edges[pair] = _edge(builder, starts, pair, table)
    for tensor in tables.shared:
        _charge(builder, starts, sizes, edges, tensor)
    row, column, coefficient = (np.concatenate(part) for part in zip(*builder.entries, strict=True))
    return OneHot(
        costs=np.concatenate(builder.costs),
        constant=constant,
        upper=np.concatenate(builder.upper),
        rows=csr_array((coefficient, (row, column)), shape=(builder.num_rows, builder.num_columns)),
        low=np.concatenate(builder.low),
        high=np.concatenate(builder.high),
        starts=np.array([*starts, starts[-1] + sizes[-1]]),
    )


def _edge(builder: _Builder, starts: list[int], pair: Pair, table: np.ndarray) -> int:
    """Binaries of an edge, tied to the strategies of its two ends; returns the number of the first."""
    first, second = table.shape
    begin = builder.columns(np.maximum(table, 0).ravel(), (table >= 0).ravel().astype(float))
    columns = np.arange(begin, begin + table.size)
    row = builder.new_rows(1, 1.0, 1.0)
    builder.put(np.full(table.size, row), columns, 1)
    row = builder.new_rows(first, -np.inf, 0.0)
    builder.put(np.repeat(np.arange(row, row + first), second), columns, 1)
    builder.put(np.arange(row, row + first), np.arange(starts[pair[0]], starts[pair[0]] + first), -1)
    row = builder.new_rows(second, -np.inf, 0.0)
    builder.put(np.tile(np.arange(row, row + second), first), columns, 1)
    builder.put(np.arange(row, row + second), np.arange(starts[pair[1]], starts[pair[1]] + second), -1)
    return begin


def _charge(
    builder: _Builder, starts: list[int], sizes: list[int], edges: dict[Pair, int], tensor: SharedTensor
) -> None:
    """Edges of a shared tensor, and one binary for every destination that is paid once."""
    charges: dict[tuple[int, int, int, int], int] = {}
    for reader in tensor.readers:
        pair = (tensor.producer, reader.variable)
        producers, readers = sizes[pair[0]], sizes[pair[1]]
        turned = pair[0] > pair[1]
        key = (pair[1], pair[0]) if turned else pair
        if key not in edges:
            edges[key] = _edge(builder, starts, key, np.zeros((sizes[key[0]], sizes[key[1]]), dtype=np.int64))
        columns = np.arange(edges[key], edges[key] + producers * readers)
        columns = columns.reshape(readers, producers).T if turned else columns.reshape(producers, readers)
        leading: dict[tuple[int, int, int, int], list[int]] = {}
        for i in range(producers):
            for j in range(readers):
                states = (tensor.source[i], tensor.wanted[i], reader.destination[j], reader.gradient[j])
                leading.setdefault(tuple(int(state) for state in states), []).append(int(columns[i, j]))  # type: ignore[arg-type]
        for states, members in leading.items():
            cost = tensor.charge_ns(*states)
            if cost is None:
                row = builder.new_rows(1, 0.0, 0.0)
                builder.put(np.full(len(members), row), np.array(members), 1)
            elif cost:
                if states not in charges:
                    charges[states] = builder.columns(np.array([cost]))
                row = builder.new_rows(1, -np.inf, 0.0)
                builder.put(np.full(len(members), row), np.array(members), 1)
                builder.put(np.array([row]), np.array([charges[states]]), -1)


# -- solvers -----------------------------------------------------------------------------------------------------


def solve_highs(program: OneHot, limit_s: float) -> Solved:
    """HiGHS through scipy."""
    return _apart(_highs, program, limit_s)


def solve_cp_sat(program: OneHot, limit_s: float) -> Solved:
    """CP-SAT with one worker."""
    return _apart(_cp_sat, program, limit_s)


_Work = Callable[[OneHot, float, Connection], None]


def _apart(work: _Work, program: OneHot, limit_s: float) -> Solved:
    """Solve in a process of its own, so that a limit is kept even by a solver that does not look at the clock."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_confined, args=(work, program, limit_s, sender))
    process.start()
    sender.close()
    started = time.perf_counter()
    try:
        if not receiver.poll(BUILD_S):
            return Solved(seconds=0.0, finished=False, failed=True, values=None)
        receiver.recv()  # built
        started = time.perf_counter()
        if receiver.poll(limit_s + GRACE_S):
            return receiver.recv()
        return Solved(seconds=limit_s, finished=False, values=None)
    except EOFError:  # it failed, and said so on stderr
        return Solved(seconds=time.perf_counter() - started, finished=False, failed=True, values=None)
    finally:
        process.kill()
        process.join()


def _confined(work: _Work, program: OneHot, limit_s: float, result: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    work(program, limit_s, result)


def _highs(program: OneHot, limit_s: float, result: Connection) -> None:
    result.send("built")
    started = time.perf_counter()
    found = milp(
        c=program.costs.astype(float),
        integrality=np.ones(len(program.costs)),
        bounds=Bounds(0, program.upper),  # pyright: ignore[reportArgumentType]
        constraints=LinearConstraint(program.rows, program.low, program.high),  # pyright: ignore[reportArgumentType]
        options={"mip_rel_gap": 0.0, "time_limit": limit_s},
    )
    seconds = time.perf_counter() - started
    values = None if found.x is None else program.values_of(found.x)
    result.send(Solved(seconds=seconds, finished=found.status == 0, values=values))


def _lists(rows: csr_array) -> tuple[list[int], list[int], list[int]]:
    """Columns and coefficients, row after row, and where each row begins."""
    indices, data, bounds = (np.asarray(part) for part in (rows.indices, rows.data, rows.indptr))
    return indices.tolist(), data.tolist(), bounds.tolist()


def _cp_sat(program: OneHot, limit_s: float, result: Connection) -> None:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    proto = model.proto
    for upper in program.upper.astype(int).tolist():
        proto.variables.add().domain.extend([0, upper])
    indices, data, bounds = _lists(program.rows)
    for row, (low, high) in enumerate(zip(program.low.tolist(), program.high.tolist(), strict=True)):
        columns, coefficients = indices[bounds[row] : bounds[row + 1]], data[bounds[row] : bounds[row + 1]]
        if low == high == 1.0:
            proto.constraints.add().exactly_one.literals.extend(columns)
            continue
        linear = proto.constraints.add().linear
        linear.vars.extend(columns)
        linear.coeffs.extend(coefficients)
        linear.domain.extend([-len(columns) if low == -np.inf else int(low), int(high)])
    paid = np.flatnonzero(program.costs)
    proto.objective.vars.extend(paid.tolist())
    proto.objective.coeffs.extend(program.costs[paid].tolist())
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = limit_s
    result.send("built")
    started = time.perf_counter()
    status = solver.solve(model)
    seconds = time.perf_counter() - started
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    values = program.values_of(np.array(list(solver.response_proto.solution))) if found else None
    result.send(Solved(seconds=seconds, finished=status == cp_model.OPTIMAL, values=values))
