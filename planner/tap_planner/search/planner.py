"""The search over configurations: meshes, ZeRO levels, recompute settings, microbatch counts."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tap_planner.errors import InfeasibleError, LimitReachedError, UnsupportedGraphError
from tap_planner.graph import Graph
from tap_planner.search.assemble import assemble
from tap_planner.search.capacity import parameter_demand, tensor_demand, uncountable
from tap_planner.search.configuration import Configuration
from tap_planner.search.constraints import StrategyFilter
from tap_planner.search.costing import CostedModel
from tap_planner.search.limited import LimitedSearch, least_memory
from tap_planner.search.model import Model, build_model
from tap_planner.search.obstacles import find_obstacles
from tap_planner.search.request import SearchRequest, SearchResult, SearchStatistics, does_not_fit, gigabytes
from tap_planner.search.solver import Solver
from tap_planner.search.weighting import Outcome
from tap_planner.sharding import BatchMap, block_hints, map_batch

WITHOUT_ACTIVATIONS = 1 << 40
"""Divisor of activations that leaves nothing of them."""
MAX_MICROBATCHES = 128
"""Largest microbatch count that the search tries by itself."""


_Setting = tuple[int, int, int]
"""Indices of mesh, ZeRO level and recompute setting."""


@dataclass(slots=True)
class _Candidate:
    """A configuration in the queue."""

    setting: _Setting
    microbatches: int
    bound_ns: int
    state: LimitedSearch | None = None
    screened: bool = False
    """Whether the graph of one microbatch (all of the batch) has given its bound."""
    excluded: bool = False
    """Whether that has shown that nothing fits."""
    last: bool = False
    """Whether larger microbatch counts are excluded as well."""
    followed: bool = False
    """Whether the next microbatch count has been queued."""


def search(request: SearchRequest) -> SearchResult:
    """Find the plan of least objective A.

    Raises:
        InfeasibleError: nothing fits, with the least memory that any plan needs.
        LimitReachedError: nothing that fits was found, though it is not proven that nothing does.
        UnsupportedGraphError: sizes are beyond what can be counted.
    """
    return _Search(request).run()


class _Search:
    """Best-first search; see ``run``."""

    def __init__(self, request: SearchRequest) -> None:
        self._request = request
        self._models: dict[tuple[int, int], Model] = {}
        self._batch_maps: dict[int, BatchMap] = {}
        self._hints: dict[int, dict[str, tuple[tuple[int, ...], ...]]] = {}
        self._notes: list[str] = []
        self._unlimited: dict[_Setting, int] = {}
        self._settled: dict[_Setting, set[int]] = {}
        self._queue: list[tuple[int, _Setting, int, int, _Candidate]] = []
        self._order = 0
        self._num_solved = 0
        self._multiplier = 0
        self._best: tuple[_Candidate, Outcome] | None = None
        self._counts = self._microbatch_counts()
        self._check_sizes()

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

    def _check_sizes(self) -> None:
        """Answer at once where sizes leave no doubt, and refuse what tables cannot count."""
        request = self._request
        graph, cluster, room = self._graph(1), request.cluster, request.cluster.usable_memory_bytes
        excess = uncountable(graph, cluster, request.precision)
        if request.limit_bytes is not None:
            demands = [tensor_demand(graph, cluster, request.precision, self._counts[-1])]
            if excess is not None:  # else the search finds the least memory, which is more
                demands.append(parameter_demand(graph, cluster, request.precision))
            least = max(demands, key=lambda demand: demand.num_bytes)
            if least.num_bytes > room:
                raise does_not_fit(request, least.num_bytes, room, f"{least.what} needs")
        if excess is not None:
            raise UnsupportedGraphError(
                f"{graph.name}: on one device the graph takes about 2^{excess.value.bit_length() - 1} {excess.what}, "
                f"expected at most 2^{excess.most.bit_length() - 1}",
                hint="bind smaller dims, or look for a wrong size in the model",
            )

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
        _, zero, recompute = candidate.setting
        return Configuration(
            zero=request.zero_levels[zero],
            recompute=request.recomputes[recompute],
            microbatches=candidate.microbatches,
            optimizer=request.optimizer,
            precision=request.precision,
            training=request.training,
        )

    def _solver(self, candidate: _Candidate) -> Solver:
        model = self._model(candidate.setting[0], candidate.microbatches)
        return Solver(CostedModel(model, self._configuration(candidate)))

    # -- best first --------------------------------------------------------------------------------------------

    def run(self) -> SearchResult:
        """Advance the most promising configuration until the best plan is proven good enough."""
        request = self._request
        for mesh in range(len(request.meshes)):
            for zero in range(len(request.zero_levels)):
                for recompute in range(len(request.recomputes)):
                    self._push(_Candidate((mesh, zero, recompute), self._counts[0], 0, screened=True))
        total = len(self._queue) * len(self._counts)
        ended: list[int] = []
        while self._queue:
            candidate = heapq.heappop(self._queue)[-1]
            if self._good_enough(candidate.bound_ns):
                self._push(candidate)
                break
            self._advance(candidate)
            state = candidate.state
            if state is not None and not candidate.followed:
                self._follow(candidate, state)
            if candidate.last:
                if not candidate.excluded:
                    ended.append(candidate.bound_ns)
            elif candidate.excluded:
                self._queue_next(candidate)
            elif state is None or not state.finished:
                if state is None and not candidate.followed and self._good_enough(candidate.bound_ns):
                    candidate.followed = True
                    self._queue_next(candidate)
                self._push(candidate)
            elif not state.infeasible:
                ended.append(state.bound_ns)
        if self._best is None:
            raise self._nothing_fits(bool(ended))
        self._polish()
        candidate, outcome = self._best
        open_bounds = [entry[-1].bound_ns for entry in self._queue]
        return self._result(candidate, outcome, min([outcome.ns, *ended, *open_bounds]), total)

    def _polish(self) -> None:
        """Take the winner through its own stages short of the master: within the gap its rounding may still hold
        decisions that cost a little and puzzle a reader."""
        assert self._best is not None
        candidate = self._best[0]
        while candidate.state is not None and not candidate.state.finished and not candidate.state.only_master_left:
            self._advance(candidate)

    def _push(self, candidate: _Candidate) -> None:
        self._order += 1
        heapq.heappush(
            self._queue, (candidate.bound_ns, candidate.setting, candidate.microbatches, self._order, candidate)
        )

    def _good_enough(self, bound_ns: int) -> bool:
        """Whether nothing of this bound is worth a look."""
        return self._best is not None and bound_ns >= self._best[1].ns * (1 - self._request.gap)

    def _advance(self, candidate: _Candidate) -> None:
        if not candidate.screened:
            candidate.screened = True
            bound = self._virtual_bound(candidate)
            candidate.excluded = bound is None
            candidate.bound_ns = max(candidate.bound_ns, bound or 0)
            return
        if candidate.state is None:
            self._num_solved += 1
            candidate.state = LimitedSearch(self._solver(candidate), self._request.limit_bytes)
        state = candidate.state
        state.advance(self._multiplier, None if self._best is None else self._best[1].ns)
        candidate.bound_ns = max(candidate.bound_ns, state.bound_ns)
        if state.multiplier and state.best is not None:
            self._multiplier = state.multiplier
        if state.best is not None and (self._best is None or state.best.ns < self._best[1].ns):
            self._best = (candidate, state.best)

    def _virtual_bound(self, candidate: _Candidate) -> int | None:
        """A lower bound from the graph of the whole batch; None where nothing fits.

        With k microbatches the same strategies take at least as long as with one, and keep at least 1/k of the
        activations; what is paid per microbatch for parameters is known. Without any activations the bound grows with
        k: where it is too high already, larger counts need no look.
        """
        ceiling = None if self._best is None else self._best[1].ns
        bound: int | None = 0
        model = self._model(candidate.setting[0], self._counts[0])
        solver = Solver(CostedModel(model, self._configuration(candidate), repeat=1))
        for divisor in (WITHOUT_ACTIVATIONS, candidate.microbatches):
            virtual = LimitedSearch(solver, self._request.limit_bytes, divisor)
            bound = virtual.virtual_bound_ns(self._multiplier, ceiling)
            if bound is None or (ceiling is not None and bound >= ceiling):
                candidate.last = divisor == WITHOUT_ACTIVATIONS
                break
        return bound

    def _follow(self, candidate: _Candidate, state: LimitedSearch) -> None:
        """Queue the next microbatch count that can matter, once the limit is seen to bind.

        Where the limit costs nothing, multiples of the count cannot be faster.
        """
        if state.parameters_too_large or (state.is_unlimited_optimum and state.finished):
            candidate.followed = True
            if not state.parameters_too_large:
                self._settled.setdefault(candidate.setting, set()).add(candidate.microbatches)
                self._queue_next(candidate)
            return
        if state.limit_binds or state.finished:
            candidate.followed = True
            self._queue_next(candidate)

    def _queue_next(self, candidate: _Candidate) -> None:
        settled = self._settled.get(candidate.setting, set())
        for count in self._counts:
            if count > candidate.microbatches and not any(count % k == 0 for k in settled):
                bound = self._unlimited.setdefault(candidate.setting, 0)
                if candidate.state is not None and candidate.microbatches == self._counts[0]:
                    bound = self._unlimited[candidate.setting] = candidate.state.unlimited_ns
                self._push(_Candidate(candidate.setting, count, bound))
                return

    # -- answers -----------------------------------------------------------------------------------------------

    def _result(self, candidate: _Candidate, outcome: Outcome, bound_ns: int, total: int) -> SearchResult:
        request = self._request
        mesh = candidate.setting[0]
        model = self._model(mesh, candidate.microbatches)
        configuration = self._configuration(candidate)
        assert outcome.assignment is not None
        decisions = assemble(model, configuration, outcome.assignment, request.cluster, request.loss_output)
        return SearchResult(
            decisions=decisions,
            folded=model.space.folded,
            mesh=request.meshes[mesh],
            objective_ns=outcome.ns,
            bound_ns=bound_ns,
            memory_bytes=outcome.num_bytes,
            multiplier=candidate.state.multiplier if candidate.state is not None else 0,
            statistics=SearchStatistics(
                meshes=len(request.meshes),
                configurations=total,
                solved=self._num_solved,
                pruned=total - self._num_solved,
                strategies=sum(len(model.space.operator(int(index)).strategies) for index in model.class_of.tolist()),
            ),
            notes=tuple(self._notes),
            obstacles=find_obstacles(model.graph, decisions.axes),
        )

    def _nothing_fits(self, unknown: bool) -> InfeasibleError | LimitReachedError:
        """The least memory that any plan of the space needs, over the meshes."""
        request = self._request
        limit = request.limit_bytes
        assert limit is not None
        bounds: list[int] = []
        found: list[int] = []
        zero = max(range(len(request.zero_levels)), key=lambda index: request.zero_levels[index])
        for mesh in range(len(request.meshes)):
            for recompute in range(len(request.recomputes)):
                solver = self._solver(_Candidate((mesh, zero, recompute), self._counts[-1], 0))
                bound, memory = least_memory(solver)
                bounds.append(bound)
                found.append(memory)
        least = min(bounds)
        if unknown and least <= limit:
            return LimitReachedError(
                f"no plan within {gigabytes(limit)} per device was found, and it is not proven that there is none",
                hint="raise --max-memory, or fix --zero, --recompute and --microbatches",
            )
        return does_not_fit(request, least, limit, "every plan needs")
