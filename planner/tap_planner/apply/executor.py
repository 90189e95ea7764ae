"""Runs a Program on local parts: every instruction in order, once per held rank.

Nothing is decided here. An operator's backward is the vector-Jacobian product of that operator alone
(torch.autograd.grad over its own small graph); what links operators are the Program's instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.communicator import Parts, RecordingCommunicator
from tap_planner.apply.operators import LossRecord, OperatorContext, run_loss, run_operator, torch_dtype
from tap_planner.apply.optimizer import Optimizer
from tap_planner.apply.parameters import ParameterStore, plain_array, read_part
from tap_planner.apply.placing import place
from tap_planner.apply.redistribute import redistribute
from tap_planner.graph import TensorKind
from tap_planner.plan import OperandDecision, RedistributionDecision
from tap_planner.program import (
    Compute,
    GatherParameters,
    GatherUpdated,
    Instruction,
    Phase,
    Program,
    Redistribute,
    ReduceGradients,
    Release,
    UpdateParameters,
)
from tap_planner.sharding import REPLICATE, Placements, local_indices, local_shape, shard

GradientFactor = Callable[[Sequence[np.ndarray], int], np.ndarray]
"""What the gradient at the loss's operand is multiplied by: (indices per dim in the microbatch, microbatch) -> factors."""


@dataclass(frozen=True, slots=True)
class _OperatorRecord:
    """One rank's forward of an operator, kept for its backward."""

    leaves: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]


@dataclass(slots=True)
class StepResult:
    """What one step made, besides the changes to the parameters."""

    outputs: dict[str, list[Parts]] = field(default_factory=dict)
    """Per graph output tensor, per microbatch: local parts."""
    losses: list[Parts] = field(default_factory=list)
    """Per microbatch: each rank's term of the loss (not divided by the number of microbatches)."""


