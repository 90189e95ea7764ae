"""The orders that split the backward pass: the gradients of the parameters fill what would be bubbles."""

from __future__ import annotations

from tap_planner.schedule.pipeline import ChunkOrder, PipelineSchedule, Slot, Work, check_counts

ZB_H1 = "zb-h1"
ZBV = "zbv"

F, I, W = Work.FORWARD, Work.INPUT_BACKWARD, Work.WEIGHT_BACKWARD  # noqa: E741


def zb_h1(num_stages: int, num_microbatches: int) -> PipelineSchedule:
    """1F1B in which rank r computes the gradients of parameters r microbatches late.

    So every rank has the same number of microbatches in flight as the first one has under 1F1B, and after its last
    forward it has r gradients of parameters left to fill the gaps between the last gradients of inputs.

    Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (ICLR), section 2.1 and figure 3.

    Args:
        num_stages: p, ranks of the pipeline.
        num_microbatches: m.
    """
    check_counts(ZB_H1, num_stages=num_stages, num_microbatches=num_microbatches)
    return PipelineSchedule(
        name=ZB_H1,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        orders=tuple(_h1_order(num_stages, num_microbatches, rank) for rank in range(num_stages)),
    )


def _h1_order(num_stages: int, num_microbatches: int, rank: int) -> tuple[Slot, ...]:
    slots = _Slots(num_microbatches)
    num_warmup = min(num_stages - 1 - rank, num_microbatches)
    slots.add(num_warmup, (F, 0))
    for microbatch in range(num_microbatches):
        slots.add(1 if microbatch < num_microbatches - num_warmup else 0, (F, 0))
        slots.add(1, (I, 0))
        slots.add(1 if microbatch >= rank else 0, (W, 0))
    slots.add(min(rank, num_microbatches), (W, 0))
    return tuple(slots.order)


def zbv(num_stages: int, num_microbatches: int) -> PipelineSchedule:
    """Two chunks per rank in the shape of a V, the backward split: no bubble between a rank's first and last slot.

    The first rank holds both ends of the model, so its first backward comes as soon as a forward has gone down and up.
    Until then rank r runs 2 (p - r) - 1 forwards on the way down, r pairs of up and down, and p - r times all work of
    a microbatch on the way up. Then both chunks take turns, each with a forward and the two parts of a backward.
    Last, gradients of inputs pass by each other, and gradients of parameters fill the gaps.

    With fewer than 2 p - 1 microbatches it is the order of 2 p - 1 with the others left out.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (NeurIPS), section 3.2 (there V-ZB); ZB-V in
    section 6 of arXiv 2401.10241.

    Args:
        num_stages: p, ranks of the pipeline.
        num_microbatches: m.
    """
    check_counts(ZBV, num_stages=num_stages, num_microbatches=num_microbatches)
    return PipelineSchedule(
        name=ZBV,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=2,
        chunk_order=ChunkOrder.VEE,
        orders=tuple(_vee_order(num_stages, num_microbatches, rank) for rank in range(num_stages)),
    )


def _vee_order(num_stages: int, num_microbatches: int, rank: int) -> tuple[Slot, ...]:
    """The order of a rank; chunk 0 is the one on the way down, chunk 1 the one on the way up."""
    slots = _Slots(num_microbatches)
    below = num_stages - rank
    num_steady = max(num_microbatches - (2 * num_stages - 1), 0) + rank
    up = ((F, 1), (I, 1), (W, 1))
    slots.add(2 * below - 1, (F, 0))
    slots.add(rank, (F, 1), (F, 0))
    slots.add(below, *up)
    slots.add(num_steady, (F, 0), (I, 0), (W, 0), *up)
    slots.add(below - 1, (I, 0), (W, 0), *up)
    slots.add(rank, (I, 0), (I, 1))
    slots.add(below, (I, 0), (W, 0))
    slots.add(rank, (W, 1))
    slots.add(rank, (W, 0))
    return tuple(slots.order)


class _Slots:
    """An order that grows: each kind of work of each chunk takes the microbatches in turn."""

    def __init__(self, num_microbatches: int) -> None:
        self.order: list[Slot] = []
        self._num_microbatches = num_microbatches
        self._following: dict[tuple[Work, int], int] = {}

    def add(self, times: int, *works: tuple[Work, int]) -> None:
        """Append (work, chunk), one after the other, several times; microbatches beyond the last are left out."""
        for _ in range(times):
            for work, chunk in works:
                microbatch = self._following.get((work, chunk), 0)
                self._following[work, chunk] = microbatch + 1
                if microbatch < self._num_microbatches:
                    self.order.append(Slot(work, microbatch, chunk))
