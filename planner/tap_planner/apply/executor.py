"""Runs a stage of a Program on local parts: every instruction in order, once per held rank.

Nothing is decided here, not even what is held until when. An operator's backward is the vector-Jacobian product of that
operator alone (``differentiation``); what links operators are the Program's instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.communicator import Parts, RecordingCommunicator
from tap_planner.apply.differentiation import OperatorRecord, product, run_recorded
from tap_planner.apply.in_flight import MicrobatchState, Seeds, StepResult
from tap_planner.apply.mail import Mail, Message
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
from tap_planner.apply.sharing import gather, scatter
from tap_planner.apply.values import TensorSources, TensorValues
from tap_planner.operators import lookup
from tap_planner.plan import OperandDecision
from tap_planner.program import (
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
    Release,
    Send,
    SumTied,
    UpdateParameters,
    part_gradients,
    renewed_operands,
    scattered_axes,
    transferred,
)
from tap_planner.sharding import Placements, local_indices, local_shape

GradientFactor = Callable[[Sequence[np.ndarray], int], np.ndarray]
"""(Indices per dim in the microbatch, microbatch) -> what the gradient at the loss's operand is multiplied by."""


class StepExecutor:
    """Runs steps of a stage of a Program; without a pipeline there is one.

    Args:
        program: what to run.
        communicator: issues and records the collectives of its stage.
        store: the stage's parameters.
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
        self._sources = TensorSources(program, communicator, store, dtype)
        self._mail = Mail(program, communicator, dtype)
        self._contexts: dict[int, list[OperatorContext]] = {}
        self._rerun = {i.operator for i in program.microbatch if isinstance(i, Compute) and i.phase is Phase.RECOMPUTE}
        self._renewed = renewed_operands(program)
        self._wanted = {*program.graph.outputs, program.graph.loss}
        self._passed_on = self._outputs_passed_on()
        self._part = Part.ALL
        """Of the backward that runs."""
        self._step = 0
        self._num_done = 0
        self._state = MicrobatchState(0, TensorValues(self._sources, {}, 0))
        """Of the microbatch and chunk whose turn it is."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> StepResult:
        """Run one step, where this process holds no other stage.

        Args:
            inputs: whole graph inputs of the global batch, by name.
        """
        (result,) = run_stages([self], inputs)
        return result

    def work(self, inputs: Mapping[str, np.ndarray]) -> Generator[int, None, StepResult]:
        """Run one step, stopping where another stage that this process holds has to run first.

        Args:
            inputs: whole graph inputs of the global batch, by name.

        Yields:
            How much has been done so far, in all steps.

        Returns:
            What the step made.
        """
        stage = self._communicator.stage
        self._store.begin_step()
        states: dict[tuple[int, int], MicrobatchState] = {}
        made: dict[str, dict[int, Parts]] = {}
        for turn in self._program.turns(stage):
            key = (turn.microbatch, turn.chunk)
            if key not in states:
                states[key] = MicrobatchState(turn.microbatch, TensorValues(self._sources, inputs, turn.microbatch))
            self._state = states[key]
            for instruction in turn.instructions:
                if isinstance(instruction, Receive):
                    yield from self._wait_for(instruction.peer, self._message(instruction))
                self._execute(instruction)
                self._num_done += 1
            if turn.is_last:
                state = states.pop(key)
                passed_on = {name: state.values.get(name) for name in self._passed_on.get(turn.chunk, ())}
                for name, parts in (state.results | passed_on).items():
                    made.setdefault(name, {})[turn.microbatch] = parts
                state.clear()
        for instruction in self._program.steps[stage]:
            if isinstance(instruction, SumTied):
                yield from self._sum_tied(instruction.parameter)
            else:
                self._execute(instruction)
        self._mail.end_step()
        self._step += 1
        return self._result(made)

    def _result(self, made: Mapping[str, Mapping[int, Parts]]) -> StepResult:
        result = StepResult()
        for name, by_microbatch in made.items():
            parts = [by_microbatch[microbatch] for microbatch in sorted(by_microbatch)]
            if name in self._graph.outputs:
                result.outputs[name] = parts
            if name == self._graph.loss:
                result.losses = parts
        return result

    def _outputs_passed_on(self) -> Mapping[int, tuple[str, ...]]:
        """Graph outputs that no operator makes, by the chunk that gives them."""
        given: dict[int, tuple[str, ...]] = {}
        for name in self._graph.outputs:
            if name not in self._sources.placements:
                read = self._graph.tensors[name].read
                stage = 0 if read is None else self._program.stages_of(read.parameter)[0]
                chunk = next(c for c in range(len(self._program.chunks)) if self._program.stage_of(c) == stage)
                given[chunk] = (*given.get(chunk, ()), name)
        return given

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Compute(phase=phase, operator=index, part=part):
                self._communicator.phase = phase
                if phase is Phase.BACKWARD:
                    self._backward(index, part)
                else:
                    self._forward(index, phase)
            case Redistribute(phase=phase, redistribution=index):
                self._communicator.phase = phase
                (self._redistribute_gradient if phase is Phase.BACKWARD else self._state.values.redistribute)(index)
            case Release():
                self._state.values.forget(instruction)
            case Send():
                self._send(instruction)
            case Receive():
                self._receive(instruction)
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
            case SumTied():
                raise AssertionError("a sum over stages waits for them")

    # Between stages ---------------------------------------------------------------------------------------------

    def _message(self, instruction: Send | Receive) -> Message:
        return Message(instruction.phase, instruction.operator, self._state.microbatch)

    def _wait_for(self, peer: int | None, message: Message) -> Generator[int, None, None]:
        while not self._mail.has(peer, message):
            yield self._num_done
        self._num_done += 1

    def _send(self, instruction: Send) -> None:
        decision = self._decisions.operators[instruction.operator]
        operand = decision.inputs[0]
        assert operand is not None
        if instruction.phase is Phase.BACKWARD:
            parts = self._state.gradients.pop(decision.outputs[0].tensor, None)
            if parts is None:
                assert operand.gradient is not None
                parts = self._zeros(operand.tensor, operand.gradient)
        else:
            parts = self._state.values.operand(operand)
        if instruction.peer is not None:
            axes = scattered_axes(self._program, instruction.phase, instruction.operator)
            parts = scatter(self._communicator, parts, axes)
            self._communicator.phase = instruction.phase
            self._communicator.record("send_recv", parts)
        self._mail.send(instruction.peer, self._message(instruction), parts)

    def _receive(self, instruction: Receive) -> None:
        decision = self._decisions.operators[instruction.operator]
        parts = self._mail.take(instruction.peer, self._message(instruction))
        if instruction.peer is not None:
            sent = (self._program, instruction.phase, instruction.operator)
            tensor, placements = transferred(*sent)
            self._communicator.phase = instruction.phase
            parts = gather(self._communicator, parts, scattered_axes(*sent), tensor.shape, placements)
        if instruction.phase is Phase.BACKWARD:
            operand = decision.inputs[0]
            assert operand is not None
            self._add_gradient(operand, parts)
        else:
            self._state.values.put(decision.outputs[0].tensor, parts)

    def _sum_tied(self, name: str) -> Generator[int, None, None]:
        """An all-reduce over the stages that hold a parameter, by the first of them."""
        first, *others = self._program.stages_of(name)
        message, parts = Message(Phase.GRADIENT, name), self._store.gradient(name)
        self._communicator.phase = Phase.GRADIENT
        self._communicator.record("all_reduce", parts)
        if self._communicator.stage == first:
            for other in others:
                yield from self._wait_for(other, message)
                parts = _sum(parts, self._mail.take(other, message))
            for other in others:
                self._mail.send(other, message, parts)
        else:
            self._mail.send(first, message, parts)
            yield from self._wait_for(first, message)
            parts = self._mail.take(first, message)
        self._store.put_gradient(name, parts)

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
        columns = [None if operand is None else self._state.values.operand(operand) for operand in decision.inputs]
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
            self._state.records[index] = record
            columns = [losses]
        else:
            recorded = bool(self._differentiated(index)) and (phase is Phase.RECOMPUTE or index not in self._rerun)
            if ring_axes(self._context(index)[0]):
                outputs = self._run_ring(index, recorded)
            else:
                outputs = self._run_recorded(index) if recorded else self._run(index)
            columns = [list(column) for column in zip(*outputs, strict=True)]
        for name, parts in zip(operator.outputs, columns, strict=True):
            self._state.values.put(name, parts)
            if phase is Phase.FORWARD and name in self._wanted:
                self._state.results[name] = parts

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
            self._state.records[index] = record
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

            renewed = {p: partial(self._part_of, index, p, rank) for p in self._renewed.get(index, ())}
            wide = operands[0] if operands and exchanges(context) else None
            if 0 in renewed and wide is not None:
                renewed[0] = partial(self._wide_part, index, rank, borders(context, wide))
            outputs, record = run_recorded(run, operands, self._differentiated(index), renewed)
            made.append(outputs)
            records.append(record)
        self._state.records[index] = records
        return made

    def _on_device(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(output.to(self._communicator.device) for output in outputs)

    def _parts(self, index: int, position: int) -> Parts:
        """Parts of an operand as they are now."""
        operand = self._decisions.operators[index].inputs[position]
        assert operand is not None
        return self._state.values.operand(operand)

    def _part_of(self, index: int, position: int, rank: int) -> Tensor | None:
        """A rank's part of an operand as it is now; None where it is not there, as the part of the backward that runs
        does not depend on it."""
        operand = self._decisions.operators[index].inputs[position]
        assert operand is not None
        if self._part is not Part.ALL and not self._state.values.has(operand):
            return None
        return self._state.values.operand(operand)[rank]

    def _wide_part(self, index: int, rank: int, rows: Borders) -> Tensor | None:
        """A rank's part of the first operand as it is now, in the rows of its neighbours that were kept."""
        part = self._part_of(index, 0, rank)
        return None if part is None else with_borders(self._context(index)[rank], part, rows)

    def _widen(self, contexts: list[OperatorContext], rows: list[list[Tensor | None]]) -> None:
        """Give first operands the rows of their neighbours, where the operator needs them."""
        if exchanges(contexts[0]):
            narrow_parts = [part for operands in rows if (part := operands[0]) is not None]
            for operands, part in zip(rows, widen(contexts, narrow_parts, self._communicator), strict=True):
                operands[0] = part

    # Backward ---------------------------------------------------------------------------------------------------

    def _backward(self, index: int, part: Part) -> None:
        """A part of an operator's backward. The first of two keeps what the second needs."""
        decision, state = self._decisions.operators[index], self._state
        record = state.records.pop(index)
        if isinstance(record, LossRecord):
            self._loss_backward(index, record)
            return
        seeds = state.seeds.pop(index, None)
        if seeds is None:
            seeds = self._seeds(index)
        is_first = part is Part.INPUTS and any(part_gradients(self._graph, decision, Part.PARAMETERS))
        if is_first:
            state.records[index], state.seeds[index] = record, seeds
        positions = [p for p, needed in enumerate(part_gradients(self._graph, decision, part)) if needed]
        self._part = part
        if isinstance(record, RingRecord):
            columns = record.backward(positions, seeds, self._communicator)
        else:
            columns = self._products(index, record, positions, seeds, keep=is_first)
        for position, column in zip(positions, columns, strict=True):
            operand = decision.inputs[position]
            assert operand is not None
            self._add_gradient(operand, column)

    def _seeds(self, index: int) -> Seeds:
        """Gradients of an operator's outputs."""
        outer = [self._state.gradients.pop(output.tensor, None) for output in self._decisions.operators[index].outputs]
        return [
            [None if column is None else column[rank] for column in outer]
            for rank in range(len(self._communicator.ranks))
        ]

    def _products(
        self,
        index: int,
        records: Sequence[OperatorRecord],
        positions: Sequence[int],
        seeds: Sequence[Sequence[Tensor | None]],
        *,
        keep: bool,
    ) -> list[Parts]:
        """Per position of an operand its gradients, given those of the outputs per rank."""
        name = self._decisions.operators[index].type
        try:
            rows = [product(each, positions, row, keep=keep) for each, row in zip(records, seeds, strict=True)]
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
                factor = torch.from_numpy(np.asarray(self._gradient_factor(held, self._state.microbatch)))
                gradients[rank] = gradients[rank] * factor.to(gradients[rank])
        self._add_gradient(operand, gradients)

    def _add_gradient(self, operand: OperandDecision, gradients: Parts) -> None:
        edge = self._sources.edge_of(operand)
        if edge is not None:
            self._state.edge_gradients[edge] = _sum(self._state.edge_gradients.get(edge), gradients)
        else:
            self._add_tensor_gradient(operand.tensor, gradients)

    def _add_tensor_gradient(self, name: str, gradients: Parts) -> None:
        read = self._graph.tensors[name].read
        if read is not None:
            self._store.accumulate(read.parameter, read, gradients)
        else:
            self._state.gradients[name] = _sum(self._state.gradients.get(name), gradients)

    def _redistribute_gradient(self, index: int) -> None:
        decision = self._decisions.redistributions[index]
        assert decision.gradient is not None
        gradients = self._state.edge_gradients.pop(index, None)
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


def run_stages(executors: Sequence[StepExecutor], inputs: Mapping[str, np.ndarray]) -> list[StepResult]:
    """Run one step of all stages that a process holds, each as far as it comes without the others, by turns.

    Args:
        executors: one for each stage.
        inputs: whole graph inputs of the global batch, by name.

    Returns:
        What each stage made.
    """
    running = {number: executor.work(inputs) for number, executor in enumerate(executors)}
    results: dict[int, StepResult] = {}
    progress: dict[int, int] = {}
    while running:
        before = (len(results), dict(progress))
        for number, work in tuple(running.items()):
            try:
                progress[number] = next(work)
            except StopIteration as end:
                results[number] = end.value
                del running[number]
        if before == (len(results), progress):
            raise AssertionError("the stages wait for each other")
    return [results[number] for number in range(len(executors))]
