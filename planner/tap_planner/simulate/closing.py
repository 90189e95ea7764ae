"""The end of the step: sums over stages, reductions of gradients, the optimizer, gathers of what it updated.

Reductions run behind the last slots of their stage: a bucket may be reduced when the last of its gradients is made, in
the last slot that adds to it. Those of tied parameters wait for the sum over stages, and where nothing overlaps all of
them wait for the end. With ``Overlap.ALL`` gathers of updated parameters run behind the slots of the next step, which
are like those of this one, each until its parameters are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tap_planner.plan import Overlap
from tap_planner.program import (
    GatherUpdated,
    Instruction,
    Program,
    ReduceGradients,
    ReduceShards,
    UpdateParameters,
)
from tap_planner.simulate.backgrounds import GRADIENT, UPDATED, background
from tap_planner.simulate.durations import Durations
from tap_planner.simulate.overlap import Background, Busy, behind_ns
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.places import Places

TIED = "tied"
"""Kind of communication: sums of gradients over stages."""
OPTIMIZER = "optimizer"
"""The optimizer's step."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Something that a stage does after its last slot."""

    kind: str
    """``TIED``, ``GRADIENT``, ``OPTIMIZER`` or ``UPDATED``."""
    label: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of a stage as it was played."""

    given: Pass
    idle_ns: int
    """What the stage waited before it."""


def _moved(job: Background, base: int) -> Background:
    """A job of a pass that begins at a position."""
    needed = None if job.needed is None else base + job.needed
    return replace(job, start=base + job.start, needed=needed)


class Closing:
    """What stages do at the end of the step.

    Args:
        program: the plan, lowered.
        places: where its parameters lie.
        durations: of its instructions.
        overlap: whether reductions run behind the last slots, and gathers behind the first ones of the next step.
    """

    def __init__(self, program: Program, places: Places, durations: Durations, *, overlap: Overlap) -> None:
        self._program = program
        self._places = places
        self._durations = durations
        self._overlap = overlap
        tied = {name for names in places.tied for name in names}
        self._tied = {bucket.id for bucket in program.decisions.buckets if tied.intersection(bucket.parameters)}

    def loose(self, stage: int, passes: Sequence[Pass], order: Sequence[int]) -> Mapping[int, tuple[Background, ...]]:
        """Reductions that run behind slots of a stage, by the position of the slot in its order.

        Args:
            stage: the stage.
            passes: of all stages.
            order: per slot of this stage an index into ``passes``.
        """
        found: dict[int, tuple[Background, ...]] = {}
        last: dict[int, int] = {index: position for position, index in enumerate(order)}
        for instruction in self._program.steps[stage]:
            if not isinstance(instruction, ReduceGradients | ReduceShards) or not self._runs_behind(instruction):
                continue
            made = [(at, passes[index].gradients.get(instruction.bucket)) for index, at in last.items()]
            slot, start = max(((at, start) for at, start in made if start is not None), default=(len(order) - 1, None))
            if start is None:
                start = len(passes[order[slot]].main)
            jobs = background(GRADIENT, self._durations.collectives(instruction, stage), start=start)
            found[slot] = (*found.get(slot, ()), *jobs)
        return found

    def behind_next_ns(self, stage: int, slots: Iterable[Slot]) -> int:
        """What of a stage's gathers of updated parameters runs behind its next step.

        Args:
            stage: the stage.
            slots: its slots, first to last.
        """
        if self._overlap is not Overlap.ALL:
            return 0
        gathers = [gather for gather in self._program.steps[stage] if isinstance(gather, GatherUpdated)]
        if not gathers:
            return 0
        main: list[tuple[Busy, ...]] = []
        others: list[Background] = []
        needed: dict[int, int] = {}
        for slot in slots:
            if all(gather.bucket in needed for gather in gathers):
                break
            if slot.idle_ns:
                main.append((Busy(slot.idle_ns),))
            base = len(main)
            others.extend(_moved(job, base) for job in slot.given.background)
            for bucket, position in slot.given.reads.items():
                needed.setdefault(bucket, base + position)
            main.extend(slot.given.main)
        return behind_ns(
            main,
            others,
            [
                job
                for gather in gathers
                for job in background(
                    UPDATED, self._durations.collectives(gather, stage), start=0, needed=needed.get(gather.bucket)
                )
            ],
        )

    def endings(self, free_ns: Sequence[int], behind_ns: Sequence[int]) -> tuple[tuple[Ending, ...], ...]:
        """Per stage what it does after its last slot.

        Args:
            free_ns: per stage when its last slot has left it.
            behind_ns: per stage what of its gathers runs behind its next step.
        """
        clocks = list(free_ns)
        found: list[list[Ending]] = [[] for _ in clocks]
        for name in self._tied_in_order():
            members = self._places.stages_of[name]
            start = max(clocks[stage] for stage in members)
            end = start + self._tied_ns(name, members)
            for stage in members:
                found[stage].append(Ending(TIED, name, start, end))
                clocks[stage] = end
        for stage, instructions in enumerate(self._program.steps):
            behind = behind_ns[stage]
            for instruction in instructions:
                kind, label, ns = self._ending(stage, instruction)
                if kind == UPDATED:
                    hidden = min(ns, behind)
                    ns, behind = ns - hidden, behind - hidden
                if kind:
                    found[stage].append(Ending(kind, label, clocks[stage], clocks[stage] + ns))
                    clocks[stage] += ns
        return tuple(map(tuple, found))

    def least_ns(self, stage: int) -> int:
        """What a stage does after its last slot, without waiting for others."""
        tied = [(name, self._places.stages_of[name]) for name in self._places.tied[stage]]
        sums_ns = sum(self._tied_ns(name, members) for name, members in tied)
        ends = [self._ending(stage, instruction) for instruction in self._program.steps[stage]]
        return sums_ns + sum(ns for kind, _, ns in ends if kind != UPDATED or self._overlap is not Overlap.ALL)

    def _tied_in_order(self) -> Sequence[str]:
        tied = {name for names in self._places.tied for name in names}
        return [parameter.name for parameter in self._program.decisions.parameters if parameter.name in tied]

    def _tied_ns(self, name: str, members: tuple[int, ...]) -> int:
        parameter = next(p for p in self._program.decisions.parameters if p.name == name)
        return self._durations.tied_ns(parameter, members)

    def _ending(self, stage: int, instruction: Instruction) -> tuple[str, str, int]:
        """Kind (empty: nothing that takes time here), label and time."""
        match instruction:
            case ReduceGradients(bucket=bucket) | ReduceShards(bucket=bucket):
                if self._runs_behind(instruction):
                    return "", "", 0
                return GRADIENT, f"bucket {bucket}", self._collectives_ns(instruction, stage)
            case UpdateParameters():
                return OPTIMIZER, OPTIMIZER, self._durations.update_ns(self._places.held_by(stage), stage)
            case GatherUpdated(bucket=bucket):
                return UPDATED, f"bucket {bucket}", self._collectives_ns(instruction, stage)
            case _:
                return "", "", 0

    def _collectives_ns(self, instruction: Instruction, stage: int) -> int:
        return sum(piece.ns for piece in self._durations.collectives(instruction, stage))

    def _runs_behind(self, instruction: ReduceGradients | ReduceShards) -> bool:
        return self._overlap is not Overlap.NONE and instruction.bucket not in self._tied
