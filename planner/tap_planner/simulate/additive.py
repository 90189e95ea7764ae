"""Objective A and memory model M of a Program: an evaluator that shares no tables with the search.

It walks the instructions and prices each by itself. Gradient reductions and ZeRO gathers are priced per parameter
without latency (bucket latency is not additive and is no part of objective A).
"""

from __future__ import annotations

from dataclasses import dataclass

from tap_planner.cluster import Cluster, Mesh, MeshAxis
from tap_planner.cost import CollectiveModel, ComputeModel, operator_times_ns, optimizer_ns, parameter_memory
from tap_planner.graph import TensorKind
from tap_planner.operators import kept_for_backward, record_of
from tap_planner.plan import OperatorDecision, ParameterDecision
from tap_planner.program import (
    Compute,
    GatherParameters,
    GatherUpdated,
    Instruction,
    Phase,
    Program,
    Redistribute,
    ReduceGradients,
    UpdateParameters,
    instruction_collectives,
    local_factor_sizes,
)
from tap_planner.sharding import Placements, local_shape


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

    @property
    def objective_ns(self) -> int:
        """Objective A."""
        return self.compute_ns + self.communication_ns + self.gradient_ns + self.optimizer_ns

    @property
    def memory_bytes(self) -> int:
        """Memory model M, per device."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


def price_program(program: Program, cluster: Cluster) -> Price:
    """Price every instruction of one step on the rank at coordinate 0."""
    return _Pricing(program, cluster).price()


class _Pricing:
    def __init__(self, program: Program, cluster: Cluster) -> None:
        self.program = program
        self.decisions = program.decisions
        self.mesh_shape = program.decisions.mesh_shape
        mesh = Mesh(axes=tuple(MeshAxis(name=axis.name, size=axis.size) for axis in program.decisions.axes))
        self.compute = ComputeModel(cluster.device, program.decisions.precision)
        self.collectives = CollectiveModel(cluster, mesh)
        self.device = cluster.device
        self.parameters = {parameter.name: parameter for parameter in program.decisions.parameters}

    def price(self) -> Price:
        totals = {"compute": 0, "communication": 0, "gradient": 0, "optimizer": 0}
        for instruction in self.program.microbatch:
            kind, ns = self._instruction(instruction)
            totals[kind] += ns * self.decisions.microbatches
            totals["communication"] += self._internal(instruction) * self.decisions.microbatches
        for instruction in self.program.step:
            kind, ns = self._instruction(instruction)
            totals[kind] += ns
        memory = [self._parameter_memory(parameter) for parameter in self.decisions.parameters]
        return Price(
            compute_ns=totals["compute"],
            communication_ns=totals["communication"],
            gradient_ns=totals["gradient"],
            optimizer_ns=totals["optimizer"],
            parameter_bytes=sum(sizes[0] for sizes in memory),
            gradient_bytes=sum(sizes[1] for sizes in memory),
            optimizer_bytes=sum(sizes[2] for sizes in memory),
            activation_bytes=self._activation_bytes() if self.decisions.mode == "train" else 0,
        )

    def _instruction(self, instruction: Instruction) -> tuple[str, int]:
        match instruction:
            case Compute(phase=phase, operator=index):
                return "compute", self._operator_ns(index, backward=phase is Phase.BACKWARD)
            case Redistribute():
                total = 0
                for _, kind, axes, elements, dtype in instruction_collectives(self.program, instruction):
                    total += self.collectives.cost(kind, axes, self.compute.tensor_bytes(dtype, elements)).ns
                return "communication", total
            case GatherParameters(bucket=number):
                return "gradient", self._bucket_ns("all_gather", number)
            case GatherUpdated(bucket=number):
                return "gradient", self._bucket_ns("all_gather", number)
            case ReduceGradients(bucket=number):
                level = self.decisions.buckets[number].zero_level
                return "gradient", self._bucket_ns("reduce_scatter" if level else "all_reduce", number)
            case UpdateParameters():
                return "optimizer", sum(self._optimizer_ns(p) for p in self.decisions.parameters if p.trainable)
            case _:
                return "compute", 0

    def _internal(self, instruction: Instruction) -> int:
        """Collectives that an operator itself issues."""
        if not isinstance(instruction, Compute):
            return 0
        return sum(
            self.collectives.cost(kind, axes, self.compute.tensor_bytes(dtype, elements)).ns
            for _, kind, axes, elements, dtype in instruction_collectives(self.program, instruction)
        )

    def _elements(self, shape: tuple[int, ...], placements: Placements) -> int:
        count = 1
        for size in local_shape(shape, placements, self.mesh_shape):
            count *= size
        return count

    def _operator_ns(self, index: int, *, backward: bool) -> int:
        operator = self.program.graph.operators[index]
        decision = self.decisions.operators[index]
        forward_ns, backward_ns = operator_times_ns(
            self.compute,
            operator.signature,
            factor_sizes=local_factor_sizes(self.program, index),
            input_elements=[
                0 if operand is None or given is None else self._elements(operand.shape, given.placement)
                for operand, given in zip(operator.signature.inputs, decision.inputs, strict=True)
            ],
            output_elements=[
                self._elements(output.shape, given.placement)
                for output, given in zip(operator.signature.outputs, decision.outputs, strict=True)
            ],
            requires_gradient=_requires_gradient(decision),
        )
        return backward_ns if backward else forward_ns

    def _local_elements(self, parameter: ParameterDecision) -> int:
        return self._elements(parameter.shape, parameter.placement)

    def _shards(self, parameter: ParameterDecision) -> int:
        shards = 1
        for axis in parameter.data_axes:
            shards *= self.mesh_shape[axis]
        return shards

    def _bucket_ns(self, kind: str, number: int) -> int:
        bucket = self.decisions.buckets[number]
        element_bytes = self.compute.element_bytes(bucket.dtype)
        return sum(
            self.collectives.rate_ns(kind, bucket.axes, self._local_elements(self.parameters[name]) * element_bytes)
            for name in bucket.parameters
        )

    def _optimizer_ns(self, parameter: ParameterDecision) -> int:
        return optimizer_ns(
            self._local_elements(parameter),
            shards=self._shards(parameter),
            zero_level=parameter.zero_level,
            precision=self.decisions.precision,
            optimizer=self.decisions.optimizer,
            device=self.device,
        )

    def _parameter_memory(self, parameter: ParameterDecision) -> tuple[int, int, int]:
        return parameter_memory(
            self._local_elements(parameter),
            dtype=parameter.dtype,
            shards=self._shards(parameter),
            zero_level=parameter.zero_level,
            precision=self.decisions.precision,
            optimizer=self.decisions.optimizer or "sgd",
            trainable=parameter.trainable,
        )

    def _activation_bytes(self) -> int:
        """Distinct (tensor, placement) entries that are held from forward to backward."""
        held: set[tuple[str, Placements]] = set()
        region_of: dict[str, int] = {}
        for number, region in enumerate(self.decisions.regions):
            region_of.update(dict.fromkeys(region.operators, number))
        working = self._working_regions()
        maker = {output.tensor: d for d in self.decisions.operators for output in d.outputs}
        placed = {output.tensor: output.placement for d in self.decisions.operators for output in d.outputs}
        for operator, decision in zip(self.program.graph.operators, self.decisions.operators, strict=True):
            number = region_of[decision.id]
            recomputed = self.decisions.regions[number].recompute == "full"
            inputs, outputs = kept_for_backward(record_of(operator.signature), _requires_gradient(decision))
            if not recomputed or number in working:
                for position in inputs:
                    operand = decision.inputs[position]
                    if operand is not None:
                        held.add((operand.tensor, operand.placement))
                for position in outputs:
                    held.add((decision.outputs[position].tensor, decision.outputs[position].placement))
            if recomputed:
                for operand in decision.inputs:
                    if operand is None:
                        continue
                    if operand.tensor not in maker:
                        held.add((operand.tensor, operand.placement))
                    elif region_of[maker[operand.tensor].id] != number:
                        held.add((operand.tensor, placed[operand.tensor]))
        for redistribution in self.decisions.redistributions:
            regions = {region_of[consumer] for consumer in redistribution.consumers}
            if len(regions) > 1 and any(self.decisions.regions[number].recompute == "full" for number in regions):
                held.add((redistribution.tensor, redistribution.to))
        tensors = self.program.graph.tensors
        kinds = (TensorKind.ACTIVATION, TensorKind.INPUT)
        return sum(
            self.compute.tensor_bytes(tensors[name].type.dtype, self._elements(tensors[name].type.shape, placements))
            for name, placements in held
            if tensors[name].kind in kinds
        )

    def _working_regions(self) -> set[int]:
        """The last recomputed occurrence of every run: it stands for the working set of recomputation."""
        last: dict[int, int] = {}
        for number, region in enumerate(self.decisions.regions):
            if region.run is not None and region.recompute == "full":
                last[region.run] = number
        return set(last.values())


def _requires_gradient(decision: OperatorDecision) -> tuple[bool, ...]:
    return tuple(operand is not None and operand.gradient is not None for operand in decision.inputs)
