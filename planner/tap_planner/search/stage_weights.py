"""How much the times of unlike stages count where all of them are searched together.

A makespan is at least what ``Pipeline.passes`` says of every stage, and what is done at the end of the step takes as
long as on the slowest stage. So a step takes at least any mean of these. Here stages count so that it is nearly the
same on which of them something lies: then the mean is near a step whose stages are well cut. For stages that are alike
it is the bound that is used for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tap_planner.cluster import Cluster, Device, alike_stages, slowest_device, stage_kinds
from tap_planner.cost import StageShare
from tap_planner.graph import Graph
from tap_planner.search.capacity import least_on
from tap_planner.search.configuration import Pipeline

__all__ = ["stage_shares"]

_STEPS = 1 << 20
"""Shares are cut off to so many parts of a whole: they need not be exact, but must not add up to more than it."""


def stage_shares(
    graph: Graph, cluster: Cluster, precision: str, pipeline: Pipeline, microbatches: int
) -> tuple[StageShare, ...]:
    """What stages of unlike devices count, of those that are alike the one that counts least; none where all are alike.

    Args:
        graph: bound with the global batch.
        cluster: the devices; the pipeline uses all of them.
        precision: what floats are cast to.
        pipeline: the stages.
        microbatches: their number.
    """
    stages = pipeline.num_stages
    of_stages = [tuple(cluster.devices[kind] for kind in kinds) for kinds in stage_kinds(cluster, stages)]
    alike = alike_stages(cluster, stages)
    if len(set(alike)) == 1:
        return ()
    times = _times(graph, of_stages, precision, cluster.num_devices // stages)
    parts, once = _even(times, pipeline, microbatches), _even(times)
    passes = pipeline.passes(microbatches)
    found: dict[int, StageShare] = {}
    for stage, part in enumerate(parts):
        forward, backward = pipeline.stage_passes(stage, part, microbatches)
        of_forward, of_backward = stages * forward / passes.forward, stages * backward / passes.backward
        share = StageShare(
            stage=alike[stage],
            devices=of_stages[stage],
            repeated=min(of_forward, of_backward),  # what runs again, and what is sent, is done in both
            backward=of_backward,
            once=stages * once[stage],
        )
        found[share.stage] = min(found.get(share.stage, share), share, key=lambda one: one.repeated)
    return tuple(found.values())


def _times(graph: Graph, of_stages: Sequence[tuple[Device, ...]], precision: str, devices: int) -> list[int]:
    """Per stage what it would take for everything."""
    known = {
        kinds: max(sum(least_on(graph, slowest_device(kinds), kinds, precision, devices)), 1)
        for kinds in dict.fromkeys(of_stages)
    }
    return [known[kinds] for kinds in of_stages]


def _even(times: Sequence[int], pipeline: Pipeline | None = None, microbatches: int = 1) -> list[Fraction]:
    """Per stage how much it counts, so that its part of the mean is the same for all; together a whole at most.

    A backward on a stage counts a + k x with the part x of the stage (``Pipeline.stage_passes``): (a + k x) t is to be
    the same for all of them, or x is 0 where that is too large already.

    Args:
        times: per stage what it would take for everything.
        pipeline: says a and k; None: a = 0 and k = 1.
        microbatches: their number.
    """
    if pipeline is None:
        least, slope = Fraction(0), Fraction(1)
    else:
        (_, least), (_, most) = (pipeline.stage_passes(0, Fraction(part), microbatches) for part in (0, 1))
        slope = most - least
    if not slope:
        return [Fraction(0)] * len(times)
    counted = list(times)
    while True:
        whole = (slope + least * len(counted)) / sum(Fraction(1, time) for time in counted)
        kept = [time for time in counted if whole > least * time]
        if len(kept) == len(counted):
            return [_cut_off(max((whole / time - least) / slope, Fraction(0))) for time in times]
        counted = kept


def _cut_off(share: Fraction) -> Fraction:
    return Fraction(share.numerator * _STEPS // share.denominator, _STEPS)
