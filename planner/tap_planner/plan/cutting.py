"""A plan cut in pipeline stages: the same strategies, with transfers where the stages meet."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from tap_planner.errors import UsageError
from tap_planner.graph import Graph, Operator, TensorKind, cut_in_stages
from tap_planner.operators import TRANSFER, rule_of
from tap_planner.plan.bucketing import bucketed
from tap_planner.plan.decisions import (
    BucketDecision,
    Decisions,
    OperandDecision,
    OperatorDecision,
    OutputDecision,
    ParameterDecision,
    PipelineDecision,
    RedistributionDecision,
    Region,
)
from tap_planner.schedule import BucketKey, PipelineSchedule
from tap_planner.sharding import Placement, local_elements, make_strategy, parse_choice

__all__ = ["cut_decisions", "join_decisions"]


def cut_decisions(
    graph: Graph,
    decisions: Decisions,
    starts: Sequence[str],
    schedule: PipelineSchedule,
    scatter_axes: tuple[int, ...] = (),
) -> tuple[Graph, Decisions]:
    """Cut a plan where chunks begin.

    What goes from one chunk to another is sent as its maker leaves it, and brought to where consumers want it by the
    stage that reads it. Regions end where chunks do, and gradients are reduced stage by stage. A parameter that several
    chunks read has at most ZeRO 1.

    Args:
        graph: bound with the batch of one microbatch of the schedule.
        decisions: of one stage, on a mesh of the shape that every stage has.
        starts: the operators (ids) that begin the chunks, in order; the first is the graph's first.
        schedule: in which order stages work.
        scatter_axes: see ``PipelineDecision``.

    Returns:
        The graph with its transfers, and the decisions about it.

    Raises:
        UsageError: an operator is not there, they are not in order, or a chunk reads another one without the schedule's
            saying so.
    """
    cut, chunks = cut_in_stages(graph, starts, schedule.copies)
    _check_reads(cut, chunks, schedule)
    pipeline = PipelineDecision(chunks=chunks, schedule=schedule, scatter_axes=scatter_axes)
    return cut, _Cutting(graph, decisions, cut, pipeline).result()


def _check_reads(cut: Graph, chunks: Sequence[int], schedule: PipelineSchedule) -> None:
    if not schedule.reads:
        return
    made: dict[str, int] = {}
    for number, (begin, end) in enumerate(itertools.pairwise((*chunks, len(cut.operators)))):
        operators = cut.operators[begin:end]
        read = {made[name] for each in operators for name in each.inputs if name is not None and name in made}
        missing = sorted(read - {*schedule.reads[number]})
        if missing:
            first = next(each.id for each in operators if each.type != TRANSFER)
            true = ",".join(map(str, sorted(read)))
            raise UsageError(
                f"pipeline schedule {schedule.name!r}: chunk {number}, from {first!r} on, reads what chunk "
                f"{missing[0]} makes, which 'reads' does not say",
                hint=f"Write {true} for chunk {number}, or leave 'reads' out: each then waits for the one before.",
            )
        made.update((name, number) for each in operators for name in each.outputs)


def join_decisions(graph: Graph, cut: Graph, decisions: Decisions, regions: Sequence[Region]) -> Decisions:
    """The plan of one stage that a cut plan comes from, as far as it tells: ``cut_decisions`` cuts it alike again.

    Args:
        graph: bound with the batch of one microbatch.
        cut: the same with the plan's transfers.
        decisions: the cut plan.
        regions: regions of one stage; how they recompute is taken from the first part of each.
    """
    before = {operator.id: operator for operator in graph.operators}
    names: dict[str, str] = {}
    for operator in cut.operators:
        if operator.id in before:
            pairs = zip(operator.inputs, before[operator.id].inputs, strict=True)
            names.update((new, old) for new, old in pairs if new is not None and old is not None)

    def renamed(operand: OperandDecision | None) -> OperandDecision | None:
        return None if operand is None else replace(operand, tensor=names.get(operand.tensor, operand.tensor))

    operators = tuple(
        replace(operator, inputs=tuple(map(renamed, operator.inputs)))
        for operator in decisions.operators
        if operator.id in before
    )
    merged: dict[object, RedistributionDecision] = {}
    for decision in decisions.redistributions:
        consumers = tuple(consumer for consumer in decision.consumers if consumer in before)
        if not consumers:
            continue
        one = replace(decision, tensor=names.get(decision.tensor, decision.tensor), consumers=consumers)
        known = merged.get((one.tensor, one.to, one.gradient))
        if known is not None:
            one = replace(known, consumers=(*known.consumers, *consumers))
        merged[one.tensor, one.to, one.gradient] = one
    settings = {name: region.recompute for region in decisions.regions for name in region.operators}
    whole = tuple(replace(region, recompute=settings[region.operators[0]]) for region in regions)
    joined = replace(
        decisions, operators=operators, redistributions=tuple(merged.values()), regions=whole, pipeline=None
    )
    return replace(joined, **_reduced(graph, joined))


def _reduced(graph: Graph, decisions: Decisions) -> dict[str, tuple[object, ...]]:
    """Parameters and buckets of a plan of one stage, reduced together as they are alike."""
    region_of = {name: number for number, region in enumerate(decisions.regions) for name in region.operators}
    first: dict[str, int] = {}
    for operator in graph.operators:
        for name in operator.inputs:
            read = None if name is None else graph.tensors[name].read
            if read is not None:
                first.setdefault(read.parameter, region_of[operator.id])
    groups = [first.get(p.name) if p.zero_level >= 2 else None for p in decisions.parameters]
    parameters, buckets = _buckets(decisions.parameters, groups, decisions.mesh_shape)
    return {"parameters": parameters, "buckets": buckets}


def _buckets(
    given: Sequence[ParameterDecision], groups: Sequence[Hashable], mesh_shape: tuple[int, ...]
) -> tuple[tuple[ParameterDecision, ...], tuple[BucketDecision, ...]]:
    """Put what is reduced together in buckets.

    Args:
        given: the parameters; those in a bucket stay in one.
        groups: what those of one bucket have in common, beside what parameters say.
        mesh_shape: sizes of the axes.
    """
    keys = [
        BucketKey(
            axes=parameter.data_axes,
            dtype=parameter.dtype,
            zero_level=parameter.zero_level,
            zero_axes=parameter.zero_axes,
            group=group,
        )
        if parameter.bucket is not None
        else None
        for parameter, group in zip(given, groups, strict=True)
    ]
    elements = [local_elements(parameter.shape, parameter.placement, mesh_shape) for parameter in given]
    numbers, buckets = bucketed(keys, elements, [parameter.name for parameter in given], mesh_shape)
    return tuple(replace(parameter, bucket=n) for parameter, n in zip(given, numbers, strict=True)), buckets


class _Cutting:
    """Working state of ``cut_decisions``."""

    def __init__(self, graph: Graph, decisions: Decisions, cut: Graph, pipeline: PipelineDecision) -> None:
        self._decisions = decisions
        self._graph = cut
        self._pipeline = pipeline
        ends = (*pipeline.chunks[1:], len(cut.operators))
        self._chunks = [range(first, end) for first, end in zip(pipeline.chunks, ends, strict=True)]
        self._chunk_of = {cut.operators[index].id: n for n, chunk in enumerate(self._chunks) for index in chunk}
        self._given = {operator.id: operator for operator in decisions.operators}
        self._names = self._renamed(graph)
        self._made = {output.tensor: output for operator in decisions.operators for output in operator.outputs}
        self._region_of = {name: n for n, region in enumerate(decisions.regions) for name in region.operators}

    def _renamed(self, graph: Graph) -> list[Mapping[str, str]]:
        """Per chunk, by what name it reads tensors of which it has a copy."""
        before = {operator.id: operator for operator in graph.operators}
        found: list[Mapping[str, str]] = []
        for chunk in self._chunks:
            names: dict[str, str] = {}
            for operator in (self._graph.operators[index] for index in chunk):
                if operator.type != TRANSFER:
                    pairs = zip(before[operator.id].inputs, operator.inputs, strict=True)
                    names.update((old, new) for old, new in pairs if old is not None and new is not None)
            found.append(names)
        return found

    def result(self) -> Decisions:
        """All of it."""
        operators = tuple(map(self._operator, self._graph.operators))
        regions = self._regions()
        parameters, buckets = self._parameters(regions)
        return replace(
            self._decisions,
            operators=operators,
            parameters=parameters,
            redistributions=tuple(self._redistributions()),
            buckets=buckets,
            regions=regions,
            microbatches=self._pipeline.schedule.num_microbatches,
            pipeline=self._pipeline,
        )

    # -- operators --------------------------------------------------------------------------------------------------

    def _operator(self, operator: Operator) -> OperatorDecision:
        if operator.type == TRANSFER:
            return self._transfer(operator)
        given, names = self._given[operator.id], self._names[self._chunk_of[operator.id]]
        inputs = (None if o is None else replace(o, tensor=names.get(o.tensor, o.tensor)) for o in given.inputs)
        return replace(given, inputs=tuple(inputs))

    def _transfer(self, operator: Operator) -> OperatorDecision:
        """What goes over as it lies."""
        name = operator.inputs[0]
        assert name is not None
        made, rule = self._made[name], rule_of(operator.signature)
        choices = tuple(parse_choice(rule, _choice(placement)) for placement in made.placement)
        strategy = make_strategy(operator.signature, rule, choices, self._decisions.mesh_shape)
        assert strategy is not None and strategy.inputs[0] is not None
        needs = self._graph.tensors[name].requires_gradient
        gradient = strategy.input_gradients[0] if needs else None
        copy = OutputDecision(tensor=operator.outputs[0], shape=made.shape, placement=strategy.outputs[0])
        self._made[copy.tensor] = copy
        return OperatorDecision(
            id=operator.id,
            name=operator.name,
            type=operator.type,
            strategy=strategy.names(rule),
            inputs=(OperandDecision(tensor=name, placement=strategy.inputs[0], gradient=gradient),),
            outputs=(copy,),
        )

    def _redistributions(self) -> Iterator[RedistributionDecision]:
        """Each for every chunk that has consumers of it."""
        for decision in self._decisions.redistributions:
            by_chunk: dict[int, list[str]] = {}
            for consumer in decision.consumers:
                by_chunk.setdefault(self._chunk_of[consumer], []).append(consumer)
            for chunk, consumers in by_chunk.items():
                name = self._names[chunk].get(decision.tensor, decision.tensor)
                yield replace(decision, tensor=name, consumers=tuple(consumers))

    # -- regions and parameters -------------------------------------------------------------------------------------

    def _regions(self) -> tuple[Region, ...]:
        """Regions end where chunks do. What is left of a run in each chunk is a run of its own, and so is a part of an
        occurrence."""
        runs: dict[tuple[int, int, int], int] = {}
        sizes: Counter[int] = Counter()
        found: list[Region] = []
        for chunk, operators in enumerate(self._chunks):
            names = [self._graph.operators[index].id for index in operators]
            for number, members in itertools.groupby(names, lambda name: self._region_of.get(name, -1)):
                given = self._decisions.regions[number] if number >= 0 else _BORDER
                part = tuple(members)
                if given.run is None:
                    found.append(replace(given, operators=part))
                    continue
                whole = len(part) == len(given.operators)
                run = runs.setdefault((given.run, chunk, -1 if whole else number), len(runs))
                found.append(replace(given, operators=part, run=run, occurrence=sizes[run]))
                sizes[run] += 1
        return tuple(found)

    def _parameters(
        self, regions: Sequence[Region]
    ) -> tuple[tuple[ParameterDecision, ...], tuple[BucketDecision, ...]]:
        region_of = {name: number for number, region in enumerate(regions) for name in region.operators}
        chunks: dict[str, dict[int, None]] = {}
        first: dict[str, int] = {}
        for operator in self._graph.operators:
            for name in operator.inputs:
                tensor = None if name is None else self._graph.tensors[name]
                if tensor is None or tensor.kind is not TensorKind.PARAMETER or tensor.read is None:
                    continue
                chunks.setdefault(tensor.read.parameter, {})[self._chunk_of[operator.id]] = None
                first.setdefault(tensor.read.parameter, region_of[operator.id])
        given = [
            self._lowered(parameter, len(chunks.get(parameter.name, ()))) for parameter in self._decisions.parameters
        ]
        groups: list[Hashable] = []
        for parameter in given:
            stages = tuple(sorted({self._pipeline.stage_of(chunk) for chunk in chunks.get(parameter.name, (0,))}))
            groups.append((stages, first.get(parameter.name) if parameter.zero_level >= 2 else None))
        return _buckets(given, groups, self._decisions.mesh_shape)

    def _lowered(self, parameter: ParameterDecision, num_chunks: int) -> ParameterDecision:
        return replace(parameter, zero_level=1) if num_chunks > 1 and parameter.zero_level > 1 else parameter


_BORDER = Region(operators=(), run=None, occurrence=0, recompute="none")
"""Of transfers: what lies between blocks."""


def _choice(placement: Placement) -> str:
    """The strategy along an axis under which a tensor passes as it lies."""
    if placement.is_shard:
        return f"d{placement.dim}" + (f"[{placement.blocks}]" if placement.blocks > 1 else "")
    return "partial" if placement.is_partial else "none"
