"""Times of the instructions of a Program, each by itself, with latency; or what each sends, by another price list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from tap_planner.cluster import Cluster, Device, Mesh, MeshAxis, slowest_device, stage_kinds
from tap_planner.cost import ComputeModel, PriceList, operator_times_ns, prices_of
from tap_planner.graph import TensorKind
from tap_planner.operators import rule_of
from tap_planner.plan import ParameterDecision
from tap_planner.program import (
    Compute,
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
    instruction_collectives,
    local_factor_sizes,
    local_operands,
    made_gradients,
    part_gradients,
    sent_elements,
    transferred,
)
from tap_planner.sharding import Placements, local_elements
from tap_planner.simulate.devices import check_devices, kinds_of
from tap_planner.simulate.overlap import Busy, Levels


class Durations:
    """What the instructions of a Program take on the rank at coordinate 0 of a stage.

    The groups of all stages that run a collective at once share the links of the topology, whichever stage's collective
    is asked for.

    Args:
        program: the plan, lowered.
        cluster: the devices that its mesh uses; with ``devices``, all that there are.
        which: what is counted; with ``PriceList.VOLUME`` bytes sent take the place of nanoseconds.
        devices: by stage, the rank in ``cluster`` of its one device (a device placement): what the stage computes takes
            what it takes on that kind of device, and links are those between these devices. Empty: ranks in order, all
            of the cluster; where its nodes are unlike, each stage is as slow as the slowest of its own devices.
        all_on: everything takes what it takes on this stage, wherever it lies; None: what it takes where it lies.

    Raises:
        UsageError: ``devices`` do not fit the program, or the cluster.
        ClusterError: a device has no peak that serves the precision.
    """

    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        which: PriceList = PriceList.TIME,
        devices: Sequence[int] = (),
        all_on: int | None = None,
    ) -> None:
        decisions = program.decisions
        self._program = program
        self._all_on = all_on
        self._mesh_shape = decisions.mesh_shape
        axes = tuple(MeshAxis(name=axis.name, size=axis.size) for axis in decisions.axes)
        if devices:
            check_devices(decisions, cluster, devices)
        stages = cluster.num_devices if devices else decisions.num_stages
        mesh = Mesh(axes=axes, order=decisions.order, num_stages=stages)
        self._prices = prices_of(which, cluster, mesh, decisions.precision)
        self.compute = self._prices.compute
        """Costs of operators, and sizes of tensors."""
        self.links = self._prices.collectives
        """Costs of collectives."""
        self._devices = tuple(devices)
        self._reserved_bytes = cluster.reserved_memory_bytes
        self._has_unlike_stages = bool(cluster.node_groups) and decisions.num_stages > 1 and not devices
        self._computes = self._computes_of(cluster)
        """By stage, where they have devices of their own; else empty."""
        self._stage_of: list[int] = []
        """By operator, in the same case."""
        if self._computes:
            self._stage_of = [program.stage_of(n) for n, chunk in enumerate(program.chunks) for _ in chunk.operators]
        self._levels = [frozenset(axis.levels) for axis in decisions.axes]
        self._kinds: dict[object, int] = {}
        """Operators that take as long as each other, numbered."""
        self._kind_of: dict[int, int] = {}
        self._times: dict[tuple[int, tuple[bool, ...]], tuple[int, int]] = {}
        """Forward and backward by kind and gradients."""
        self._parts: dict[int, tuple[int, int]] = {}
        self._silent: dict[int, bool] = {}
        """By kind whether no collective runs inside the operator."""
        self._collectives: dict[object, Busy] = {}
        self._sizes: dict[object, int] = {}

    # -- devices ----------------------------------------------------------------------------------------------------

    def _computes_of(self, cluster: Cluster) -> list[ComputeModel]:
        """One model for each kind of stage; of a price list by which operators are free, free ones."""
        make, precision = type(self.compute), self._program.decisions.precision
        if self._has_unlike_stages:
            kinds = stage_kinds(cluster, self._program.decisions.num_stages)
        else:
            kinds = tuple((kind,) for kind in kinds_of(cluster, self._devices))
        models: dict[tuple[int, ...], ComputeModel] = {}
        for of_stage in set(kinds):
            devices = [cluster.devices[kind] for kind in of_stage]
            unlike = (devices,) if len(devices) > 1 and make is ComputeModel else ()
            models[of_stage] = make(slowest_device(devices), precision, *unlike)
        return [models[of_stage] for of_stage in kinds]

    def _compute_at(self, stage: int) -> ComputeModel:
        return self._computes[stage if self._all_on is None else self._all_on] if self._computes else self.compute

    def compute_of(self, index: int) -> ComputeModel:
        """Of the devices that an operator runs on."""
        return self._compute_at(self._stage_of[index]) if self._computes else self.compute

    def stage_of(self, instruction: Instruction, stage: int | None = None) -> int | None:
        """The stage on whose devices an instruction is timed; None where that makes no difference, or where several
        stages run it: then the slowest counts.

        Args:
            instruction: of the program.
            stage: which of several; None: not known.
        """
        if not self._has_unlike_stages:
            return None
        if stage is not None or self._all_on is not None:
            return stage if self._all_on is None else self._all_on
        decisions = self._program.decisions
        match instruction:
            case Compute(operator=index):
                return self._stage_of[index]
            case Redistribute(redistribution=edge):
                return self._stage_of[self._operator_of[decisions.redistributions[edge].consumers[0]]]
            case Receive(phase=Phase.BACKWARD, operator=index):
                tensor = self._program.graph.operators[index].inputs[0]
                return self._stage_of[self._makers[tensor]] if tensor in self._makers else None
            case Receive(operator=index):
                return self._stage_of[index]
            case ReduceGradients() | ReduceShards() | GatherParameters() | GatherUpdated():
                return self._only_stage(instruction.bucket)
            case _:
                return None

    def _only_stage(self, bucket: int) -> int | None:
        """The stage that holds a bucket, where only one does."""
        names = self._program.decisions.buckets[bucket].parameters
        stages = {stage for name in names for stage in self._program.stages_of(name)}
        return stages.pop() if len(stages) == 1 else None

    @cached_property
    def _operator_of(self) -> Mapping[str, int]:
        return {operator.id: index for index, operator in enumerate(self._program.graph.operators)}

    @cached_property
    def _makers(self) -> Mapping[str | None, int]:
        """By tensor the operator that makes it."""
        operators = enumerate(self._program.graph.operators)
        return {name: index for index, operator in operators for name in operator.outputs}

    def _members(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        """Stages, as the links know them."""
        return tuple(self._devices[stage] for stage in stages) if self._devices else stages

    @property
    def room_bytes(self) -> tuple[int, ...]:
        """Per stage, the memory of one of its devices that a plan may use."""
        stages = range(self._program.decisions.num_stages)
        return tuple(self._compute_at(stage).device.memory_bytes - self._reserved_bytes for stage in stages)

    # -- collectives ------------------------------------------------------------------------------------------------

    def collectives(self, instruction: Instruction, stage: int | None = None) -> tuple[Busy, ...]:
        """The collectives that an instruction issues, each with the levels whose links it uses.

        Args:
            instruction: of the program.
            stage: which one issues it, where several may; None: the only one, or the slowest.
        """
        if isinstance(instruction, Compute) and self._is_silent(instruction.operator):
            return ()
        found = instruction_collectives(self._program, instruction)
        stage = self.stage_of(instruction, stage)
        return tuple(self._collective(kind, axes, elements, dtype, stage) for _, kind, axes, elements, dtype in found)

    def _collective(self, kind: str, axes: tuple[int, ...], elements: int, dtype: str, stage: int | None) -> Busy:
        key = (kind, axes, elements, dtype, stage)
        if key not in self._collectives:
            ns = self.links.cost(kind, axes, self.compute.tensor_bytes(dtype, elements), stage).ns
            self._collectives[key] = Busy(ns, self._levels_of(axes))
        return self._collectives[key]

    def _levels_of(self, axes: Sequence[int]) -> Levels:
        return frozenset[str]().union(*(self._levels[axis] for axis in axes))

    def transfer_bytes(self, instruction: Send | Receive) -> int:
        """What one rank sends to its counterpart in another stage."""
        sent = (self._program, instruction.phase, instruction.operator)
        tensor, _ = transferred(*sent)
        return self.compute.tensor_bytes(tensor.dtype, sent_elements(*sent))

    def transfer_ns(self, instruction: Send | Receive, stages: tuple[int, int]) -> int:
        """A transfer between two stages, all ranks of one sending at once; nothing inside a stage.

        It is a ``send_recv`` over the links that part these two stages; what other stages send then is not there.
        """
        if stages[0] == stages[1]:
            return 0
        return self.links.among("send_recv", self._members(stages), self.transfer_bytes(instruction)).ns

    def tied_ns(self, parameter: ParameterDecision, stages: tuple[int, ...]) -> int:
        """The sum of a parameter's gradient over the stages that read it."""
        elements = local_elements(parameter.shape, parameter.placement, self._mesh_shape)
        num_bytes = self.compute.tensor_bytes(parameter.dtype, elements)
        return self.links.among("all_reduce", self._members(stages), num_bytes).ns

    # -- operators --------------------------------------------------------------------------------------------------

    def compute_ns(self, instruction: Compute) -> int:
        """What an instruction computes, without collectives."""
        forward_ns, backward_ns = self.operator_ns(instruction.operator)
        if instruction.phase is not Phase.BACKWARD:
            return forward_ns
        if instruction.part is Part.ALL:
            return backward_ns
        first_ns, later_ns = self.parts_ns(instruction.operator)
        return first_ns if instruction.part is Part.INPUTS else later_ns

    def parts_ns(self, index: int) -> tuple[int, int]:
        """The backward of an operator in two parts: gradients of activations, gradients of parameters.

        Each part is timed as if it were the whole. Both together take longer then (what both read, and a launch, count
        twice), so that they are scaled down to the whole backward, in proportion.
        """
        kind = self._kind(index)
        if kind not in self._parts:
            decision, whole_ns = self._program.decisions.operators[index], self.operator_ns(index)[1]
            first_ns, later_ns = (
                self._timed(index, part_gradients(self._program.graph, decision, part))[1]
                for part in (Part.INPUTS, Part.PARAMETERS)
            )
            if first_ns + later_ns > whole_ns:
                first_ns = (2 * whole_ns * first_ns + first_ns + later_ns) // (2 * (first_ns + later_ns))
            self._parts[kind] = (first_ns, whole_ns - first_ns)
        return self._parts[kind]

    def operator_ns(self, index: int) -> tuple[int, int]:
        """Forward and backward time of an operator, without collectives."""
        return self._timed(index, made_gradients(self._program.decisions.operators[index]))

    def _timed(self, index: int, gradients: tuple[bool, ...]) -> tuple[int, int]:
        key = (self._kind(index), gradients)
        if key not in self._times:
            operator, decision = self._program.graph.operators[index], self._program.decisions.operators[index]
            self._times[key] = operator_times_ns(
                self.compute_of(index),
                operator.signature,
                factor_sizes=local_factor_sizes(self._program, index),
                input_elements=local_operands(self._program, index),
                output_elements=[
                    local_elements(output.shape, given.placement, self._mesh_shape)
                    for output, given in zip(operator.signature.outputs, decision.outputs, strict=True)
                ],
                requires_gradient=gradients,
            )
        return self._times[key]

    def _is_silent(self, index: int) -> bool:
        kind = self._kind(index)
        if kind not in self._silent:
            self._silent[kind] = not rule_of(self._program.graph.operators[index].signature).collectives
        return self._silent[kind]

    def _kind(self, index: int) -> int:
        """Which operators an operator is like, on the same kind of device; told once, as signatures are slow to
        compare."""
        if index not in self._kind_of:
            operator, decision = self._program.graph.operators[index], self._program.decisions.operators[index]
            tensors = self._program.graph.tensors
            read = tuple(
                None
                if o is None
                else (o.placement, o.gradient is not None, tensors[o.tensor].kind is TensorKind.PARAMETER)
                for o in decision.inputs
            )
            made = tuple(output.placement for output in decision.outputs)
            key = (self.compute_of(index), operator.signature, decision.strategy, read, made)
            self._kind_of[index] = self._kinds.setdefault(key, len(self._kinds))
        return self._kind_of[index]

    def update_ns(self, names: Iterable[str] | None = None, stage: int = 0) -> int:
        """The optimizer's step on a stage, for some parameters (None: all)."""
        chosen = None if names is None else frozenset(names)
        device = self._compute_at(stage).device
        parameters = [p for p in self._program.decisions.parameters if p.trainable]
        return sum(self._update_ns(p, device) for p in parameters if chosen is None or p.name in chosen)

    def _update_ns(self, parameter: ParameterDecision, device: Device) -> int:
        shards = 1
        for axis in parameter.zero_axes:
            shards *= self._mesh_shape[axis]
        return self._prices.optimizer_ns(
            local_elements(parameter.shape, parameter.placement, self._mesh_shape),
            shards=shards,
            zero_level=parameter.zero_level,
            precision=self._program.decisions.precision,
            optimizer=self._program.decisions.optimizer,
            optimizer_states=self._program.decisions.optimizer_states,
            device=device,
        )

    def tensor_bytes(self, name: str, placements: Placements) -> int:
        """What one rank holds of a tensor."""
        tensor = self._program.graph.tensors[name].type
        key = (tensor.dtype, tensor.shape, placements)
        if key not in self._sizes:
            elements = local_elements(tensor.shape, placements, self._mesh_shape)
            self._sizes[key] = self.compute.tensor_bytes(tensor.dtype, elements)
        return self._sizes[key]