class StepExecutor:
    """Runs steps of a Program.

    Args:
        program: what to run.
        communicator: issues and records the collectives.
        store: the parameters.
        optimizer: None in inference.
        dtype: what floats are computed in.
        gradient_factor: see ``GradientFactor``; None for plain training.
    """

    def __init__(
        self,
        program: Program,
        communicator: RecordingCommunicator,
        store: ParameterStore,
        optimizer: Optimizer | None,
        *,
        dtype: torch.dtype,
        gradient_factor: GradientFactor | None = None,
    ) -> None:
        self._program = program
        self._graph = program.graph
        self._decisions = program.decisions
        self._communicator = communicator
        self._store = store
        self._optimizer = optimizer
        self._dtype = dtype
        self._gradient_factor = gradient_factor
        self._edge_of = program.decisions.redistribution_of()
        self._sources = {
            output.tensor: output.placement for operator in self._decisions.operators for output in operator.outputs
        }
        self._contexts: dict[int, list[OperatorContext]] = {}
        self._constants: dict[tuple[str, Placements], Parts] = {}
        self._releases = {
            instruction.region: _released(program, instruction.region)
            for instruction in program.microbatch
            if isinstance(instruction, Release)
        }
        self._clear()

    def _clear(self) -> None:
        self._inputs: dict[tuple[str, Placements], Parts] = {}
        self._values: dict[str, Parts] = {}
        self._edges: dict[int, Parts] = {}
        self._gradients: dict[str, Parts] = {}
        self._edge_gradients: dict[int, Parts] = {}
        self._records: dict[int, list[_OperatorRecord] | LossRecord] = {}

    def run(self, inputs: Mapping[str, np.ndarray]) -> StepResult:
        """Run one step.

        Args:
            inputs: whole graph inputs of the global batch, by name.
        """
        result = StepResult()
        self._store.begin_step()
        for microbatch in range(self._decisions.microbatches):
            self._clear()
            self._microbatch = microbatch
            self._fed = self._feed(inputs, microbatch)
            for instruction in self._program.microbatch:
                self._execute(instruction)
            for name in self._graph.outputs:
                result.outputs.setdefault(name, []).append(self._output(name))
            if self._graph.loss is not None and self._graph.loss in self._values:
                result.losses.append(self._values[self._graph.loss])
            self._store.release_gathered()
        self._clear()
        for instruction in self._program.step:
            self._execute(instruction)
        return result

    def _feed(self, inputs: Mapping[str, np.ndarray], microbatch: int) -> dict[str, Tensor]:
        """This microbatch's slice of every input."""
        fed: dict[str, Tensor] = {}
        for name in self._graph.inputs:
            value, dim = inputs[name], self._graph.batch_dims.get(name)
            if dim is not None and self._decisions.microbatches > 1:
                size = self._graph.tensors[name].type.shape[dim]
                value = np.take(value, range(microbatch * size, (microbatch + 1) * size), dim)
            fed[name] = self._tensor(value, self._graph.tensors[name].type.dtype)
        return fed

    def _tensor(self, value: np.ndarray, dtype: str) -> Tensor:
        tensor = torch.from_numpy(plain_array(value))
        return tensor.to(self._communicator.device, torch_dtype(dtype, self._dtype))

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Compute(phase=Phase.BACKWARD, operator=index):
                self._communicator.phase = Phase.BACKWARD
                self._backward(index)
            case Compute(phase=phase, operator=index):
                self._communicator.phase = phase
                self._forward(index)
            case Redistribute(phase=Phase.BACKWARD, redistribution=index):
                self._communicator.phase = Phase.BACKWARD
                self._redistribute_gradient(index)
            case Redistribute(phase=phase, redistribution=index):
                self._communicator.phase = phase
                self._redistribute_value(index)
            case GatherParameters(phase=phase, bucket=bucket):
                self._communicator.phase = phase
                self._store.gather(bucket)
            case ReduceGradients(bucket=bucket):
                self._communicator.phase = Phase.GRADIENT
                self._store.reduce(bucket)
            case UpdateParameters():
                assert self._optimizer is not None
                self._store.update(self._optimizer)
            case GatherUpdated(bucket=bucket):
                self._communicator.phase = Phase.OPTIMIZER
                self._store.gather_updated(bucket)
            case Release(region=region):
                self._release(region)

    # Values -----------------------------------------------------------------------------------------------------

    def _output(self, name: str) -> Parts:
        tensor = self._graph.tensors[name]
        if tensor.kind is TensorKind.ACTIVATION:
            return self._values[name]
        return self._source_value(name, self.output_placement(name))

    def output_placement(self, name: str) -> Placements:
        """Placement in which a graph output is left by its producer (R for what has no producer)."""
        if name in self._sources:
            return self._sources[name]
        tensor = self._graph.tensors[name]
        if tensor.read is not None:
            return read_placements(self._store.decision(tensor.read.parameter).placement, tensor.read.dims)
        return (REPLICATE,) * len(self._communicator.mesh_shape)

    def _source_value(self, name: str, placement: Placements) -> Parts:
        """A tensor as its producer left it; constants and inputs directly in ``placement``."""
        tensor = self._graph.tensors[name]
        if tensor.kind is TensorKind.ACTIVATION:
            return self._values[name]
        if tensor.kind is TensorKind.PARAMETER:
            read = tensor.read
            assert read is not None
            return [read_part(part, read) for part in self._store.parts(read.parameter)]
        cache = self._inputs if tensor.kind is TensorKind.INPUT else self._constants
        key = (name, placement)
        if key not in cache:
            whole = self._fed[name] if tensor.kind is TensorKind.INPUT else self._constant(name)
            cache[key] = [
                place(whole, placement, self._communicator.mesh_shape, rank) for rank in self._communicator.ranks
            ]
        return cache[key]

    def _constant(self, name: str) -> Tensor:
        return self._tensor(self._graph.constants.value(name), self._graph.tensors[name].type.dtype)

    def _edge(self, operand: OperandDecision) -> int | None:
        return self._edge_of.get((operand.tensor, operand.placement, operand.gradient))

    def _operand(self, operand: OperandDecision) -> Parts:
        edge = self._edge(operand)
        return self._source_value(operand.tensor, operand.placement) if edge is None else self._edges[edge]

    def _redistribute_value(self, index: int) -> None:
        decision = self._decisions.redistributions[index]
        value = self._source_value(decision.tensor, decision.source)
        self._edges[index] = self._steps(decision, value, decision.source, backward=False)

    def _steps(
        self, decision: RedistributionDecision, parts: Parts, placements: Placements, *, backward: bool
    ) -> Parts:
        shape = self._graph.tensors[decision.tensor].type.shape
        steps = decision.backward if backward else decision.forward
        return redistribute(self._communicator, parts, shape, placements, steps)

    # Forward ----------------------------------------------------------------------------------------------------

    def _context(self, index: int) -> list[OperatorContext]:
        if index not in self._contexts:
            decision = self._decisions.operators[index]
            self._contexts[index] = [
                OperatorContext(
                    signature=self._graph.operators[index].signature,
                    inputs=tuple(None if operand is None else operand.placement for operand in decision.inputs),
                    outputs=tuple(output.placement for output in decision.outputs),
                    mesh_shape=self._communicator.mesh_shape,
                    coordinates=rank,
                    dtype=self._dtype,
                )
                for rank in self._communicator.ranks
            ]
        return self._contexts[index]

    def _forward(self, index: int) -> None:
        operator = self._graph.operators[index]
        if operator.type == "Loss":
            operands = self._operand_lists(index)
            losses, record = run_loss(self._context(index), operands, self._communicator)
            self._values[operator.outputs[0]] = losses
            self._records[index] = record
            return
        records = self._run(index)
        if self._needs_gradient(index):
            self._records[index] = records
        for position, name in enumerate(operator.outputs):
            self._values[name] = [record.outputs[position].detach() for record in records]

    def _needs_gradient(self, index: int) -> bool:
        if self._decisions.mode != "train":
            return False
        return any(operand is not None and operand.gradient is not None for operand in self._decisions.operators[index].inputs)

    def _operand_lists(self, index: int) -> list[list[Tensor | None]]:
        """Per rank, the local parts of an operator's operands."""
        decision = self._decisions.operators[index]
        columns = [None if operand is None else self._operand(operand) for operand in decision.inputs]
        return [
            [None if column is None else column[rank] for column in columns]
            for rank in range(len(self._communicator.ranks))
        ]

    def _run(self, index: int) -> list[_OperatorRecord]:
        decision = self._decisions.operators[index]
        wanted = [
            operand is not None and operand.gradient is not None and self._decisions.mode == "train"
            for operand in decision.inputs
        ]
        records: list[_OperatorRecord] = []
        for context, operands in zip(self._context(index), self._operand_lists(index), strict=True):
            leaves = tuple(
                value.detach().requires_grad_() if value is not None and needed else value
                for value, needed in zip(operands, wanted, strict=True)
            )
            with torch.set_grad_enabled(any(wanted)):
                outputs = run_operator(context, leaves)
            records.append(_OperatorRecord(leaves, tuple(output.to(self._communicator.device) for output in outputs)))
        return records

    # Backward ---------------------------------------------------------------------------------------------------

    def _backward(self, index: int) -> None:
        decision = self._decisions.operators[index]
        record = self._records.pop(index, None)
        if isinstance(record, LossRecord):
            self._loss_backward(index, record)
            return
        records = self._run(index) if record is None else record
        gradients = [self._gradients.get(output.tensor) for output in decision.outputs]
        positions = [p for p, operand in enumerate(decision.inputs) if operand is not None and operand.gradient is not None]
        columns: dict[int, Parts] = {position: [] for position in positions}
        for rank, each in enumerate(records):
            seeds = [None if column is None else column[rank] for column in gradients]
            for position, gradient in zip(positions, _product(each, positions, seeds), strict=True):
                columns[position].append(gradient)
        for position, column in columns.items():
            operand = decision.inputs[position]
            assert operand is not None
            self._add_gradient(operand, column)
        for output in decision.outputs:
            self._gradients.pop(output.tensor, None)

    def _loss_backward(self, index: int, record: LossRecord) -> None:
        operand = self._decisions.operators[index].inputs[0]
        assert operand is not None and operand.gradient is not None
        seed = torch.tensor(
            1.0 / self._program.loss_scale_denominator, dtype=self._dtype, device=self._communicator.device
        )
        gradients = record.backward([seed] * len(self._communicator.ranks))
        if self._gradient_factor is not None:
            shape = self._graph.tensors[operand.tensor].type.shape
            for rank, coordinates in enumerate(self._communicator.ranks):
                held = local_indices(shape, operand.gradient, self._communicator.mesh_shape, coordinates)
                factor = torch.from_numpy(self._gradient_factor(held, self._microbatch))
                gradients[rank] = gradients[rank] * factor.to(gradients[rank])
        self._add_gradient(operand, gradients)

    def _add_gradient(self, operand: OperandDecision, gradients: Parts) -> None:
        edge = self._edge(operand)
        if edge is not None:
            known = self._edge_gradients.get(edge)
            self._edge_gradients[edge] = _sum(known, gradients)
        else:
            self._add_tensor_gradient(operand.tensor, gradients)

    def _add_tensor_gradient(self, name: str, gradients: Parts) -> None:
        read = self._graph.tensors[name].read
        if read is not None:
            self._store.accumulate(read.parameter, read, gradients)
        else:
            self._gradients[name] = _sum(self._gradients.get(name), gradients)

    def _redistribute_gradient(self, index: int) -> None:
        decision = self._decisions.redistributions[index]
        assert decision.gradient is not None
        gradients = self._edge_gradients.pop(index, None)
        if gradients is None:
            gradients = self._zeros(decision.tensor, decision.gradient)
        moved = self._steps(decision, gradients, decision.gradient, backward=True)
        self._add_tensor_gradient(decision.tensor, moved)

    def _zeros(self, name: str, placements: Placements) -> Parts:
        shape = self._graph.tensors[name].type.shape
        mesh_shape, device = self._communicator.mesh_shape, self._communicator.device
        return [
            torch.zeros(local_shape(shape, placements, mesh_shape, rank), dtype=self._dtype, device=device)
            for rank in self._communicator.ranks
        ]

    def _release(self, region: int) -> None:
        tensors, edges, operators = self._releases[region]
        for name in tensors:
            self._values.pop(name, None)
        for edge in edges:
            self._edges.pop(edge, None)
        for index in operators:
            self._records.pop(index, None)


