"""The settings of a plan: those that hold for all of it, and those that each region chooses from."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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

    def passes(self, microbatches: int) -> int:
        """Of p stages that take equally long, p times the makespan over the work of all of them on one microbatch: the
        microbatches and the bubble, rounded down. What zero-bubble schedules and orders of the user's own leave of it
        counts for nothing."""
        if self.order is not None:
            return microbatches
        ramp = self.num_stages - 1
        bubble = {"fill-drain": ramp, "1f1b": ramp, "interleaved": ramp // self.num_chunks}
        return microbatches + bubble.get(self.schedule, 0)

    def in_flight(self, microbatches: int) -> int:
        """Whole microbatches whose activations the first stage holds at once, rounded down."""
        if self.order is not None and self.order.places:
            return 1  # the first stage may have a small part of the model
        if self.order is not None:
            held = peak_in_flight(self.order)[0]
        else:
            held = in_flight(self.schedule, self.num_stages, microbatches, self.num_chunks, 0)
        return max(held.until_input_backward // self.num_chunks, 1)


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
    def passes(self) -> int:
        """How often the work of all stages on one microbatch takes its time, at least."""
        return self.microbatches if self.pipeline is None else self.pipeline.passes(self.microbatches)

    @property
    def in_flight(self) -> int:
        """Microbatches whose activations the first stage holds at once, at least."""
        return 1 if self.pipeline is None else self.pipeline.in_flight(self.microbatches)
