"""The settings of a plan: those that hold for all of it, and those that each region chooses from."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

from tap_planner.schedule import PipelineSchedule, in_flight, make_schedule, peak_in_flight


class Recompute(enum.IntEnum):
    """How a region keeps activations for backward, in order of growing time."""

    NONE = 0
    """All that backward reads is kept."""
    SELECTIVE = 1
    """What is large and cheap runs again (``schedule.rerun_operators``)."""
    FULL = 2
    """The region's boundary is kept; its whole forward runs again."""

    @property
    def label(self) -> str:
        """Name in plans and options."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ZeroSetting:
    """What ZeRO shards of the parameters of a region, and over which of their data axes."""

    level: int
    axes: tuple[int, ...] | None
    """Only over these of the data axes (hybrid sharding); None: over all."""

    def sharded(self, data_axes: tuple[int, ...]) -> tuple[int, ...]:
        """Axes over which a parameter with these data axes is sharded; empty at level 0."""
        if self.level == 0:
            return ()
        return data_axes if self.axes is None else tuple(axis for axis in data_axes if axis in self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What every region may choose from."""

    recomputes: tuple[Recompute, ...]
    """Ascending."""
    zeros: tuple[ZeroSetting, ...]
    whole_level: int = 0
    """The ZeRO level for which the last occurrences of runs make room: whole gradients from 2 on, and whole parameters
    at 3. At least the highest level that is chosen in a run; below that, memory is a lower bound."""
    run_level: int | None = None
    """The highest ZeRO level that may be chosen in runs; None: any."""

    @property
    def fastest(self) -> Settings:
        """Only the recompute setting that takes the least time."""
        return replace(self, recomputes=self.recomputes[:1])

    def up_to(self, level: int) -> Settings:
        """In runs only ZeRO settings up to a level, with room for it."""
        return replace(self, run_level=level, whole_level=level)

    def places(self, *, inside: bool) -> tuple[int, ...]:
        """Places of the ZeRO settings that may be chosen in runs (``inside``), or outside."""
        highest = self.run_level if inside else None
        return tuple(n for n, zero in enumerate(self.zeros) if highest is None or zero.level <= highest)

    @property
    def levels(self) -> tuple[int, ...]:
        """Highest ZeRO levels that room can be made for; levels 0 and 1 need none."""
        return tuple(sorted({max(zero.level, 1) for zero in self.zeros}))


def zero_settings(levels: Sequence[int], num_axes: int, *, hybrid: bool) -> tuple[ZeroSetting, ...]:
    """ZeRO over all data axes or, where ``hybrid``, over those of the inner axes of the mesh only.

    Args:
        levels: the levels allowed.
        num_axes: axes of the mesh.
        hybrid: whether to shard over some of the data axes.
    """
    found: list[ZeroSetting] = []
    for level in levels:
        found.append(ZeroSetting(level=level, axes=None))
        if hybrid and level:
            found.extend(ZeroSetting(level=level, axes=tuple(range(first, num_axes))) for first in range(1, num_axes))
    return tuple(found)


class Passes(NamedTuple):
    """How often the work on one microbatch counts in a step."""

    forward: int
    backward: int
    """No less than ``forward``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages, and in which order they work."""

    num_stages: int
    schedule: str
    """One of ``SCHEDULES``, or what ``order`` is called."""
    num_chunks: int = 1
    order: PipelineSchedule | None = field(default=None, hash=False)
    """The user's own; for its number of microbatches only."""

    def at(self, microbatches: int) -> PipelineSchedule:
        """The order of so many microbatches."""
        if self.order is not None:
            return self.order
        return make_schedule(self.schedule, self.num_stages, microbatches, self.num_chunks)

    def passes(self, microbatches: int) -> Passes:
        """How often forward and backward of one microbatch, of all p stages together, count in p makespans at least,
        however the work lies on the stages.

        Stage i, whose forward and backward take F_i and B_i, is busy m (F_i + B_i), and the makespan is at least that
        of any stage, and so at least the mean. fill-drain begins no backward before the last stage has ended all
        forwards, so that it takes m (F_i + B_i) and what the other stages take for one microbatch. With 1f1b stage i
        does w = min(m, p - i) forwards before its first backward, which needs all stages behind it, and the last one
        needs all before it:

            makespan >= (m - w + 1) F_i + m B_i + (what all other stages take for one microbatch)

        What is left of a bubble elsewhere depends on how unequal stages are, and counts for nothing.
        """
        stages, filled = self.num_stages, microbatches + self.num_stages - 1
        if self.order is None and self.schedule == "fill-drain":
            return Passes(filled, filled)
        if self.order is None and self.schedule == "1f1b":
            return Passes(max(microbatches, stages), filled)
        return Passes(microbatches, microbatches)

    def stage_passes(self, stage: int, part: Fraction, microbatches: int) -> tuple[Fraction, Fraction]:
        """How often forward and backward of a stage on one microbatch count in a makespan at least, where stages count
        unequally: the mean of what ``passes`` says of every stage.

        Args:
            stage: which one.
            part: how much it counts; those of all stages add up to 1 at most.
            microbatches: their number.
        """
        if self.order is None and self.schedule == "fill-drain":
            both = 1 + part * (microbatches - 1)
            return both, both
        if self.order is None and self.schedule == "1f1b":
            before = min(microbatches, self.num_stages - stage)
            return 1 + part * (microbatches - before), 1 + part * (microbatches - 1)
        return part * microbatches, part * microbatches

    def in_flight(self, microbatches: int) -> int:
        """Whole microbatches whose activations the first stage holds at once, rounded down."""
        if self.order is not None and self.order.places:
            return 1  # the first stage may have a small part of the model
        if self.order is not None:
            held = peak_in_flight(self.order)[0]
        else:
            held = in_flight(self.schedule, self.num_stages, microbatches, self.num_chunks, 0)
        return max(held.until_input_backward // self.num_chunks, 1)

    def least_in_flight(self, microbatches: int) -> int:
        """Whole microbatches whose activations every stage holds at once at some time, however the work lies on them:
        before its first backward it has done all forwards of one."""
        if self.num_chunks > 1 or (self.order is not None and self.order.places):
            return 1
        stages = range(self.num_stages)
        if self.order is not None:
            held = peak_in_flight(self.order)
        else:
            held = tuple(in_flight(self.schedule, self.num_stages, microbatches, 1, stage) for stage in stages)
        return max(min(held[stage].until_input_backward for stage in stages), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The settings that hold for the whole plan, and those that regions choose from."""

    settings: Settings
    microbatches: int
    optimizer: str
    precision: str
    training: bool
    optimizer_states: str = "fp32"
    """Element type of AdamW's moments."""
    pipeline: Pipeline | None = None
    """Times and bytes are then those of all stages together (docs/cost-model.md, "Pipelines")."""

    @property
    def passes(self) -> Passes:
        """How often the work of all stages on one microbatch takes its time, at least."""
        count = self.microbatches
        return Passes(count, count) if self.pipeline is None else self.pipeline.passes(count)

    @property
    def in_flight(self) -> int:
        """Microbatches whose activations the first stage holds at once, at least."""
        return 1 if self.pipeline is None else self.pipeline.in_flight(self.microbatches)

    @property
    def least_in_flight(self) -> int:
        """The same of every stage."""
        return 1 if self.pipeline is None else self.pipeline.least_in_flight(self.microbatches)
