"""Objective A and memory model M of a Program: an evaluator that shares no tables with the search.

It walks the instructions and prices each by itself. Gradient reductions and ZeRO gathers are priced per parameter
without latency (bucket latency is not additive and is no part of objective A).
"""

from __future__ import annotations

from dataclasses import dataclass

from tap_planner.cluster import Cluster
from tap_planner.cost import (
    PriceList,
    shard_elements,
    unsharded_bytes,
    workspace_bytes,
)
from tap_planner.graph import TensorKind
from tap_planner.operators import CACHE_OPERAND, OUTPUT
from tap_planner.plan import ParameterDecision
from tap_planner.program import (
    Compute,
    GatherParameters,
    GatherUpdated,
    Instruction,
    Phase,
    Program,
    Redistribute,
    ReduceGradients,
    ReduceShards,
    SumTied,
    UpdateParameters,
)
from tap_planner.schedule import BUCKET_ELEMENTS
from tap_planner.sharding import Placements, local_elements
from tap_planner.simulate.durations import Durations
from tap_planner.simulate.holding import (
    first_regions,
    held_by_chunk,
    held_for_backward,
    waiting_by_chunk,
    working_regions,
)
from tap_planner.simulate.memory import stored_memory
from tap_planner.simulate.staged import in_flight_bytes, stage_times


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Objective A and memory model M of one step."""

    compute_ns: int
    """Operators, forward, recompute and backward, all microbatches."""
    communication_ns: int
    """Collectives of forward, recompute and backward."""
    gradient_ns: int
    """Gradient reductions and ZeRO gathers, without latency."""
    optimizer_ns: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    bubble_ns: int = 0
    """Of a pipeline: what the stage that the rest speaks of waits for others."""
    unsharded_bytes: int = 0
    """Whole copies of parameters and gradients that exist beside ZeRO's shards while their group is in use."""
    cache_bytes: int = 0
    """Of all microbatches, in inference; what a cache was before the step is the same memory."""
    input_bytes: int = 0
    """Of one microbatch, in inference; caches are none of them."""
    output_bytes: int = 0
    """Of all microbatches, in inference; caches are none of them."""
    workspace_bytes: int = 0
    """What communication takes, the same for every plan on a mesh."""
    stage_bytes: tuple[int, ...] = ()
    """Of a pipeline: memory model M of every stage; the kinds of memory are those of the one with the least room."""

    @property
    def objective_ns(self) -> int:
        """Objective A."""
        busy_ns = self.compute_ns + self.communication_ns + self.gradient_ns + self.optimizer_ns
        return busy_ns + self.bubble_ns

    @property
    def bytes_of_stages(self) -> tuple[int, ...]:
        """Memory model M, per device of every stage; without a pipeline there is one."""
        return self.stage_bytes or (self.memory_bytes,)

    @property
    def memory_bytes(self) -> int:
        """Memory model M, per device."""
        training = self.gradient_bytes + self.optimizer_bytes + self.activation_bytes + self.unsharded_bytes
        inference = self.cache_bytes + self.input_bytes + self.output_bytes
        return self.parameter_bytes + training + inference + self.workspace_bytes


def price_program(program: Program, cluster: Cluster, which: PriceList = PriceList.TIME) -> Price:
    """Price every instruction of one step on the rank at coordinate 0; of a pipeline as ``staged`` says, times of the
    stage whose step ends last, memory of the stage that holds most.

    Args:
        program: the plan, lowered.
        cluster: the devices that its mesh uses.
        which: what is counted; with ``PriceList.VOLUME`` what is called ns is bytes sent.
    """
    pricing = _Pricing(program, cluster, which)
    return pricing.price() if program.decisions.pipeline is None else pricing.price_of_stages()


def sent_by_program(program: Program, cluster: Cluster) -> int:
    """Bytes that the rank at coordinate 0 sends in one step, each collective at the least that it can do with.

    Gradient reductions and ZeRO gathers count parameter by parameter, as objective A prices them: without the padding
    of buckets.
    """
    return sum(_Pricing(program, cluster, PriceList.VOLUME).totals().values())


