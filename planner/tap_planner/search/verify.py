"""Leaves of a proof, checked: that they cover the space, and that elimination gives their bounds again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from tap_planner.cluster import Cluster
from tap_planner.cost import PriceList
from tap_planner.errors import InfeasibleError
from tap_planner.search.configuration import Settings
from tap_planner.search.enumeration import SearchSpace
from tap_planner.search.factors import WidthError
from tap_planner.search.fewer import requests_by_room
from tap_planner.search.limited import LimitedSearch
from tap_planner.search.memory_only import memory_solver
from tap_planner.search.proof import Leaf, ProofKind, mesh_label
from tap_planner.search.request import SearchRequest
from tap_planner.search.shares import wrong_shares
from tap_planner.search.smallest import open_meshes, within
from tap_planner.search.solver import Solver
from tap_planner.search.terms import SCALE
from tap_planner.search.weighting import Weights

__all__ = ["LeafFinding", "verify_in_memory", "verify_leaves", "verify_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafFinding:
    """Something about the leaves that is not as the plan says."""

    where: str
    what: str


def verify_leaves(
    requests: Sequence[SearchRequest],
    limit_bytes: Callable[[Cluster], int | None],
    leaves: Sequence[Leaf],
    *,
    replay: bool,
) -> tuple[LeafFinding, ...]:
    """Everything that is wrong with the leaves of a proof.

    Args:
        requests: the parts of the space, laid out anew.
        limit_bytes: the limit on the devices of a cluster.
        leaves: what the plan says.
        replay: whether to prove again what the solver has proven beyond elimination.
    """
    return _verify(enumerate(requests), limit_bytes, leaves, lambda *given: _Checking(*given, replay=replay))


def verify_memory(
    requests: Sequence[SearchRequest], limit_bytes: Callable[[Cluster], int | None], leaves: Sequence[Leaf]
) -> tuple[LeafFinding, ...]:
    """Everything that is wrong with the leaves of a proof of how much memory plans need at least; see ``smallest``."""
    return _verify(enumerate(requests), limit_bytes, leaves, _CheckingMemory)


def verify_in_memory(
    requests: Sequence[SearchRequest],
    limit_bytes: Callable[[Cluster], int | None],
    leaves: Sequence[Leaf],
    needs: Sequence[Leaf],
    most: int,
    *,
    replay: bool,
) -> tuple[LeafFinding, ...]:
    """``verify_leaves`` of a proof about the plans that need so much memory at most.

    Args:
        requests: the parts of the space, laid out anew.
        limit_bytes: the limit on the devices of a cluster.
        leaves: what the plan says.
        needs: how much memory plans need (verified apart): meshes on which all need more are none of the space.
        most: so much.
        replay: whether to prove again what the solver has proven beyond elimination.
    """
    parts = ((number, replace(request, lean=True)) for number, request in open_meshes(requests, needs, most))
    return _verify(parts, within(limit_bytes, most), leaves, lambda *given: _Checking(*given, replay=replay))


def _verify(
    parts: Iterable[tuple[int, SearchRequest]],
    limit_bytes: Callable[[Cluster], int | None],
    leaves: Sequence[Leaf],
    checking_of: Callable[[SearchSpace, SearchRequest, Sequence[Leaf]], _Checking],
) -> tuple[LeafFinding, ...]:
    findings: list[LeafFinding] = []
    known: set[tuple[int, str, int]] = set()
    for part, request in parts:
        for room in requests_by_room(request, limit_bytes):
            mine = [leaf for leaf in leaves if leaf.part == part]
            try:
                space = SearchSpace(room)
            except InfeasibleError:  # by its sizes alone: there is nothing to cover, and there are no leaves
                continue
            checking = checking_of(space, room, mine)
            findings += checking.findings()
            known |= {(part, mesh, setting) for mesh, setting in checking.settings}
    findings += (
        LeafFinding(where=_shown(leaf), what="is about nothing that is in the space")
        for leaf in leaves
        if (leaf.part, leaf.mesh, leaf.setting) not in known
    )
    return tuple(findings)


def _shown(leaf: Leaf) -> str:
    room = "" if leaf.room is None else f", room for ZeRO {leaf.room}"
    setting = f", setting {leaf.setting}" if leaf.setting else ""
    return f"{leaf.mesh}, {leaf.microbatches} microbatches{setting}{room}"


class _Checking:
    """The leaves of meshes whose devices have equal room."""

    def __init__(
        self, space: SearchSpace, request: SearchRequest, leaves: Sequence[Leaf], *, replay: bool = False
    ) -> None:
        self._space = space
        self._limit = request.limit_bytes
        self._unit = "bytes" if request.prices is PriceList.VOLUME else "ns"
        self._replay = replay
        self._mesh = {mesh_label(mesh): number for number, mesh in enumerate(request.meshes)}
        self.settings: dict[tuple[str, int], Settings] = {
            (label, number): settings
            for label, mesh in self._mesh.items()
            for number, settings in enumerate(space.settings(mesh))
        }
        self._leaves: dict[tuple[str, int], list[Leaf]] = {key: [] for key in self.settings}
        for leaf in leaves:
            if (leaf.mesh, leaf.setting) in self._leaves:
                self._leaves[leaf.mesh, leaf.setting].append(leaf)
        self._bounds: dict[object, int] = {}

    def findings(self) -> Iterator[LeafFinding]:
        for key, settings in self.settings.items():
            leaves = self._leaves[key]
            yield from self._uncovered(key, settings, leaves)
            for leaf in leaves:
                wrong = self._wrong(leaf, settings)
                if wrong:
                    yield LeafFinding(where=_shown(leaf), what=wrong)

    # -- coverage ----------------------------------------------------------------------------------------------

    def _uncovered(self, key: tuple[str, int], settings: Settings, leaves: Sequence[Leaf]) -> Iterator[LeafFinding]:
        mesh = self._mesh[key[0]]
        for count in self._space.counts:
            if not self._space.is_allowed(mesh, count):
                continue
            rooms = {leaf.room for leaf in leaves if self._covers(leaf, count)}
            missing = [] if None in rooms else [level for level in settings.levels if level not in rooms]
            if missing:
                where = f"{key[0]}, {count} microbatches" + (f", setting {key[1]}" if key[1] else "")
                levels = ", ".join(map(str, missing)) if rooms else "any"
                yield LeafFinding(where=where, what=f"is not covered (ZeRO level {levels})")

    def _covers(self, leaf: Leaf, count: int) -> bool:
        if leaf.microbatches == count or (leaf.and_more and leaf.microbatches < count):
            return True
        return leaf.and_multiples and count % leaf.microbatches == 0 and self._space.is_like_first(count)

    # -- bounds ------------------------------------------------------------------------------------------------

    def _wrong(self, leaf: Leaf, settings: Settings) -> str | None:
        """What does not hold of a leaf; None if all does."""
        proof, mesh = leaf.proof, self._mesh[leaf.mesh]
        if leaf.microbatches not in self._space.counts or not self._space.is_allowed(mesh, leaf.microbatches):
            return "has a microbatch count that is not in the space"
        if leaf.room is not None and leaf.room not in settings.levels:
            return f"has room for ZeRO {leaf.room}, which is not in the space"
        if not self._has_graph(proof.graph_of, leaf.microbatches):
            return f"is bounded by the graph of {proof.graph_of} microbatches, which says nothing of it"
        if proof.multiplier and self._limit is None:
            return "has a multiplier, but there is no memory limit"
        if proof.multiplier and not self._space.limit_bounds:
            return "has a multiplier, but the limit of all stages together bounds no plan in stages"
        if _bounds_more(leaf):
            graph_of = proof.graph_of
            if graph_of is None or not self._space.tells_of_all_from(graph_of, leaf.microbatches):
                which = f"the graph of {graph_of} microbatches" if graph_of else "its own graph"
                return f"is bounded by {which}, which says nothing of all larger counts"
        elif leaf.and_more and not self._parameters_too_large(leaf, settings):
            return "claims that larger microbatch counts do not fit, but its parameters do"
        if proof.kind is ProofKind.INFEASIBLE:
            return None if self._nothing_fits(leaf, settings) else "claims that nothing fits, which is not so"
        if leaf.solver_ns < proof.bound_ns:
            return "claims that the solver has proven less than elimination"
        if leaf.and_multiples and proof.multiplier:
            return "speaks of multiples of its microbatches, which a multiplier does not bound"
        if proof.shares:
            wrong = wrong_shares(proof.shares, self._space.model(mesh, proof.graph_of or leaf.microbatches))
            if wrong:
                return wrong
        if not self._bounded(leaf, settings):
            return f"claims a bound of {proof.bound_ns} {self._unit}, which elimination does not give"
        if leaf.solver_ns > proof.bound_ns and self._replay and not self._solved(leaf, settings):
            return f"claims a solver's bound of {leaf.solver_ns} {self._unit}, which the solver does not give again"
        return None

    def _has_graph(self, graph_of: int | None, count: int) -> bool:
        if graph_of is None or graph_of == count:
            return True
        return graph_of in self._space.counts and count % graph_of == 0 and self._space.is_like_first(count)

    def _bounded(self, leaf: Leaf, settings: Settings) -> bool:
        proof, mesh = leaf.proof, self._mesh[leaf.mesh]
        if proof.kind is ProofKind.SPLIT or not proof.bound_ns:
            is_alike = self._space.is_like_first(leaf.microbatches) or not proof.bound_ns
            return is_alike and self._space.least_ns(mesh) >= proof.bound_ns
        if proof.kind is ProofKind.TIGHTENED and proof.multiplier:
            return any(self._proven(leaf, settings, room) for room in dict.fromkeys((leaf.room, None)))
        return any(
            self._bound(leaf, settings, room, count, graph_of) >= proof.bound_ns
            for room, count, graph_of in self._views(leaf)
        )

    def _proven(self, leaf: Leaf, settings: Settings, room: int | None) -> bool:
        """Whether the weighted model has nothing below a bound, by the shares and the exact tables that gave it."""
        proof = leaf.proof
        solver = self._solver(leaf, settings, room, leaf.microbatches, proof.graph_of)
        weights = _weights(proof.multiplier, _divisor(leaf.microbatches, proof.graph_of))
        least = SCALE * ((proof.bound_ns - 1) * weights.time + weights.memory * (self._limit or 0)) + 1
        return solver.proves(weights, least, proof.shares, proof.loose)

    def _views(self, leaf: Leaf) -> Iterator[tuple[int | None, int, int | None]]:
        """(room, microbatches, graph of) of what bounds a leaf; the cheapest to take and the likeliest first."""
        rooms = (leaf.room,) if leaf.room is None else (leaf.room, None)
        for room in reversed(rooms):  # without room it is a bound as well, and the leaf may have it from there
            if leaf.proof.graph_of is not None and not leaf.proof.multiplier:
                yield room, leaf.proof.graph_of, None
            yield room, leaf.microbatches, leaf.proof.graph_of

    def _solver(self, leaf: Leaf, settings: Settings, room: int | None, count: int, graph_of: int | None) -> Solver:
        mesh, more = self._mesh[leaf.mesh], _bounds_more(leaf)
        return self._space.solver(self._space.costed(mesh, settings, room, count, graph_of=graph_of, and_more=more))

    def _bound(self, leaf: Leaf, settings: Settings, room: int | None, count: int, graph_of: int | None) -> int:
        """The Lagrangian bound, in ns, computed from nothing but the multiplier."""
        proof = leaf.proof
        more = _bounds_more(leaf)
        key = (leaf.mesh, leaf.setting, room, count, graph_of, more, proof.multiplier, proof.kind, proof.shares)
        if key not in self._bounds:
            weights = _weights(proof.multiplier, _divisor(self._space.counts[-1] if more else count, graph_of))
            solver = self._solver(leaf, settings, room, count, graph_of)
            solver.share_out(weights, proof.shares)
            found = solver.optimum(weights) if proof.kind is ProofKind.TIGHTENED else solver.minimise(weights)
            paid = SCALE * weights.memory * (self._limit or 0)
            self._bounds[key] = -(-(found.bound - paid) // (SCALE * weights.time))
        return self._bounds[key]

    def _parameters_too_large(self, leaf: Leaf, settings: Settings) -> bool:
        if self._limit is None:
            return False
        return (
            self._space.costed(
                self._mesh[leaf.mesh], settings, leaf.room, leaf.microbatches, graph_of=leaf.proof.graph_of
            ).least_own_bytes()
            > self._limit
        )

    def _nothing_fits(self, leaf: Leaf, settings: Settings) -> bool:
        if self._limit is None:
            return False
        if self._parameters_too_large(leaf, settings):
            return True
        if not self._space.limit_bounds:
            return False
        graph_of = leaf.proof.graph_of
        rooms = (None,) if leaf.room is None else (leaf.room, None)
        for room in rooms:
            solver = self._solver(leaf, settings, room, leaf.microbatches, graph_of)
            if solver.is_empty:
                return True
            least = solver.minimise(Weights(0, 1, _divisor(leaf.microbatches, graph_of)))
            if -(-least.bound // SCALE) > self._limit:
                return True
        return False

    def _solved(self, leaf: Leaf, settings: Settings) -> bool:
        """Whether the search of the leaf, run to its end, proves the solver's bound again."""
        for room in (leaf.room,) if leaf.room is None else (leaf.room, None):
            limit = self._limit if self._space.limit_bounds else None
            state = LimitedSearch(self._solver(leaf, settings, room, leaf.microbatches, None), limit)
            try:
                while not state.finished and state.bound_ns < leaf.solver_ns:
                    state.advance(leaf.proof.multiplier, leaf.solver_ns)
            except WidthError:
                continue
            if state.infeasible or state.bound_ns >= leaf.solver_ns:
                return True
        return False


