"""What a simulated step looks like: events, times and memory of every stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tap_planner.simulate.events import Event, MemoryPoint, StageRecord, events_of, memory_of, memory_of_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What one rank of a stage holds when it holds most, by kind."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Of all microbatches that are there at that time."""
    working_bytes: int
    """What exists only while a slot runs, or between the two parts of a backward (``live.Live``)."""
    peak_ns: int
    """When that is."""

    @property
    def stored_bytes(self) -> int:
        """What is there all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return self.stored_bytes + self.activation_bytes + self.working_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeline:
    """A step as one rank of a stage spends it: ``compute_ns``, ``exposed_ns`` and ``bubble_ns`` add up to the step."""

    stage: int
    step_ns: int
    """Of all stages."""
    compute_ns: int
    """Operators and the optimizer."""
    communication_ns: Mapping[str, int]
    """All communication, by kind; transfers those that the stage receives."""
    exposed_ns: Mapping[str, int]
    """What of it the stage waits for while it has nothing else to do."""
    memory: StageMemory
    record: StageRecord
    """What ``events`` and ``memory_curve`` are made of."""

    @property
    def bubble_ns(self) -> int:
        """Time in which the stage waits for other stages."""
        return self.step_ns - self.compute_ns - sum(self.exposed_ns.values())

    @property
    def hidden_ns(self) -> Mapping[str, int]:
        """Communication that runs behind something else, by kind."""
        return {kind: ns - self.exposed_ns.get(kind, 0) for kind, ns in self.communication_ns.items()}

    @property
    def utilisation(self) -> float:
        """Share of the step in which the stage computes."""
        return self.compute_ns / self.step_ns if self.step_ns else 0.0

    @property
    def events(self) -> tuple[Event, ...]:
        """All that it does, by stream and time; made when asked for."""
        return events_of(self.record)

    @property
    def memory_curve(self) -> tuple[MemoryPoint, ...]:
        """What of activations and working memory it holds from each time on; made when asked for."""
        return memory_of(self.record)

    @property
    def memory_of_slots(self) -> tuple[MemoryPoint, ...]:
        """The curve at the begin, the peak and the end of every slot."""
        return memory_of_slots(self.record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of a Program."""

    step_ns: int
    """From the start of the first slot to when the last stage is done."""
    stages: tuple[StageTimeline, ...]

    @property
    def peak_bytes(self) -> int:
        """The most that any stage holds."""
        return max((stage.memory.peak_bytes for stage in self.stages), default=0)

    @property
    def busiest(self) -> StageTimeline:
        """The stage with the least bubble (ties: the first)."""
        return min(self.stages, key=lambda stage: stage.bubble_ns)
