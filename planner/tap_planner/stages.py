"""Pipelines that were asked for: what the search is to find for all stages together, one microbatch count at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tap_planner.errors import UsageError
from tap_planner.plan import DEFAULT_SCHEDULE, PlanOptions
from tap_planner.schedule import SCHEDULES, PipelineSchedule, check, parse_order

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster, Mesh
    from tap_planner.search import MicrobatchGraphs, SearchRequest

__all__ = ["LEAST_CHUNKS", "check_pipeline", "counts_in_stages", "in_stages"]

MAX_ROUNDS = 64
"""Most microbatches for each stage that are tried by themselves."""
LIKELY = 8
"""Microbatches for each stage that are tried first."""
LEAST_CHUNKS = {"interleaved": 2, "zbv": 2}
"""Parts of the model on each stage that a schedule needs; 1 elsewhere."""


def check_pipeline(options: PlanOptions, cluster: Cluster, meshes: Sequence[Mesh]) -> None:
    """Refuse what pipelines do not go with.

    Raises:
        UsageError: names the option.
    """
    if not any(mesh.num_stages > 1 for mesh in meshes):
        if options.schedule != DEFAULT_SCHEDULE or options.chunks is not None:
            name = "--chunks" if options.schedule == DEFAULT_SCHEDULE else f"--schedule {options.schedule}"
            raise UsageError(f"{name}: there is one stage", hint="Name stages in --mesh, as pp=4,dp=2,tp=2.")
        return
    wrong = {
        "--mode infer": options.mode != "train",
        f"--objective {options.objective}": options.objective != "time",
        "--allow-idle": options.allow_idle,
        f"--target {options.target}": options.target is not None,
        "unlike nodes": bool(cluster.node_groups),
    }
    for name, given in wrong.items():
        if given:
            raise UsageError(f"{name} with pipeline stages (pp in --mesh)", hint="Leave one of them out.")
    order = order_of(options)
    if order is not None:
        _check_order(order, options, meshes)
        return
    least = LEAST_CHUNKS.get(options.schedule, 1)
    chunks = least if options.chunks is None else options.chunks
    most = least if options.schedule != "interleaved" else chunks
    if not least <= chunks <= most:
        wanted = str(least) if options.schedule != "interleaved" else f"at least {least}"
        raise UsageError(f"--chunks {chunks}: --schedule {options.schedule} has {wanted}")


def order_of(options: PlanOptions) -> PipelineSchedule | None:
    """The order of the user's own, if there is one.

    Raises:
        UsageError: it cannot be understood, or cannot run.
    """
    if not options.order:
        return None
    found = parse_order("\n".join(options.order), f"--schedule {options.schedule}")
    check(found)
    return found


def _check_order(order: PipelineSchedule, options: PlanOptions, meshes: Sequence[Mesh]) -> None:
    """Refuse an order that is for another number of stages or chunks, or that takes the name of a known one."""
    stages = meshes[0].num_stages
    if order.name in SCHEDULES:
        raise UsageError(
            f"--schedule: the order is called {order.name!r}, which is the name of another one",
            hint="Write another name into its file.",
        )
    if order.num_stages != stages:
        raise UsageError(
            f"--schedule: the order {order.name!r} is for {order.num_stages} stages, "
            f"--mesh {options.mesh} has {stages}",
            hint=f"Name pp={order.num_stages} in --mesh, or write an order for {stages}.",
        )
    if options.chunks not in (None, order.num_chunks):
        raise UsageError(
            f"--chunks {options.chunks}: the order {order.name!r} has {order.num_chunks}", hint="Leave --chunks out."
        )


def _count_of(order: PipelineSchedule, request: SearchRequest, options: PlanOptions) -> int:
    """How many microbatches an order has; refuse others, and a batch that they do not divide."""
    count = order.num_microbatches
    if options.microbatches not in ("auto", count):
        raise UsageError(
            f"--microbatches {options.microbatches}: the order {order.name!r} has {count}",
            hint="Leave --microbatches out.",
        )
    fixed = request.graphs.batch(1).obstacles or request.folded(1).graph.is_batch_fixed
    if request.batch % count or (count > 1 and fixed):
        raise UsageError(
            f"--schedule: a batch of {request.batch} cannot be cut in the {count} microbatches of the order "
            f"{order.name!r}",
            hint="Choose another --batch, or write an order for another number.",
        )
    return count


def in_stages(request: SearchRequest, options: PlanOptions) -> tuple[SearchRequest, ...]:
    """A request; with pipeline stages, one for each microbatch count: of times and bytes of all stages together.

    Raises:
        UsageError: no microbatch count suits the schedule.
    """
    from tap_planner.search import Pipeline

    stages = request.meshes[0].num_stages
    if stages == 1:
        return (request,)
    order = order_of(options)
    if order is None:
        chunks, counts = options.chunks or LEAST_CHUNKS.get(options.schedule, 1), _counts(request, options, stages)
    else:
        chunks, counts = order.num_chunks, (_count_of(order, request, options),)
    pipeline = Pipeline(num_stages=stages, schedule=options.schedule, num_chunks=chunks, order=order)
    whole = None if request.limit_bytes is None else request.limit_bytes * stages
    return tuple(replace(request, pipeline=pipeline, microbatches=count, limit_bytes=whole) for count in counts)


def _counts(request: SearchRequest, options: PlanOptions, stages: int) -> tuple[int, ...]:
    """Microbatch counts: that which was asked for, else those that suit the schedule."""
    if options.microbatches == "auto":
        return counts_in_stages(request.graphs, options.schedule, stages)
    if options.schedule == "interleaved" and options.microbatches % stages:
        raise UsageError(
            f"--microbatches {options.microbatches}: --schedule interleaved wants a multiple of {stages} stages",
            hint=f"Choose a multiple of {stages}, or --schedule 1f1b.",
        )
    return (options.microbatches,)


def counts_in_stages(graphs: MicrobatchGraphs, schedule: str, stages: int) -> tuple[int, ...]:
    """Microbatch counts that fill a pipeline, whole rounds of its stages, the likely ones first.

    Raises:
        UsageError: the batch cannot be cut so.
    """
    whole = graphs.folded(1).graph
    if graphs.batch(1).obstacles or whole.is_batch_fixed:
        found = (1,)
    else:
        most = min(whole.batch, MAX_ROUNDS * stages)
        found = tuple(k for k in range(stages, most + 1, stages) if whole.batch % k == 0 and _is_round(k // stages))
        found = tuple(
            sorted(found, key=lambda count: (max(count, LIKELY * stages) / min(count, LIKELY * stages), count))
        )
    if not found or (schedule == "interleaved" and found[0] % stages):
        raise UsageError(
            f"a batch of {whole.batch} cannot be cut in a multiple of {stages} microbatches",
            hint="Choose --microbatches, --batch, or fewer stages.",
        )
    return found


def _is_round(number: int) -> bool:
    """Whether a number is a power of two, or three times one."""
    while number % 2 == 0:
        number //= 2
    return number in (1, 3)
