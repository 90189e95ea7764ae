"""Lower a plan's decisions onto a graph: the instructions that every rank runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tap_planner.errors import ApplyError
from tap_planner.graph import Graph, TensorKind
from tap_planner.plan import Decisions, OperandDecision, OperatorDecision
from tap_planner.program.reading import Reading, made_gradients, part_gradients, rerun_of_regions
from tap_planner.program.stages import Stages, cut_as_planned
from tap_planner.program.types import (
    Chunk,
    Compute,
    ForgetParameters,
    GatherParameters,
    GatherUpdated,
    Instruction,
    Part,
    Phase,
    Program,
    Receive,
    Redistribute,
    ReduceGradients,
    ReduceShards,
    Send,
    SumTied,
    UpdateParameters,
)
from tap_planner.sharding import Placements


def lower(graph: Graph, decisions: Decisions) -> Program:
    """Turn decisions into a Program.

    Args:
        graph: the model bound with the batch of one microbatch, and cut in stages (``graph.cut_in_stages``).
        decisions: as expanded from a plan.

    Raises:
        ApplyError: the decisions are not about this graph, or a bucket cannot be reduced as they say.
    """
    lowering = _Lowering(graph, decisions)
    mean = decisions.loss is not None and decisions.loss.kind != "sum"
    return Program(
        graph=graph,
        decisions=decisions,
        chunks=tuple(lowering.chunks()),
        steps=tuple(lowering.steps()),
        parameters=tuple(lowering.parameters()),
        loss_scale_denominator=decisions.microbatches if mean else 1,
    )


def lower_plan(graph: Graph, decisions: Decisions) -> Program:
    """Cut a graph in the stages of a plan and lower the plan onto it.

    Args:
        graph: the model bound with the batch of one microbatch.
        decisions: as expanded from a plan.

    Raises:
        ApplyError: as ``lower``.
    """
    return lower(cut_as_planned(graph, decisions), decisions)


class _Lowering:
    """Working state of ``lower``."""

    def __init__(self, graph: Graph, decisions: Decisions) -> None:
        self.graph = graph
        self.decisions = decisions
        self._check()
        self.reading = Reading(graph, decisions)
        self.stages = Stages(graph, decisions)
        self.region_of = self._region_of()
        self.rerun = rerun_of_regions(graph, decisions)
        self.bucket_of_tensor = self._gathered_tensors()
        self.regions_of_bucket = self._reading_regions()
        self.activation_edges = self._activation_edges()
        self.released_edges = self._edges_by_release()
        self.own_edges = self._edges_of_one_region()

    def _check(self) -> None:
        ids = tuple(operator.id for operator in self.graph.operators)
        planned = tuple(operator.id for operator in self.decisions.operators)
        if ids != planned:
            different = next((a for a, b in zip(ids, planned, strict=False) if a != b), "the number of operators")
            raise ApplyError(
                f"the plan was made for another model: they differ at {different!r}",
                hint="plan this model anew with tap-plan",
            )
        in_regions = tuple(name for region in self.decisions.regions for name in region.operators)
        if in_regions != ids:
            raise ApplyError("the plan's repeats do not list the operators of the model in order")
        for parameter in self.decisions.parameters:
            if not set(parameter.zero_axes) <= set(parameter.data_axes):
                raise ApplyError(
                    f"parameter {parameter.name!r}: ZeRO axes {list(parameter.zero_axes)}, expected some of its data "
                    f"axes {list(parameter.data_axes)}",
                    hint="the plan was edited or damaged: write it again with tap-plan",
                )

    def _region_of(self) -> dict[str, int]:
        return {name: index for index, region in enumerate(self.decisions.regions) for name in region.operators}

    def _gathered_tensors(self) -> dict[str, int]:
        """Bucket to gather before a stored parameter can be read (ZeRO 3)."""
        return {
            parameter.name: parameter.bucket
            for parameter in self.decisions.parameters
            if parameter.zero_level == 3 and parameter.bucket is not None
        }

    def _reading_regions(self) -> dict[int, tuple[int, int]]:
        """First and last region that reads a parameter of each bucket."""
        bucket_of = {p.name: p.bucket for p in self.decisions.parameters if p.bucket is not None}
        found: dict[int, tuple[int, int]] = {}
        for operator in self.decisions.operators:
            region = self.region_of[operator.id]
            for operand in operator.inputs:
                read = None if operand is None else self.graph.tensors[operand.tensor].read
                if read is not None and read.parameter in bucket_of:
                    bucket = bucket_of[read.parameter]
                    found[bucket] = (found.get(bucket, (region, region))[0], region)
        return found

    def chunks(self) -> Iterator[Chunk]:
        """What is done with one microbatch, chunk by chunk."""
        for number, operators in enumerate(self.stages.chunks):
            forward = list(self._forward(number))
            backward = list(self._backward(number)) if self.decisions.mode == "train" else []
            parts = [forward, backward, []]
            if self.stages.splits_backward:
                parts[1:] = self._split(backward)
            forward, backward, weights = self.reading.with_releases(parts)
            yield Chunk(operators=operators, forward=forward, backward=backward, weights=weights)

    def _split(self, backward: Sequence[Instruction]) -> tuple[list[Instruction], list[Instruction]]:
        """A backward in what others wait for, and what is left for later: gradients of parameters alone."""
        first: list[Instruction] = []
        later: list[Instruction] = []
        for instruction in backward:
            match instruction:
                case Compute(phase=Phase.BACKWARD, operator=index):
                    decision = self.decisions.operators[index]
                    for part, into in ((Part.INPUTS, first), (Part.PARAMETERS, later)):
                        if any(part_gradients(self.graph, decision, part)):
                            into.append(Compute(Phase.BACKWARD, index, part))
                case Redistribute(phase=Phase.BACKWARD, redistribution=edge):
                    tensor = self.graph.tensors[self.decisions.redistributions[edge].tensor]
                    (later if tensor.kind is TensorKind.PARAMETER else first).append(instruction)
                case ReduceGradients():
                    later.append(instruction)
                case _:
                    first.append(instruction)
        return first, self._with_gathers(later)

    def _with_gathers(self, later: Sequence[Instruction]) -> list[Instruction]:
        """Gradients of parameters with what they read of parameters themselves: gathered before the first that does,
        forgotten after the last."""
        needed = [self._buckets_read(instruction) for instruction in later]
        last = {bucket: position for position, buckets in enumerate(needed) for bucket in buckets}
        gathered: set[int] = set()
        found: list[Instruction] = []
        for position, (instruction, buckets) in enumerate(zip(later, needed, strict=True)):
            found.extend(GatherParameters(Phase.BACKWARD, bucket) for bucket in buckets if bucket not in gathered)
            gathered.update(buckets)
            found.append(instruction)
            found.extend(ForgetParameters(bucket) for bucket in buckets if last[bucket] == position)
        return found

    def _buckets_read(self, instruction: Instruction) -> tuple[int, ...]:
        """Buckets (ZeRO 3) whose whole parameters the backward of parameters reads."""
        if not isinstance(instruction, Compute):
            return ()
        operands = self.reading.kept(instruction.operator, instruction.part)[0]
        reads = (self.graph.tensors[o.tensor].read for o in operands if self.reading.edge(o) is None)
        buckets = (self.bucket_of_tensor.get(read.parameter) for read in reads if read is not None)
        return tuple(dict.fromkeys(bucket for bucket in buckets if bucket is not None))

    def parameters(self) -> Iterator[tuple[str, ...]]:
        """What each stage holds."""
        for stage in range(self.decisions.num_stages):
            yield tuple(name for name, stages in self.stages.of_parameter.items() if stage in stages)

    def steps(self) -> Iterator[tuple[Instruction, ...]]:
        """What each stage does once."""
        for stage in range(self.decisions.num_stages):
            yield tuple(self._end_of_step(stage)) if self.decisions.mode == "train" else ()

    def _end_of_step(self, stage: int) -> Iterator[Instruction]:
        yield from (SumTied(name) for name in self.stages.tied(stage))
        buckets = [bucket for bucket in self.decisions.buckets if stage in self.stages.of_bucket(bucket.id)]
        for bucket in buckets:
            if bucket.zero_level < 2:
                yield ReduceGradients(bucket.id)
            if bucket.rest_axes:
                yield ReduceShards(bucket.id)
        yield UpdateParameters()
        for bucket in buckets:
            if bucket.zero_level in (1, 2):
                yield GatherUpdated(bucket.id)

    def _after_forward(self, region: int, gathered: set[int]) -> Iterator[Instruction]:
        """Forget gathered parameters that no later region reads."""
        for bucket in sorted(gathered):
            if self.regions_of_bucket[bucket][1] == region:
                gathered.remove(bucket)
                yield ForgetParameters(bucket)

    def _after_backward(self, region: int, gathered: set[int]) -> Iterator[Instruction]:
        """Reduce the gradients that are complete, and forget gathered parameters that no earlier region reads."""
        for bucket in self.decisions.buckets:
            if bucket.zero_level >= 2 and self.regions_of_bucket[bucket.id][0] == region:
                yield ReduceGradients(bucket.id)
        for bucket in sorted(gathered):
            if self.regions_of_bucket[bucket][0] == region:
                gathered.remove(bucket)
                yield ForgetParameters(bucket)

    def _operands(self, operator: OperatorDecision) -> Iterator[OperandDecision]:
        seen: set[tuple[str, Placements, Placements | None]] = set()
        for operand in operator.inputs:
            if operand is None:
                continue
            key = (operand.tensor, operand.placement, operand.gradient)
            if key not in seen:
                seen.add(key)
                yield operand

    def _run(self, index: int, phase: Phase, made: set[int], gathered: set[int]) -> Iterator[Instruction]:
        """Gathers and redistributions that an operator still waits for, then the operator."""
        if self.stages.is_transfer(index):
            yield Receive(phase, index, self.stages.other_end(index, self.stages.chunk_of(index)))
            return
        yield from self._operands_of(index, phase, made, gathered)
        yield Compute(phase, index)

    def _operands_of(self, index: int, phase: Phase, made: set[int], gathered: set[int]) -> Iterator[Instruction]:
        """Gathers and redistributions that an operator still waits for."""
        for operand in self._operands(self.decisions.operators[index]):
            read = self.graph.tensors[operand.tensor].read
            bucket = self.bucket_of_tensor.get(read.parameter) if read is not None else None
            if bucket is not None and bucket not in gathered:
                gathered.add(bucket)
                yield GatherParameters(phase, bucket)
            edge = self.reading.edge(operand)
            if edge is not None and edge not in made:
                made.add(edge)
                yield Redistribute(phase, edge)

    def _forward(self, chunk: int) -> Iterator[Instruction]:
        made: set[int] = set()
        gathered: set[int] = set()
        position = self.stages.chunks[chunk].start
        for number in self.stages.regions[chunk]:
            for _ in self.decisions.regions[number].operators:
                yield from self._run(position, Phase.FORWARD, made, gathered)
                position += 1
            yield from self._after_forward(number, gathered)
        for transfer in self.stages.sent_from(chunk):
            yield from self._operands_of(transfer, Phase.FORWARD, made, gathered)
            yield Send(Phase.FORWARD, transfer, self.stages.other_end(transfer, chunk))

    def _backward(self, chunk: int) -> Iterator[Instruction]:
        gathered: set[int] = set()
        pending = self.released_edges
        for transfer in self.stages.sent_from(chunk):
            if self._makes_gradient(transfer):
                yield Receive(Phase.BACKWARD, transfer, self.stages.other_end(transfer, chunk))
        position = self.stages.chunks[chunk].stop
        for number in reversed(self.stages.regions[chunk]):
            region = self.decisions.regions[number]
            first = position - len(region.operators)
            if self.rerun[number]:
                yield from self._recompute(number, range(first, position), gathered)
            for index in range(position - 1, first - 1, -1):
                yield from self._backward_of(index, gathered, pending)
            yield from self._after_backward(number, gathered)
            position = first

    def _recompute(self, number: int, indices: range, gathered: set[int]) -> Iterator[Instruction]:
        """What runs again before a region's backward, and the redistributions of what it makes."""
        made = self._kept_edges(number)
        for index in indices:
            if index in self.rerun[number]:
                for instruction in self._run(index, Phase.RECOMPUTE, made, gathered):
                    if isinstance(instruction, GatherParameters):
                        instruction = GatherParameters(Phase.BACKWARD, instruction.bucket)
                    yield instruction
                continue
            for operand in self.reading.kept(index)[0]:
                edge = self.reading.edge(operand)
                if edge is not None and edge not in made:
                    made.add(edge)
                    yield Redistribute(Phase.RECOMPUTE, edge)

    def _kept_edges(self, number: int) -> set[int]:
        """Redistributions that are not made again: what several regions share, and, in a region where not everything
        runs again, copies of what does not."""
        everything = self.decisions.regions[number].recompute == "full"
        again = {name for index in self.rerun[number] for name in self.graph.operators[index].outputs}
        own = self.own_edges.get(number, ())
        renewed = {edge for edge in own if everything or self.decisions.redistributions[edge].tensor in again}
        return set(range(len(self.decisions.redistributions))) - renewed

    def _edges_of_one_region(self) -> Mapping[int, Sequence[int]]:
        """Redistributions that one region alone reads, by region."""
        found: dict[int, list[int]] = {}
        for edge, decision in enumerate(self.decisions.redistributions):
            regions = {self.region_of[consumer] for consumer in decision.consumers}
            if len(regions) == 1:
                found.setdefault(regions.pop(), []).append(edge)
        return found

    def _edges_by_release(self) -> Mapping[int, Sequence[int]]:
        """Redistributions whose gradient is complete once an operator's backward has run: those of parameters after
        their first consumer. Those of activations are run just before their producer's backward."""
        position = {operator.id: index for index, operator in enumerate(self.decisions.operators)}
        result: dict[int, list[int]] = {}
        for edge, decision in enumerate(self.decisions.redistributions):
            if decision.gradient is None:
                continue
            if self.graph.tensors[decision.tensor].kind is TensorKind.PARAMETER:
                first = min(position[consumer] for consumer in decision.consumers)
                result.setdefault(first, []).append(edge)
        return result

    def _backward_of(
        self, index: int, gathered: set[int], pending: Mapping[int, Sequence[int]]
    ) -> Iterator[Instruction]:
        operator = self.graph.operators[index]
        decision = self.decisions.operators[index]
        for name in operator.outputs:
            yield from (Redistribute(Phase.BACKWARD, edge) for edge in self._edges_of(name))
        if self._makes_gradient(index):
            if self.stages.is_transfer(index):
                yield Send(Phase.BACKWARD, index, self.stages.other_end(index, self.stages.chunk_of(index)))
                return
            for operand in self._operands(decision):
                read = self.graph.tensors[operand.tensor].read
                bucket = self.bucket_of_tensor.get(read.parameter) if read is not None else None
                if bucket is not None and bucket not in gathered:
                    gathered.add(bucket)
                    yield GatherParameters(Phase.BACKWARD, bucket)
            yield Compute(Phase.BACKWARD, index)
        for edge in pending.get(index, ()):
            yield Redistribute(Phase.BACKWARD, edge)

    def _makes_gradient(self, index: int) -> bool:
        """Whether an operator has a backward."""
        outputs = self.graph.operators[index].outputs
        return any(made_gradients(self.decisions.operators[index])) and any(
            self.graph.tensors[name].requires_gradient for name in outputs
        )

    def _edges_of(self, tensor: str) -> tuple[int, ...]:
        """Redistributions of an activation that bring back a gradient."""
        return self.activation_edges.get(tensor, ())

    def _activation_edges(self) -> dict[str, tuple[int, ...]]:
        edges: dict[str, tuple[int, ...]] = {}
        for edge, decision in enumerate(self.decisions.redistributions):
            activation = self.graph.tensors[decision.tensor].kind is TensorKind.ACTIVATION
            if activation and decision.gradient is not None:
                edges[decision.tensor] = (*edges.get(decision.tensor, ()), edge)
        return edges
