"""What each slot of a schedule waits for, and an order in which slots can run."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from tap_planner.errors import UsageError
from tap_planner.schedule.pipeline import PipelineSchedule, Slot, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotGraph:
    """The slots of all ranks, numbered rank by rank in the order in which each rank runs them, with what they need.

    A forward needs the forward of the virtual stages that it reads: of the one before, unless the schedule says more. A
    backward (whole, or of inputs) needs the forward of its own virtual stage and the backward (whole, or of inputs) of
    those that read it. A backward of parameters needs that of
    inputs of its own. Besides, each slot follows the one before it on its rank.
    """

    starts: tuple[int, ...]
    """Per rank the number of its first slot; then the number of all slots."""
    needs: tuple[tuple[int, ...], ...]
    """Per slot the numbers of the slots that it needs, without the one before it on its rank."""
    virtual_stages: tuple[int, ...]
    """Per slot."""

    def number(self, rank: int, position: int) -> int:
        """The number of a rank's slot, by its position in the rank's order."""
        return self.starts[rank] + position

    def locate(self, number: int) -> tuple[int, int]:
        """The rank of a slot, and its position there."""
        rank = bisect_right(self.starts, number) - 1
        return rank, number - self.starts[rank]

    def dependencies(self, rank: int, position: int) -> tuple[tuple[int, int], ...]:
        """The slots that a slot needs, as (rank, position)."""
        return tuple(self.locate(need) for need in self.needs[self.number(rank, position)])


def slot_graph(schedule: PipelineSchedule) -> SlotGraph:
    """Number the slots of a schedule and find what each needs.

    Raises:
        UsageError: where a slot needs one that is in no order.
    """
    stages = [schedule.chunks_of(rank) for rank in range(schedule.num_stages)]
    forwards: dict[tuple[int, int], int] = {}
    gradients: dict[tuple[int, int], int] = {}
    virtual_stages: list[int] = []
    for rank, order in enumerate(schedule.orders):
        for slot in order:
            stage = stages[rank][slot.chunk]
            if slot.work is Work.FORWARD:
                forwards[stage, slot.microbatch] = len(virtual_stages)
            elif slot.work is not Work.WEIGHT_BACKWARD:
                gradients[stage, slot.microbatch] = len(virtual_stages)
            virtual_stages.append(stage)
    needs: list[tuple[int, ...]] = []
    readers: list[list[int]] = [[] for _ in range(schedule.num_virtual_stages)]
    for stage in range(schedule.num_virtual_stages):
        for source in schedule.sources(stage):
            readers[source].append(stage)
    for slot, stage in zip((slot for order in schedule.orders for slot in order), virtual_stages, strict=True):
        microbatch = slot.microbatch
        try:
            if slot.work is Work.FORWARD:
                needs.append(tuple(forwards[source, microbatch] for source in schedule.sources(stage)))
            elif slot.work is Work.WEIGHT_BACKWARD:
                needs.append((gradients[stage, microbatch],))
            else:
                later = (gradients[reader, microbatch] for reader in readers[stage])
                needs.append((forwards[stage, microbatch], *later))
        except KeyError:
            raise _missing(schedule, slot, stage) from None
    return SlotGraph(
        starts=tuple(accumulate((len(order) for order in schedule.orders), initial=0)),
        needs=tuple(needs),
        virtual_stages=tuple(virtual_stages),
    )


def _missing(schedule: PipelineSchedule, slot: Slot, stage: int) -> UsageError:
    rank, _ = schedule.rank_and_chunk(stage)
    return UsageError(
        f"pipeline schedule {schedule.name!r}: rank {rank}: {schedule.slot_text(slot)} needs a slot that is in no"
        " order",
        hint="Check the schedule: every chunk needs a forward and a backward of every microbatch.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """How far the ranks come when each runs its slots in order."""

    order: tuple[int, ...]
    """Numbers of the slots that run, each after all that it needs and after the one before it on its rank."""
    reached: tuple[int, ...]
    """Per rank the number of the first slot that never runs, or that after its last one."""

    def is_complete(self, graph: SlotGraph) -> bool:
        """Whether every slot runs."""
        return len(self.order) == len(graph.needs)


def walk(graph: SlotGraph) -> Walk:
    """Run every rank as far as it comes: sends never wait, receives wait for their send."""
    done = bytearray(len(graph.needs))
    reached = list(graph.starts[:-1])
    order: list[int] = []
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(reached) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        number = reached[rank]
        while number < graph.starts[rank + 1]:
            open_need = next((need for need in graph.needs[number] if not done[need]), None)
            if open_need is not None:
                waiting.setdefault(open_need, []).append(rank)
                break
            done[number] = 1
            order.append(number)
            ready.extend(waiting.pop(number, ()))
            number += 1
        reached[rank] = number
    return Walk(order=tuple(order), reached=tuple(reached))
