"""When each slot of a schedule runs, if every piece of work takes a known time."""

from __future__ import annotations

from dataclasses import dataclass

from tap_planner.errors import UsageError
from tap_planner.schedule.dependencies import slot_graph, walk
from tap_planner.schedule.pipeline import PipelineSchedule, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Times of one microbatch, per virtual stage in model order. A whole backward takes both of its parts' times."""

    forward_ns: tuple[int, ...]
    input_backward_ns: tuple[int, ...]
    weight_backward_ns: tuple[int, ...]
    transfer_ns: int = 0
    """From the end of a slot to when another rank has its result. Transfers hide behind work and never queue."""

    @classmethod
    def uniform(
        cls,
        num_virtual_stages: int,
        *,
        forward_ns: int,
        input_backward_ns: int,
        weight_backward_ns: int,
        transfer_ns: int = 0,
    ) -> Durations:
        """The same times for every virtual stage."""
        return cls(
            forward_ns=(forward_ns,) * num_virtual_stages,
            input_backward_ns=(input_backward_ns,) * num_virtual_stages,
            weight_backward_ns=(weight_backward_ns,) * num_virtual_stages,
            transfer_ns=transfer_ns,
        )

    def of(self, work: Work) -> tuple[int, ...]:
        """Per virtual stage the time of a kind of work, in ns."""
        match work:
            case Work.FORWARD:
                return self.forward_ns
            case Work.INPUT_BACKWARD:
                return self.input_backward_ns
            case Work.WEIGHT_BACKWARD:
                return self.weight_backward_ns
            case Work.BACKWARD:
                return tuple(sum(parts) for parts in zip(self.input_backward_ns, self.weight_backward_ns, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When each rank does what."""

    start_ns: tuple[tuple[int, ...], ...]
    """Per rank, per slot of its order."""
    end_ns: tuple[tuple[int, ...], ...]
    """Per rank, per slot of its order."""
    busy_ns: tuple[int, ...]
    """Per rank, the sum of its slots."""

    @property
    def makespan_ns(self) -> int:
        """From the start of the first slot to the end of the last."""
        return max((ends[-1] for ends in self.end_ns if ends), default=0)

    @property
    def idle_ns(self) -> tuple[int, ...]:
        """Per rank, the part of the makespan in which it has no work, before its first and after its last slot too."""
        return tuple(self.makespan_ns - busy for busy in self.busy_ns)


def makespan(schedule: PipelineSchedule, durations: Durations) -> Timing:
    """Time a schedule: each rank runs its slots in order, each as soon as it has what it needs.

    Takes time linear in the number of slots.

    Raises:
        UsageError: for an order that is incomplete or deadlocks (``check`` names the place), or durations of another
            number of virtual stages.
    """
    for times in (durations.forward_ns, durations.input_backward_ns, durations.weight_backward_ns):
        if len(times) != schedule.num_virtual_stages:
            raise UsageError(
                f"pipeline schedule {schedule.name!r}: times of {len(times)} virtual stages, expected"
                f" {schedule.num_virtual_stages}",
                hint="Give a time for each chunk of each rank.",
            )
    graph = slot_graph(schedule)
    found = walk(graph)
    if not found.is_complete(graph):
        raise UsageError(
            f"pipeline schedule {schedule.name!r}: the ranks wait for each other", hint="Check the schedule first."
        )
    by_work = {work: durations.of(work) for work in Work}
    works = [by_work[slot.work] for order in schedule.orders for slot in order]
    spent = [times[stage] for times, stage in zip(works, graph.virtual_stages, strict=True)]
    rank_of = [rank for rank, order in enumerate(schedule.orders) for _ in order]
    free = [0] * schedule.num_stages
    end = [0] * len(spent)
    for number in found.order:
        rank = rank_of[number]
        start = free[rank]
        for need in graph.needs[number]:
            arrival = end[need] if rank_of[need] == rank else end[need] + durations.transfer_ns
            if arrival > start:
                start = arrival
        end[number] = free[rank] = start + spent[number]
    begin = [stop - time for stop, time in zip(end, spent, strict=True)]
    spans = [slice(*span) for span in zip(graph.starts, graph.starts[1:], strict=False)]
    return Timing(
        start_ns=tuple(tuple(begin[span]) for span in spans),
        end_ns=tuple(tuple(end[span]) for span in spans),
        busy_ns=tuple(sum(spent[span]) for span in spans),
    )
