"""Pipelines that are asked for: what the search is to find for all stages together, one pipeline and microbatch count
at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tap_planner.errors import UsageError
from tap_planner.operators import ComputeKind, record_of
from tap_planner.plan import DEFAULT_SCHEDULE, PlanOptions
from tap_planner.schedule import SCHEDULES, PipelineSchedule, check, parse_order

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster, Mesh
    from tap_planner.graph import Graph
    from tap_planner.search import MicrobatchGraphs, Pipeline, SearchRequest

__all__ = [
    "LEAST_CHUNKS",
    "axes_beside",
    "check_pipeline",
    "counts_in_stages",
    "in_stages",
    "numbers_of_stages",
]

AUTO = "auto"
"""The search chooses."""
MAX_AXES = 2
"""Most axes of a stage's mesh where the number of stages is open."""
MAX_STAGES = 64
"""Most stages that are tried by themselves."""
MAX_ROUNDS = 64
"""Most microbatches for each stage that are tried by themselves."""
LIKELY = 8
"""Microbatches for each stage that are tried first."""
LEAST_CHUNKS = {"interleaved": 2, "zbv": 2}
"""Parts of the model on each stage that a schedule needs; 1 elsewhere."""
OFFERED = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zbv", 2))
"""Schedules and chunks among which ``auto`` chooses; fill-drain takes as long as 1f1b, and more memory."""


def check_pipeline(options: PlanOptions, cluster: Cluster, meshes: Sequence[Mesh]) -> None:
    """Refuse what pipelines do not go with.

    Raises:
        UsageError: names the option.
    """
    open_meshes = options.mesh is None and options.stages != 1
    if not open_meshes and not any(mesh.num_stages > 1 for mesh in meshes):
        if options.schedule != DEFAULT_SCHEDULE or options.chunks is not None:
            name = "--chunks" if options.schedule == DEFAULT_SCHEDULE else f"--schedule {options.schedule}"
            raise UsageError(
                f"{name}: there is one stage", hint="Name stages in --mesh, as pp=4,dp=2,tp=2, or add --stages auto."
            )
        return
    wrong = {
        "--mode infer": options.mode != "train",
        f"--objective {options.objective}": options.objective != "time",
        "--allow-idle": options.allow_idle,
        f"--target {options.target}": options.target is not None,
    }
    named = f"--stages {options.stages}" if open_meshes else "pp in --mesh"
    for name, given in wrong.items():
        if given:
            raise UsageError(f"{name} with pipeline stages ({named})", hint="Leave one of them out.")
    order = order_of(options)
    if order is not None:
        _check_order(order, options, meshes)
        return
    if options.schedule == AUTO:
        if options.chunks is not None and options.chunks not in {chunks for _, chunks in OFFERED}:
            raise UsageError(
                f"--chunks {options.chunks}: --schedule auto tries {_listed({chunks for _, chunks in OFFERED})}",
                hint="Name the schedule, as --schedule interleaved.",
            )
        return
    least = LEAST_CHUNKS.get(options.schedule, 1)
    chunks = least if options.chunks is None else options.chunks
    most = least if options.schedule != "interleaved" else chunks
    if not least <= chunks <= most:
        wanted = str(least) if options.schedule != "interleaved" else f"at least {least}"
        raise UsageError(f"--chunks {chunks}: --schedule {options.schedule} has {wanted}")


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


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
    stages = max(mesh.num_stages for mesh in meshes)
    asked = f"--mesh {options.mesh}" if options.mesh is not None else f"--stages {options.stages}"
    if order.name in (*SCHEDULES, AUTO):
        raise UsageError(
            f"--schedule: the order is called {order.name!r}, which is the name of another one",
            hint="Write another name into its file.",
        )
    if order.num_stages != stages:
        raise UsageError(
            f"--schedule: the order {order.name!r} is for {order.num_stages} stages, {asked} has {stages}",
            hint=f"Ask for {order.num_stages} stages, or write an order for {stages}.",
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


def numbers_of_stages(options: PlanOptions, num_devices: int, whole: Graph) -> tuple[int, ...]:
    """How many stages a mesh that is left open may have, ascending.

    Args:
        options: what is asked for.
        num_devices: of the cluster.
        whole: the model; every stage is to have a matrix product or the like.

    Raises:
        UsageError: the devices cannot be shared out among so many stages.
    """
    if options.stages == AUTO:
        order = order_of(options)
        if order is not None:
            return (1, order.num_stages) if num_devices % order.num_stages == 0 else (1,)
        products = sum(record_of(operator.signature).kind is ComputeKind.CONTRACTION for operator in whole.operators)
        most = min(num_devices, products, MAX_STAGES)
        return tuple(stages for stages in range(1, most + 1) if num_devices % stages == 0)
    if num_devices % options.stages:
        raise UsageError(
            f"--stages {options.stages}: {num_devices} devices cannot be shared out among so many stages",
            hint=f"Choose a divisor of {num_devices}.",
        )
    return (options.stages,)


def axes_beside(stages: int, options: PlanOptions) -> int:
    """Most axes of a mesh where the number of stages is open: there are many numbers, schedules and microbatch counts,
    and with a third axis many meshes for each."""
    return options.max_axes if stages == 1 else min(options.max_axes, MAX_AXES)


def in_stages(
    request: SearchRequest, options: PlanOptions, limit_bytes: Callable[[Cluster], int | None]
) -> tuple[SearchRequest, ...]:
    """A request; with pipeline stages, one for each pipeline and microbatch count: of times and bytes of all stages
    together.

    Args:
        request: on meshes of one number of stages.
        options: what is asked for.
        limit_bytes: the memory limit on the devices of a cluster.

    Raises:
        UsageError: no microbatch count suits the schedule that was asked for.
    """
    from tap_planner.search import stage_rooms

    stages = request.meshes[0].num_stages
    if stages == 1:
        return (request,)
    rooms = stage_rooms(request.cluster, stages, limit_bytes)
    whole = None if rooms is None else sum(rooms)
    return tuple(
        replace(request, pipeline=pipeline, microbatches=count, limit_bytes=whole)
        for pipeline, counts in _pipelines(request, options, stages)
        for count in counts
    )


def _pipelines(request: SearchRequest, options: PlanOptions, stages: int) -> Iterator[tuple[Pipeline, tuple[int, ...]]]:
    """Pipelines of so many stages with their microbatch counts; of several, those that cannot be are left out."""
    from tap_planner.search import Pipeline

    order = order_of(options)
    if order is not None:
        pipeline = Pipeline(num_stages=stages, schedule=options.schedule, num_chunks=order.num_chunks, order=order)
        yield pipeline, (_count_of(order, request, options),)
        return
    several = options.schedule == AUTO
    for schedule, chunks in OFFERED if several else ((options.schedule, LEAST_CHUNKS.get(options.schedule, 1)),):
        if several and options.chunks not in (None, chunks):
            continue
        pipeline = Pipeline(
            num_stages=stages, schedule=schedule, num_chunks=chunks if several else options.chunks or chunks
        )
        try:
            counts = _counts(request, options, schedule, stages)
        except UsageError:
            if not several and options.stages != AUTO:
                raise
            continue
        yield pipeline, counts


def _counts(request: SearchRequest, options: PlanOptions, schedule: str, stages: int) -> tuple[int, ...]:
    """Microbatch counts: that which was asked for, else those that suit the schedule."""
    if options.microbatches == "auto":
        return counts_in_stages(request.graphs, schedule, stages)
    if schedule == "interleaved" and options.microbatches % stages:
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
