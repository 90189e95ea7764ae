"""What a stage does in one slot of its schedule, the same for every microbatch: a *pass* of its two streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tap_planner.plan import Overlap
from tap_planner.program import (
    Compute,
    GatherParameters,
    Instruction,
    Program,
    Receive,
    ReduceGradients,
    ReduceShards,
    Release,
    Send,
)
from tap_planner.schedule import Work
from tap_planner.simulate.backgrounds import GATHER, GRADIENT, Regions, background, first_reads, last_gradients
from tap_planner.simulate.durations import Durations
from tap_planner.simulate.live import Held, Live
from tap_planner.simulate.overlap import Background, Busy
from tap_planner.simulate.products import Behind, Products
from tap_planner.simulate.routes import TRANSFER, Route, Routes

BLOCKING = "blocking"
"""Kind of communication: what the main stream waits for, redistributions and collectives inside operators."""

Changes = tuple[tuple[int, Held], ...]
"""Positions at which more or less is held, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One or more pieces of work of one microbatch in one chunk, one after the other."""

    chunk: int
    """Index into ``Program.chunks``."""
    works: tuple[tuple[Work, int], ...]
    """Kinds of work, each with the position where it ends."""
    main: tuple[tuple[Busy, ...], ...]
    """What the main stream does at each position."""
    background: tuple[Background, ...]
    """What runs behind it."""
    compute_ns: int
    """Operators."""
    waited_ns: Mapping[str, int]
    """Communication of the main stream, by kind."""
    behind_ns: int
    """Communication behind products: part of ``compute_ns``."""
    sends: tuple[tuple[int, Route], ...]
    """Positions at which it sends to other chunks."""
    receives: tuple[tuple[int, Route], ...]
    """Positions at which it waits for other chunks."""
    gradients: Mapping[int, int]
    """Per bucket the position after which this pass adds no more to its gradients."""
    reads: Mapping[int, int]
    """Per bucket the position at which this pass first reads its parameters forward; empty where nobody asks."""
    changes: Changes
    """Of one microbatch, see ``Live``."""

    @property
    def main_ns(self) -> int:
        """What the main stream does, one after the other."""
        return self.compute_ns + sum(self.waited_ns.values())


class Passes:
    """Makes the passes of a Program.

    Args:
        program: the plan, lowered.
        durations: of its instructions.
        routes: of its sends and receives.
        overlap: what runs behind something else; the main stream waits for every other collective, and for every send
            where nothing does.
    """

    def __init__(self, program: Program, durations: Durations, routes: Routes, *, overlap: Overlap) -> None:
        self._program = program
        self._durations = durations
        self._routes = routes
        self._overlap = overlap
        self._products = Products(program, durations)
        self._regions = Regions(program)
        self._live = Live(program, durations.tensor_bytes)

    def of_chunk(self, number: int, passes: Sequence[tuple[Work, ...]]) -> Iterator[Pass]:
        """Passes of a chunk.

        Args:
            number: index of the chunk.
            passes: for each the kinds of work in it.
        """
        chunk = self._program.chunks[number]
        lists = (chunk.forward, chunk.backward, chunk.weights)
        parts = [_Part(instructions, tuple(self._changes(instructions))) for instructions in lists]
        for works in passes:
            yield self._pass(number, [(work, [parts[one] for one in _PARTS[work]]) for work in works])

    def _changes(self, instructions: Sequence[Instruction]) -> Iterator[tuple[int, Held]]:
        for position, instruction in enumerate(instructions):
            added, gone = self._live.run(instruction)
            if added.total:
                yield position, added
            if gone.total:
                yield position + 1, Held(-gone.activations, -gone.working)

    def _pass(self, number: int, works: Sequence[tuple[Work, Sequence[_Part]]]) -> Pass:
        instructions: list[Instruction] = []
        changes: list[tuple[int, Held]] = []
        ends: list[tuple[Work, int]] = []
        for work, parts in works:
            for part in parts:
                changes.extend((len(instructions) + position, held) for position, held in part.changes)
                instructions.extend(part.instructions)
            ends.append((work, len(instructions)))
        made = last_gradients(self._program, instructions)
        behind = self._products.of(instructions) if self._overlap is Overlap.ALL else {}
        streams = _Streams(self._durations, self._routes, behind, overlaps=self._overlap is not Overlap.NONE)
        earliest = self._regions.earliest(instructions)
        for position, instruction in enumerate(instructions):
            streams.add(instruction, position, earliest[position], made)
        return Pass(
            chunk=number,
            works=tuple(ends),
            main=tuple(streams.main),
            background=tuple(streams.background),
            compute_ns=streams.compute_ns,
            waited_ns=streams.waited_ns,
            behind_ns=sum(each.hidden_ns for each in behind.values()),
            sends=tuple((at, self._routes.of(i)) for at, i in enumerate(instructions) if isinstance(i, Send)),
            receives=tuple((at, self._routes.of(i)) for at, i in enumerate(instructions) if isinstance(i, Receive)),
            gradients=made,
            reads=first_reads(self._program, instructions) if self._overlap is Overlap.ALL else {},
            changes=tuple(changes),
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """One of a chunk's lists."""

    instructions: Sequence[Instruction]
    changes: Changes


