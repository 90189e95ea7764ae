"""Whether a plan fits, answered in little time: a small space is searched, of a large one some likely corners."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from tap_planner.errors import TapError
from tap_planner.requests import PreparedSearch, limit_bytes

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster, Mesh
    from tap_planner.search import SearchRequest, SearchResult
    from tap_planner.search.enumeration import SearchSpace

__all__ = ["Prober"]

GAP = Fraction(1, 5)
"""A plan this near the optimum is good enough to compare changes."""
MAX_EFFORT = 5_000
"""Of all probes together, in ``_effort``; about ten seconds."""
SMALL = 450
"""Spaces of no more effort are searched as a whole."""
MESHES = 3
"""Meshes of a large space that are looked at."""
SEARCH = 4
"""A search takes about so many times as long as a minimisation of memory."""


@dataclass(slots=True)
class Prober:
    """Looks for plans with a limited effort, counted in sizes (never on the clock, so answers are reproducible)."""

    left: int = MAX_EFFORT

    @property
    def exhausted(self) -> bool:
        """Whether nothing more is looked for."""
        return self.left <= 0

    def plan(self, prepared: PreparedSearch) -> SearchResult | None:
        """A plan that fits; None where none is found, which does not prove that there is none.

        Pipelines are no answer: whether their stages fit shows when they are cut.
        """
        plain = (request for request in prepared.requests if request.pipeline is None)
        found = [result for request in plain if (result := self._plan(request, prepared)) is not None]
        return min(found, key=lambda result: result.objective_ns, default=None)

    def least_bytes(self, prepared: PreparedSearch) -> int | None:
        """Memory of a plan that needs little; of the least that any needs where the space is small."""
        found: list[int] = []
        for request in prepared.requests:
            try:
                found += self._least(request)
            except TapError:
                continue
        return min(found, default=None)

    # -- one part of the space ---------------------------------------------------------------------------------

    def _plan(self, request: SearchRequest, prepared: PreparedSearch) -> SearchResult | None:
        from tap_planner.search import search_by_room
        from tap_planner.search.enumeration import SearchSpace

        if self.exhausted:
            return None
        try:
            space = SearchSpace(replace(request, gap=GAP))
            whole = SEARCH * sum(_effort(request, mesh) for mesh in request.meshes)
            if whole <= SMALL or any(mesh.devices for mesh in request.meshes):
                self.left -= whole

                def room(cluster: Cluster) -> int | None:
                    return limit_bytes(cluster, prepared.options)

                return search_by_room(replace(request, gap=GAP), room)
            return next(self._corners(request, space.counts), None)
        except TapError:
            return None

    def _corners(self, request: SearchRequest, counts: Sequence[int]) -> Iterator[SearchResult]:
        """Plans with all that saves memory, on likely meshes, with few and with many microbatches."""
        from tap_planner.search import search

        for mesh in _likely(request.meshes, request.cluster):
            corner = _saving(request, mesh)
            most, few = counts[-1], _splitting(request.batch, counts, mesh)
            if self.exhausted or not self._may_fit(corner, most):
                continue
            for count in dict.fromkeys((few, most)):
                self.left -= SEARCH * _effort(corner, mesh)
                try:
                    yield search(replace(corner, microbatches=count, gap=GAP))
                except TapError:
                    continue

    def _may_fit(self, corner: SearchRequest, count: int) -> bool:
        """Whether it is not proven that nothing fits."""
        from tap_planner.search import Solver, Weights
        from tap_planner.search.terms import SCALE

        if corner.limit_bytes is None:
            return True
        space = _space(corner, count)
        self.left -= _effort(corner, corner.meshes[0])
        solver = Solver(space.costed(0, space.settings(0)[0], None, count))
        return -(-solver.minimise(Weights(0, 1)).bound // SCALE) <= corner.limit_bytes

    def _least(self, request: SearchRequest) -> list[int]:
        from tap_planner.search import Solver, Weights
        from tap_planner.search.enumeration import SearchSpace

        counts = SearchSpace(replace(request, limit_bytes=None)).counts
        found: list[int] = []
        for mesh in _likely(request.meshes, request.cluster):
            if self.exhausted:
                break
            corner = replace(_saving(request, mesh), limit_bytes=None)
            self.left -= SEARCH * _effort(corner, mesh)
            space = _space(corner, counts[-1])
            solver = Solver(space.costed(0, space.settings(0)[0], corner.zero_levels[-1], counts[-1]))
            found.append(solver.optimum(Weights(0, 1)).num_bytes)
        return found


def _space(corner: SearchRequest, count: int) -> SearchSpace:
    from tap_planner.search.enumeration import SearchSpace

    return SearchSpace(replace(corner, microbatches=count))


def _saving(request: SearchRequest, mesh: Mesh) -> SearchRequest:
    """On one mesh, with the recompute setting that saves most: a part of the space."""
    return replace(request, meshes=(mesh,), recomputes=request.recomputes[-1:])


def _likely(meshes: Sequence[Mesh], cluster: Cluster) -> list[Mesh]:
    """Meshes of few axes, whose inner ones fill a node."""
    per_node = cluster.levels[0].size

    def key(mesh: Mesh) -> tuple[int, int]:
        inner = math.prod(mesh.shape[1:])
        return len(mesh.shape), abs(inner - per_node)

    return sorted(meshes, key=key)[:MESHES]


def _splitting(batch: int, counts: Sequence[int], mesh: Mesh) -> int:
    """The most microbatches that still leave each place of the outermost axis a sample."""
    return max((count for count in counts if batch // count >= mesh.shape[0]), default=counts[0])


def _effort(request: SearchRequest, mesh: Mesh) -> int:
    """Size of the folded graph of a microbatch, more with more axes."""
    return len(request.folded(1).representatives()) * 3 ** (len(mesh.shape) - 1)
