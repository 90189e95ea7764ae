"""Bubbles and activations of the schedules as formulas, for stages of equal times and transfers that take none."""

from __future__ import annotations

from tap_planner.errors import UsageError
from tap_planner.schedule.activations import InFlight
from tap_planner.schedule.named import check_name
from tap_planner.schedule.orders import FILL_DRAIN, INTERLEAVED
from tap_planner.schedule.zero_bubble import ZB_H1, ZBV


def bubble_ns(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    forward_ns: int,
    input_backward_ns: int,
    weight_backward_ns: int,
) -> int:
    """Makespan less the work of a rank, where all virtual stages take the same times.

    With F, B and W the three times of one virtual stage (a rank's times divided by its chunks):

    - ``fill-drain``, ``1f1b``: (p-1) (F+B+W), for every m (Narayanan et al. 2021, "Efficient Large-Scale Language Model
      Training on GPU Clusters Using Megatron-LM", section 2.2.1).
    - ``interleaved``: (p-1) (F+B+W), for every m that is a multiple of p. As a virtual stage takes 1/v of a rank's
      times, this is 1/v of the above (the same, section 2.2.2).
    - ``zb-h1``: (p-1) (F+B-W) (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", table 2), which holds for m >= p
      and W <= min(F, B). For every m and all times it is (p-1) (F+B) - (min(m, p) - 1) min(F, B, W), by this order.
    - ``zbv``: (p-1) F, the last rank's wait for its first forward and no bubble besides (Qi et al. 2024, "Pipeline
      Parallelism with Controllable Memory", section 3.2), which holds for F = B = W and 2m >= 3p-1. With fewer
      microbatches (3 (p-1) - 2 (m-1)) F come on top. With unequal times F <= B, for m >= 2p-1, it is (p-1) B +
      (p-2) max(W-B, 0) + (p-1) max(B-2W, 0): in no paper, but so for this order.

    Args:
        name: one of ``SCHEDULES``.
        num_stages: p, ranks of the pipeline.
        num_microbatches: m.
        forward_ns: F.
        input_backward_ns: B, of the gradients of inputs alone.
        weight_backward_ns: W, of the gradients of parameters alone; a whole backward takes B + W.

    Raises:
        UsageError: for an unknown name, or for ``zbv`` outside its conditions: ``makespan`` times it.
    """
    check_name(name)
    f, b, w = forward_ns, input_backward_ns, weight_backward_ns
    gaps = num_stages - 1
    if name == ZB_H1:
        return gaps * (f + b) - (min(num_microbatches, num_stages) - 1) * min(f, b, w)
    if name != ZBV:
        return gaps * (f + b + w)
    if num_stages == 1:
        return 0
    if f == b == w:
        return gaps * f + max(3 * gaps - 2 * (num_microbatches - 1), 0) * f
    if f <= b and num_microbatches >= 2 * num_stages - 1:
        return gaps * b + (gaps - 1) * max(w - b, 0) + gaps * max(b - 2 * w, 0)
    raise UsageError(
        f"pipeline schedule {ZBV!r}: no formula for the bubble of {num_microbatches} microbatches on {num_stages} ranks"
        f" with forward_ns {f}, input_backward_ns {b} and weight_backward_ns {w}, expected equal times, or"
        f" at least {2 * num_stages - 1} microbatches and a forward no longer than the backward of inputs",
        hint="Time the schedule instead (makespan).",
    )


def in_flight(name: str, num_stages: int, num_microbatches: int, num_chunks: int, rank: int) -> InFlight:
    """``peak_in_flight`` of a rank, as a formula; times do not matter for it.

    In microbatches of a chunk, of which a rank's whole microbatch has v:

    - ``fill-drain``: m (Huang et al. 2019, "GPipe", section 2.3).
    - ``1f1b``: min(p - rank, m) (Narayanan et al. 2021, as above, section 2.2.1).
    - ``interleaved``: 2 (p - 1 - rank) + (v - 1) p + 1, at most m v (warm-up of Megatron-LM and one more).
    - ``zb-h1``: until the backward of inputs as 1F1B, min(p - rank, m); until that of parameters min(p, m) on every
      rank (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.1: as the first rank of 1F1B).
    - ``zbv``: both min(2p, 2m, m + rank + 1); with m >= 2p-1 2p on every rank, in memory p of a rank's microbatches,
      as the first rank of 1F1B (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3.2).

    Args:
        name: one of ``SCHEDULES``.
        num_stages: p, ranks of the pipeline.
        num_microbatches: m.
        num_chunks: v.
        rank: of the pipeline, from 0.

    Raises:
        UsageError: for an unknown name.
    """
    check_name(name)
    m, below = num_microbatches, num_stages - rank
    if name == ZB_H1:
        return InFlight(until_input_backward=min(below, m), until_weight_backward=min(num_stages, m))
    if name == ZBV:
        count = min(2 * num_stages, 2 * m, m + rank + 1)
    elif name == FILL_DRAIN:
        count = m
    elif name == INTERLEAVED:
        count = min(2 * (below - 1) + (num_chunks - 1) * num_stages + 1, m * num_chunks)
    else:
        count = min(below, m)
    return InFlight(until_input_backward=count, until_weight_backward=count)