class _CheckingMemory(_Checking):
    """The same of leaves whose bounds are bytes of memory."""

    def _wrong(self, leaf: Leaf, settings: Settings) -> str | None:
        proof, mesh = leaf.proof, self._mesh[leaf.mesh]
        if leaf.microbatches not in self._space.counts or not self._space.is_allowed(mesh, leaf.microbatches):
            return "has a microbatch count that is not in the space"
        if leaf.room is not None and leaf.room not in settings.levels:
            return f"has room for ZeRO {leaf.room}, which is not in the space"
        if not self._has_graph(proof.graph_of, leaf.microbatches):
            return f"is bounded by the graph of {proof.graph_of} microbatches, which says nothing of it"
        if proof.multiplier or leaf.and_more or leaf.and_multiples or leaf.solver_ns != proof.bound_ns:
            return "claims more than a bound of memory"
        if proof.kind is ProofKind.INFEASIBLE:
            fits = self._limit is None or self._least(leaf, settings, exact=True) <= self._limit
            return "claims that nothing fits, which is not so" if fits else None
        if proof.bound_ns and proof.kind is ProofKind.SPLIT:
            return "claims a bound of memory by splitting operators"
        if proof.bound_ns > self._least(leaf, settings, exact=proof.kind is ProofKind.TIGHTENED):
            return f"claims a bound of {proof.bound_ns} bytes, which elimination does not give"
        return None

    def _least(self, leaf: Leaf, settings: Settings, *, exact: bool) -> int:
        """The bound, in bytes, computed anew."""
        count, graph_of = leaf.microbatches, leaf.proof.graph_of
        key = (leaf.mesh, leaf.setting, leaf.room, count, graph_of, exact)
        if key not in self._bounds:
            mesh, weights = self._mesh[leaf.mesh], Weights(0, 1, _divisor(count, graph_of))
            solver = memory_solver(self._space.costed(mesh, settings, leaf.room, count, graph_of=graph_of))
            found = solver.optimum(weights) if exact else solver.minimise(weights)
            self._bounds[key] = -(-found.bound // SCALE)
        return self._bounds[key]


def _bounds_more(leaf: Leaf) -> bool:
    """Whether a bound is claimed for all larger microbatch counts, not that their parameters are too large."""
    return leaf.and_more and leaf.proof.kind is ProofKind.RELAXED and bool(leaf.proof.multiplier)


def _divisor(count: int, graph_of: int | None) -> int:
    """Of activations, where the graph of fewer microbatches stands for that of ``count``."""
    return 1 if graph_of is None else count // graph_of


def _weights(multiplier: Fraction, divisor: int) -> Weights:
    return Weights(multiplier.denominator, multiplier.numerator, divisor)
