"""What of a list of instructions runs in the background, and from when to when it may."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tap_planner.program import Compute, Instruction, Phase, Program, Redistribute, part_gradients
from tap_planner.simulate.overlap import Background, Busy

GRADIENT = "gradient"
"""Kind of communication: reductions of gradients."""
GATHER = "gather"
"""Kind of communication: ZeRO-3 gathers of parameters, prefetched."""
UPDATED = "updated"
"""Kind of communication: gathers of updated parameters (ZeRO 1 and 2)."""


def background(
    kind: str, collectives: Iterable[Busy], *, start: int, needed: int | None = None
) -> Iterator[Background]:
    """Collectives of the background stream, see ``Background``."""
    for piece in collectives:
        yield Background(kind=kind, ns=piece.ns, levels=piece.levels, start=start, needed=needed)


def _buckets(program: Program) -> Callable[[Iterable[str]], list[int]]:
    """Names of tensors -> the buckets of the parameters that they read, where they read any."""
    bucket_of = {name: bucket.id for bucket in program.decisions.buckets for name in bucket.parameters}
    tensors = program.graph.tensors

    def buckets_of(names: Iterable[str]) -> list[int]:
        reads = (tensors[name].read for name in names)
        return [bucket_of[read.parameter] for read in reads if read is not None and read.parameter in bucket_of]

    return buckets_of


def last_gradients(program: Program, instructions: Sequence[Instruction]) -> Mapping[int, int]:
    """Per bucket the position after the instruction that makes the last of its gradients."""
    buckets_of, made = _buckets(program), dict[int, int]()
    for position, instruction in enumerate(instructions):
        match instruction:
            case Compute(phase=Phase.BACKWARD, operator=index, part=part):
                decision = program.decisions.operators[index]
                gradients = part_gradients(program.graph, decision, part)
                pairs = zip(decision.inputs, gradients, strict=True)
                names = [operand.tensor for operand, is_made in pairs if operand is not None and is_made]
            case Redistribute(phase=Phase.BACKWARD, redistribution=edge):
                names = [program.decisions.redistributions[edge].tensor]
            case _:
                continue
        made.update(dict.fromkeys(buckets_of(names), position + 1))
    return made


def first_reads(program: Program, instructions: Sequence[Instruction]) -> Mapping[int, int]:
    """Per bucket the position of the first instruction that reads one of its parameters forward."""
    buckets_of, found = _buckets(program), dict[int, int]()
    for position, instruction in enumerate(instructions):
        match instruction:
            case Compute(phase=Phase.FORWARD, operator=index):
                names = [operand.tensor for operand in program.decisions.operators[index].inputs if operand is not None]
            case Redistribute(phase=Phase.FORWARD, redistribution=edge):
                names = [program.decisions.redistributions[edge].tensor]
            case _:
                continue
        for bucket in buckets_of(names):
            found.setdefault(bucket, position)
    return found


class Regions:
    """Which region each operator of a plan lies in."""

    def __init__(self, program: Program) -> None:
        regions = enumerate(program.decisions.regions)
        self._region_of = [number for number, region in regions for _ in region.operators]

    def earliest(self, instructions: Sequence[Instruction]) -> list[int]:
        """Per position that of the first instruction of the region that runs before: a gather may start there."""
        following: list[object] = []
        """Per position, backwards: which region of which direction it belongs to, that of the next operator."""
        current: object = None
        for instruction in reversed(instructions):
            if isinstance(instruction, Compute):
                current = (self._region_of[instruction.operator], instruction.phase is not Phase.FORWARD)
            following.append(current)
        following.reverse()
        found: list[int] = []
        before = begin = 0
        for position, segment in enumerate(following):
            if position and segment != following[position - 1]:
                before, begin = begin, position
            found.append(before)
        return found
