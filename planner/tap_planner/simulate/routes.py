"""Where sends and receives of a pipeline go, and what each takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tap_planner.cluster import Cluster
from tap_planner.program import Phase, Program, Receive, Send
from tap_planner.simulate.durations import Durations
from tap_planner.simulate.overlap import Levels
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
    levels: Levels = frozenset()
    """Levels of the topology whose links it uses; none inside a stage."""

    @property
    def is_local(self) -> bool:
        """Whether both chunks lie on one stage."""
        return self.stages[0] == self.stages[1]

    def is_next(self, num_stages: int) -> bool:
        """Whether it goes to the next stages (the last one is followed by the first) rather than to those before: each
        direction has links of its own."""
        return 2 * ((self.stages[1] - self.stages[0]) % num_stages) <= num_stages


class Routes:
    """The routes of a Program.

    Args:
        program: the plan, lowered.
        places: where its parameters and activations lie.
        durations: of its instructions.
        cluster: the devices of its stages, in order; None: nothing but transfers uses the links between stages.
    """

    def __init__(self, program: Program, places: Places, durations: Durations, cluster: Cluster | None = None) -> None:
        self._program = program
        self._places = places
        self._durations = durations
        self._cluster = cluster
        self._device_places: tuple[tuple[int, ...], ...] = ()
        self._levels: dict[tuple[int, int], Levels] = {}
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
                levels=self.levels_between(*stages),
            )
        return self._known[key]

    def levels_between(self, source: int, target: int) -> Levels:
        """Levels of the topology whose links transfers between two stages use.

        Every rank of one has its counterpart in the other: that is the level that parts them and, above nodes, all
        between; those of a transfer's price (``cost.LevelShare.is_used``).
        """
        key = (min(source, target), max(source, target))
        if key not in self._levels:
            self._levels[key] = frozenset(self._names(*key))
        return self._levels[key]

    def _names(self, first: int, second: int) -> set[str]:
        if self._cluster is None or first == second:
            return set()
        if not self._device_places:
            self._device_places = self._cluster.places()
        places, names = self._device_places, [level.name for level in self._cluster.levels]
        ranks = math.prod(axis.size for axis in self._program.decisions.axes)
        used: set[str] = set()
        for rank in range(ranks):
            one, other = places[first * ranks + rank], places[second * ranks + rank]
            top = len(one) - 1 - next(depth for depth in range(len(one)) if one[depth] != other[depth])
            used.update(names[min(top, 1) : top + 1])
        return used
