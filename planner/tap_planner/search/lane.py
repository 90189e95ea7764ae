"""Best-first search over the configurations of some of the meshes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from tap_planner.search.configuration import Settings
from tap_planner.search.enumeration import SearchSpace
from tap_planner.search.limited import LimitedSearch, least_memory
from tap_planner.search.messages import Choice, ChosenPlan, FoundPlan, Known, PlanKey, Report
from tap_planner.search.proof import UNPROVEN, Leaf, Proof, ProofKind, mesh_label
from tap_planner.search.request import SearchRequest
from tap_planner.search.shares import Shares
from tap_planner.search.solver import Solver
from tap_planner.search.weighting import Outcome

FEW_AXES = 2
"""Meshes of more axes are looked at after those of so many, and with limited effort: their bounds are far from what can
be reached, and there are many of them."""
MAX_EFFORT = 45_000_000
"""Table entries of the models that a lane runs stages for, of meshes of more axes, where there are others (15 s)."""
BOUND, GRAPH = 3, 6
"""Roughly what it costs to look at a configuration through the graph of fewer microbatches, and to make its own."""
STAGES = (2, 1, 4, 40, 25)
"""The same of its stages."""
BORROWING = 12
"""The same of a stage that begins with what a sibling has found."""
LARGER = 10
"""How many times as much that is for meshes of more axes."""
FAR_ABOVE = 32
"""Where the bound of a microbatch count is above the ceiling by more than this part of it, all larger ones are tried at
once."""
NEAR_LEADER = 128
"""A ZeRO level waits for one whose bound is above its own by no more than this part."""
WARM = 2
"""Meshes whose tables a lane keeps, which may take some hundred MB each."""

_Setting = tuple[int, int]
"""Index of the mesh, and of what regions may choose from."""


@dataclass(slots=True, eq=False)
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
    unlimited_ns: int = 0
    """A lower bound of the least time without the limit, where its own is not asked for."""
    before: _Candidate | None = None
    """That of the next smaller microbatch count, which has queued it."""
    expected_ns: int = 0
    """About what bound the graph of fewer microbatches will give."""

    @property
    def key(self) -> PlanKey:
        """Of its plan."""
        return PlanKey(*self.setting, self.microbatches, self.room)


class Lane:
    """The search over some of the meshes: ``choose`` and ``advance`` by turns, until nothing is left to choose.

    Args:
        request: the search.
        space: its space.
        meshes: numbers of the meshes.
    """

    def __init__(self, request: SearchRequest, space: SearchSpace, meshes: Sequence[int]) -> None:
        self._request = request
        self._space = space
        self._counts = space.counts
        self._known = Known()
        self._unlimited: dict[_Setting, dict[int, Proof]] = {}
        """By microbatch count, for those whose own graph was looked at, what is proven of its multiples."""
        self._settled: dict[_Setting, set[int]] = {}
        self._queue: list[tuple[bool, int, _Setting, int, int, _Candidate]] = []
        self._order = 0
        self._chosen: _Candidate | None = None
        self._ended: list[int] = []
        self._solved: set[tuple[_Setting, int]] = set()
        self._leaves: list[Leaf] = []
        self._found: dict[PlanKey, tuple[_Candidate, Outcome]] = {}
        self._hints_of_bounds: dict[_Setting, Fraction] = {}
        self._tightened: dict[tuple[_Setting, int], tuple[Fraction, Shares]] = {}
        """By setting and microbatch count, multiplier and shares of the first tightened model, whatever there was room
        for."""
        self._families: dict[tuple[_Setting, int], list[_Candidate]] = {}
        """By setting and microbatch count, the ZeRO levels of which none has been through a stage that takes long."""
        self._best: tuple[_Candidate, Outcome] | None = None
        self._tails: dict[_Setting, _Candidate] = {}
        """By setting, the candidate of the largest microbatch count that was queued so far."""
        self._settings: dict[_Setting, Settings] = {}
        has_few = any(len(mesh.axes) <= FEW_AXES for mesh in request.meshes)
        self._is_late = [has_few and len(mesh.axes) > FEW_AXES for mesh in request.meshes]
        """By mesh, whether it comes after the others, with limited effort."""
        self._warm: list[int] = []
        """Meshes whose tables are kept, the last one that was looked at last."""
        self._effort = 0
        """Table entries of the models that stages were run for, of such meshes."""
        for mesh in meshes:
            self._start(mesh)
        self._configurations = len(self._queue) * len(self._counts)

    def _start(self, mesh: int) -> None:
        parts = bool(self._request.meshes[mesh].devices) or self._request.pipeline is not None
        bound = self._space.least_ns(mesh) if parts else 0  # what is within the gap may be predicted faster: look at it
        for number, choices in enumerate(self._space.settings(mesh)):
            self._settings[mesh, number] = choices
            self._unlimited[mesh, number] = {self._counts[0]: UNPROVEN}
            proof = Proof(kind=ProofKind.SPLIT, bound_ns=bound)
            first = _Candidate((mesh, number), self._counts[0], bound, screened=True, proof=proof)
            self._tails[first.setting] = first
            self._push(first)

    def _solver(
        self, candidate: _Candidate, *, graph_of: int | None = None, and_more: bool = False, least: bool = False
    ) -> Solver:
        """A solver of a candidate; ``graph_of``, ``and_more`` and ``least`` as in ``SearchSpace.costed``."""
        mesh, _ = candidate.setting
        settings, count = self._settings[candidate.setting], candidate.microbatches
        costed = self._space.costed(
            mesh, settings, candidate.room, count, graph_of=graph_of, and_more=and_more, least=least
        )
        return self._space.solver(costed)

    def _limited(self, solver: Solver, divisor: int, unlimited_ns: int) -> LimitedSearch:
        """The search of one configuration, see there."""
        request = self._request
        return LimitedSearch(solver, request.limit_bytes, divisor, gap=request.gap, unlimited_ns=unlimited_ns)

    # -- best first --------------------------------------------------------------------------------------------

    def choose(self, known: Known, elsewhere_ns: int | None = None) -> Choice | None:
        """Choose the most promising configuration, and leave those that are not worth a look.

        Args:
            known: what all lanes have found.
            elsewhere_ns: the least bound that another lane is busy with: what takes long waits for what that may find,
                as long as there is something else to do.

        Returns:
            None: nothing is left.
        """
        self._known = known
        waiting: list[_Candidate] = []
        while self._queue and self._chosen is None:
            place = heapq.heappop(self._queue)
            candidate = place[-1]
            if self._is_settled(candidate):
                if not candidate.followed:
                    self._queue_next(candidate)
            elif self._good_enough(candidate.bound_ns) or self._too_long(candidate):
                self._drop(candidate)
            elif self._place(candidate)[:2] > place[:2] or self._looks_further(candidate):
                self._push(candidate)
            elif self._takes_long(candidate) and elsewhere_ns is not None and elsewhere_ns < self._place(candidate)[1]:
                waiting.append(candidate)
            else:
                self._chosen = candidate
        if self._chosen is None and waiting:
            self._chosen = waiting.pop(0)
        for candidate in waiting:
            self._push(candidate)
        if self._chosen is None:
            return None
        bound_ns = self._chosen.bound_ns if self._chosen.screened else None
        return Choice(cost=self._cost(self._chosen), bound_ns=bound_ns)

    def _drop(self, candidate: _Candidate) -> None:
        """Nothing of it is worth a further look."""
        least_ns = self._space.least_ns(candidate.setting[0])
        if candidate.bound_ns < least_ns and self._space.is_like_first(candidate.microbatches):
            candidate.proof = Proof(kind=ProofKind.SPLIT, bound_ns=least_ns)
            candidate.bound_ns = least_ns
        self._ended.append(candidate.bound_ns)
        if not candidate.followed and not candidate.last:
            self._queue_next(candidate)
        self._leave(candidate)

    def _takes_long(self, candidate: _Candidate) -> bool:
        """Whether it, or the sibling that it waits for, is about to go through a stage that takes long."""
        states = (candidate.state, *(leader.state for leader in self._leaders_of(candidate)))
        return any(state is not None and state.has_crossed for state in states)

    def _looks_further(self, candidate: _Candidate) -> bool:
        """Queue the next microbatch count of its setting before it goes through a stage that takes long: a bound that
        rises from one count to the next may hide a lower one at the count after."""
        tail = self._tails[candidate.setting]
        if not self._takes_long(candidate) or not tail.screened or tail.followed or tail.last:
            return False
        self._queue_next(tail)
        return self._tails[candidate.setting] is not tail

    def _cost(self, candidate: _Candidate) -> int:
        """Roughly what comes next costs."""
        times = LARGER if self._is_late[candidate.setting[0]] else 1
        if not candidate.screened:
            return BOUND * times
        if candidate.state is None:
            is_new = candidate.microbatches not in {count for _, count in self._solved}
            return STAGES[0] * times + (GRAPH if is_new else 0)
        is_lent = candidate.state.can_borrow and (candidate.setting, candidate.microbatches) in self._tightened
        return (BORROWING if is_lent else STAGES[candidate.state.stage]) * times

    def advance(self) -> Known:
        """Run the next stage of the configuration that was chosen; returns what this lane has found."""
        candidate = self._chosen
        assert candidate is not None
        self._chosen = None
        multiplier = self._advance(candidate)
        state = candidate.state
        if state is not None:
            self._follow(candidate, state)
        self._keep_warm(candidate)
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
                self._ended.append(state.bound_ns)
        return Known(None if self._best is None else self._best[1].ns, multiplier)

    def _keep_warm(self, candidate: _Candidate) -> None:
        """Free the tables of a mesh that has not been looked at for long."""
        mesh = candidate.setting[0]
        self._warm = [*(other for other in self._warm if other != mesh), mesh]
        if len(self._warm) <= WARM:
            return
        cold = self._warm.pop(0)
        self._space.forget(cold)
        for *_, other in self._queue:
            if other.setting[0] == cold and other.state is not None:
                other.state.forget()

    def polish(self) -> PlanKey:
        """Take the best plan's configuration through its own stages short of the master: within the gap its rounding
        may still hold decisions that cost a little and puzzle a reader. Returns which it is."""
        assert self._best is not None
        candidate = self._best[0]
        while candidate.state is not None and not candidate.state.finished and not candidate.state.only_master_left:
            self._advance(candidate)
        if candidate.state is not None:
            candidate.state.polish()
            self._note_best(candidate, candidate.state)
        return self._best[0].key

    def _leave(self, candidate: _Candidate) -> None:
        """A part of the space is done with: note how it is bounded."""
        if candidate.state is not None:
            candidate.state.forget()
        family = self._families.get((candidate.setting, candidate.microbatches), [])
        if candidate in family:
            family.remove(candidate)
        proof, solver_ns = candidate.proof, max(candidate.bound_ns, candidate.proof.bound_ns)
        if not self._space.limit_bounds:
            proof = self._without_limit(candidate)
            solver_ns = proof.bound_ns
        self._leaves.append(
            Leaf(
                mesh=mesh_label(self._request.meshes[candidate.setting[0]]),
                setting=candidate.setting[1],
                room=candidate.room,
                microbatches=candidate.microbatches,
                and_more=candidate.last,
                and_multiples=candidate.settled,
                proof=proof,
                solver_ns=solver_ns,
            )
        )

    def _without_limit(self, candidate: _Candidate) -> Proof:
        """What is proven of a candidate whether or not a plan is within the limit, or that its parameters alone are
        not."""
        state, mesh = candidate.state, candidate.setting[0]
        if state is not None and state.parameters_too_large:
            return candidate.proof
        known = [Proof(kind=ProofKind.SPLIT, bound_ns=self._space.least_ns(mesh))]
        known += (proof for proof in self._unlimited[candidate.setting].values() if proof.bound_ns)
        if state is not None and state.unlimited.bound_ns:
            known.append(state.unlimited)
        if not candidate.proof.multiplier and candidate.proof.kind is not ProofKind.INFEASIBLE:
            known.append(candidate.proof)
        return max(known, key=lambda proof: proof.bound_ns)

    def _split(self, candidate: _Candidate) -> list[_Candidate]:
        """A candidate whose bound leaves out room for whole copies, as one candidate for each highest ZeRO level."""
        state = candidate.state
        levels = self._settings[candidate.setting].levels
        if state is None or candidate.room is not None or not state.has_crossed or levels[-1] < 2:
            return [candidate]
        if not candidate.followed:
            self._queue_next(candidate)
        rooms = [
            _Candidate(
                candidate.setting,
                candidate.microbatches,
                candidate.bound_ns,
                level,
                screened=True,
                followed=True,
                proof=candidate.proof,
                unlimited_ns=state.unlimited_ns,
            )
            for level in levels
        ]
        self._families[candidate.setting, candidate.microbatches] = list(rooms)
        return rooms

    def _push(self, candidate: _Candidate) -> None:
        self._order += 1
        heapq.heappush(
            self._queue,
            (*self._place(candidate), candidate.setting, candidate.microbatches, self._order, candidate),
        )

    def _place(self, candidate: _Candidate) -> tuple[bool, int]:
        """Its place in the queue, but for ties: after a sibling of another ZeRO level whose bound it is to borrow."""
        bound = candidate.bound_ns if candidate.screened else max(candidate.bound_ns, candidate.expected_ns)
        bounds = (bound, *(leader.bound_ns + 1 for leader in self._leaders_of(candidate)))
        return self._is_late[candidate.setting[0]], max(bounds)

    def _leaders_of(self, candidate: _Candidate) -> tuple[_Candidate, ...]:
        """The sibling that a candidate waits for, if there is one: the lowest ZeRO level that bounds no worse."""
        if candidate.room is None or candidate.state is None or not candidate.state.can_borrow:
            return ()
        for sibling in self._families.get((candidate.setting, candidate.microbatches), ()):
            if sibling is candidate:
                break
            if sibling.bound_ns - candidate.bound_ns <= candidate.bound_ns // NEAR_LEADER:
                return (sibling,)
        return ()

    @property
    def _ceiling(self) -> int | None:
        """Only faster plans matter."""
        wanted = self._request.ceiling_ns if self._request.pipeline is not None else None
        known = [ns for ns in (self._known.best_ns, self._best and self._best[1].ns, wanted) if ns is not None]
        return min(known, default=None)

    def _good_enough(self, bound_ns: int) -> bool:
        """Whether nothing of this bound is worth a look."""
        ceiling, wanted = self._ceiling, self._request.ceiling_ns
        if wanted is not None and bound_ns >= wanted:
            return True
        return ceiling is not None and bound_ns >= ceiling / (1 + self._request.gap)

    def _too_long(self, candidate: _Candidate) -> bool:
        """Whether enough was done for meshes of many axes."""
        return self._ceiling is not None and self._is_late[candidate.setting[0]] and self._effort >= MAX_EFFORT

    def _note_effort(self, candidate: _Candidate, graph_of: int) -> None:
        """A stage looks at the graph of so many microbatches."""
        mesh = candidate.setting[0]
        if self._is_late[mesh]:
            self._effort += self._space.model(mesh, graph_of).num_entries

    def _advance(self, candidate: _Candidate) -> Fraction:
        """Run one stage; returns the multiplier that gave a plan, 0 for none."""
        if not candidate.screened:
            candidate.screened = True
            if self._exclude_all_from(candidate):
                return Fraction(0)
            bound = self._virtual_bound(candidate)
            candidate.excluded = bound is None
            candidate.bound_ns = max(candidate.bound_ns, bound or 0)
            before = candidate.before
            if before is not None and not candidate.excluded and candidate.bound_ns < before.bound_ns:
                self._queue_next(candidate, 2 * candidate.bound_ns - before.bound_ns)
            return Fraction(0)
        if candidate.state is None:
            self._solved.add((candidate.setting, candidate.microbatches))
            candidate.state = self._limited(self._solver(candidate), 1, candidate.unlimited_ns)
        self._note_effort(candidate, candidate.microbatches)
        state = candidate.state
        siblings = (candidate.setting, candidate.microbatches)
        lent = self._tightened.get(siblings)
        if not (lent and state.can_borrow and state.borrow(*lent, self._ceiling)):
            state.advance(lent[0] if lent else self._known.multiplier, self._ceiling)
        if candidate.room is not None and state.only_master_left:
            self._families.pop(siblings, None)
        if state.only_master_left and state.multiplier and state.proof.shares:
            self._tightened.setdefault(siblings, (state.proof.multiplier, state.proof.shares))
        candidate.bound_ns = max(candidate.bound_ns, state.bound_ns)
        if state.proof.bound_ns > candidate.proof.bound_ns or state.proof.kind is ProofKind.INFEASIBLE:
            candidate.proof = state.proof
        if candidate.room is None:
            count = candidate.microbatches
            self._unlimited[candidate.setting][count] = replace(state.unlimited, graph_of=count)
        return self._note_best(candidate, state)

    def _note_best(self, candidate: _Candidate, state: LimitedSearch) -> Fraction:
        """Keep a configuration's best plan; returns the multiplier that gave it, 0 where there is none."""
        if state.best is None:
            return Fraction(0)
        self._found[candidate.key] = (candidate, state.best)
        if self._best is None or state.best.ns < self._best[1].ns:
            self._best = (candidate, state.best)
        return state.multiplier

    def _exclude_all_from(self, candidate: _Candidate) -> bool:
        """Try to exclude a microbatch count and all larger ones by one bound: with what the least of them pays for each
        microbatch, and the activations of the largest."""
        setting, count, last = candidate.setting, candidate.microbatches, self._counts[-1]
        ceiling, before = self._ceiling, candidate.before
        hint = self._hints_of_bounds.get(setting, self._known.multiplier)
        if ceiling is None or before is None or not hint or before.bound_ns < ceiling + ceiling // FAR_ABOVE:
            return False
        graphs = [k for k in self._unlimited[setting] if self._space.tells_of_all_from(k, count)]
        if count == last or not graphs:
            return False
        graph_of = max(graphs)
        self._note_effort(candidate, graph_of)
        solver = self._solver(candidate, graph_of=graph_of, and_more=True)
        state = self._limited(solver, last // graph_of, candidate.bound_ns)
        if not state.bound_under(hint, ceiling):
            return False
        candidate.bound_ns, candidate.proof = state.bound_ns, replace(state.proof, graph_of=graph_of)
        candidate.followed = candidate.last = True
        return True

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
        virtual = self._limited(solver, count // graph_of, candidate.bound_ns)
        hint = self._hints_of_bounds.get(candidate.setting, self._known.multiplier)
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
        costs_nothing = state.is_unlimited_optimum and state.finished and not candidate.proof.multiplier
        if state.parameters_too_large:
            candidate.followed = candidate.last = True
        elif costs_nothing and candidate.room is None:
            candidate.settled = True
            self._settled.setdefault(candidate.setting, set()).add(candidate.microbatches)
        if not candidate.followed and (state.limit_binds or state.finished):
            self._queue_next(candidate)

    def _is_settled(self, candidate: _Candidate) -> bool:
        """Whether its microbatch count is a multiple of one at which the limit costs nothing."""
        return candidate.state is None and self._costs_nothing(candidate.setting, candidate.microbatches)

    def _costs_nothing(self, setting: _Setting, count: int) -> bool:
        """Whether a microbatch count is a multiple of one at which the limit costs nothing, and no faster for it."""
        settled = self._settled.get(setting, set())
        return any(count % k == 0 for k in settled) and self._space.is_like_first(count)

    def _queue_next(self, candidate: _Candidate, expected_ns: int = 0) -> None:
        """Queue the next microbatch count that can matter; ``expected_ns`` is about the bound that it will have."""
        candidate.followed = True
        for count in self._counts:
            if count <= candidate.microbatches or self._costs_nothing(candidate.setting, count):
                continue
            if self._space.is_allowed(candidate.setting[0], count):
                following = _Candidate(candidate.setting, count, 0, before=candidate, expected_ns=expected_ns)
                if self._space.is_like_first(count):
                    known = self._unlimited[candidate.setting].items()
                    proofs = (proof for k, proof in known if count % k == 0 and self._space.is_like_first(k))
                    following.proof = max(proofs, key=lambda proof: proof.bound_ns)
                    following.bound_ns = following.proof.bound_ns
                else:
                    following.screened = True
                self._tails[candidate.setting] = following
                self._push(following)
                return

    # -- answers -----------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """How all is bounded, and what was found."""
        return Report(
            leaves=tuple(self._leaves),
            ended_ns=min(self._ended, default=None),
            found=tuple(FoundPlan(key=key, ns=outcome.ns) for key, (_, outcome) in self._found.items()),
            configurations=self._configurations,
            solved=len(self._solved),
        )

    def chosen(self, key: PlanKey) -> ChosenPlan:
        """A plan that was met."""
        candidate, met = self._found[key]
        assert candidate.state is not None
        outcome = candidate.state.plainest(met)
        assert outcome.choices is not None
        return ChosenPlan(
            objective_ns=outcome.ns,
            memory_bytes=outcome.num_bytes,
            multiplier=candidate.state.multiplier,
            strategies=outcome.choices.model.num_strategies,
            configuration=candidate.state.configuration,
            values=outcome.choices.values,
        )

    def least_bytes(self) -> int:
        """The least memory that any plan needs, of all microbatch counts."""
        bounds: list[int] = []
        for setting in self._settings:
            count = max(count for count in self._counts if self._space.is_allowed(setting[0], count))
            levels = self._settings[setting].levels
            for room in levels if levels[-1] >= 2 else (None,):
                bounds.append(least_memory(self._solver(_Candidate(setting, count, 0, room), least=True))[0])
        return min(bounds)
