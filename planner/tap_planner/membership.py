"""Is a plan a point of the space that was searched? Regions, settings, microbatches and rules, checked part by part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tap_planner.errors import InfeasibleError
from tap_planner.legality import strategy_of
from tap_planner.operators import rule_of

if TYPE_CHECKING:
    from tap_planner.cluster import Mesh
    from tap_planner.folding import FoldedGraph
    from tap_planner.plan import Decisions, ParameterDecision, Region
    from tap_planner.search import SearchRequest, ZeroSetting

__all__ = ["outside", "regions_of"]


def outside(request: SearchRequest, mesh: Mesh, decisions: Decisions) -> Iterator[str]:
    """Why decisions are no plan of a part of the space; nothing where they are one.

    Args:
        request: the part.
        mesh: one of its meshes, that of the plan.
        decisions: the plan.
    """
    from tap_planner.search import SearchSpace

    if mesh not in request.meshes:
        yield f"mesh: {mesh} is not in the space"
        return
    try:
        space = SearchSpace(request)
    except InfeasibleError as error:
        yield f"memory_bytes: {error.message}"
        return
    count = decisions.microbatches
    if count not in space.counts or not space.is_allowed(request.meshes.index(mesh), count):
        yield f"microbatches: {count} are not in the space"
        return
    folded = request.folded(count)
    wrong = list(_regions(folded, decisions))
    yield from wrong
    if not wrong:
        yield from _zeros(request, len(mesh.axes), folded, decisions)
        yield from _recomputes(request, decisions)
        yield from _rules(request, mesh, folded, decisions)


def regions_of(folded: FoldedGraph) -> tuple[Region, ...]:
    """Each occurrence of a run, and what lies between runs, cut at the ends of shared stretches; keeping everything."""
    from tap_planner.plan import Region

    ends = {end for stretch in folded.stretches() for end in stretch}
    expected: list[tuple[range, int | None, int]] = []

    def between(start: int, stop: int) -> None:
        cuts = [start, *sorted(end for end in ends if start < end < stop), stop]
        expected.extend((range(a, b), None, 0) for a, b in itertools.pairwise(cuts) if a < b)

    position = 0
    for number, run in enumerate(folded.runs):
        between(position, run.start)
        for occurrence in range(run.count):
            first = run.start + occurrence * run.period
            expected.append((range(first, first + run.period), number, occurrence))
        position = run.stop
    between(position, len(folded.graph.operators))
    ids = [operator.id for operator in folded.graph.operators]
    return tuple(
        Region(operators=tuple(ids[i] for i in part), run=run, occurrence=occurrence, recompute="none")
        for part, run, occurrence in expected
    )


def _regions(folded: FoldedGraph, decisions: Decisions) -> Iterator[str]:
    wanted = [(region.operators, region.run, region.occurrence) for region in regions_of(folded)]
    if wanted != [(region.operators, region.run, region.occurrence) for region in decisions.regions]:
        yield "repeats: they are not the repeats of the model"


def _recomputes(request: SearchRequest, decisions: Decisions) -> Iterator[str]:
    used = {region.recompute for region in decisions.regions if region.run is not None}
    allowed = request.recomputes if request.training else ("none",)
    for setting in sorted(used - set(allowed)):
        yield f"repeats: recompute {setting} is not in the space"
    if request.uniform_settings and len(used) > 1:
        yield f"repeats: recompute {' and '.join(sorted(used))}, expected one setting"
    if any(region.recompute != "none" for region in decisions.regions if region.run is None):
        yield "repeats: what lies outside repeats is recomputed"


# -- ZeRO --------------------------------------------------------------------------------------------------------


def _zeros(request: SearchRequest, num_axes: int, folded: FoldedGraph, decisions: Decisions) -> Iterator[str]:
    """ZeRO levels and axes that no setting of their group gives."""
    from tap_planner.search import zero_settings

    settings = zero_settings(request.zero_levels, num_axes, hybrid=request.hybrid_zero)
    trained = [parameter for parameter in decisions.parameters if parameter.trainable]
    if not request.training:
        return
    if request.uniform_settings:
        if not any(all(_follows(p, zero) for p in trained) for zero in settings):
            yield "parameters: no one ZeRO setting gives the levels and axes of all of them"
        return
    groups: dict[tuple[object, tuple[int, ...]], list[ParameterDecision]] = {}
    home = _groups(folded)
    for parameter in trained:
        groups.setdefault((home[parameter.name], parameter.data_axes), []).append(parameter)
    for (_, axes), members in groups.items():
        sharding = [zero for zero in settings if not zero.level or zero.sharded(axes)] or settings
        if not any(all(_follows(p, zero) for p in members) for zero in sharding):
            first = members[0]
            alike = f" and {len(members) - 1} more" if len(members) > 1 else ""
            yield (
                f"parameters: {first.name}{alike}: ZeRO level {first.zero_level} over axes {list(first.zero_axes)} "
                "is no setting of the space for all of them"
            )


def _follows(parameter: ParameterDecision, zero: ZeroSetting) -> bool:
    sharded = zero.sharded(parameter.data_axes)
    return (parameter.zero_level, parameter.zero_axes) == (zero.level if sharded else 0, sharded)


def _groups(folded: FoldedGraph) -> Mapping[str, object]:
    """By parameter what it shares a setting with: its region, or nothing where several regions read it."""
    region_of: list[object] = []
    position = 0
    for number, run in enumerate(folded.runs):
        region_of += [("before", number)] * (run.start - position)
        region_of += [(number, index // run.period) for index in range(run.period * run.count)]
        position = run.stop
    region_of += [("behind", 0)] * (len(folded.graph.operators) - position)
    readers: dict[str, set[object]] = {}
    for operator, region in zip(folded.graph.operators, region_of, strict=True):
        for name in operator.inputs:
            read = None if name is None else folded.graph.tensors[name].read
            if read is not None:
                readers.setdefault(read.parameter, set()).add(region)
    return {name: next(iter(found)) if len(found) == 1 else name for name, found in readers.items()}


# -- rules -------------------------------------------------------------------------------------------------------


def _rules(request: SearchRequest, mesh: Mesh, folded: FoldedGraph, decisions: Decisions) -> Iterator[str]:
    """Strategies and storage that the rules of the user, or of a target, forbid."""
    graph = folded.graph
    rules = request.constraints(mesh, graph)
    for operator, decision in zip(graph.operators, decisions.operators, strict=True):
        if rules.demands(operator):
            made = strategy_of(operator, decision.strategy, mesh.shape)
            if made is None or not rules.allows(operator, made, rule_of(operator.signature)):
                yield f"operators: {operator.id}: the rules forbid {', '.join(decision.strategy)}"
    for parameter in decisions.parameters:
        if not rules.allows_storage(parameter.name, parameter.shape, parameter.placement):
            yield f"parameters: {parameter.name}: the rules forbid where it is stored"
