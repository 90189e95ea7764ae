"""A schedule as a picture of letters, one line per rank."""

from __future__ import annotations

from tap_planner.schedule.pipeline import PipelineSchedule, Slot
from tap_planner.schedule.timing import Durations, makespan


def picture(schedule: PipelineSchedule) -> str:
    """What each rank does when, if F, I and W take one unit each and a whole backward two.

    A unit is one cell; ``=`` goes on with the slot before, ``.`` is idle. With two chunks per rank the letters of the
    second are small.
    """
    units = Durations.uniform(schedule.num_virtual_stages, forward_ns=1, input_backward_ns=1, weight_backward_ns=1)
    timing = makespan(schedule, units)
    width = max(len(_label(schedule, slot)) for order in schedule.orders for slot in order)
    lines: list[str] = []
    for rank, order in enumerate(schedule.orders):
        cells = ["." * width] * timing.makespan_ns
        for slot, start, end in zip(order, timing.start_ns[rank], timing.end_ns[rank], strict=True):
            cells[start:end] = [_label(schedule, slot).ljust(width), *["=" * width] * (end - start - 1)]
        lines.append(f"rank {rank} |{''.join(cells)}|")
    return "\n".join(lines)


def _label(schedule: PipelineSchedule, slot: Slot) -> str:
    if schedule.num_chunks != 2:
        return schedule.slot_text(slot)
    letter = slot.work.value
    return f"{letter.lower() if slot.chunk else letter}{slot.microbatch}"
