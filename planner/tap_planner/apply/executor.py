"""Runs a Program on local parts: every instruction in order, once per held rank.

Nothing is decided here. An operator's backward is the vector-Jacobian product of that operator alone
(torch.autograd.grad over its own small graph); what links operators are the Program's instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.communicator import Parts, RecordingCommunicator
from tap_planner.apply.operators import (
    NO_CUSTOM,
    CustomFunctions,
    LossRecord,
    OperatorContext,
    failed,
    run_loss,
    run_operator,
)
from tap_planner.apply.optimizer import Optimizer
from tap_planner.apply.parameters import ParameterStore
from tap_planner.apply.redistribute import redistribute
from tap_planner.apply.values import TensorValues
from tap_planner.operators import lookup
from tap_planner.plan import OperandDecision
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
from tap_planner.sharding import Placements, local_indices, local_shape

GradientFactor = Callable[[Sequence[np.ndarray], int], np.ndarray]
"""(Indices per dim in the microbatch, microbatch) -> what the gradient at the loss's operand is multiplied by."""


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
        custom: torch functions of the user's.
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
        custom: CustomFunctions = NO_CUSTOM,
    ) -> None:
        self._program = program
        self._graph = program.graph
        self._decisions = program.decisions
        self._training = program.decisions.mode == "train"
        self._communicator = communicator
        self._store = store
        self._optimizer = optimizer
        self._dtype = dtype
        self._gradient_factor = gradient_factor
        self._custom = custom
        self._values = TensorValues(program, communicator, store, dtype)
        self._contexts: dict[int, list[OperatorContext]] = {}
        self._releases = {
            instruction.region: _released(program, instruction.region)
            for instruction in program.microbatch
            if isinstance(instruction, Release)
        }
        self._microbatch = 0
        self._step = 0
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
            self._microbatch = microbatch
            self._values.begin(inputs, microbatch)
            for instruction in self._program.microbatch:
                self._execute(instruction)
            for name in self._graph.outputs:
                result.outputs.setdefault(name, []).append(self._values.get(name))
            if self._graph.loss is not None:
                result.losses.append(self._values.get(self._graph.loss))
            for kept in (self._gradients, self._edge_gradients, self._records):
                kept.clear()
            self._store.release_gathered()
        self._values.clear()
        for instruction in self._program.step:
            self._execute(instruction)
        self._step += 1
        return result

    def output_placement(self, name: str) -> Placements:
        """Placement of a graph output or of the loss in the result."""
        return self._values.output_placement(name)

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Compute(phase=phase, operator=index):
                self._communicator.phase = phase
                (self._backward if phase is Phase.BACKWARD else self._forward)(index)
            case Redistribute(phase=phase, redistribution=index):
                self._communicator.phase = phase
                (self._redistribute_gradient if phase is Phase.BACKWARD else self._values.redistribute)(index)
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
                    id=self._graph.operators[index].id,
                    body=self._graph.body(self._graph.operators[index]),
                )
                for rank in self._communicator.ranks
            ]
        contexts = self._contexts[index]
        if self._step and lookup(self._graph.operators[index].type).random:
            return [replace(context, step=self._step) for context in contexts]
        return contexts

    def _operands(self, index: int) -> list[list[Tensor | None]]:
        """Per rank, the local parts of an operator's operands."""
        decision = self._decisions.operators[index]
        columns = [None if operand is None else self._values.operand(operand) for operand in decision.inputs]
        return [
            [None if column is None else column[rank] for column in columns]
            for rank in range(len(self._communicator.ranks))
        ]

    def _differentiated(self, index: int) -> list[int]:
        """Positions of the operands whose gradient is wanted."""
        inputs = self._decisions.operators[index].inputs if self._training else ()
        return [p for p, operand in enumerate(inputs) if operand is not None and operand.gradient is not None]

    def _forward(self, index: int) -> None:
        operator = self._graph.operators[index]
        if operator.type == "Loss":
            losses, record = run_loss(self._context(index), self._operands(index), self._communicator)
            self._values.put(operator.outputs[0], losses)
            self._records[index] = record
            return
        records = self._run(index)
        if self._differentiated(index):
            self._records[index] = records
        for position, name in enumerate(operator.outputs):
            self._values.put(name, [record.outputs[position].detach() for record in records])

    def _run(self, index: int) -> list[_OperatorRecord]:
        wanted = self._differentiated(index)
        records: list[_OperatorRecord] = []
        for context, operands in zip(self._context(index), self._operands(index), strict=True):
            leaves = tuple(
                value.detach().requires_grad_() if value is not None and position in wanted else value
                for position, value in enumerate(operands)
            )
            with torch.set_grad_enabled(bool(wanted)):
                outputs = run_operator(context, leaves, self._custom)
            records.append(_OperatorRecord(leaves, tuple(output.to(self._communicator.device) for output in outputs)))
        return records

    def _release(self, region: int) -> None:
        tensors, edges, operators = self._releases[region]
        self._values.forget(tensors, edges)
        for index in operators:
            self._records.pop(index, None)

    # Backward ---------------------------------------------------------------------------------------------------

    def _backward(self, index: int) -> None:
        decision = self._decisions.operators[index]
        record = self._records.pop(index, None)
        if isinstance(record, LossRecord):
            self._loss_backward(index, record)
            return
        records = self._run(index) if record is None else record
        outer = [self._gradients.pop(output.tensor, None) for output in decision.outputs]
        positions = self._differentiated(index)
        try:
            products = [
                _product(each, positions, [None if column is None else column[rank] for column in outer])
                for rank, each in enumerate(records)
            ]
        except Exception as error:
            if decision.type in self._custom:
                raise failed(self._custom[decision.type], decision.type, error, "failed in backward") from error
            raise
        for position, column in zip(positions, zip(*products, strict=True), strict=True):
            operand = decision.inputs[position]
            assert operand is not None
            self._add_gradient(operand, list(column))
        # Every consumer's backward has run by now: only graph outputs are still wanted.
        self._values.forget([o.tensor for o in decision.outputs if o.tensor not in self._graph.outputs], ())

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
                factor = torch.from_numpy(np.asarray(self._gradient_factor(held, self._microbatch)))
                gradients[rank] = gradients[rank] * factor.to(gradients[rank])
        self._add_gradient(operand, gradients)

    def _add_gradient(self, operand: OperandDecision, gradients: Parts) -> None:
        edge = self._values.edge_of(operand)
        if edge is not None:
            self._edge_gradients[edge] = _sum(self._edge_gradients.get(edge), gradients)
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
        shape = self._graph.tensors[decision.tensor].type.shape
        moved = redistribute(self._communicator, gradients, shape, decision.gradient, decision.backward)
        self._values.forget((), (index,))
        self._add_tensor_gradient(decision.tensor, moved)

    def _zeros(self, name: str, placements: Placements) -> Parts:
        shape = self._graph.tensors[name].type.shape
        mesh_shape, device = self._communicator.mesh_shape, self._communicator.device
        return [
            torch.zeros(local_shape(shape, placements, mesh_shape, rank), dtype=self._dtype, device=device)
            for rank in self._communicator.ranks
        ]


def _sum(known: Parts | None, more: Parts) -> Parts:
    return list(more) if known is None else [a + b for a, b in zip(known, more, strict=True)]


def _product(record: _OperatorRecord, positions: Sequence[int], seeds: Sequence[Tensor | None]) -> Parts:
    """Vector-Jacobian product of one operator on one rank: gradients of the operands at ``positions``."""
    leaves = [leaf for position in positions if (leaf := record.leaves[position]) is not None]
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
        name for index in operators for name in program.graph.operators[index].outputs if name not in outside_reads
    ]
    edges = [
        index
        for index, decision in enumerate(program.decisions.redistributions)
        if inside.issuperset(decision.consumers)
    ]
    return tensors, edges, operators