def read_placements(stored: Placements, dims: Sequence[int | None]) -> Placements:
    """Placements of a stored parameter in the dims of a read of it."""
    return tuple(shard(list(dims).index(p.dim), p.blocks) if p.is_shard else p for p in stored)


def _sum(known: Parts | None, more: Parts) -> Parts:
    return list(more) if known is None else [a + b for a, b in zip(known, more, strict=True)]


def _product(record: _OperatorRecord, positions: Sequence[int], seeds: Sequence[Tensor | None]) -> Parts:
    """Vector-Jacobian product of one operator on one rank: gradients of the operands at ``positions``."""
    leaves: list[Tensor] = []
    for position in positions:
        leaf = record.leaves[position]
        assert leaf is not None
        leaves.append(leaf)
    pairs = [
        (output, seed)
        for output, seed in zip(record.outputs, seeds, strict=True)
        if seed is not None and output.requires_grad
    ]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    outputs, weights = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True)]


def _released(program: Program, region: int) -> tuple[list[str], list[int], list[int]]:
    """Tensors, redistributions and operators that a recomputed region forgets after its forward."""
    inside = set(program.decisions.regions[region].operators)
    outside_reads = set(program.graph.outputs)
    for operator in program.graph.operators:
        if operator.id not in inside:
            outside_reads.update(name for name in operator.inputs if name is not None)
    operators = [index for index, operator in enumerate(program.graph.operators) if operator.id in inside]
    tensors = [
        name
        for index in operators
        for name in program.graph.operators[index].outputs
        if name not in outside_reads
    ]
    edges = [
        index
        for index, decision in enumerate(program.decisions.redistributions)
        if inside.issuperset(decision.consumers)
    ]
    return tensors, edges, operators
