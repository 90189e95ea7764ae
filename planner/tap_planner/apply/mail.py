"""What the stages of a pipeline send each other, each message under its name.

Between two stages messages go in the order in which they are sent, without names. So who waits for one takes those
before it too, and knows from the Program which they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tap_planner.apply.communicator import Form, Parts, RecordingCommunicator
from tap_planner.apply.operators import torch_dtype
from tap_planner.apply.sharing import share_shape
from tap_planner.program import Phase, Program, Send, SumTied, scattered_axes, transferred
from tap_planner.sharding import Placements, local_shape

_END_OF_STEP = -1


class Message(NamedTuple):
    """What a message brings."""

    phase: Phase
    subject: int | str
    """The ``Transfer`` (index of the operator), or a tied parameter."""
    microbatch: int = _END_OF_STEP


class Mail:
    """What a stage sends and receives.

    Args:
        program: what runs.
        communicator: of the stage.
        dtype: what floats are computed in.
    """

    def __init__(self, program: Program, communicator: RecordingCommunicator, dtype: torch.dtype) -> None:
        self._program = program
        self._communicator = communicator
        self._dtype = dtype
        self._parameters = {parameter.name: parameter for parameter in program.decisions.parameters}
        others = set(range(program.decisions.num_stages)) - {communicator.stage}
        self._expected = {stage: messages(program, stage, communicator.stage) for stage in others}
        self._num_taken = dict.fromkeys(others, 0)
        self._held: dict[tuple[int | None, Message], Parts] = {}
        """What has arrived and was not taken yet, by the stage that it comes from."""

    def send(self, peer: int | None, message: Message, parts: Parts) -> None:
        """Send to another stage, or hand over to a later turn of this one (None)."""
        if peer is None:
            self._held[None, message] = parts
        else:
            dtypes = (form.dtype for form in self._forms(message))
            self._communicator.send([part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True)], peer)

    def has(self, peer: int | None, message: Message) -> bool:
        """Whether a message is here; False where it will only be sent once this stage lets another one run."""
        while (peer, message) not in self._held:
            if peer is None or not self._communicator.may_receive(peer):
                return False
            following = self._expected[peer][self._num_taken[peer]]
            self._num_taken[peer] += 1
            self._held[peer, following] = self._communicator.receive(self._forms(following), peer)
        return True

    def take(self, peer: int | None, message: Message) -> Parts:
        """What a message brings, which must be here."""
        return self._held.pop((peer, message))

    def end_step(self) -> None:
        """Wait until all is received; nothing is left."""
        self._communicator.finish_sends()
        taken = all(number == len(self._expected[stage]) for stage, number in self._num_taken.items())
        assert taken and not self._held, "a message was not taken"
        self._num_taken = dict.fromkeys(self._num_taken, 0)

    def _forms(self, message: Message) -> list[Form]:
        shape, placements, dtype = self._content(message)
        ranks, mesh_shape = self._communicator.ranks, self._communicator.mesh_shape
        local = [local_shape(shape, placements, mesh_shape, rank) for rank in ranks]
        if not isinstance(message.subject, str):
            axes = scattered_axes(self._program, message.phase, message.subject)
            local = [share_shape(whole, mesh_shape, axes) for whole in local]
        return [Form(part, dtype) for part in local]

    def _content(self, message: Message) -> tuple[tuple[int, ...], Placements, torch.dtype]:
        """Global shape, placement and type of what a message brings."""
        if isinstance(message.subject, str):
            parameter = self._parameters[message.subject]
            return parameter.shape, parameter.placement, torch_dtype(parameter.dtype, self._dtype)
        tensor, placements = transferred(self._program, message.phase, message.subject)
        return tensor.shape, placements, torch_dtype(tensor.dtype, self._dtype)


def messages(program: Program, source: int, destination: int) -> tuple[Message, ...]:
    """What one stage sends to another in a step, in order."""
    found = [
        Message(instruction.phase, instruction.operator, turn.microbatch)
        for turn in program.turns(source)
        for instruction in turn.instructions
        if isinstance(instruction, Send) and instruction.peer == destination
    ]
    for instruction in program.steps[source]:
        if isinstance(instruction, SumTied):
            first, *others = program.stages_of(instruction.parameter)
            if (source == first and destination in others) or (destination == first and source in others):
                found.append(Message(Phase.GRADIENT, instruction.parameter))
    return tuple(found)
