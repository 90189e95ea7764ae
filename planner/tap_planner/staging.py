"""The best pipeline: parts of the space, each of one schedule on so many stages with so many microbatches, are searched
in the order in which they promise to be fast."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from tap_planner.collector import collector_paused
from tap_planner.errors import InfeasibleError, LimitReachedError, TapError, UsageError
from tap_planner.logs import NOTE

if TYPE_CHECKING:
    from tap_planner.documents import LoweredResult
    from tap_planner.plan import StatesChoice
    from tap_planner.requests import PreparedSearch
    from tap_planner.search import Leaf, SearchRequest, SearchResult

Lowering = Callable[["PreparedSearch", "SearchResult"], "LoweredResult"]
"""Writes a search result of a space out."""
SearchPlain = Callable[["SearchRequest"], "SearchResult"]
"""Searches a part without pipeline."""

__all__ = ["StagedPlan", "is_staged", "search_stages"]

_log = logging.getLogger("tap_planner")

MAX_SHOWN = 4
"""Plans of other numbers of stages that are told of."""
MAX_SEARCHED = 250_000
"""Operators x meshes of the parts that are searched (some 15 of 175B on 1,024 devices, all of a small model); of the
others it is only known what they take at least."""
MAX_CUT = 25_000
"""Operators of the plans of parts that are cut in stages and made to fit (8 of 175B)."""
PROMISING = 0.98
"""Twice as many, of plans that promise to take no more than this of the best one."""
ROUGH = Fraction(1, 200)
"""How near its optimum the plan of a part is proven to be, unless it is the one that is taken."""
MAX_ROUNDS = 6
"""Searches under a lower and lower limit, where a stage holds more than its share."""
MAX_RELAXED = 2
"""Plans whose repeats run again as little as stages seem to need, until one really fits; then one as many of which do
as before."""
LOOSE = Fraction(1, 100)
"""How near the optimum such a plan needs to be proven under its own limit."""
MARGIN = Fraction(99, 100)
"""Of the limit that would be just low enough, were all stages to shrink alike."""
WORTH = Fraction(999, 1000)
"""Transfers are shared out where the step takes less than so much of what it takes else."""
LIKELY = 4
"""Microbatches for each stage that are likely."""
UNLIKELY, INSIDE, OUTSIDE = 1 / 128, 1 / 64, 1 / 8
"""What is taken to be lost, to decide where to look first: by each doubling or halving of their number; by each
doubling of the devices that one sample is split over, and by each beyond a node."""
FAILED = 1.25
"""How many times as long as expected a step is taken to be where no plan that fits was found."""
LEFT = {"1f1b": 1 / 3, "interleaved": 1, "zb-h1": 1 / 3, "zbv": 1 / 6}
"""What schedules leave of the bubble of 1f1b with one chunk a stage where forward and both backwards take equally long
(``schedule.bubble_ns``), beyond what is counted (``Pipeline.passes``); no bound, but where to look first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPlan:
    """The best plan of a space with pipelines."""

    lowered: LoweredResult
    """As it is cut; its bound and proof are those of the whole space."""
    objective_ns: int
    """Objective A of the plan as it is cut."""
    states: StatesChoice | None = None
    """What was compared where the element type of the moments was left open."""

    @property
    def bound_ns(self) -> int:
        """No plan of the space has a smaller objective."""
        return self.lowered.result.bound_ns


def is_staged(prepared: PreparedSearch) -> bool:
    """Whether there are pipelines in the space."""
    return any(request.pipeline is not None for request in prepared.requests)


