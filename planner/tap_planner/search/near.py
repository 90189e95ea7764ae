"""Of all plans that are nearly as fast as the best one, one that changes little of an old plan.

On the mesh of the old plan, time + penalty x changes is minimised under the memory limit. A larger penalty gives fewer
changes and more time, so that two solutions stand around the time allowed: one within it, one with fewer changes
beyond. The next penalty is the one at which both are worth the same. Then the two are mixed, occurrence by occurrence,
and what still differs is put back, group by group, while the time allows it. Nothing of this proves that fewer changes
are impossible, but for none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from tap_planner.cluster import Cluster, Mesh, mesh_text
from tap_planner.errors import UsageError
from tap_planner.plan import Decisions, Nearness
from tap_planner.search.assemble import assemble
from tap_planner.search.changes import OldPlan
from tap_planner.search.configuration import Configuration, Recompute, Settings, zero_settings
from tap_planner.search.distance import Distance, WidenedModel
from tap_planner.search.enumeration import may_be_tried, model_of
from tap_planner.search.fewer import request_on
from tap_planner.search.model import Model
from tap_planner.search.request import SearchRequest, SearchResult
from tap_planner.search.returning import Returning


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the old plan can be stayed near to."""

    request: SearchRequest
    """With a single mesh."""
    microbatches: int

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.request.meshes[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A plan within the regret."""

    place: _Place
    model: Model
    decisions: Decisions
    ns: int
    num_bytes: int


def stay_near(
    requests: Sequence[SearchRequest],
    result: SearchResult,
    old: Decisions,
    max_regret: Fraction,
    limit_bytes: Callable[[Cluster], int | None],
) -> SearchResult:
    """Exchange the best plan for one with few changes from an old plan.

    Args:
        requests: the parts of the space.
        result: what their search gave.
        old: the old plan.
        max_regret: the share by which the plan's objective may exceed that of the best one.
        limit_bytes: the memory limit on the devices of a cluster.

    Returns:
        The result with the other plan; its bound is that of the ordinary search.
    """
    return _Search(requests, result, OldPlan(old), max_regret, limit_bytes).run()


class _Search:
    def __init__(
        self,
        requests: Sequence[SearchRequest],
        result: SearchResult,
        old: OldPlan,
        max_regret: Fraction,
        limit_bytes: Callable[[Cluster], int | None],
    ) -> None:
        self._result = result
        self._requests = requests
        self._old = old
        self._most_ns = int(result.objective_ns * (1 + max_regret))
        self._limit_bytes = limit_bytes

    def run(self) -> SearchResult:
        """Try the mesh of the old plan with some numbers of microbatches; the first without any change will do."""
        if self._changes(self._result.decisions) == 0:
            return self._near(self._result)
        best: _Found | None = None
        for place in self._places():
            found = self._on(place)
            if found is None:
                continue
            if best is None or self._rank(found) < self._rank(best):
                best = found
            if self._changes(found.decisions) == 0:
                break
        if best is None or self._rank(best) >= (self._changes(self._result.decisions), self._result.objective_ns):
            return self._near(self._result)
        return self._near(self._with(best))

    def _changes(self, decisions: Decisions) -> int:
        return self._old.changes(decisions).total

    def _rank(self, found: _Found) -> tuple[int, int]:
        return self._changes(found.decisions), found.ns

    # -- where to look -----------------------------------------------------------------------------------------

    def _places(self) -> Iterator[_Place]:
        for request in self._requests:
            for mesh in request.meshes:
                if self._old.has_mesh(mesh):
                    alone = request_on(request, mesh, self._limit_bytes)
                    for count in self._microbatch_counts(alone):
                        yield _Place(request=alone, microbatches=count)

    def _microbatch_counts(self, request: SearchRequest) -> Iterator[int]:
        """That of the old plan, the one that keeps the size of its microbatches, and that of the best plan, as far as
        they lie in the space."""
        before = self._old.decisions.microbatches
        wanted = [before, self._result.decisions.microbatches]
        size = self._old_batch() // before
        if size and request.batch % size == 0:
            wanted.insert(1, request.batch // size)
        for count in dict.fromkeys(wanted):
            if request.microbatches is not None:
                allowed = count == request.microbatches
            elif count == 1 or not request.training:
                allowed = count == 1
            else:
                allowed = may_be_tried(count, request.batch) and not request.graphs.batch(1).obstacles
            if allowed:
                yield count

    def _old_batch(self) -> int:
        """The batch of the old plan, by a tensor whose leading dim has the size of the batch now; 0 if unknown."""
        graph = self._requests[0].folded(1).graph
        shapes = {
            name: tensor.type.shape
            for name, tensor in graph.tensors.items()
            if tensor.type.shape and tensor.type.shape[0] == graph.batch
        }
        before = self._old.decisions
        for operator in before.operators:
            for output in operator.outputs:
                shape = shapes.get(output.tensor)
                if shape is not None and output.shape and shape[1:] == output.shape[1:]:
                    return output.shape[0] * before.microbatches
        return 0

    # -- one place ---------------------------------------------------------------------------------------------

    def _on(self, place: _Place) -> _Found | None:
        """The best plan of a place; None where none is within the regret."""
        model = self._model(place)
        if model is None:
            return None
        best: _Found | None = None
        for settings in self._settings(place):
            configuration = Configuration(
                settings=settings,
                microbatches=place.microbatches,
                optimizer=place.request.optimizer,
                precision=place.request.precision,
                training=place.request.training,
                optimizer_states=place.request.optimizer_states,
            )
            found = self._under(place, model, configuration)
            if found is not None and (best is None or self._rank(found) < self._rank(best)):
                best = found
            if best is not None and self._old.changes(best.decisions).total == 0:
                break
        return best

    def _model(self, place: _Place) -> Model | None:
        try:
            return model_of(place.request, place.mesh, place.microbatches)
        except UsageError:  # rules that so small a microbatch cannot keep
            return None

    def _settings(self, place: _Place) -> Iterator[Settings]:
        """What regions may choose from: with room for the ZeRO levels of the old plan, then for those of the best."""
        request = place.request
        zeros = zero_settings(request.zero_levels, len(place.mesh.axes), hybrid=request.hybrid_zero)
        recomputes = tuple(sorted(Recompute[name.upper()] for name in request.recomputes))
        plans = (self._old.decisions, self._result.decisions)
        seen: list[Settings] = []
        for plan in plans:
            level = max((parameter.zero_level for parameter in plan.parameters), default=0)
            if request.uniform_settings:
                used = {region.recompute for region in plan.regions if region.run is not None}
                modes = tuple(mode for mode in recomputes if mode.label in used) or recomputes
                own = [zero for zero in zeros if zero.level == level] or list(zeros)
                settings = Settings(recomputes=modes[:1], zeros=(own[0],), whole_level=own[0].level)
            else:
                known = [zero.level for zero in zeros if zero.level <= level] or [min(zero.level for zero in zeros)]
                settings = Settings(recomputes=recomputes, zeros=zeros).up_to(max(known))
            if settings not in seen:
                seen.append(settings)
                yield settings

    def _under(self, place: _Place, model: Model, configuration: Configuration) -> _Found | None:
        costed = WidenedModel(model, configuration, self._old)
        best = self._result.decisions
        same = self._old.has_mesh(best) and best.microbatches == place.microbatches
        returning = Returning(
            Distance(costed, self._old),
            limit_bytes=place.request.limit_bytes,
            most_ns=self._most_ns,
            least_ns=self._result.bound_ns,
            start=Distance(costed, OldPlan(best)).assignment() if same else None,
            multiplier=self._result.multiplier,
        )
        found = returning.run()
        if found is None:
            return None
        return _Found(
            place=place,
            model=model,
            decisions=assemble(model, configuration, found.assignment, place.request.loss_output),
            ns=found.ns,
            num_bytes=found.num_bytes,
        )

    # -- answers -----------------------------------------------------------------------------------------------

    def _with(self, found: _Found) -> SearchResult:
        model = found.model
        if found.ns < self._result.bound_ns:
            raise AssertionError(f"a plan of {found.ns} ns is below the bound of {self._result.bound_ns} ns")
        return replace(
            self._result,
            write=lambda: found.decisions,
            folded=model.space.folded,
            mesh=found.place.mesh,
            objective_ns=found.ns,
            memory_bytes=found.num_bytes,
            statistics=replace(
                self._result.statistics,
                strategies=sum(len(model.space.operator(int(i)).strategies) for i in model.class_of.tolist()),
            ),
            runners_up=(),
        )

    def _near(self, result: SearchResult) -> SearchResult:
        """The result with what it changes, and what that saves and costs."""
        changes, before = self._old.changes(result.decisions), self._result
        regret = max(0, result.objective_ns - before.objective_ns)
        near = Nearness(
            regret_basis_points=-(-regret * 10_000 // max(before.objective_ns, 1)),
            microbatches=changes.microbatches,
            operators=changes.operators,
            parameters=changes.parameters,
            regions=changes.regions,
            compared=self._old.counterparts(result.decisions),
            changes_of_best=self._changes(before.decisions),
        )
        return replace(result, near=near, notes=(*result.notes, *self._notes(result, near)))

    def _notes(self, result: SearchResult, near: Nearness) -> Iterator[str]:
        if not self._old.has_mesh(result.decisions):
            was = self._old.decisions
            old = mesh_text(was.axes, was.order)
            yield f"no plan on the old mesh {old} is within the regret: everything changes"
        yield near.shown


__all__ = ["stay_near"]
