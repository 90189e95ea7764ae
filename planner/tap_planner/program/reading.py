"""Which values the instructions of a Program read and make, and when each may be forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tap_planner.graph import Graph, TensorKind
from tap_planner.operators import TRANSFER, kept_for_backward, record_of
from tap_planner.plan import Decisions, OperandDecision, OperatorDecision
from tap_planner.program.types import (
    Compute,
    Instruction,
    Part,
    Phase,
    Program,
    Receive,
    Redistribute,
    Release,
    Send,
)
from tap_planner.schedule import rerun_by_region
from tap_planner.sharding import Placements


@dataclass(frozen=True, slots=True)
class Value:
    """Something that a rank holds: an activation as its producer left it, a graph input in a placement, or what a
    redistribution made."""

    tensor: str
    placement: Placements | None = None
    """Of a graph input."""
    redistribution: int | None = None


class Reading:
    """What the instructions of a plan read.

    Args:
        graph: bound with the batch of one microbatch.
        decisions: the plan.
    """

    def __init__(self, graph: Graph, decisions: Decisions) -> None:
        self._graph = graph
        self._decisions = decisions
        self._edges = decisions.redistribution_of()

    def edge(self, operand: OperandDecision) -> int | None:
        """The redistribution that an operand reads from."""
        return self._edges.get((operand.tensor, operand.placement, operand.gradient))

    def value(self, operand: OperandDecision) -> Value | None:
        """What an operand is read from; None for constants and parameters."""
        edge = self.edge(operand)
        if edge is not None:
            return Value(operand.tensor, redistribution=edge)
        return self._source(operand.tensor, operand.placement)

    def kept(self, index: int, part: Part = Part.ALL) -> tuple[tuple[OperandDecision, ...], tuple[str, ...]]:
        """Operands and outputs that an operator's backward reads."""
        decision = self._decisions.operators[index]
        record = record_of(self._graph.operators[index].signature)
        inputs, outputs = kept_for_backward(record, part_gradients(self._graph, decision, part))
        operands = (decision.inputs[position] for position in inputs)
        return (
            tuple(operand for operand in operands if operand is not None),
            tuple(decision.outputs[position].tensor for position in outputs),
        )

    def reads(self, instruction: Instruction) -> tuple[Value, ...]:
        """Values that an instruction reads."""
        found: Iterable[Value | None] = ()
        match instruction:
            case Compute(phase=Phase.BACKWARD, operator=index, part=part):
                operands, outputs = self.kept(index, part)
                found = (*map(self.value, operands), *map(Value, outputs))
            case Compute(operator=index):
                found = (self.value(o) for o in self._decisions.operators[index].inputs if o is not None)
            case Redistribute(phase=phase, redistribution=edge) if phase is not Phase.BACKWARD:
                decision = self._decisions.redistributions[edge]
                found = (self._source(decision.tensor, decision.source),)
            case Send(phase=Phase.FORWARD, operator=index):
                found = (self.value(o) for o in self._decisions.operators[index].inputs if o is not None)
            case _:
                pass
        return tuple(value for value in found if value is not None)

    def makes(self, instruction: Instruction) -> tuple[Value, ...]:
        """Values that an instruction makes."""
        match instruction:
            case Compute(phase=phase, operator=index) if phase is not Phase.BACKWARD:
                return tuple(Value(output.tensor) for output in self._decisions.operators[index].outputs)
            case Redistribute(phase=phase, redistribution=edge) if phase is not Phase.BACKWARD:
                return (Value(self._decisions.redistributions[edge].tensor, redistribution=edge),)
            case Receive(phase=Phase.FORWARD, operator=index):
                return tuple(Value(output.tensor) for output in self._decisions.operators[index].outputs)
            case _:
                return ()

    def with_releases(self, parts: Sequence[Sequence[Instruction]]) -> list[tuple[Instruction, ...]]:
        """Lists of instructions that run one after the other, each instruction followed by a ``Release`` of what
        nothing reads before it is made again."""
        needed: set[Value] = set()
        """Values that an instruction further on reads before they are made again."""
        found: list[tuple[Instruction, ...]] = []
        for part in reversed(parts):
            backwards: list[Instruction] = []
            for instruction in reversed(part):
                reads, makes = self.reads(instruction), self.makes(instruction)
                done = [value for value in dict.fromkeys((*reads, *makes)) if value not in needed]
                if done:
                    backwards.append(_release(done))
                backwards.append(instruction)
                needed.difference_update(makes)
                needed.update(reads)
            found.append(tuple(reversed(backwards)))
        return found[::-1]

    def _source(self, tensor: str, placement: Placements) -> Value | None:
        match self._graph.tensors[tensor].kind:
            case TensorKind.ACTIVATION:
                return Value(tensor)
            case TensorKind.INPUT:
                return Value(tensor, placement=placement)
            case _:
                return None


