"""The search over configurations: meshes, ZeRO levels, recompute settings, microbatch counts."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

from tap_planner.errors import InfeasibleError, LimitReachedError
from tap_planner.plan import Decisions
from tap_planner.search.assemble import assemble
from tap_planner.search.configuration import Settings
from tap_planner.search.enumeration import SearchSpace
from tap_planner.search.limited import LimitedSearch, least_memory
from tap_planner.search.proof import UNPROVEN, Leaf, Proof, ProofKind, mesh_label
from tap_planner.search.request import (
    NothingFasterError,
    NothingFitsError,
    SearchRequest,
    SearchResult,
    SearchStatistics,
    does_not_fit,
    gigabytes,
)
from tap_planner.search.solver import Solver
from tap_planner.search.weighting import Outcome

MAX_RUNNERS_UP = 4
"""Other plans within the gap that the result holds."""
FEW_AXES = 2
"""Meshes of more axes are looked at after those of so many, and with limited effort: their bounds are far from what can
be reached, and there are many of them."""
MAX_EFFORT = 120_000_000
"""Table entries of the models that stages are run for, of meshes of more axes, where there are others (40 s)."""

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
    """Whether the graph of fewer microbatches has given its bound."""
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
    """Find the plan of least objective A (of what ``request.prices`` count).

    Raises:
        InfeasibleError: nothing fits, with the least memory that any plan needs.
        LimitReachedError: nothing that fits was found, though it is not proven that nothing does.
        NothingFasterError: nothing is faster than the request's ceiling.
        UnsupportedGraphError: sizes are beyond what can be counted.
    """
    return _Search(request).run()


class _Search:
    """Best-first search; see ``run``."""

    def __init__(self, request: SearchRequest) -> None:
        self._request = request
        self._space = SearchSpace(request)
        self._unlimited: dict[_Setting, dict[int, Proof]] = {}
        """By microbatch count, for those whose own graph was looked at, what is proven of its multiples."""
        self._settled: dict[_Setting, set[int]] = {}
        self._queue: list[tuple[bool, int, _Setting, int, int, _Candidate]] = []
        self._order = 0
        self._solved: set[tuple[_Setting, int]] = set()
        self._leaves: list[Leaf] = []
        self._found: dict[tuple[int, int, int | None], tuple[_Candidate, Outcome]] = {}
        """By mesh, microbatch count and room, the best plan met."""
        self._hints_of_bounds: dict[_Setting, Fraction] = {}
        self._multiplier = Fraction(0)
        self._best: tuple[_Candidate, Outcome] | None = None
        self._settings: dict[_Setting, Settings] = {}
        self._counts = self._space.counts
        has_few = any(len(mesh.axes) <= FEW_AXES for mesh in request.meshes)
        self._is_late = [has_few and len(mesh.axes) > FEW_AXES for mesh in request.meshes]
        """By mesh, whether it comes after the others, with limited effort."""
        self._effort = 0
        """Table entries of the models that stages were run for, of such meshes."""

    def _solver(self, candidate: _Candidate, *, graph_of: int | None = None) -> Solver:
        """A solver of a candidate; ``graph_of`` as in ``SearchSpace.costed``."""
        settings = self._settings[candidate.setting]
        return self._space.solver(
            candidate.setting[0], settings, candidate.room, candidate.microbatches, graph_of=graph_of
        )

    # -- best first --------------------------------------------------------------------------------------------

    def run(self) -> SearchResult:
        """Advance the most promising configuration until the best plan is proven good enough."""
        request = self._request
        for mesh in range(len(request.meshes)):
            bound = self._space.least_ns(mesh)
            for number, choices in enumerate(self._space.settings(mesh)):
                self._settings[mesh, number] = choices
                self._unlimited[mesh, number] = {self._counts[0]: UNPROVEN}
                proof = Proof(kind=ProofKind.SPLIT, bound_ns=bound)
                self._push(_Candidate((mesh, number), self._counts[0], bound, screened=True, proof=proof))
        total = len(self._queue) * len(self._counts)
        ended: list[int] = []
        while self._queue:
            candidate = heapq.heappop(self._queue)[-1]
            if self._good_enough(candidate.bound_ns) or self._too_long(candidate):
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
        if self._best is None and request.ceiling_ns is not None:
            raise NothingFasterError("no plan is faster than asked for")
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
                mesh=mesh_label(self._request.meshes[candidate.setting[0]]),
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

    def _polish(self) -> None:
        """Take the winner through its own stages short of the master: within the gap its rounding may still hold
        decisions that cost a little and puzzle a reader."""
        assert self._best is not None
        candidate = self._best[0]
        while candidate.state is not None and not candidate.state.finished and not candidate.state.only_master_left:
            self._advance(candidate)

    def _push(self, candidate: _Candidate) -> None:
        self._order += 1
        late = self._is_late[candidate.setting[0]]
        place = (late, candidate.bound_ns, candidate.setting, candidate.microbatches, self._order)
        heapq.heappush(self._queue, (*place, candidate))

    def _good_enough(self, bound_ns: int) -> bool:
        """Whether nothing of this bound is worth a look."""
        ceiling = self._request.ceiling_ns
        if ceiling is not None and bound_ns >= ceiling:
            return True
        return self._best is not None and bound_ns >= self._best[1].ns * (1 - self._request.gap)

    def _too_long(self, candidate: _Candidate) -> bool:
        """Whether enough was done for meshes of many axes."""
        return self._best is not None and self._is_late[candidate.setting[0]] and self._effort >= MAX_EFFORT

    def _note_effort(self, candidate: _Candidate, graph_of: int) -> None:
        """A stage looks at the graph of so many microbatches."""
        mesh = candidate.setting[0]
        if self._is_late[mesh]:
            self._effort += self._space.model(mesh, graph_of).num_entries

    @property
    def _ceiling(self) -> int | None:
        """Only faster plans matter."""
        return None if self._best is None else self._best[1].ns

    def _advance(self, candidate: _Candidate) -> None:
        if not candidate.screened:
            candidate.screened = True
            bound = self._virtual_bound(candidate)
            candidate.excluded = bound is None
            candidate.bound_ns = max(candidate.bound_ns, bound or 0)
            return
        if candidate.state is None:
            self._solved.add((candidate.setting, candidate.microbatches))
            candidate.state = LimitedSearch(self._solver(candidate), self._request.limit_bytes, gap=self._request.gap)
        self._note_effort(candidate, candidate.microbatches)
        state = candidate.state
        state.advance(self._multiplier, self._ceiling)
        candidate.bound_ns = max(candidate.bound_ns, state.bound_ns)
        if state.proof.bound_ns > candidate.proof.bound_ns or state.proof.kind is ProofKind.INFEASIBLE:
            candidate.proof = state.proof
        if candidate.room is None:
            count = candidate.microbatches
            self._unlimited[candidate.setting][count] = replace(state.unlimited, graph_of=count)
        if state.multiplier and state.best is not None:
            self._multiplier = state.multiplier
        if state.best is not None:
            self._found[candidate.setting[0], candidate.microbatches, candidate.room] = (candidate, state.best)
            if self._best is None or state.best.ns < self._best[1].ns:
                self._best = (candidate, state.best)

    def _virtual_bound(self, candidate: _Candidate) -> int | None:
        """A lower bound from the graph of fewer microbatches; None where nothing fits.

        With k times as many microbatches the same strategies take at least as long, and keep at least 1/k of the
        activations; what is paid per microbatch for parameters is known. The largest count whose graph was looked at
        anyway is nearest.
        """
        count = candidate.microbatches
        graph_of = max(known for known in self._unlimited[candidate.setting] if count % known == 0)
        self._note_effort(candidate, graph_of)
        solver = self._solver(candidate, graph_of=graph_of)
        virtual = LimitedSearch(solver, self._request.limit_bytes, count // graph_of, gap=self._request.gap)
        hint = self._hints_of_bounds.get(candidate.setting, self._multiplier)
        bound = virtual.virtual_bound_ns(hint, self._ceiling)
        if virtual.multiplier:
            self._hints_of_bounds[candidate.setting] = virtual.multiplier
        candidate.last = virtual.parameters_too_large
        if virtual.proof.bound_ns > candidate.proof.bound_ns or virtual.proof.kind is ProofKind.INFEASIBLE:
            candidate.proof = replace(virtual.proof, graph_of=graph_of)
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
            if wanted and self._space.is_allowed(candidate.setting[0], count):
                known = self._unlimited[candidate.setting].items()
                proof = max((proof for k, proof in known if count % k == 0), key=lambda proof: proof.bound_ns)
                self._push(_Candidate(candidate.setting, count, proof.bound_ns, proof=proof))
                return

    # -- answers -----------------------------------------------------------------------------------------------

    def _result(self, candidate: _Candidate, outcome: Outcome, bound_ns: int, total: int) -> SearchResult:
        request = self._request
        mesh = candidate.setting[0]
        model = self._space.model(mesh, candidate.microbatches)
        assert outcome.choices is not None and candidate.state is not None
        configuration = candidate.state.configuration
        choices = outcome.choices

        @cache
        def write() -> Decisions:
            return assemble(model, configuration, choices.expand(), request.cluster, request.loss_output)

        return SearchResult(
            write=write,
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
                solved=len(self._solved),
                pruned=total - len(self._solved),
                strategies=model.num_strategies,
            ),
            notes=self._space.notes,
        )

    def _nothing_fits(self, unknown: bool) -> InfeasibleError | LimitReachedError:
        """The least memory that any plan of the space needs, over the meshes."""
        request = self._request
        limit = request.limit_bytes
        assert limit is not None
        bounds: list[int] = []
        for setting in self._settings:
            count = max(count for count in self._counts if self._space.is_allowed(setting[0], count))
            levels = self._settings[setting].levels
            for room in levels if levels[-1] >= 2 else (None,):
                bounds.append(least_memory(self._solver(_Candidate(setting, count, 0, room)))[0])
        least = min(bounds)
        if unknown and least <= limit:
            return LimitReachedError(
                f"no plan within {gigabytes(limit)} per device was found, and it is not proven that there is none",
                hint="raise --max-memory, or fix --zero, --recompute and --microbatches",
            )
        return NothingFitsError(does_not_fit(request, least, limit, "every plan needs"), tuple(self._leaves))
