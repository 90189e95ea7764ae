"""Runs a Program on local parts: every instruction in order, once per held rank.

Nothing is decided here, not even what is held until when. An operator's backward is the vector-Jacobian product of that
operator alone (``differentiation``); what links operators are the Program's instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.communicator import Parts, RecordingCommunicator
from tap_planner.apply.differentiation import OperatorRecord, product, run_recorded
from tap_planner.apply.operators import (
    NO_CUSTOM,
    Borders,
    CustomFunctions,
    LossRecord,
    Operands,
    OperatorContext,
    RingRecord,
    borders,
    exchanges,
    failed,
    narrow,
    ring_axes,
    run_loss,
    run_operator,
    run_ring,
    widen,
    with_borders,
)
from tap_planner.apply.optimizer import Optimizer
from tap_planner.apply.parameters import ParameterStore
from tap_planner.apply.redistribute import redistribute
from tap_planner.apply.values import TensorValues
from tap_planner.operators import lookup
from tap_planner.plan import OperandDecision
from tap_planner.program import (
    Compute,
    ForgetParameters,
    GatherParameters,
    GatherUpdated,
    Instruction,
    Phase,
    Program,
    Redistribute,
    ReduceGradients,
    ReduceShards,
    Release,
    UpdateParameters,
    renewed_operands,
)
from tap_planner.sharding import Placements, local_indices, local_shape

GradientFactor = Callable[[Sequence[np.ndarray], int], np.ndarray]
"""(Indices per dim in the microbatch, microbatch) -> what the gradient at the loss's operand is multiplied by."""


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
        self._rerun = {i.operator for i in program.microbatch if isinstance(i, Compute) and i.phase is Phase.RECOMPUTE}
        self._renewed = renewed_operands(program)
        self._wanted = {*program.graph.outputs, program.graph.loss}
        self._microbatch = 0
        self._step = 0
        self._gradients: dict[str, Parts] = {}
        self._edge_gradients: dict[int, Parts] = {}
        self._records: dict[int, list[OperatorRecord] | LossRecord | RingRecord] = {}
        self._results: dict[str, Parts] = {}
        """Graph outputs and the loss of the microbatch, as forward made them."""

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
                result.outputs.setdefault(name, []).append(self._result(name))
            if self._graph.loss is not None:
                result.losses.append(self._result(self._graph.loss))
            for kept in (self._gradients, self._edge_gradients, self._records, self._results):
                kept.clear()
        self._values.clear()
        for instruction in self._program.step:
            self._execute(instruction)
        self._step += 1
        return result

    def _result(self, name: str) -> Parts:
        return self._results[name] if name in self._results else self._values.get(name)

    def output_placement(self, name: str) -> Placements:
        """Placement of a graph output or of the loss in the result."""
        return self._values.output_placement(name)

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Compute(phase=phase, operator=index):
                self._communicator.phase = phase
                if phase is Phase.BACKWARD:
                    self._backward(index)
                else:
                    self._forward(index, phase)
            case Redistribute(phase=phase, redistribution=index):
                self._communicator.phase = phase
                (self._redistribute_gradient if phase is Phase.BACKWARD else self._values.redistribute)(index)
            case GatherParameters(phase=phase, bucket=bucket):
                self._communicator.phase = phase
                self._store.gather(bucket)
            case ForgetParameters(bucket=bucket):
                self._store.forget(bucket)
            case ReduceGradients(bucket=bucket):
                self._communicator.phase = Phase.GRADIENT
                self._store.reduce(bucket)
            case ReduceShards(bucket=bucket):
                self._communicator.phase = Phase.GRADIENT
                self._store.reduce_shards(bucket)
            case UpdateParameters():
                assert self._optimizer is not None
                self._store.update(self._optimizer)
            case GatherUpdated(bucket=bucket):
                self._communicator.phase = Phase.OPTIMIZER
                self._store.gather_updated(bucket)
            case Release():
                self._values.forget(instruction)

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

    def _forward(self, index: int, phase: Phase) -> None:
        operator = self._graph.operators[index]
        if operator.type == "Loss":
            losses, record = run_loss(self._context(index), self._operands(index), self._communicator)
            self._records[index] = record
            columns = [losses]
        else:
            recorded = bool(self._differentiated(index)) and (phase is Phase.RECOMPUTE or index not in self._rerun)
            if ring_axes(self._context(index)[0]):
                outputs = self._run_ring(index, recorded)
            else:
                outputs = self._run_recorded(index) if recorded else self._run(index)
            columns = [list(column) for column in zip(*outputs, strict=True)]
        for name, parts in zip(operator.outputs, columns, strict=True):
            self._values.put(name, parts)
            if phase is Phase.FORWARD and name in self._wanted:
                self._results[name] = parts

    def _run(self, index: int) -> list[tuple[Tensor, ...]]:
        """Outputs per rank; backward has no use for them, or they are made again until then."""
        contexts, rows = self._context(index), self._operands(index)
        self._widen(contexts, rows)
        with torch.no_grad():
            return [
                self._on_device(run_operator(context, operands, self._custom))
                for context, operands in zip(contexts, rows, strict=True)
            ]

    def _run_ring(self, index: int, recorded: bool) -> list[tuple[Tensor, ...]]:
        """Outputs per rank of an operator whose keys go round, and if asked for a record for backward."""
        renewed = {position: partial(self._parts, index, position) for position in self._renewed.get(index, ())}
        if self._decisions.operators[index].type in self._custom:
            raise self._context(index)[0].unsupported("a ring, with a function of the user's")
        outputs, record = run_ring(self._context(index), self._operands(index), self._communicator, renewed)
        if recorded:
            self._records[index] = record
        return outputs

    def _run_recorded(self, index: int) -> list[tuple[Tensor, ...]]:
        """Outputs per rank, with records for backward."""
        contexts, rows = self._context(index), self._operands(index)
        self._widen(contexts, rows)
        made: list[tuple[Tensor, ...]] = []
        records: list[OperatorRecord] = []
        for rank, (context, operands) in enumerate(zip(contexts, rows, strict=True)):

            def run(entered: Operands, context: OperatorContext = context) -> tuple[Tensor, ...]:
                return self._on_device(run_operator(context, entered, self._custom))

            renewed = {p: partial(self._part, index, p, rank) for p in self._renewed.get(index, ())}
            wide = operands[0] if operands and exchanges(context) else None
            if 0 in renewed and wide is not None:
                renewed[0] = partial(self._wide_part, index, rank, borders(context, wide))
            outputs, record = run_recorded(run, operands, self._differentiated(index), renewed)
            made.append(outputs)
            records.append(record)
        self._records[index] = records
        return made

    def _on_device(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(output.to(self._communicator.device) for output in outputs)

    def _parts(self, index: int, position: int) -> Parts:
        """Parts of an operand as they are now."""
        operand = self._decisions.operators[index].inputs[position]
        assert operand is not None
        return self._values.operand(operand)

    def _part(self, index: int, position: int, rank: int) -> Tensor:
        """A rank's part of an operand as it is now."""
        return self._parts(index, position)[rank]

    def _wide_part(self, index: int, rank: int, rows: Borders) -> Tensor:
        """A rank's part of the first operand as it is now, in the rows of its neighbours that were kept."""
        return with_borders(self._context(index)[rank], self._part(index, 0, rank), rows)

    def _widen(self, contexts: list[OperatorContext], rows: list[list[Tensor | None]]) -> None:
        """Give first operands the rows of their neighbours, where the operator needs them."""
        if exchanges(contexts[0]):
            narrow_parts = [part for operands in rows if (part := operands[0]) is not None]
            for operands, part in zip(rows, widen(contexts, narrow_parts, self._communicator), strict=True):
                operands[0] = part

    # Backward ---------------------------------------------------------------------------------------------------

    def _backward(self, index: int) -> None:
        decision = self._decisions.operators[index]
        records = self._records.pop(index)
        if isinstance(records, LossRecord):
            self._loss_backward(index, records)
            return
        outer = [self._gradients.pop(output.tensor, None) for output in decision.outputs]
        seeds = [
            [None if column is None else column[rank] for column in outer]
            for rank in range(len(self._communicator.ranks))
        ]
        positions = self._differentiated(index)
        if isinstance(records, RingRecord):
            columns = records.backward(positions, seeds, self._communicator)
        else:
            columns = self._products(index, records, positions, seeds)
        for position, column in zip(positions, columns, strict=True):
            operand = decision.inputs[position]
            assert operand is not None
            self._add_gradient(operand, column)

    def _products(
        self,
        index: int,
        records: Sequence[OperatorRecord],
        positions: Sequence[int],
        seeds: Sequence[Sequence[Tensor | None]],
    ) -> list[Parts]:
        """Per position of an operand its gradients, given those of the outputs per rank."""
        name = self._decisions.operators[index].type
        try:
            rows = [product(each, positions, row) for each, row in zip(records, seeds, strict=True)]
        except Exception as error:
            if name in self._custom:
                raise failed(self._custom[name], name, error, "failed in backward") from error
            raise
        columns = [list(column) for column in zip(*rows, strict=True)]
        if positions and positions[0] == 0:
            columns[0] = narrow(self._context(index), columns[0], self._communicator)
        return columns

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
