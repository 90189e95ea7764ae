"""The search over configurations: meshes, ZeRO levels, recompute settings, microbatch counts."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from tap_planner.cluster import Cluster, Mesh
from tap_planner.errors import InfeasibleError, LimitReachedError
from tap_planner.folding import FoldedGraph
from tap_planner.graph import Graph
from tap_planner.plan import Decisions
from tap_planner.search.assemble import assemble
from tap_planner.search.constraints import StrategyFilter, StrategyRule
from tap_planner.search.limited import LimitedOutcome, LimitedStatus, least_memory, solve_limited
from tap_planner.search.model import Configuration, CostedModel, Model
from tap_planner.search.solver import Solver
from tap_planner.search.space import ModelSpace, block_hints
from tap_planner.sharding import BatchMap, map_batch

MAX_MICROBATCHES = 128
"""Largest microbatch count that the search tries by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What to search."""

    folded: Callable[[int], FoldedGraph]
    """Microbatch count -> the graph bound with the batch of one microbatch, folded."""
    batch: int
    """Global batch."""
    cluster: Cluster
    meshes: tuple[Mesh, ...]
    precision: str
    optimizer: str
    training: bool
    zero_levels: tuple[int, ...]
    recomputes: tuple[str, ...]
    microbatches: int | None
    """None: the search chooses."""
    limit_bytes: int | None
    constraints: Callable[[Mesh], tuple[StrategyRule, ...]]
    """Constraints for a mesh (they name axes)."""
    loss_output: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStatistics:
    """How much was looked at."""

    meshes: int
    configurations: int
    """Configurations of the space."""
    solved: int
    pruned: int
    strategies: int
    """Strategies of all operators on the chosen mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan found, with its proof."""

    decisions: Decisions
    folded: FoldedGraph
    mesh: Mesh
    objective_ns: int
    bound_ns: int
    """No plan of the space has a smaller objective."""
    memory_bytes: int
    multiplier: int
    """Memory weight of the Lagrangian bound, in ns per 1024 bytes; 0 where the limit does not bind."""
    statistics: SearchStatistics
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    bound_ns: int
    mesh: int
    zero: int
    recompute: int
    microbatches: int


def search(request: SearchRequest) -> SearchResult:
    """Find the plan of least objective A.

    Raises:
        InfeasibleError: nothing fits, with the least memory that any plan needs.
        LimitReachedError: nothing that fits was found, though it is not proven that nothing does.
    """
    return _Search(request).run()


class _Search:
    def __init__(self, request: SearchRequest) -> None:
        self._request = request
        self._models: dict[tuple[int, int], Model] = {}
        self._batch_maps: dict[int, BatchMap] = {}
        self._hints: dict[int, dict[str, tuple[tuple[int, ...], ...]]] = {}
        self._notes: list[str] = []
        self._unlimited: dict[tuple[int, int, int], dict[int, int]] = {}
        self._settled: dict[tuple[int, int, int], set[int]] = {}
        self._counts = self._microbatch_counts()

    # -- the space ---------------------------------------------------------------------------------------------

    def _microbatch_counts(self) -> tuple[int, ...]:
        request = self._request
        if request.microbatches is not None:
            return (request.microbatches,)
        if not request.training:
            return (1,)
        obstacles = self._batch_map(1).obstacles
        if obstacles:
            self._notes.append(
                f"one microbatch only: the batch cannot be split at {obstacles[0]!r}"
                + (f" and {len(obstacles) - 1} more" if len(obstacles) > 1 else "")
            )
            return (1,)
        top = min(request.batch, MAX_MICROBATCHES)
        return tuple(k for k in range(1, top + 1) if request.batch % k == 0 and (k <= 16 or k & (k - 1) == 0))

    def _batch_map(self, microbatches: int) -> BatchMap:
        if microbatches not in self._batch_maps:
            self._batch_maps[microbatches] = map_batch(self._graph(microbatches))
        return self._batch_maps[microbatches]

    def _graph(self, microbatches: int) -> Graph:
        return self._request.folded(microbatches).graph

    def _model(self, mesh: int, microbatches: int) -> Model:
        key = (mesh, microbatches)
        if key not in self._models:
            request = self._request
            folded = request.folded(microbatches)
            if microbatches not in self._hints:
                self._hints[microbatches] = dict(block_hints(folded.graph))
            rules = request.constraints(request.meshes[mesh])
            self._models[key] = build_model(
                folded,
                request.cluster,
                request.meshes[mesh],
                request.precision,
                StrategyFilter(rules, self._batch_map(microbatches).choices),
                self._hints[microbatches],
            )
        return self._models[key]

    def _configuration(self, candidate: _Candidate) -> Configuration:
        request = self._request
        return Configuration(
            zero=request.zero_levels[candidate.zero],
            recompute=request.recomputes[candidate.recompute],
            microbatches=candidate.microbatches,
            optimizer=request.optimizer,
            precision=request.precision,
            training=request.training,
        )

    def _solver(self, candidate: _Candidate) -> Solver:
        model = self._model(candidate.mesh, candidate.microbatches)
        return Solver(CostedModel(model, self._configuration(candidate)))

    # -- best first --------------------------------------------------------------------------------------------

    def run(self) -> SearchResult:
        request = self._request
        queue = [
            _Candidate(0, mesh, zero, recompute, self._counts[0])
            for mesh in range(len(request.meshes))
            for zero in range(len(request.zero_levels))
            for recompute in range(len(request.recomputes))
        ]
        total = len(queue) * len(self._counts)
        heapq.heapify(queue)
        best: tuple[_Candidate, LimitedOutcome] | None = None
        open_bounds: list[int] = []
        unknown = solved = 0
        refined: set[_Candidate] = set()
        while queue:
            candidate = heapq.heappop(queue)
            if best is not None and candidate.bound_ns >= best[1].ns:
                break
            if candidate not in refined:
                found = self._solver(candidate).relaxed_time_ns()
                raised = _Candidate(
                    max(candidate.bound_ns, found),
                    candidate.mesh,
                    candidate.zero,
                    candidate.recompute,
                    candidate.microbatches,
                )
                refined.add(raised)
                heapq.heappush(queue, raised)
                continue
            outcome = self._solve(candidate, None if best is None else best[1].ns)
            solved += 1
            if outcome.status is LimitedStatus.UNKNOWN:
                unknown += 1
                open_bounds.append(outcome.bound_ns)
            if outcome.status is LimitedStatus.SOLVED:
                open_bounds.append(outcome.bound_ns)
                if best is None or outcome.ns < best[1].ns:
                    best = (candidate, outcome)
            self._push_more_microbatches(queue, candidate, outcome)
        if best is None:
            raise self._nothing_fits(unknown)
        return self._result(best, min([best[1].ns, *open_bounds]), total, solved)

    def _push_more_microbatches(
        self, queue: list[_Candidate], candidate: _Candidate, outcome: LimitedOutcome
    ) -> None:
        """Queue the next microbatch count that can matter.

        With k times as many microbatches the same strategies take at least as long, so a count's bound holds for its
        multiples, and where the limit cost nothing its multiples cannot be faster.
        """
        if outcome.parameters_too_large:
            return
        setting = (candidate.mesh, candidate.zero, candidate.recompute)
        known = self._unlimited.setdefault(setting, {})
        known[candidate.microbatches] = max(candidate.bound_ns, outcome.unlimited_ns)
        settled = self._settled.setdefault(setting, set())
        if outcome.is_unlimited_optimum:
            settled.add(candidate.microbatches)
        for count in self._counts:
            if count <= candidate.microbatches or any(count % k == 0 for k in settled):
                continue
            bound = max(ns for k, ns in known.items() if count % k == 0)
            heapq.heappush(queue, _Candidate(bound - bound // 1_000_000, *setting, count))
            return

    def _solve(self, candidate: _Candidate, incumbent_ns: int | None) -> LimitedOutcome:
        limit = self._request.limit_bytes
        solver = self._solver(candidate)
        if limit is not None and solver.least_own_bytes() > limit:
            return LimitedOutcome(
                status=LimitedStatus.INFEASIBLE, bound_ns=candidate.bound_ns, parameters_too_large=True
            )
        return solve_limited(solver, limit, incumbent_ns)

    # -- answers -----------------------------------------------------------------------------------------------

    def _result(
        self, best: tuple[_Candidate, LimitedOutcome], bound_ns: int, total: int, solved: int
    ) -> SearchResult:
        request = self._request
        candidate, outcome = best
        model = self._model(candidate.mesh, candidate.microbatches)
        configuration = self._configuration(candidate)
        assert outcome.assignment is not None
        decisions = assemble(model, configuration, outcome.assignment, request.cluster, request.loss_output)
        return SearchResult(
            decisions=decisions,
            folded=model.space.folded,
            mesh=request.meshes[candidate.mesh],
            objective_ns=outcome.ns,
            bound_ns=bound_ns,
            memory_bytes=outcome.num_bytes,
            multiplier=outcome.multiplier,
            statistics=SearchStatistics(
                meshes=len(request.meshes),
                configurations=total,
                solved=solved,
                pruned=total - solved,
                strategies=sum(
                    len(model.space.operator(int(index)).strategies) for index in model.class_of.tolist()
                ),
            ),
            notes=tuple(self._notes),
        )

    def _nothing_fits(self, unknown: int) -> InfeasibleError | LimitReachedError:
        """The least memory that any plan of the space needs, over the meshes."""
        request = self._request
        limit = request.limit_bytes
        assert limit is not None
        bounds: list[int] = []
        found: list[int] = []
        zero = max(range(len(request.zero_levels)), key=lambda index: request.zero_levels[index])
        for mesh in range(len(request.meshes)):
            for recompute in range(len(request.recomputes)):
                solver = self._solver(_Candidate(0, mesh, zero, recompute, self._counts[-1]))
                bound, memory = least_memory(solver)
                bounds.append(bound)
                found.append(memory)
        least = min(bounds)
        if unknown and least <= limit:
            return LimitReachedError(
                f"no plan within {_gigabytes(limit)} per device was found, and it is not proven that there is none",
                hint="raise --max-memory, or fix --zero, --recompute and --microbatches",
            )
        return InfeasibleError(
            f"no plan fits: every plan needs at least {_gigabytes(least)} per device "
            f"({least} bytes), the limit is {_gigabytes(limit)} ({limit} bytes)",
            hint=_infeasible_hint(request, least, limit),
            least_memory_bytes=least,
            limit_bytes=limit,
        )


def _infeasible_hint(request: SearchRequest, least: int, limit: int) -> str:
    devices = request.cluster.num_devices
    needed = -(-least * devices // limit)
    hint = f"use about {needed} such devices (there are {devices})"
    if 3 not in request.zero_levels and request.training:
        hint += ", or allow --zero 3"
    if "full" not in request.recomputes and request.training:
        hint += ", or allow --recompute full"
    return hint


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def build_model(
    folded: FoldedGraph,
    cluster: Cluster,
    mesh: Mesh,
    precision: str,
    strategy_filter: StrategyFilter,
    hints: dict[str, tuple[tuple[int, ...], ...]],
) -> Model:
    """Variables and terms of a folded graph on a mesh; runs that are no chains are taken apart."""
    model = Model(ModelSpace(folded.graph, folded, cluster, mesh, precision, strategy_filter, hints))
    if model.chainable():
        return model
    unfolded = FoldedGraph(graph=folded.graph, runs=())
    return Model(ModelSpace(folded.graph, unfolded, cluster, mesh, precision, strategy_filter, hints))
