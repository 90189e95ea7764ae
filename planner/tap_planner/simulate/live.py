"""What a rank holds of one microbatch while it runs instructions: activations, and what exists only while it works.

Activations are what the instructions make or receive until their ``Release``, and graph inputs from their first read
on. The *working* set is gradients of activations until the producer's backward has read them (where the backward is in
two parts, until the later one has), copies of parameters in other placements, whole parameters of ZeRO-3 groups, and
whole gradients of ZeRO-2 and 3 groups until the instruction that reduces them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tap_planner.cost import parameter_bytes
from tap_planner.graph import TensorKind
from tap_planner.plan import OperandDecision
from tap_planner.program import (
    Compute,
    ForgetParameters,
    GatherParameters,
    Instruction,
    Part,
    Phase,
    Program,
    Receive,
    Redistribute,
    ReduceGradients,
    Release,
    Send,
    Value,
    part_gradients,
)
from tap_planner.sharding import Placements


class Held(NamedTuple):
    """Bytes on one rank, or a change of them."""

    activations: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.activations + self.working


class Live:
    """Follows the instructions of one microbatch in the order in which a rank runs them.

    Args:
        program: the plan, lowered.
        tensor_bytes: what one rank holds of a tensor in a placement.
    """

    def __init__(self, program: Program, tensor_bytes: Callable[[str, Placements], int]) -> None:
        self._graph = program.graph
        self._decisions = program.decisions
        self._edges = program.decisions.redistribution_of()
        self._tensor_bytes = tensor_bytes
        self._placed = {o.tensor: o.placement for operator in self._decisions.operators for o in operator.outputs}
        self._reduced_in = {
            parameter.name: parameter.bucket
            for parameter in self._decisions.parameters
            if parameter.bucket is not None and parameter.zero_level >= 2
        }
        """Bucket of the parameters whose whole gradients exist only for a while."""
        self._activations: dict[object, int] = {}
        self._working: dict[object, int] = {}
        self._added = [0, 0]
        self._gone = [0, 0]

    def run(self, instruction: Instruction) -> tuple[Held, Held]:
        """Follow one instruction; returns what it adds when it begins, and what is gone (positive) when it ends."""
        self._added, self._gone = [0, 0], [0, 0]
        match instruction:
            case Compute(phase=Phase.BACKWARD, operator=index, part=part):
                self._backward(index, part)
            case Compute(operator=index):
                self._read_inputs(index)
                self._make_outputs(index)
            case Receive(phase=Phase.FORWARD, operator=index):
                self._make_outputs(index)
            case Receive(operator=index):
                self._make_gradient(self._sent(index))
            case Send(phase=Phase.BACKWARD, operator=index):
                self._forget_output_gradients(index)
            case Redistribute(phase=Phase.BACKWARD, redistribution=edge):
                self._return_gradient(edge)
            case Redistribute(redistribution=edge):
                self._redistribute(edge)
            case Release():
                self._release(instruction)
            case GatherParameters(bucket=number):
                self._work(("parameters", number), self._bucket_bytes(number)[0])
            case ForgetParameters(bucket=number):
                self._done(("parameters", number))
            case ReduceGradients(bucket=number):
                self._done(("gradients", number))
            case _:
                pass
        return Held(*self._added), Held(*self._gone)

    # -- forward ----------------------------------------------------------------------------------------------------

    def _read_inputs(self, index: int) -> None:
        for operand in self._decisions.operators[index].inputs:
            if operand is not None and self._graph.tensors[operand.tensor].kind is TensorKind.INPUT:
                value = Value(operand.tensor, placement=operand.placement)
                self._keep(value, self._tensor_bytes(operand.tensor, operand.placement))

    def _make_outputs(self, index: int) -> None:
        for output in self._decisions.operators[index].outputs:
            self._keep(Value(output.tensor), self._tensor_bytes(output.tensor, output.placement))

    def _redistribute(self, edge: int) -> None:
        decision = self._decisions.redistributions[edge]
        size = self._tensor_bytes(decision.tensor, decision.to)
        value = Value(decision.tensor, redistribution=edge)
        if self._graph.tensors[decision.tensor].kind is TensorKind.PARAMETER:
            self._work(value, size)
        else:
            self._keep(value, size)

    def _release(self, released: Release) -> None:
        for tensor in released.tensors:
            self._let_go(Value(tensor))
        for tensor, placement in released.inputs:
            self._let_go(Value(tensor, placement=placement))
        for edge in released.redistributions:
            value = Value(self._decisions.redistributions[edge].tensor, redistribution=edge)
            self._let_go(value)
            self._done(value)

    # -- backward ---------------------------------------------------------------------------------------------------

    def _backward(self, index: int, part: Part) -> None:
        decision = self._decisions.operators[index]
        for operand, is_made in zip(decision.inputs, part_gradients(self._graph, decision, part), strict=True):
            if operand is not None and is_made:
                self._make_gradient(operand)
        later = part is Part.INPUTS and any(part_gradients(self._graph, decision, Part.PARAMETERS))
        if not later:
            self._forget_output_gradients(index)

    def _make_gradient(self, operand: OperandDecision) -> None:
        """The gradient of an operand, as a consumer makes it."""
        edge = self._edges.get((operand.tensor, operand.placement, operand.gradient))
        if edge is None:
            self._keep_gradient(operand.tensor)
            return
        assert operand.gradient is not None
        self._work(("gradient", operand.tensor, edge), self._tensor_bytes(operand.tensor, operand.gradient))

    def _return_gradient(self, edge: int) -> None:
        tensor = self._decisions.redistributions[edge].tensor
        self._keep_gradient(tensor)
        self._done(("gradient", tensor, edge))

    def _keep_gradient(self, tensor: str) -> None:
        """A gradient where its producer wants it; a parameter's goes where its optimizer's is, or waits for ZeRO."""
        if tensor in self._placed:
            self._work(("gradient", tensor), self._tensor_bytes(tensor, self._placed[tensor]))
            return
        read = self._graph.tensors[tensor].read
        bucket = None if read is None else self._reduced_in.get(read.parameter)
        if bucket is not None:
            self._work(("gradients", bucket), self._bucket_bytes(bucket)[1])

    def _forget_output_gradients(self, index: int) -> None:
        for output in self._decisions.operators[index].outputs:
            self._done(("gradient", output.tensor))

    # -- what is there ----------------------------------------------------------------------------------------------

    def _sent(self, transfer: int) -> OperandDecision:
        (operand,) = self._decisions.operators[transfer].inputs
        assert operand is not None
        return operand

    def _bucket_bytes(self, number: int) -> tuple[int, int]:
        """Whole parameters and whole gradients of a bucket."""
        size = parameter_bytes(self._decisions.precision, self._decisions.optimizer or "sgd")
        elements = self._decisions.buckets[number].elements
        return elements * size.parameter, elements * size.gradient

    def _keep(self, value: Value, size: int) -> None:
        if value not in self._activations:
            self._activations[value] = size
            self._added[0] += size

    def _let_go(self, value: Value) -> None:
        self._gone[0] += self._activations.pop(value, 0)

    def _work(self, key: object, size: int) -> None:
        if key not in self._working:
            self._working[key] = size
            self._added[1] += size

    def _done(self, key: object) -> None:
        self._gone[1] += self._working.pop(key, 0)
