"""The orders of whole backward passes: fill-drain, 1F1B and interleaved 1F1B."""

from __future__ import annotations

from tap_planner.errors import UsageError
from tap_planner.schedule.pipeline import PipelineSchedule, Slot, Work, check_counts

FILL_DRAIN = "fill-drain"
ONE_FORWARD_ONE_BACKWARD = "1f1b"
INTERLEAVED = "interleaved"


def fill_drain(num_stages: int, num_microbatches: int) -> PipelineSchedule:
    """All forward passes, then all backward passes, the first microbatch first in both.

    Source: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    section 2.3. (Where GPipe runs backward from the last microbatch on, the times are the same.)

    Args:
        num_stages: p, ranks of the pipeline.
        num_microbatches: m.
    """
    check_counts(FILL_DRAIN, num_stages=num_stages, num_microbatches=num_microbatches)
    order = tuple(Slot(work, i) for work in (Work.FORWARD, Work.BACKWARD) for i in range(num_microbatches))
    return PipelineSchedule(
        name=FILL_DRAIN, num_stages=num_stages, num_microbatches=num_microbatches, orders=(order,) * num_stages
    )


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> PipelineSchedule:
    """As few forward passes as fill the pipeline, then by turns one forward and one backward.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    section 2.2.1 (there PipeDream-Flush).

    Args:
        num_stages: p, ranks of the pipeline.
        num_microbatches: m.
    """
    check_counts(ONE_FORWARD_ONE_BACKWARD, num_stages=num_stages, num_microbatches=num_microbatches)
    forwards = tuple(Slot(Work.FORWARD, i) for i in range(num_microbatches))
    backwards = tuple(Slot(Work.BACKWARD, i) for i in range(num_microbatches))
    return PipelineSchedule(
        name=ONE_FORWARD_ONE_BACKWARD,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        orders=tuple(_by_turns(forwards, backwards, num_stages - 1 - rank) for rank in range(num_stages)),
    )


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> PipelineSchedule:
    """1F1B with several chunks of the model per rank: groups of p microbatches go through one chunk after the other.

    Source: Narayanan et al. 2021 (as above), section 2.2.2 and figure 4; the count of forward passes before the first
    backward, 2 (p - 1 - rank) + (v - 1) p, is Megatron-LM's (``get_pp_rank_microbatches`` in
    ``megatron/core/pipeline_parallel/schedules.py``).

    Args:
        num_stages: p, ranks of the pipeline.
        num_microbatches: m, a multiple of p.
        num_chunks: v, 2 or more.

    Raises:
        UsageError: for a count that does not fit.
    """
    check_counts(INTERLEAVED, num_stages=num_stages, num_microbatches=num_microbatches)
    if num_chunks < 2:
        raise UsageError(
            f"pipeline schedule {INTERLEAVED!r}: num_chunks is {num_chunks}, expected at least 2",
            hint=f"Give each rank 2 or more chunks, or use {ONE_FORWARD_ONE_BACKWARD!r}.",
        )
    if num_microbatches % num_stages:
        above = -(-num_microbatches // num_stages) * num_stages
        raise UsageError(
            f"pipeline schedule {INTERLEAVED!r}: num_microbatches is {num_microbatches}, expected a multiple of the"
            f" {num_stages} pipeline ranks",
            hint=f"Choose {above} microbatches, or use {ONE_FORWARD_ONE_BACKWARD!r}.",
        )
    turns = [
        (group + offset, chunk)
        for group in range(0, num_microbatches, num_stages)
        for chunk in range(num_chunks)
        for offset in range(num_stages)
    ]
    forwards = tuple(Slot(Work.FORWARD, microbatch, chunk) for microbatch, chunk in turns)
    backwards = tuple(Slot(Work.BACKWARD, microbatch, num_chunks - 1 - chunk) for microbatch, chunk in turns)
    return PipelineSchedule(
        name=INTERLEAVED,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        orders=tuple(
            _by_turns(forwards, backwards, 2 * (num_stages - 1 - rank) + (num_chunks - 1) * num_stages)
            for rank in range(num_stages)
        ),
    )


def _by_turns(forwards: tuple[Slot, ...], backwards: tuple[Slot, ...], num_warmup: int) -> tuple[Slot, ...]:
    """Forward passes for the warm-up, forward and backward by turns, and the backward passes that are left."""
    num_warmup = min(num_warmup, len(forwards))
    order = list(forwards[:num_warmup])
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        order += (forward, backward)
    order += backwards[len(forwards) - num_warmup :]
    return tuple(order)