_PARTS: Mapping[Work, tuple[int, ...]] = {
    Work.FORWARD: (0,),
    Work.BACKWARD: (1, 2),
    Work.INPUT_BACKWARD: (1,),
    Work.WEIGHT_BACKWARD: (2,),
}
"""Which of a chunk's lists (forward, backward, weights) each kind of work runs."""


class _Streams:
    """The two streams of a pass as they grow, instruction by instruction."""

    def __init__(self, durations: Durations, routes: Routes, behind: Mapping[int, Behind], *, overlaps: bool) -> None:
        self._durations = durations
        self._routes = routes
        self._behind = behind
        self._overlaps = overlaps
        self.main: list[tuple[Busy, ...]] = []
        self.background: list[Background] = []
        self.compute_ns = 0
        self.waited_ns: Counter[str] = Counter()

    def add(self, instruction: Instruction, position: int, earliest: int, made: Mapping[int, int]) -> None:
        """One more instruction.

        Args:
            instruction: what comes next.
            position: its position.
            earliest: where the region before it begins.
            made: per bucket the position after the last of its gradients.
        """
        if isinstance(instruction, Release):
            self.main.append(())
            return
        if position in self._behind:
            self._in_parts(self._behind[position])
            return
        collectives = self._durations.collectives(instruction)
        match instruction:
            case Compute():
                ns = self._durations.compute_ns(instruction)
                self.compute_ns += ns
                self._wait(BLOCKING, collectives)
                self.main.append((Busy(ns), *collectives))
            case GatherParameters():
                self._in_background(GATHER, collectives, earliest, position)
            case ReduceGradients(bucket=bucket) | ReduceShards(bucket=bucket):
                self._in_background(GRADIENT, collectives, made.get(bucket, position), None)
            case Send() if not self._overlaps:
                self._in_front(TRANSFER, (Busy(self._routes.of(instruction).ns),))
            case _:
                self._in_front(BLOCKING, collectives)

    def _in_parts(self, given: Behind) -> None:
        self.compute_ns += given.compute_ns
        self.waited_ns[BLOCKING] += given.waited_ns
        self.main.append(given.pieces)

    def _in_background(self, kind: str, collectives: Sequence[Busy], start: int, needed: int | None) -> None:
        if self._overlaps:
            self.background.extend(background(kind, collectives, start=start, needed=needed))
            self.main.append(())
        else:
            self._in_front(kind, collectives)

    def _in_front(self, kind: str, collectives: Sequence[Busy]) -> None:
        self._wait(kind, collectives)
        self.main.append(tuple(collectives))

    def _wait(self, kind: str, collectives: Sequence[Busy]) -> None:
        for piece in collectives:
            self.waited_ns[kind] += piece.ns