def made_gradients(decision: OperatorDecision) -> tuple[bool, ...]:
    """Per operand, whether backward makes its gradient."""
    return tuple(operand is not None and operand.gradient is not None for operand in decision.inputs)


def part_gradients(graph: Graph, decision: OperatorDecision, part: Part) -> tuple[bool, ...]:
    """Per operand, whether a part of the backward makes its gradient."""
    if part is Part.ALL:
        return made_gradients(decision)
    of_parameters = part is Part.PARAMETERS
    return tuple(
        operand is not None
        and operand.gradient is not None
        and (graph.tensors[operand.tensor].kind is TensorKind.PARAMETER) is of_parameters
        for operand in decision.inputs
    )


def rerun_of_regions(graph: Graph, decisions: Decisions) -> tuple[frozenset[int], ...]:
    """Per region the operators (indices) whose forward runs again before its backward.

    What another stage sent is kept.
    """
    regions: list[range] = []
    for region in decisions.regions:
        first = regions[-1].stop if regions else 0
        regions.append(range(first, first + len(region.operators)))
    cut: Sequence[frozenset[int]] = ()
    if any(region.recompute == "selective" for region in decisions.regions):
        cut = rerun_by_region(graph, regions)
    again: list[frozenset[int]] = []
    for number, region in enumerate(decisions.regions):
        if region.recompute == "selective":
            again.append(cut[number])
        else:
            again.append(frozenset(regions[number]) if region.recompute == "full" else frozenset())
    received = {index for index, operator in enumerate(graph.operators) if operator.type == TRANSFER}
    return tuple(indices - received for indices in again)


def renewed_operands(program: Program) -> Mapping[int, tuple[int, ...]]:
    """Per operator the operands that are forgotten after its forward and there again at its backward.

    They are activations that are made again (of operators that are made again themselves nothing is kept), and
    parameters that are gathered again.
    """
    graph, decisions = program.graph, program.decisions
    reading = Reading(graph, decisions)
    again = {i.operator for i in program.microbatch if isinstance(i, Compute) and i.phase is Phase.RECOMPUTE}
    made = {name for index in again for name in graph.operators[index].outputs}
    sharded = {parameter.name for parameter in decisions.parameters if parameter.zero_level == 3}

    def is_gathered(operand: OperandDecision) -> bool:
        read = graph.tensors[operand.tensor].read
        return read is not None and read.parameter in sharded and reading.edge(operand) is None

    found: dict[int, tuple[int, ...]] = {}
    for index, decision in enumerate(decisions.operators):
        kept = reading.kept(index)[0]
        positions = tuple(
            position
            for position, operand in enumerate(decision.inputs)
            if operand is not None and ((operand.tensor in made and operand in kept) or is_gathered(operand))
        )
        if positions and index not in again:
            found[index] = positions
    return found


def _release(values: Sequence[Value]) -> Release:
    return Release(
        tensors=tuple(v.tensor for v in values if v.redistribution is None and v.placement is None),
        inputs=tuple(_inputs(values)),
        redistributions=tuple(v.redistribution for v in values if v.redistribution is not None),
    )


def _inputs(values: Sequence[Value]) -> Iterator[tuple[str, Placements]]:
    for value in values:
        if value.placement is not None:
            yield value.tensor, value.placement
