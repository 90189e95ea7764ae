"""The least memory that any plan needs, exactly; and of the plans that need no more, the fastest.

A candidate is a mesh, settings, the highest ZeRO level in runs (with room for whole copies) and a microbatch count. The
one with the least bound is advanced first: from the graph of the whole batch, of whose activations k microbatches keep
at least 1/k; in the relaxed model of its own graph; exactly. Of the counts of a mesh the largest comes first: with
fewer microbatches the first of these bounds only rises, so that what it excludes it excludes for fewer as well.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tap_planner.cluster import Cluster
from tap_planner.errors import InfeasibleError
from tap_planner.search.configuration import Settings
from tap_planner.search.enumeration import SearchSpace
from tap_planner.search.fewer import requests_by_room, search_by_room
from tap_planner.search.memory_only import memory_solver
from tap_planner.search.merging import search_parts
from tap_planner.search.proof import UNPROVEN, Leaf, Proof, ProofKind, mesh_label
from tap_planner.search.request import SearchRequest, SearchResult, Smallest, does_not_fit
from tap_planner.search.solver import Solver
from tap_planner.search.terms import SCALE
from tap_planner.search.weighting import Outcome, Weights

__all__ = ["open_meshes", "search_smallest", "smallest", "within"]

Limits = Callable[[Cluster], int | None]
"""The memory limit on the devices of a cluster."""


def search_smallest(requests: Sequence[SearchRequest], limit_bytes: Limits) -> SearchResult:
    """The fastest of the plans that need the least memory.

    Args:
        requests: the parts of the space.
        limit_bytes: the limit on the devices of a cluster.

    Raises:
        InfeasibleError: nothing fits.
        LimitReachedError: nothing that fits was found, though it is not proven that nothing does.
    """
    least = smallest(requests, limit_bytes)
    if least.num_bytes is None and all(leaf.proof.kind is ProofKind.INFEASIBLE for leaf in least.leaves):
        raise _nothing_fits(requests, limit_bytes)
    if least.num_bytes is None:  # not proven: perhaps a plan that fits is met on the way to the fastest
        found = search_parts(requests, lambda request: search_by_room(request, limit_bytes))
        least = replace(least, num_bytes=found.memory_bytes)
    limits = within(limit_bytes, least.num_bytes)
    numbers, parts = zip(*open_meshes(requests, least.leaves, least.num_bytes), strict=True)
    result = search_parts(parts, lambda request: search_by_room(replace(request, lean=True), limits))
    meshes = sum(len(request.meshes) for request in requests)
    return replace(
        result,
        leaves=tuple(replace(leaf, part=numbers[leaf.part]) for leaf in result.leaves),
        statistics=replace(
            result.statistics,
            meshes=meshes,
            configurations=least.configurations,
            pruned=least.configurations - result.statistics.solved,
        ),
        smallest=least,
    )


def _nothing_fits(requests: Sequence[SearchRequest], limit_bytes: Limits) -> InfeasibleError:
    """The answer that no plan fits, with the least memory that any needs."""
    failures: list[InfeasibleError] = []
    for request in requests:
        for room in requests_by_room(request, limit_bytes):
            try:
                SearchSpace(room)
            except InfeasibleError as failure:
                failures.append(failure)
                continue
            least = smallest((room,), lambda cluster: None)
            assert room.limit_bytes is not None
            failures.append(does_not_fit(room, least.bound_bytes, room.limit_bytes, "every plan needs"))
    return min(failures, key=lambda failure: failure.least_memory_bytes)


def within(limit_bytes: Limits, most: int | None) -> Limits:
    """Limits that are no higher than so many bytes."""

    def limit(cluster: Cluster) -> int | None:
        own = limit_bytes(cluster)
        return most if own is None or (most is not None and most < own) else own

    return limit


def open_meshes(
    requests: Sequence[SearchRequest], leaves: Sequence[Leaf], most: int | None
) -> Iterator[tuple[int, SearchRequest]]:
    """Parts of the space, by number, with the meshes on which it is not proven that all plans need more memory.

    Args:
        requests: all parts.
        leaves: how much memory plans need.
        most: so much.
    """
    left = {
        (leaf.part, leaf.mesh)
        for leaf in leaves
        if leaf.proof.kind is not ProofKind.INFEASIBLE and (most is None or leaf.proof.bound_ns <= most)
    }
    for number, request in enumerate(requests):
        meshes = tuple(mesh for mesh in request.meshes if (number, mesh_label(mesh)) in left)
        if meshes:
            yield number, replace(request, meshes=meshes)


def smallest(requests: Sequence[SearchRequest], limit_bytes: Limits) -> Smallest:
    """The least memory of a plan within the limits, with the proof that none needs less.

    Args:
        requests: the parts of the space.
        limit_bytes: the limit on the devices of a cluster.
    """
    search = _Search()
    for part, request in enumerate(requests):
        for room in requests_by_room(request, limit_bytes):
            try:
                search.add(part, room)
            except InfeasibleError:  # by its sizes alone: there is nothing to look at
                continue
    return search.run()


@dataclass(slots=True)
class _Candidate:
    """Configurations that differ in their microbatch count only; the first count is looked at."""

    space: SearchSpace
    request: SearchRequest
    part: int
    mesh: int
    setting: int
    settings: Settings
    room: int | None
    counts: tuple[int, ...]
    """Descending."""
    whole: Solver | None = None
    """Of the graph of the whole batch."""
    stage: int = 0
    """What comes next: 0 that graph, 1 the relaxed model of its own, 2 the exact optimum; 3: nothing."""
    proof: Proof = UNPROVEN
    """``bound_ns`` are bytes; it holds for all counts."""


class _Search:
    """Best first; see the module."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, _Candidate]] = []
        self._order = 0
        self._leaves: list[Leaf] = []
        self._best: int | None = None
        self._configurations = 0

    def add(self, part: int, request: SearchRequest) -> None:
        """Add the meshes of a request, whose devices have equal room."""
        space = SearchSpace(request)
        for mesh in range(len(request.meshes)):
            counts = tuple(count for count in reversed(space.counts) if space.is_allowed(mesh, count))
            for number, settings in enumerate(space.settings(mesh)):
                self._configurations += len(space.counts)
                for room in settings.levels if settings.levels[-1] >= 2 else (None,):
                    self._push(_Candidate(space, request, part, mesh, number, settings, room, counts))

    def run(self) -> Smallest:
        """Advance the candidate of the least bound until the best plan is proven."""
        while self._queue:
            candidate = heapq.heappop(self._queue)[-1]
            limit, bound = candidate.request.limit_bytes, candidate.proof.bound_ns
            if limit is not None and bound > limit:
                candidate.proof = replace(candidate.proof, kind=ProofKind.INFEASIBLE)
                self._leave(candidate)
            elif candidate.stage == 3 or (self._best is not None and bound >= self._best):
                self._leave(candidate)
            else:
                self._advance(candidate)
        bounds = [leaf.proof.bound_ns for leaf in self._leaves if leaf.proof.kind is not ProofKind.INFEASIBLE]
        if self._best is not None:
            bounds.append(self._best)
        return Smallest(
            num_bytes=self._best,
            bound_bytes=min(bounds, default=0),
            leaves=tuple(self._leaves),
            configurations=self._configurations,
        )

    def _push(self, candidate: _Candidate) -> None:
        self._order += 1
        heapq.heappush(self._queue, (candidate.proof.bound_ns, self._order, candidate))

    def _leave(self, candidate: _Candidate) -> None:
        """Note how the counts that are left are bounded."""
        for count in candidate.counts:
            self._leaves.append(
                Leaf(
                    mesh=mesh_label(candidate.request.meshes[candidate.mesh]),
                    setting=candidate.setting,
                    room=candidate.room,
                    microbatches=count,
                    and_more=False,
                    and_multiples=False,
                    proof=candidate.proof,
                    solver_ns=candidate.proof.bound_ns,
                    part=candidate.part,
                )
            )

    def _advance(self, candidate: _Candidate) -> None:
        """Run the next stage; before the graph of its own is looked at, part with the other counts."""
        count, others = candidate.counts[0], candidate.counts[1:]
        space = candidate.space
        if candidate.stage == 0 and (count == space.counts[0] or not space.is_like_first(count)):
            candidate.stage = 1  # its own graph is that of the whole batch, or that says nothing of it
        if candidate.stage == 0:
            found = self._whole(candidate).minimise(Weights(0, 1, count))
            self._prove(candidate, ProofKind.RELAXED, found, graph_of=candidate.space.counts[0])
        else:
            if candidate.stage == 1 and others:
                self._push(replace(candidate, counts=others, stage=0))
                candidate.counts = (count,)
            solver = self._solver(candidate, count)
            exact = candidate.stage == 2
            found = solver.optimum(Weights(0, 1)) if exact else solver.minimise(Weights(0, 1))
            self._prove(candidate, ProofKind.TIGHTENED if exact else ProofKind.RELAXED, found)
            self._take(candidate, found)
        candidate.stage += 1
        self._push(candidate)

    def _whole(self, candidate: _Candidate) -> Solver:
        """Of the whole batch: but for times it is the same for all counts."""
        if candidate.whole is None:
            candidate.whole = self._solver(candidate, candidate.counts[0], graph_of=candidate.space.counts[0])
        return candidate.whole

    def _solver(self, candidate: _Candidate, count: int, *, graph_of: int | None = None) -> Solver:
        costed = candidate.space.costed(candidate.mesh, candidate.settings, candidate.room, count, graph_of=graph_of)
        return memory_solver(costed)

    def _prove(self, candidate: _Candidate, kind: ProofKind, found: Outcome, *, graph_of: int | None = None) -> None:
        bound = -(-found.bound // SCALE)
        if bound > candidate.proof.bound_ns or candidate.proof is UNPROVEN:
            candidate.proof = Proof(kind=kind, bound_ns=bound, graph_of=graph_of)

    def _take(self, candidate: _Candidate, found: Outcome) -> None:
        limit = candidate.request.limit_bytes
        if found.choices is None or (limit is not None and found.num_bytes > limit):
            return
        if self._best is None or found.num_bytes < self._best:
            self._best = found.num_bytes