class _Pricing:
    def __init__(self, program: Program, cluster: Cluster, which: PriceList) -> None:
        self.program = program
        self.cluster = cluster
        self.decisions = program.decisions
        self.mesh_shape = program.decisions.mesh_shape
        self.durations = Durations(program, cluster, which)
        self.compute, self.collectives = self.durations.compute, self.durations.links
        self.parameters = {parameter.name: parameter for parameter in program.decisions.parameters}

    def totals(self) -> dict[str, int]:
        """What the instructions cost, by kind, in the unit of the price list."""
        totals = {"compute": 0, "communication": 0, "gradient": 0, "optimizer": 0}
        for instruction in self.program.microbatch:
            kind, ns = self._instruction(instruction)
            totals[kind] += ns * self.decisions.microbatches
            if isinstance(instruction, Compute):
                totals["communication"] += self._collectives_ns(instruction) * self.decisions.microbatches
        for instruction in self.program.step:
            kind, ns = self._instruction(instruction)
            totals[kind] += ns
        return totals

    def price(self) -> Price:
        """Costs, and memory."""
        totals = self.totals()
        memory = [stored_memory(self.decisions, parameter) for parameter in self.decisions.parameters]
        kept = self._stored_bytes() if self.decisions.mode == "infer" else {}
        return Price(
            compute_ns=totals["compute"],
            communication_ns=totals["communication"],
            gradient_ns=totals["gradient"],
            optimizer_ns=totals["optimizer"],
            parameter_bytes=sum(sizes[0] for sizes in memory),
            gradient_bytes=sum(sizes[1] for sizes in memory),
            optimizer_bytes=sum(sizes[2] for sizes in memory),
            activation_bytes=self._activation_bytes() if self.decisions.mode == "train" else 0,
            unsharded_bytes=self._unsharded_bytes() if self.decisions.mode == "train" else 0,
            workspace_bytes=self._workspace_bytes(),
            cache_bytes=kept.get("cache_bytes", 0),
            input_bytes=kept.get("input_bytes", 0),
            output_bytes=kept.get("output_bytes", 0),
        )

    def price_of_stages(self) -> Price:
        """Costs, and memory, of a pipeline."""
        times = stage_times(self.program, self.durations)
        ends = [self._once(stage) for stage in range(self.decisions.num_stages)]
        slowest = max(range(len(ends)), key=lambda stage: (sum(ends[stage]), -stage))
        own = times.stages[slowest]
        memory, workspace = self._memory_of_stages(), self._workspace_bytes()
        stage_bytes = tuple(sum(one) + workspace for one in memory)
        left = [room - taken for room, taken in zip(self.durations.room_bytes, stage_bytes, strict=True)]
        fullest = memory[left.index(min(left))]
        return Price(
            compute_ns=own.compute_ns,
            communication_ns=own.communication_ns,
            gradient_ns=ends[slowest][0],
            optimizer_ns=ends[slowest][1],
            bubble_ns=times.makespan_ns - own.compute_ns - own.communication_ns,
            parameter_bytes=fullest[0],
            gradient_bytes=fullest[1],
            optimizer_bytes=fullest[2],
            activation_bytes=fullest[3],
            unsharded_bytes=fullest[4],
            workspace_bytes=workspace,
            stage_bytes=stage_bytes,
        )

    def _once(self, stage: int) -> tuple[int, int]:
        """What a stage does beside its slots: (reductions and gathers, the optimizer)."""
        gradient = optimizer = 0
        for number, chunk in enumerate(self.program.chunks):
            if self.program.stage_of(number) == stage:
                for instruction in (*chunk.forward, *chunk.backward, *chunk.weights):
                    kind, ns = self._instruction(instruction)
                    gradient += ns * self.decisions.microbatches if kind == "gradient" else 0
        for instruction in self.program.steps[stage]:
            if isinstance(instruction, UpdateParameters):
                optimizer += self.durations.update_ns(self.program.parameters[stage], stage)
            elif isinstance(instruction, SumTied):
                name = instruction.parameter
                gradient += self.durations.tied_ns(self.parameters[name], self.program.stages_of(name))
            else:
                gradient += self._instruction(instruction, stage)[1]
        return gradient, optimizer

    def _memory_of_stages(self) -> list[tuple[int, int, int, int, int]]:
        """Per stage: parameters, gradients, optimizer, activations, whole copies."""
        held, working = (
            [
                sum(self._tensor_bytes(*entry) for entry in chunk)
                for chunk in held_by_chunk(self.program, with_working=w)
            ]
            for w in (False, True)
        )
        waiting = [sum(self._tensor_bytes(*entry) for _, entry in chunk) for chunk in waiting_by_chunk(self.program)]
        activations = in_flight_bytes(self.program, held, waiting, working)
        found: list[tuple[int, int, int, int, int]] = []
        for stage in range(self.decisions.num_stages):
            names = self.program.parameters[stage]
            sizes = [stored_memory(self.decisions, self.parameters[name]) for name in names]
            stored = (sum(size[kind] for size in sizes) for kind in range(3))
            found.append((*stored, activations[stage], self._unsharded_bytes(frozenset(names))))  # type: ignore[arg-type]
        return found

    def _instruction(self, instruction: Instruction, stage: int | None = None) -> tuple[str, int]:
        """Kind and time of an instruction; ``stage`` is the one that runs it, where several may."""
        stage = self.durations.stage_of(instruction, stage)
        match instruction:
            case Compute(phase=phase, operator=index):
                forward_ns, backward_ns = self.durations.operator_ns(index)
                return "compute", backward_ns if phase is Phase.BACKWARD else forward_ns
            case Redistribute():
                return "communication", self._collectives_ns(instruction)
            case GatherParameters(bucket=number):
                return "gradient", self._bucket_ns("all_gather", number, stage)
            case GatherUpdated(bucket=number):
                return "gradient", self._bucket_ns("all_gather", number, stage)
            case ReduceGradients(bucket=number):
                level = self.decisions.buckets[number].zero_level
                kind = "reduce_scatter" if level else "all_reduce"
                return "gradient", self._bucket_ns(kind, number, stage)
            case ReduceShards(bucket=number):
                return "gradient", self._shards_ns(number, stage)
            case UpdateParameters():
                return "optimizer", self.durations.update_ns()
            case _:
                return "compute", 0

    def _collectives_ns(self, instruction: Instruction) -> int:
        """What an instruction issues, one after the other."""
        return sum(busy.ns for busy in self.durations.collectives(instruction))

    def _local_elements(self, parameter: ParameterDecision) -> int:
        return local_elements(parameter.shape, parameter.placement, self.mesh_shape)

    def _bucket_ns(self, kind: str, number: int, stage: int | None) -> int:
        bucket = self.decisions.buckets[number]
        element_bytes = self.compute.element_bytes(bucket.dtype)
        axes = bucket.zero_axes if bucket.zero_level else bucket.axes
        return sum(
            self.collectives.rate_ns(kind, axes, self._local_elements(self.parameters[name]) * element_bytes, stage)
            for name in bucket.parameters
        )

    def _shards_ns(self, number: int, stage: int | None) -> int:
        bucket = self.decisions.buckets[number]
        element_bytes = self.compute.element_bytes(bucket.dtype)
        total = 0
        for name in bucket.parameters:
            shard = shard_elements(self._local_elements(self.parameters[name]), bucket.zero_axes, self.mesh_shape)
            total += self.collectives.rate_ns("all_reduce", bucket.rest_axes, shard * element_bytes, stage)
        return total

    def _activation_bytes(self) -> int:
        """Distinct (tensor, placement) entries that are held from forward to backward, with the working sets."""
        return sum(self._tensor_bytes(*entry) for entry in held_for_backward(self.program))

    def _unsharded_bytes(self, names: frozenset[str] | None = None) -> int:
        """Whole copies beside ZeRO's shards, and room for them; of some parameters (None: all).

        The occurrences of a run take turns in one room: it is that of the last occurrence, for the highest level in any
        run. Outside runs, copies count that are too large for a bucket.
        """
        first = first_regions(self.program)
        working = working_regions(self.decisions)
        regions = self.decisions.regions
        in_runs = {name for name, number in first.items() if regions[number].run is not None}
        chosen = [p for p in self.decisions.parameters if names is None or p.name in names]
        highest = max((p.zero_level for p in chosen if p.name in in_runs), default=0)
        total = 0
        for parameter in chosen:
            number = first.get(parameter.name)
            if number is None or not parameter.trainable or not parameter.data_axes:
                continue
            elements, run = self._local_elements(parameter), regions[number].run
            if number in working if run is not None else elements > BUCKET_ELEMENTS:
                total += unsharded_bytes(
                    elements,
                    zero_level=parameter.zero_level if run is None else highest,
                    precision=self.decisions.precision,
                    optimizer=self.decisions.optimizer or "sgd",
                )
        return total

    def _workspace_bytes(self) -> int:
        return workspace_bytes(
            self.cluster,
            self.mesh_shape,
            self.program.graph,
            self.decisions.precision,
            training=self.decisions.mode == "train",
            num_stages=self.decisions.num_stages,
        )

    def _stored_bytes(self) -> dict[str, int]:
        """Inference: what the devices hold from step to step, and what goes in and comes out."""
        caches = outputs = 0
        past: set[str] = set()
        read: set[tuple[str, Placements]] = set()
        for decision in self.decisions.operators:
            read.update((operand.tensor, operand.placement) for operand in decision.inputs if operand is not None)
            if decision.type != OUTPUT:
                continue
            result = decision.outputs[0]
            size = self._tensor_bytes(result.tensor, result.placement) * self.decisions.microbatches
            if len(decision.inputs) > CACHE_OPERAND:
                caches += size
                past.update(operand.tensor for operand in decision.inputs[CACHE_OPERAND:] if operand is not None)
            else:
                outputs += size
        tensors = self.program.graph.tensors
        inputs = (item for item in read if tensors[item[0]].kind is TensorKind.INPUT and item[0] not in past)
        return {
            "cache_bytes": caches,
            "input_bytes": sum(self._tensor_bytes(*item) for item in inputs),
            "output_bytes": outputs,
        }

    def _tensor_bytes(self, name: str, placements: Placements) -> int:
        tensor = self.program.graph.tensors[name].type
        return self.compute.tensor_bytes(tensor.dtype, local_elements(tensor.shape, placements, self.mesh_shape))
