"""Where sends and receives of a pipeline go, and what each takes."""

from __future__ import annotations

from dataclasses import dataclass

from tap_planner.program import Phase, Program, Receive, Send
from tap_planner.simulate.durations import Durations
from tap_planner.simulate.places import Places

TRANSFER = "transfer"
"""Kind of communication: between stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """From one chunk to another, of one tensor or its gradient."""

    operator: int
    """The ``Transfer``, index into ``Graph.operators``."""
    tensor: str
    """What it sends, or sends the gradient of, as its maker calls it."""
    forward: bool
    chunks: tuple[int, int]
    """Source and target."""
    stages: tuple[int, int]
    """Source and target."""
    num_bytes: int
    """Of one rank."""
    ns: int
    """0 inside a stage, where nothing is sent."""

    @property
    def is_local(self) -> bool:
        """Whether both chunks lie on one stage."""
        return self.stages[0] == self.stages[1]

    def is_next(self, num_stages: int) -> bool:
        """Whether it goes to the next stages (the last one is followed by the first) rather than to those before: each
        direction has links of its own."""
        return 2 * ((self.stages[1] - self.stages[0]) % num_stages) <= num_stages


class Routes:
    """The routes of a Program."""

    def __init__(self, program: Program, places: Places, durations: Durations) -> None:
        self._program = program
        self._places = places
        self._durations = durations
        self._known: dict[tuple[bool, int], Route] = {}

    def of(self, instruction: Send | Receive) -> Route:
        """Where an instruction sends to, or receives from."""
        forward = instruction.phase is not Phase.BACKWARD
        key = (forward, instruction.operator)
        if key not in self._known:
            made_in, read_in = (
                self._places.source_of(instruction.operator),
                self._program.chunk_of(instruction.operator),
            )
            chunks = (made_in, read_in) if forward else (read_in, made_in)
            stages = (self._program.stage_of(chunks[0]), self._program.stage_of(chunks[1]))
            self._known[key] = Route(
                operator=instruction.operator,
                tensor=self._places.sent_by(instruction.operator),
                forward=forward,
                chunks=chunks,
                stages=stages,
                num_bytes=0 if stages[0] == stages[1] else self._durations.transfer_bytes(instruction),
                ns=self._durations.transfer_ns(instruction, stages),
            )
        return self._known[key]
