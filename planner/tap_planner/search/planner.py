"""The search over configurations: meshes, ZeRO levels, recompute settings, microbatch counts."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from fractions import Fraction

from tap_planner.cluster import Mesh, part_of
from tap_planner.errors import InfeasibleError, LimitReachedError, UnsupportedGraphError
from tap_planner.graph import Graph
from tap_planner.search.assemble import assemble
from tap_planner.search.capacity import least_ns, parameter_demand, tensor_demand, uncountable
from tap_planner.search.configuration import Configuration, Recompute, Settings, zero_settings
from tap_planner.search.constraints import NO_RULES
from tap_planner.search.costing import CostedModel
from tap_planner.search.feasibility import first_conflict
from tap_planner.search.limited import LimitedSearch, least_memory
from tap_planner.search.model import Model, build_model
from tap_planner.search.obstacles import find_obstacles
from tap_planner.search.proof import UNPROVEN, Leaf, Proof, ProofKind
from tap_planner.search.request import SearchRequest, SearchResult, SearchStatistics, does_not_fit, gigabytes
from tap_planner.search.solver import Solver
from tap_planner.search.weighting import Outcome
from tap_planner.sharding import BatchMap, block_hints, map_batch

MAX_RUNNERS_UP = 4
"""Other plans within the gap that the result holds."""
MAX_MICROBATCHES = 128
"""Largest microbatch count that the search tries by itself."""


_Setting = tuple[int, int]
"""Index of the mesh, and of what regions may choose from."""


@dataclass(slots=True)
class _Candidate:
    """A configuration in the queue."""

    setting: _Setting
    microbatches: int
    bound_ns: int
    room: int | None = None
    """Highest ZeRO level in runs, for which there is room; None: any, without room (a lower bound)."""
    state: LimitedSearch | None = None
    screened: bool = False
    """Whether the graph of one microbatch (all of the batch) has given its bound."""
    excluded: bool = False
    """Whether that has shown that nothing fits."""
    last: bool = False
    """Whether larger microbatch counts are excluded as well."""
    followed: bool = False
    """Whether the next microbatch count has been queued."""
    proof: Proof = UNPROVEN
    """By what the bound is proven, as far as elimination goes."""
    settled: bool = False
    """Whether multiples of the microbatch count are excluded as well."""


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
        self._allowed: dict[tuple[int, int], bool] = {}
        self._notes: list[str] = []
        self._unlimited: dict[_Setting, Proof] = {}
        self._settled: dict[_Setting, set[int]] = {}
        self._queue: list[tuple[int, _Setting, int, int, _Candidate]] = []
        self._order = 0
        self._num_solved = 0
        self._leaves: list[Leaf] = []
        self._found: dict[tuple[int, int, int | None], tuple[_Candidate, Outcome]] = {}
        """By mesh, microbatch count and room, the best plan met."""
        self._hints_of_bounds: dict[_Setting, Fraction] = {}
        self._multiplier = Fraction(0)
        self._least: dict[tuple[int, ...], int] = {(): 0}
        self._best: tuple[_Candidate, Outcome] | None = None
        self._settings: dict[_Setting, Settings] = {}
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

    def _hints_of(self, microbatches: int) -> dict[str, tuple[tuple[int, ...], ...]]:
        if microbatches not in self._hints:
            self._hints[microbatches] = dict(block_hints(self._graph(microbatches)))
        return self._hints[microbatches]

    def _is_allowed(self, mesh: int, microbatches: int) -> bool:
        """Whether the rules leave every operator a strategy: a smaller microbatch may no longer be split as they ask.

        For the first count that is sure: the meshes of a request are those on which it is so.
        """
        if microbatches == self._counts[0]:
            return True
        key = (mesh, microbatches)
        if key not in self._allowed:
            self._allowed[key] = self._keeps_rules(self._request.meshes[mesh], microbatches)
        return self._allowed[key]

    def _keeps_rules(self, mesh: Mesh, microbatches: int) -> bool:
        if self._request.constraints(mesh, self._graph(self._counts[0])).rules == NO_RULES:
            return True
        graph = self._graph(microbatches)
        rules = self._request.constraints(mesh, graph)
        return first_conflict(graph, self._hints_of(microbatches), rules, mesh) is None

    def _model(self, mesh: int, microbatches: int) -> Model:
        key = (mesh, microbatches)
        if key not in self._models:
            request = self._request
            folded = request.folded(microbatches)
            self._models[key] = build_model(
                folded,
                request.cluster,
                request.meshes[mesh],
                request.precision,
                request.constraints(request.meshes[mesh], folded.graph),
                self._hints_of(microbatches),
            )
        return self._models[key]

    def _choices_of_settings(self, mesh: int) -> tuple[Settings, ...]:
        """What regions may choose from: everything, or one after the other where the whole plan must have the same."""
        request = self._request
        zeros = zero_settings(request.zero_levels, len(request.meshes[mesh].axes), hybrid=request.hybrid_zero)
        recomputes = tuple(sorted(Recompute[name.upper()] for name in request.recomputes))
        if not request.uniform_settings:
            return (Settings(recomputes=recomputes, zeros=zeros),)
        return tuple(Settings(recomputes=(mode,), zeros=(zero,)) for zero in zeros for mode in recomputes)

    def _configuration(self, candidate: _Candidate) -> Configuration:
        request = self._request
        settings = self._settings[candidate.setting]
        return Configuration(
            settings=settings if candidate.room is None else settings.up_to(candidate.room),
            microbatches=candidate.microbatches,
            optimizer=request.optimizer,
            precision=request.precision,
            training=request.training,
        )

    def _costed(self, candidate: _Candidate, *, whole_batch: bool = False) -> CostedModel:
        """The model of a candidate.

        Args:
            candidate: which one.
            whole_batch: with the graph of the whole batch, and what is paid for each of the candidate's microbatches.
        """
        model = self._model(candidate.setting[0], self._counts[0] if whole_batch else candidate.microbatches)
        return CostedModel(model, self._configuration(candidate), repeat=1 if whole_batch else None)

    def _solver(self, candidate: _Candidate) -> Solver:
        return Solver(self._costed(candidate))

    # -- best first --------------------------------------------------------------------------------------------

    def run(self) -> SearchResult:
        """Advance the most promising configuration until the best plan is proven good enough."""
        request = self._request
        for mesh in range(len(request.meshes)):
            bound = self._least_ns(mesh)
            for number, choices in enumerate(self._choices_of_settings(mesh)):
                self._settings[mesh, number] = choices
                proof = Proof(kind=ProofKind.SPLIT, bound_ns=bound)
                self._push(_Candidate((mesh, number), self._counts[0], bound, screened=True, proof=proof))
        total = len(self._queue) * len(self._counts)
        ended: list[int] = []
        while self._queue:
            candidate = heapq.heappop(self._queue)[-1]
            if self._good_enough(candidate.bound_ns):
                ended.append(candidate.bound_ns)
                if not candidate.followed and not candidate.last:
                    self._queue_next(candidate)
                self._leave(candidate)
                continue
            self._advance(candidate)
            state = candidate.state
            if state is not None and not candidate.followed:
                self._follow(candidate, state)
            if candidate.excluded:
                if not candidate.last:
                    self._queue_next(candidate)
                self._leave(candidate)
            elif state is None or not state.finished:
                for following in self._split(candidate):
                    self._push(following)
            else:
                self._leave(candidate)
                if not state.infeasible:
                    ended.append(state.bound_ns)
        if self._best is None:
            raise self._nothing_fits(bool(ended))
        self._polish()
        candidate, outcome = self._best
        bound_ns = min([outcome.ns, *ended])
        result = self._result(candidate, outcome, bound_ns, total)
        return replace(result, runners_up=self._runners_up(outcome, bound_ns, total))

    def _runners_up(self, best: Outcome, bound_ns: int, total: int) -> tuple[SearchResult, ...]:
        """The best plans of other meshes and microbatch counts, as far as they too are within the gap."""
        others: dict[tuple[int, int], tuple[_Candidate, Outcome]] = {}
        chosen: tuple[int, int] | None = None
        for (mesh, microbatches, _), (candidate, outcome) in self._found.items():
            key = (mesh, microbatches)
            if outcome is best:
                chosen = key
            elif key not in others or outcome.ns < others[key][1].ns:
                others[key] = (candidate, outcome)
        near = [
            pair for key, pair in others.items() if key != chosen and pair[1].ns * (1 - self._request.gap) <= bound_ns
        ]
        near.sort(key=lambda pair: (pair[1].ns, pair[0].setting, pair[0].microbatches))
        return tuple(self._result(*pair, bound_ns, total) for pair in near[:MAX_RUNNERS_UP])

    def _leave(self, candidate: _Candidate) -> None:
        """A part of the space is done with: note how it is bounded."""
        self._leaves.append(
            Leaf(
                mesh=str(self._request.meshes[candidate.setting[0]]),
                setting=candidate.setting[1],
                room=candidate.room,
                microbatches=candidate.microbatches,
                and_more=candidate.last,
                and_multiples=candidate.settled,
                proof=candidate.proof,
                solver_ns=max(candidate.bound_ns, candidate.proof.bound_ns),
            )
        )

    def _split(self, candidate: _Candidate) -> list[_Candidate]:
        """A candidate whose bound leaves out room for whole copies, as one candidate for each highest ZeRO level."""
        state = candidate.state
        levels = self._settings[candidate.setting].levels
        if state is None or candidate.room is not None or not state.has_crossed or levels[-1] < 2:
            return [candidate]
        if not candidate.followed:
            candidate.followed = True
            self._queue_next(candidate)
        return [
            _Candidate(
                candidate.setting,
                candidate.microbatches,
                candidate.bound_ns,
                level,
                screened=True,
                followed=True,
                proof=candidate.proof,
            )
            for level in levels
        ]

    def _least_ns(self, mesh: int) -> int:
        """What a mesh that leaves devices idle takes at least."""
        devices = self._request.meshes[mesh].devices
        if devices not in self._least:
            part = part_of(self._request.cluster, self._request.meshes[mesh])
            self._least[devices] = least_ns(self._graph(1), part, self._request.precision)
        return self._least[devices]

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
        if state.proof.bound_ns > candidate.proof.bound_ns or state.proof.kind is ProofKind.INFEASIBLE:
            candidate.proof = state.proof
        if state.multiplier and state.best is not None:
            self._multiplier = state.multiplier
        if state.best is not None:
            self._found[candidate.setting[0], candidate.microbatches, candidate.room] = (candidate, state.best)
            if self._best is None or state.best.ns < self._best[1].ns:
                self._best = (candidate, state.best)

    def _virtual_bound(self, candidate: _Candidate) -> int | None:
        """A lower bound from the graph of the whole batch; None where nothing fits.

        With k microbatches the same strategies take at least as long as with one, and keep at least 1/k of the
        activations; what is paid per microbatch for parameters is known.
        """
        ceiling = None if self._best is None else self._best[1].ns
        solver = Solver(self._costed(candidate, whole_batch=True))
        virtual = LimitedSearch(solver, self._request.limit_bytes, candidate.microbatches)
        hint = self._hints_of_bounds.get(candidate.setting, self._multiplier)
        bound = virtual.virtual_bound_ns(hint, ceiling)
        if virtual.multiplier:
            self._hints_of_bounds[candidate.setting] = virtual.multiplier
        candidate.last = virtual.parameters_too_large
        if virtual.proof.bound_ns > candidate.proof.bound_ns or virtual.proof.kind is ProofKind.INFEASIBLE:
            candidate.proof = replace(virtual.proof, whole_batch=True)
        return bound

    def _follow(self, candidate: _Candidate, state: LimitedSearch) -> None:
        """Queue the next microbatch count that can matter, once the limit is seen to bind.

        Where the limit costs nothing, multiples of the count cannot be faster.
        """
        if state.parameters_too_large or (state.is_unlimited_optimum and state.finished):
            candidate.followed = True
            candidate.last = state.parameters_too_large
            if not state.parameters_too_large:
                candidate.settled = True
                self._settled.setdefault(candidate.setting, set()).add(candidate.microbatches)
                self._queue_next(candidate)
            return
        if state.limit_binds or state.finished:
            candidate.followed = True
            self._queue_next(candidate)

    def _queue_next(self, candidate: _Candidate) -> None:
        settled = self._settled.get(candidate.setting, set())
        for count in self._counts:
            wanted = count > candidate.microbatches and not any(count % k == 0 for k in settled)
            if wanted and self._is_allowed(candidate.setting[0], count):
                proof = self._unlimited.setdefault(candidate.setting, UNPROVEN)
                if candidate.state is not None and candidate.microbatches == self._counts[0]:
                    proof = replace(candidate.state.unlimited, whole_batch=True)
                    self._unlimited[candidate.setting] = proof
                self._push(_Candidate(candidate.setting, count, proof.bound_ns, proof=proof))
                return

    # -- answers -----------------------------------------------------------------------------------------------

    def _result(self, candidate: _Candidate, outcome: Outcome, bound_ns: int, total: int) -> SearchResult:
        request = self._request
        mesh = candidate.setting[0]
        model = self._model(mesh, candidate.microbatches)
        assert outcome.choices is not None and candidate.state is not None
        configuration = candidate.state.configuration
        decisions = assemble(model, configuration, outcome.choices.expand(), request.cluster, request.loss_output)
        return SearchResult(
            decisions=decisions,
            folded=model.space.folded,
            mesh=request.meshes[mesh],
            objective_ns=outcome.ns,
            bound_ns=bound_ns,
            memory_bytes=outcome.num_bytes,
            multiplier=candidate.state.multiplier,
            leaves=tuple(self._leaves),
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
        for setting in self._settings:
            count = max(count for count in self._counts if self._is_allowed(setting[0], count))
            bound, memory = least_memory(self._solver(_Candidate(setting, count, 0)))
            bounds.append(bound)
            found.append(memory)
        least = min(bounds)
        if unknown and least <= limit:
            return LimitReachedError(
                f"no plan within {gigabytes(limit)} per device was found, and it is not proven that there is none",
                hint="raise --max-memory, or fix --zero, --recompute and --microbatches",
            )
        return does_not_fit(request, least, limit, "every plan needs")
