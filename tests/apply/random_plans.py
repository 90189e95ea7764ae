"""Random points of the decision space, made without the search: any strategy of each operator, any destination."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tap_planner.graph import Graph, Operator, ParameterRead, TensorKind, cut_in_stages
from tap_planner.operators import lookup, rule_of
from tap_planner.plan import (
    AxisDecision,
    BucketDecision,
    Decisions,
    LossDecision,
    OperandDecision,
    OperatorDecision,
    OutputDecision,
    ParameterDecision,
    PipelineDecision,
    RedistributionDecision,
    Region,
)
from tap_planner.schedule import BucketKey, PipelineSchedule, assign_buckets
from tap_planner.sharding import (
    PARTIAL,
    REPLICATE,
    Choice,
    Placements,
    Step,
    Strategy,
    apply_step,
    axis_choices,
    block_hints,
    dual_placements,
    fits,
    local_shape,
    make_step,
    make_strategy,
    shard,
)


def find_steps(
    shape: tuple[int, ...], is_float: bool, mesh_shape: tuple[int, ...], source: Placements, target: Placements
) -> tuple[Step, ...] | None:
    """A shortest sequence of steps between two placements, by breadth-first search."""
    shards = sorted({p for p in (*source, *target) if p.is_shard}, key=str)
    options = [REPLICATE, *([PARTIAL] if is_float else []), *shards]
    paths: dict[Placements, tuple[Step, ...]] = {source: ()}
    queue = deque([source])
    while queue:
        state = queue.popleft()
        if state == target:
            return paths[state]
        for axis in range(len(mesh_shape)):
            for option in options:
                step = make_step(shape, state, mesh_shape, axis, option)
                if step is None:
                    continue
                after = apply_step(state, step)
                if after not in paths and fits(shape, after, mesh_shape):
                    paths[after] = (*paths[state], step)
                    queue.append(after)
    return None


def read_placements(read: ParameterRead, placements: Placements) -> Placements | None:
    """Placements of a stored parameter in the dims of its read."""
    if any(p.is_shard and p.dim not in read.dims for p in placements):
        return None
    return tuple(shard(read.dims.index(p.dim), p.blocks) if p.is_shard else p for p in placements)


def stored_placements(read: ParameterRead, placements: Placements) -> Placements:
    """Placements of a read in the dims of the stored parameter; P becomes R."""
    result = []
    for p in placements:
        dim = read.dims[p.dim] if p.is_shard else None
        result.append(shard(dim, p.blocks) if p.is_shard and dim is not None else REPLICATE)
    return tuple(result)


def cut_at_random(graph: Graph, schedule: PipelineSchedule, seed: int) -> tuple[Graph, PipelineDecision]:
    """A graph cut at random operators in as many chunks as a schedule has."""
    inner = [operator.id for operator in graph.operators[1:]]
    chosen = sorted(random.Random(seed).sample(range(len(inner)), schedule.num_virtual_stages - 1))
    cut, chunks = cut_in_stages(graph, [graph.operators[0].id, *(inner[index] for index in chosen)])
    return cut, PipelineDecision(chunks=chunks, schedule=schedule)


class RandomPlan:
    """Builds random decisions about a graph (bound with the microbatch's batch).

    Args:
        graph: what the plan is for, cut in stages.
        mesh_shape: sizes of the axes.
        seed: which point of the space.
        zero: ZeRO level; None: each region's parameters have a level and axes of their own.
        recompute: ``none``, ``selective``, ``full``, or ``mixed``: each region has a setting of its own.
        microbatches: how many.
        optimizer: ``adamw`` or ``sgd``.
        loss_kind: kind of the graph's loss.
        pipeline: None: one stage.
    """

    def __init__(
        self,
        graph: Graph,
        mesh_shape: tuple[int, ...],
        seed: int,
        *,
        zero: int | None = 0,
        recompute: str = "none",
        microbatches: int = 1,
        optimizer: str = "adamw",
        loss_kind: str = "mean",
        pipeline: PipelineDecision | None = None,
    ) -> None:
        self.graph = graph
        self.mesh_shape = mesh_shape
        self.random = random.Random(seed)
        self.zero = zero
        self.recompute = recompute
        self.microbatches = microbatches
        self.optimizer = optimizer
        self.loss_kind = loss_kind
        self.pipeline = pipeline
        self.training = graph.loss is not None
        self.hints = block_hints(graph)

    def build(self) -> Decisions:
        """The decisions."""
        strategies = [self._choose(operator) for operator in self.graph.operators]
        operators = tuple(
            self._operator(operator, strategy)
            for operator, strategy in zip(self.graph.operators, strategies, strict=True)
        )
        regions = self._regions()
        parameters, buckets = self._parameters(operators, regions)
        return Decisions(
            mode="train" if self.training else "infer",
            precision="fp64",
            optimizer=self.optimizer if self.training else "",
            loss=LossDecision(kind=self.loss_kind, output=self.graph.output_names[0]) if self.training else None,
            microbatches=self.microbatches,
            axes=tuple(
                AxisDecision(name=f"axis{index}", size=size, levels=()) for index, size in enumerate(self.mesh_shape)
            ),
            operators=operators,
            parameters=parameters,
            redistributions=self._redistributions(operators, parameters),
            buckets=buckets,
            regions=regions,
            pipeline=self.pipeline,
        )

    def _chunk_of(self, index: int) -> int:
        """The chunk that an operator lies in."""
        return 0 if self.pipeline is None else bisect.bisect_right(self.pipeline.chunks, index) - 1

    def _needed(self, operator: Operator) -> tuple[bool, ...]:
        if not any(self.graph.tensors[name].requires_gradient for name in operator.outputs):
            return (False,) * len(operator.inputs)
        differentiable = lookup(operator.type).differentiable_operands
        return tuple(
            name is not None
            and self.graph.tensors[name].requires_gradient
            and (differentiable is None or position in differentiable)
            for position, name in enumerate(operator.inputs)
        )

    def _choose(self, operator: Operator) -> Strategy:
        partial = tuple(
            name is not None and self.graph.tensors[name].kind is TensorKind.ACTIVATION for name in operator.inputs
        )
        rule = rule_of(operator.signature)
        options = axis_choices(rule, self.hints[operator.id], partial)
        for _ in range(50):
            choices = tuple(self.random.choice(options) for _ in self.mesh_shape)
            strategy = make_strategy(operator.signature, rule, choices, self.mesh_shape)
            if strategy is not None:
                return strategy
        strategy = make_strategy(operator.signature, rule, (Choice("none"),) * len(self.mesh_shape), self.mesh_shape)
        assert strategy is not None
        return strategy

    def _operator(self, operator: Operator, strategy: Strategy) -> OperatorDecision:
        needed = self._needed(operator)
        inputs = []
        for position, name in enumerate(operator.inputs):
            placement, gradient = strategy.inputs[position], strategy.input_gradients[position]
            if name is None or placement is None:
                inputs.append(None)
            else:
                wanted = gradient if needed[position] else None
                inputs.append(OperandDecision(tensor=name, placement=placement, gradient=wanted))
        outputs = tuple(
            OutputDecision(tensor=name, shape=self.graph.tensors[name].type.shape, placement=placement)
            for name, placement in zip(operator.outputs, strategy.outputs, strict=True)
        )
        return OperatorDecision(
            id=operator.id,
            name=operator.name,
            type=operator.type,
            strategy=strategy.names(rule_of(operator.signature)),
            inputs=tuple(inputs),
            outputs=outputs,
        )

    def _regions(self) -> tuple[Region, ...]:
        ids = [operator.id for operator in self.graph.operators]
        third = max(1, (len(ids) - 1) // 3)
        cuts = [0, third, 2 * third, len(ids) - 1 if self.training else len(ids), len(ids)]
        if self.recompute in ("mixed", "selective"):
            return self._mixed_regions(ids)
        regions: list[Region] = []
        for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
            if begin < end:
                again = self.recompute if number < 2 and self.training else "none"
                regions.append(Region(operators=tuple(ids[begin:end]), run=None, occurrence=0, recompute=again))
        return self._within_chunks(regions)

    def _within_chunks(self, regions: Sequence[Region]) -> tuple[Region, ...]:
        """Regions, cut where chunks begin."""
        if self.pipeline is None:
            return tuple(regions)
        found: list[Region] = []
        begin = 0
        for region in regions:
            chunks = [self._chunk_of(begin + position) for position in range(len(region.operators))]
            for chunk in dict.fromkeys(chunks):
                inside = tuple(name for name, own in zip(region.operators, chunks, strict=True) if own == chunk)
                found.append(replace(region, operators=inside))
            begin += len(region.operators)
        return tuple(found)

    def _mixed_regions(self, ids: list[str]) -> tuple[Region, ...]:
        """What lies first, four occurrences of a run with settings of their own, and what lies last."""
        last = len(ids) - 1
        cuts = [0, *sorted(self.random.sample(range(1, last), 5)), len(ids)]
        regions: list[Region] = []
        for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
            inside = 0 < number < 5
            settings = ["none", "selective", "full"] if self.recompute == "mixed" else [self.recompute]
            regions.append(
                Region(
                    operators=tuple(ids[begin:end]),
                    run=0 if inside else None,
                    occurrence=number - 1 if inside else 0,
                    recompute=self.random.choice(settings) if inside else "none",
                )
            )
        return self._within_chunks(regions)

    def _zero_settings(self, num_regions: int) -> list[tuple[int, set[int]]]:
        """Per region ZeRO level and the axes over which it may shard."""
        axes = range(len(self.mesh_shape))
        if self.zero is not None:
            return [(self.zero, set(axes))] * num_regions
        return [
            (self.random.randrange(4), set(self.random.sample(axes, self.random.randint(1, len(axes)))))
            for _ in range(num_regions)
        ]

    def _key(
        self, axes: tuple[int, ...], dtype: str, region: int, setting: tuple[int, set[int]], chunks: tuple[int, ...]
    ) -> BucketKey | None:
        if not axes:
            return None
        level, over = setting
        if len(chunks) > 1:
            level = min(level, 1)
        zero_axes = tuple(axis for axis in axes if axis in over) if level else ()
        level = level if zero_axes else 0
        stages = None if self.pipeline is None else tuple(sorted({*map(self.pipeline.stage_of, chunks)}))
        group = region if level >= 2 else stages
        return BucketKey(axes=axes, dtype=dtype, zero_level=level, zero_axes=zero_axes, group=group)

    def _parameters(
        self, operators: tuple[OperatorDecision, ...], regions: tuple[Region, ...]
    ) -> tuple[tuple[ParameterDecision, ...], tuple[BucketDecision, ...]]:
        region_of = {name: number for number, region in enumerate(regions) for name in region.operators}
        uses: dict[str, list[tuple[OperandDecision, ParameterRead, int]]] = {}
        chunks: dict[str, set[int]] = {}
        for index, operator in enumerate(operators):
            for operand in operator.inputs:
                read = None if operand is None else self.graph.tensors[operand.tensor].read
                if operand is not None and read is not None:
                    uses.setdefault(read.parameter, []).append((operand, read, region_of[operator.id]))
                    chunks.setdefault(read.parameter, set()).add(self._chunk_of(index))
        rows = []
        for parameter in self.graph.parameters:
            trainable = parameter.trainable and self.training
            placement, gradient = self._storage(parameter.name, parameter.type.shape, uses, trainable)
            axes = tuple(a for a, p in enumerate(gradient or ()) if p.is_partial)
            local = math.prod(local_shape(parameter.type.shape, placement, self.mesh_shape))
            rows.append((parameter, placement, gradient, axes, local, trainable))
        settings = self._zero_settings(len(regions))
        first = [uses[row[0].name][0][2] if row[0].name in uses else 0 for row in rows]
        keys = [
            self._key(
                axes, parameter.type.dtype, region, settings[region], tuple(sorted(chunks.get(parameter.name, {0})))
            )
            for (parameter, _, _, axes, _, _), region in zip(rows, first, strict=True)
        ]
        numbers = assign_buckets(keys, [row[4] for row in rows], capacity=500)
        decisions = tuple(
            ParameterDecision(
                name=parameter.name,
                shape=parameter.type.shape,
                dtype=parameter.type.dtype,
                trainable=trainable,
                placement=placement,
                gradient=gradient,
                zero_level=key.zero_level if key is not None else 0,
                zero_axes=key.zero_axes if key is not None else (),
                bucket=number,
            )
            for (parameter, placement, gradient, _, _, trainable), key, number in zip(rows, keys, numbers, strict=True)
        )
        return decisions, self._buckets(decisions, [row[4] for row in rows])

    def _buckets(self, decisions: tuple[ParameterDecision, ...], sizes: list[int]) -> tuple[BucketDecision, ...]:
        found: dict[int, list[int]] = {}
        for index, decision in enumerate(decisions):
            if decision.bucket is not None:
                found.setdefault(decision.bucket, []).append(index)
        buckets = []
        for number, members in sorted(found.items()):
            first = decisions[members[0]]
            shards = math.prod(self.mesh_shape[axis] for axis in first.zero_axes)
            elements = sum(sizes[index] for index in members)
            buckets.append(
                BucketDecision(
                    id=number,
                    axes=first.data_axes,
                    dtype=first.dtype,
                    zero_level=first.zero_level,
                    zero_axes=first.zero_axes,
                    parameters=tuple(decisions[index].name for index in members),
                    elements=-(-elements // shards) * shards,
                )
            )
        return tuple(buckets)

    def _storage(
        self,
        name: str,
        shape: tuple[int, ...],
        uses: Mapping[str, list[tuple[OperandDecision, ParameterRead, int]]],
        trainable: bool,
    ) -> tuple[Placements, Placements | None]:
        placement: Placements = (REPLICATE,) * len(self.mesh_shape)
        readers = uses.get(name, [])
        choices = [stored_placements(read, operand.placement) for operand, read, _ in readers]
        possible = [
            choice
            for choice in choices
            if fits(shape, choice, self.mesh_shape)
            and all(read_placements(read, choice) is not None for _, read, _ in readers)
        ]
        if possible and self.random.random() < 0.8:
            placement = self.random.choice(possible)
        if not trainable:
            return placement, None
        wanted = []
        for axis, p in enumerate(placement):
            arrives_partial = any(
                operand.gradient is not None and operand.gradient[axis].is_partial for operand, _, _ in readers
            )
            wanted.append(PARTIAL if p.is_replicate and arrives_partial and self.random.random() < 0.8 else p)
        return placement, tuple(wanted)

    def _redistributions(
        self, operators: tuple[OperatorDecision, ...], parameters: tuple[ParameterDecision, ...]
    ) -> tuple[RedistributionDecision, ...]:
        sources = {output.tensor: output.placement for operator in operators for output in operator.outputs}
        by_name = {decision.name: decision for decision in parameters}
        groups: dict[tuple[str, Placements, Placements | None], list[str]] = {}
        for operator in operators:
            for operand in operator.inputs:
                if operand is not None:
                    consumers = groups.setdefault((operand.tensor, operand.placement, operand.gradient), [])
                    if operator.id not in consumers:
                        consumers.append(operator.id)
        caches = {name: operators[index].inputs[1] for name, index in self.graph.caches.items()}
        result = []
        for (name, target, gradient), consumers in groups.items():
            tensor = self.graph.tensors[name]
            stored_cache = caches.get(name)
            if stored_cache is not None:
                source = wanted = stored_cache.placement
            elif tensor.kind is TensorKind.ACTIVATION:
                source, wanted = sources[name], dual_placements(sources[name])
            elif tensor.read is not None:
                stored = by_name[tensor.read.parameter]
                source = read_placements(tensor.read, stored.placement)
                wanted = read_placements(tensor.read, stored.gradient or stored.placement)
                assert source is not None and wanted is not None
            else:
                continue
            if target == source and gradient in (None, wanted):
                continue
            shape, is_float = tensor.type.shape, tensor.type.is_float
            forward = find_steps(shape, is_float, self.mesh_shape, source, target)
            backward = () if gradient is None else find_steps(shape, is_float, self.mesh_shape, gradient, wanted)
            assert forward is not None and backward is not None, (name, source, target, gradient, wanted)
            result.append(
                RedistributionDecision(
                    tensor=name,
                    source=source,
                    to=target,
                    gradient=gradient,
                    forward=forward,
                    backward=backward,
                    consumers=tuple(consumers),
                )
            )
        return tuple(result)
