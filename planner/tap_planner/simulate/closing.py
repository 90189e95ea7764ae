"""The end of the step: sums over stages, reductions of gradients, the optimizer, gathers of what it updated.

Reductions run behind the last slots of their stage: a bucket may be reduced when the last of its gradients is made, in
the last slot that adds to it. Those of tied parameters wait for the sum over stages, and over gloo all of them wait for
the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tap_planner.program import (
    GatherUpdated,
    Instruction,
    Program,
    ReduceGradients,
    ReduceShards,
    UpdateParameters,
)
from tap_planner.simulate.backgrounds import GRADIENT, background
from tap_planner.simulate.durations import Durations
from tap_planner.simulate.overlap import Background
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.places import Places

TIED = "tied"
"""Kind of communication: sums of gradients over stages."""
UPDATED = "updated"
"""Kind of communication: gathers of updated parameters (ZeRO 1 and 2)."""
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


class Closing:
    """What stages do at the end of the step.

    Args:
        program: the plan, lowered.
        places: where its parameters lie.
        durations: of its instructions.
        overlaps: whether reductions run behind the last slots.
    """

    def __init__(self, program: Program, places: Places, durations: Durations, *, overlaps: bool) -> None:
        self._program = program
        self._places = places
        self._durations = durations
        self._overlaps = overlaps
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
            jobs = background(GRADIENT, self._durations.collectives(instruction), start=start)
            found[slot] = (*found.get(slot, ()), *jobs)
        return found

    def endings(self, free_ns: Sequence[int]) -> tuple[tuple[Ending, ...], ...]:
        """Per stage what it does after its last slot.

        Args:
            free_ns: per stage when its last slot has left it.
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
            for instruction in instructions:
                kind, label, ns = self._ending(stage, instruction)
                if kind:
                    found[stage].append(Ending(kind, label, clocks[stage], clocks[stage] + ns))
                    clocks[stage] += ns
        return tuple(map(tuple, found))

    def least_ns(self, stage: int) -> int:
        """What a stage does after its last slot, without waiting for others."""
        tied = [(name, self._places.stages_of[name]) for name in self._places.tied[stage]]
        sums_ns = sum(self._tied_ns(name, members) for name, members in tied)
        return sums_ns + sum(self._ending(stage, instruction)[2] for instruction in self._program.steps[stage])

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
                return GRADIENT, f"bucket {bucket}", self._collectives_ns(instruction)
            case UpdateParameters():
                return OPTIMIZER, OPTIMIZER, self._durations.update_ns(self._places.held_by(stage), stage)
            case GatherUpdated(bucket=bucket):
                return UPDATED, f"bucket {bucket}", self._collectives_ns(instruction)
            case _:
                return "", "", 0

    def _collectives_ns(self, instruction: Instruction) -> int:
        return sum(piece.ns for piece in self._durations.collectives(instruction))

    def _runs_behind(self, instruction: ReduceGradients | ReduceShards) -> bool:
        return self._overlaps and instruction.bucket not in self._tied