def search_stages(prepared: PreparedSearch, lower: Lowering, search_plain: SearchPlain) -> StagedPlan:
    """Search all parts of a space with pipelines: the plan that is predicted fastest, with a bound for all of them.

    Args:
        prepared: the request.
        lower: cuts and predicts a plan.
        search_plain: searches a part without pipeline.

    Raises:
        InfeasibleError: nothing fits.
        LimitReachedError: no plan was found whose stages all fit, and it is not proven that there is none.
        UsageError: the model cannot be cut so.
    """
    return _Search(prepared, lower, search_plain).plan()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    part: int
    lowered: LoweredResult
    objective_ns: int
    fullness: Fraction
    """The memory of the stage that is fullest over its limit; 0 without a limit."""

    @property
    def fits(self) -> bool:
        """Whether all stages are within their limits."""
        return self.fullness <= 1

    @property
    def key(self) -> tuple[int, int, int]:
        """What is predicted fastest comes first."""
        return self.lowered.prediction.step_ns, self.objective_ns, self.part


class _Search:
    def __init__(self, prepared: PreparedSearch, lower: Lowering, search_plain: SearchPlain) -> None:
        from tap_planner.search import split_ns

        self._prepared = prepared
        self._lower = lower
        self._search_plain = search_plain
        self._requests = prepared.requests
        self._rooms: dict[int, tuple[int, ...] | None] = {}
        """By number of stages, the limit of each."""
        self._split = [0 if request.pipeline is None else split_ns(request) for request in prepared.requests]
        """By part, what all stages together take at least."""
        self._leaves: dict[int, tuple[Leaf, ...]] = {}
        self._uncut: dict[int, SearchResult] = {}
        """By part, its best plan of all stages together, where that is not cut yet."""
        self._num_operators = len(prepared.graph.operators)
        self._searched = self._cut_off = 0
        self._found: list[_Found] = []
        self._failures: list[TapError] = []
        self._met: dict[int, list[tuple[int, float]]] = {}
        """By number of stages, microbatch counts with how many times as long as expected their best plan takes."""
        self._losses: dict[int, dict[tuple[str, int], float]] = {}
        """By number of stages, of schedules and chunks, how many times as long as expected a plan takes once cut."""
        self._failed: dict[tuple[int, str, int], list[int]] = {}
        """By number of stages, schedule and chunks, the microbatch counts whose plan did not fit once cut."""

    def plan(self) -> StagedPlan:
        """Search part after part."""
        waiting = set(range(len(self._requests)))
        for number, request in enumerate(self._requests):
            if request.pipeline is None:
                waiting.remove(number)
                self._look_at_plain(number, request)
        while waiting or self._uncut:
            for number in [number for number in waiting if not self._is_worth_while(number)]:
                waiting.remove(number)
                self._leave(number)
            number = min((*waiting, *self._uncut), key=lambda n: (self._expected_ns(n), n), default=None)
            if number is None:
                break
            if number in self._uncut:
                self._cut(number, self._uncut.pop(number))
            else:
                waiting.remove(number)
                self._look_at(number)
        if not self._found:
            raise self._nothing()
        best = self._sharing(self._polished(min(self._found, key=lambda found: found.key)))
        self._note_others(best)
        return StagedPlan(lowered=self._certified(best), objective_ns=best.objective_ns)

    # -- which part is next ------------------------------------------------------------------------------------

    @property
    def _best_ns(self) -> int | None:
        return min((found.objective_ns for found in self._found), default=None)

    def _is_worth_while(self, number: int) -> bool:
        """Whether something in a part may be faster than what there is, and there is effort left."""
        best = self._best_ns
        may_be_faster = best is None or self._split[number] < best * self._requests[number].num_stages
        return may_be_faster and self._searched < MAX_SEARCHED

    def _expected_ns(self, number: int) -> float:
        """About how long a step takes: as a plan of all stages together says, else a perfect split times what other
        microbatch counts of as many stages (or, if there are none, all parts) took beyond that; with the bubble and
        with uneven stages."""
        request = self._requests[number]
        count = request.microbatches or 1
        if number in self._uncut:
            return self._uncut[number].objective_ns / request.num_stages * self._lost(request)
        known = self._met.get(request.num_stages)
        if known:
            times = min(known, key=lambda met: (abs(math.log(met[0] / count)), met))[1]
        else:
            times = min((times for met in self._met.values() for _, times in met), default=1.0)
        return self._split_ns(number) * self._lost(request) * self._prior(request) * times

    def _prior(self, request: SearchRequest) -> float:
        """How many times as long as with a perfect split a step may take for its microbatches."""
        count = request.microbatches or 1
        devices, node = request.cluster.num_devices // request.num_stages, request.cluster.levels[0].size
        devices //= math.gcd(devices, request.batch // count)
        lost = UNLIKELY * abs(math.log2(count / (LIKELY * request.num_stages))) + INSIDE * math.log2(devices)
        return 1 + lost + OUTSIDE * math.log2(max(devices / node, 1))

    def _lost(self, request: SearchRequest) -> float:
        """About how many times as long as its bound a plan takes when it is cut."""
        pipeline, count = request.pipeline, request.microbatches
        assert pipeline is not None and count is not None
        left = LEFT.get(pipeline.schedule, 0) * (pipeline.num_stages - 1)
        left /= pipeline.num_chunks if pipeline.schedule == "interleaved" else 1
        layers, parts = sum(run.count for run in request.folded(1).runs), pipeline.num_stages * pipeline.num_chunks
        uneven = -(-layers // parts) * parts / layers if layers >= pipeline.num_stages else 1.0
        known = self._losses.get(pipeline.num_stages, {})
        times = known.get((pipeline.schedule, pipeline.num_chunks), min(known.values(), default=1.0))
        failed = self._failed.get((pipeline.num_stages, pipeline.schedule, pipeline.num_chunks), ())
        times *= FAILED ** sum(other >= count for other in failed)  # with more microbatches stages hold less
        return (1 + left / count) * uneven * times

    def _split_ns(self, number: int) -> float:
        """What a step takes if all is split perfectly."""
        return max(self._split[number], 1) / self._requests[number].num_stages

    def _learn(self, number: int, bound_ns: float) -> None:
        """A part takes so long at least, with all stages together."""
        request = self._requests[number]
        times = bound_ns / request.num_stages / (self._split_ns(number) * self._prior(request))
        self._met.setdefault(request.num_stages, []).append((request.microbatches or 1, times))

    def _learn_failure(self, number: int) -> None:
        """Of a part no plan was found."""
        request = self._requests[number]
        known = self._expected_ns(number) / self._lost(request) * request.num_stages
        self._learn(number, known * FAILED)

    # -- one part ----------------------------------------------------------------------------------------------

    def _look_at_plain(self, number: int, request: SearchRequest) -> None:
        try:
            result = self._search_plain(request)
        except InfeasibleError as failure:
            self._failures.append(failure)
            self._leaves[number] = getattr(failure, "leaves", ())
            return
        self._leaves[number] = result.leaves
        self._keep(number, self._lower(self._prepared, result))

    def _keep(self, number: int, lowered: LoweredResult) -> _Found:
        """Note a plan, if it fits."""
        price, rooms = lowered.price, self._rooms_of(self._requests[number].num_stages)
        taken = price.bytes_of_stages
        fullness = max(Fraction(*pair) for pair in zip(taken, rooms, strict=True)) if rooms else Fraction(0)
        found = _Found(part=number, lowered=lowered, objective_ns=price.objective_ns, fullness=fullness)
        if found.fits:
            self._found.append(found)
        return found

    def _rooms_of(self, num_stages: int) -> tuple[int, ...] | None:
        """The memory limit of each stage, if there is one."""
        from tap_planner.requests import limit_bytes
        from tap_planner.search import stage_rooms

        if num_stages not in self._rooms:
            cluster, options = self._prepared.cluster, self._prepared.options
            self._rooms[num_stages] = stage_rooms(cluster, num_stages, lambda part: limit_bytes(part, options))
        return self._rooms[num_stages]

    def _leave(self, number: int) -> None:
        """Nothing is known of a part but what it takes at least."""
        from tap_planner.search import split_leaves

        self._leaves[number] = split_leaves(self._requests[number], self._split[number])

    def _ceiling_ns(self, number: int) -> int | None:
        best = self._best_ns
        return None if best is None else best * self._requests[number].num_stages

    def _look_at(self, number: int) -> None:
        """Search a part."""
        from tap_planner.search import NothingFasterError, search

        request = self._requests[number]
        self._searched += self._num_operators * len(request.meshes)
        try:
            result = search(replace(request, gap=max(request.gap, ROUGH), ceiling_ns=self._ceiling_ns(number)))
        except NothingFasterError as failure:
            self._leaves[number] = failure.leaves
            ceiling = self._ceiling_ns(number)
            assert ceiling is not None
            self._learn(number, ceiling)
        except InfeasibleError as failure:
            self._failures.append(failure)
            self._leaves[number] = getattr(failure, "leaves", ())
            self._learn_failure(number)
        except LimitReachedError as failure:
            self._failures.append(failure)
            self._leave(number)
            self._learn_failure(number)
        else:
            self._leaves[number] = result.leaves
            self._uncut[number] = result
            self._learn(number, result.objective_ns)

    @collector_paused()
    def _cut(self, number: int, result: SearchResult) -> None:
        """Cut the plan of a part, and have it fit; unless it is no faster than what there is already, or enough was
        tried."""
        ceiling = self._ceiling_ns(number)
        if ceiling is not None:
            promised = result.objective_ns * self._lost(self._requests[number])
            most = 2 * MAX_CUT if promised < ceiling * PROMISING else MAX_CUT
            if self._cut_off >= most or result.objective_ns >= ceiling:
                return
        self._cut_off += self._num_operators
        request = self._requests[number]
        pipeline, losses = request.pipeline, self._losses.setdefault(request.num_stages, {})
        assert pipeline is not None
        key, expected = (pipeline.schedule, pipeline.num_chunks), result.objective_ns * self._lost(request)
        try:
            found = self._fitting(number, result)
        except (LimitReachedError, UsageError) as failure:
            self._failures.append(failure)
            self._failed.setdefault((request.num_stages, *key), []).append(request.microbatches or 1)
        else:
            losses[key] = losses.get(key, 1.0) * found.objective_ns * request.num_stages / expected

    def _fitting(self, number: int, first: SearchResult) -> _Found:
        """The plan of a search, if every stage fits; else that of a search under a limit that leaves the fullest more
        room.

        Raises:
            LimitReachedError: no plan was found whose stages fit.
        """
        from tap_planner.search import search

        request, result = self._requests[number], first
        found = self._keep(number, self._lower(self._prepared, result))
        other = self._otherwise(number, found) if found.fits else None
        for _ in range(MAX_ROUNDS):
            if found.fits:
                break
            ceiling = self._ceiling_ns(number)
            if ceiling is not None and found.objective_ns * request.num_stages >= ceiling:
                break
            if other is None:  # stages of unlike times may be better than a plan that holds less everywhere
                other = self._otherwise(number, found)
                ceiling = self._ceiling_ns(number)
            lower = replace(
                request,
                meshes=(first.mesh,),
                limit_bytes=int(result.memory_bytes * MARGIN / found.fullness),
                gap=max(request.gap, LOOSE),
                ceiling_ns=ceiling,
            )
            try:
                result = search(lower)
                found = self._keep(number, self._lower(self._prepared, result))
            except (InfeasibleError, LimitReachedError):
                break
        fitting = [found] if found.fits else []
        fitting += [] if other is None else [other]
        if fitting:
            return min(fitting, key=lambda one: one.key)
        raise LimitReachedError(
            f"the fullest stage of the best plan needs {found.lowered.price.memory_bytes} bytes, "
            f"{float(found.fullness):.3g} times its limit; no plan was found whose stages all fit, and it is not "
            "proven that there is none",
            hint="Choose more stages, another --mesh, more --microbatches, or --recompute full.",
        )

    def _otherwise(self, number: int, found: _Found) -> _Found | None:
        """A plan in other stages that fit, whose repeats run again no more than they must, if there are any."""
        request = self._requests[number]
        rooms, last = self._rooms_of(request.num_stages), found.lowered
        for recomputes in (*[request.recomputes] * MAX_RELAXED, ()) if rooms is not None else ():
            lowered = last.within(rooms or (), recomputes)
            if lowered is None:
                break
            other = self._keep(number, lowered)
            if other.fits:
                return other
            last = lowered
        return None

    # -- the answer --------------------------------------------------------------------------------------------

    @collector_paused()
    def _polished(self, best: _Found) -> _Found:
        """The best plan, or what a search of its part to the end makes of it."""
        from tap_planner.search import search

        request = self._requests[best.part]
        if request.pipeline is None or request.gap >= ROUGH:
            return best
        try:
            result = search(request)
            self._leaves[best.part] = result.leaves
            return min(best, self._fitting(best.part, result), key=lambda found: found.key)
        except (InfeasibleError, LimitReachedError, UsageError):
            return best  # what was found under a lower limit is no worse

    @collector_paused()
    def _sharing(self, best: _Found) -> _Found:
        """The best plan, with its transfers shared out between ranks if that is predicted to be worth it."""
        most = best.lowered.prediction.step_ns * WORTH
        others = [self._keep(best.part, lowered) for lowered in best.lowered.sharing_transfers()]
        better = [one for one in others if one.fits and one.lowered.prediction.step_ns < most]
        return min(better, key=lambda one: one.key, default=best)

    def _certified(self, best: _Found) -> LoweredResult:
        """The best plan with the bound and the proof of the whole space."""
        from tap_planner.search import ProofKind, SearchStatistics, mesh_label

        result = best.lowered.result
        leaves = tuple(replace(leaf, part=part) for part in sorted(self._leaves) for leaf in self._leaves[part])
        bounds = (-(-leaf.solver_ns // self._requests[leaf.part].num_stages) for leaf in leaves if leaf.is_open)
        decisions = result.decisions
        all_pairs = {(part, mesh_label(mesh)) for part, r in enumerate(self._requests) for mesh in r.meshes}
        pairs = {(leaf.part, leaf.mesh) for leaf in leaves if leaf.proof.kind is not ProofKind.SPLIT}
        result = replace(
            result,
            write=lambda: decisions,
            bound_ns=min([best.objective_ns, *bounds]),
            leaves=leaves,
            statistics=SearchStatistics(
                meshes=len({mesh for _, mesh in all_pairs}),
                configurations=len(all_pairs),
                solved=len(pairs),
                pruned=len(all_pairs) - len(pairs),
                strategies=result.statistics.strategies,
            ),
        )
        return replace(best.lowered, result=result)

    def _note_others(self, best: _Found) -> None:
        """Say what other numbers of stages would take."""
        by_stages: dict[int, _Found] = {}
        for found in sorted(self._found, key=lambda found: found.key):
            by_stages.setdefault(self._requests[found.part].num_stages, found)
        others = [found for found in by_stages.values() if found.lowered.result.mesh != best.lowered.result.mesh]
        shown = [f"{found.lowered.result.mesh} {found.lowered.prediction.step_ns / 1e6:.3f} ms" for found in others]
        if len({request.num_stages for request in self._requests}) > 1 and shown:
            _log.log(NOTE, f"the best plans of other numbers of stages: {', '.join(shown[:MAX_SHOWN])}")

    def _nothing(self) -> TapError:
        """Why there is no plan: what was found does not fit, rather than that nothing can."""
        open_ends = [failure for failure in self._failures if not isinstance(failure, InfeasibleError)]
        if open_ends:
            return open_ends[0]
        infeasible = [failure for failure in self._failures if isinstance(failure, InfeasibleError)]
        return min(infeasible, key=lambda failure: failure.least_memory_bytes)
