"""Whether the orders of a schedule are complete and can run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from tap_planner.errors import UsageError
from tap_planner.schedule.dependencies import SlotGraph, Walk, slot_graph, walk
from tap_planner.schedule.pipeline import ChunkOrder, PipelineSchedule, Slot, Work, check_counts


def check(schedule: PipelineSchedule) -> None:
    """Prove that a schedule computes everything once and that no rank waits for ever.

    Every rank has, of every microbatch and chunk, one forward and either one whole backward or one of inputs and one
    of parameters. And the ranks can run their orders to the end where a receive waits for its send and a send for
    nothing.

    Raises:
        UsageError: names the slot that is missing, doubled or unknown, or the ranks that wait for each other in a
            circle.
    """
    check_counts(
        schedule.name,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        num_chunks=schedule.num_chunks,
    )
    if schedule.places:
        _check_places(schedule)
    elif schedule.chunk_order is ChunkOrder.VEE and schedule.num_chunks != 2:
        _fail(schedule, f"{schedule.num_chunks} chunks per rank in a vee, expected 2", "Use 2 chunks, or interleave.")
    if schedule.reads:
        _check_reads(schedule)
    if len(schedule.orders) != schedule.num_stages:
        _fail(
            schedule,
            f"orders for {len(schedule.orders)} ranks, expected {schedule.num_stages}",
            "Give an order for each rank.",
        )
    for rank in range(schedule.num_stages):
        _check_rank(schedule, rank)
    graph = slot_graph(schedule)
    found = walk(graph)
    if not found.is_complete(graph):
        _fail(
            schedule,
            f"the ranks wait for each other: {'; '.join(_circle(schedule, graph, found))}",
            "Put one of these slots behind what it waits for.",
        )


def _fail(schedule: PipelineSchedule, problem: str, hint: str) -> NoReturn:
    raise UsageError(f"pipeline schedule {schedule.name!r}: {problem}", hint=hint)


def _check_places(schedule: PipelineSchedule) -> None:
    """Every chunk lies on a rank, and every rank has some."""
    for chunk, rank in enumerate(schedule.places):
        if not 0 <= rank < schedule.num_stages:
            _fail(
                schedule,
                f"chunk {chunk} lies on rank {rank}, expected 0 to {schedule.num_stages - 1}",
                "Correct the rank, or give it an order.",
            )
    empty = sorted(set(range(schedule.num_stages)) - set(schedule.places))
    if empty:
        _fail(schedule, f"no chunk lies on rank {empty[0]}", "Give it one, or leave the rank out.")
    most = max(len(schedule.chunks_of(rank)) for rank in range(schedule.num_stages))
    if schedule.num_chunks != most:
        _fail(schedule, f"num_chunks is {schedule.num_chunks}, expected {most} by the places", f"Say {most}.")


def _check_reads(schedule: PipelineSchedule) -> None:
    """It is said of every chunk what it reads, and that is made before."""
    if len(schedule.reads) != schedule.num_virtual_stages:
        _fail(
            schedule,
            f"what {len(schedule.reads)} chunks read, expected {schedule.num_virtual_stages}",
            "Say it of every chunk, or of none.",
        )
    for chunk, sources in enumerate(schedule.reads):
        if list(sources) != sorted({*sources} & {*range(chunk)}):
            expected = f"chunks 0 to {chunk - 1}, each once, ascending" if chunk else "nothing"
            read = ",".join(map(str, sources))
            _fail(schedule, f"chunk {chunk} reads {read}, expected {expected}", "Correct what it reads.")


def _check_rank(schedule: PipelineSchedule, rank: int) -> None:
    """A rank's slots, against what it has to do."""
    done: dict[Work, set[tuple[int, int]]] = {work: set() for work in Work}
    num_chunks = len(schedule.chunks_of(rank))
    for position, slot in enumerate(schedule.orders[rank]):
        key = (slot.microbatch, slot.chunk)
        if not (0 <= slot.microbatch < schedule.num_microbatches and 0 <= slot.chunk < num_chunks):
            _fail(
                schedule,
                f"rank {rank}: {schedule.slot_text(slot)} at position {position}, expected microbatches 0 to"
                f" {schedule.num_microbatches - 1} and chunks 0 to {num_chunks - 1}",
                "Take the slot out, or raise the number of microbatches or chunks.",
            )
        if key in done[slot.work]:
            _fail(schedule, f"rank {rank}: {schedule.slot_text(slot)} occurs twice", "Take one of the two out.")
        done[slot.work].add(key)
    whole, inputs, weights = (done[work] for work in (Work.BACKWARD, Work.INPUT_BACKWARD, Work.WEIGHT_BACKWARD))
    both = sorted(whole & (inputs | weights))
    if both:
        split = Slot(Work.INPUT_BACKWARD if both[0] in inputs else Work.WEIGHT_BACKWARD, *both[0])
        text = schedule.slot_text(Slot(Work.BACKWARD, *both[0]))
        _fail(
            schedule,
            f"rank {rank}: {text} and {schedule.slot_text(split)}, expected a whole backward or a split one",
            f"Take {text} or the split backward out.",
        )
    for key in _keys(schedule, num_chunks):
        if key not in done[Work.FORWARD]:
            _missing(schedule, rank, Slot(Work.FORWARD, *key), "")
        if key in whole or (key in inputs and key in weights):
            continue
        if key in inputs:
            _missing(schedule, rank, Slot(Work.WEIGHT_BACKWARD, *key), "")
        if key in weights:
            _missing(schedule, rank, Slot(Work.INPUT_BACKWARD, *key), "")
        split_text = " and ".join(
            schedule.slot_text(Slot(work, *key)) for work in (Work.INPUT_BACKWARD, Work.WEIGHT_BACKWARD)
        )
        _missing(schedule, rank, Slot(Work.BACKWARD, *key), f" (or {split_text})")


def _keys(schedule: PipelineSchedule, num_chunks: int) -> Iterator[tuple[int, int]]:
    """(microbatch, chunk) of everything a rank has to do; lazily, as a number in a file may be huge."""
    return ((microbatch, chunk) for microbatch in range(schedule.num_microbatches) for chunk in range(num_chunks))


def _missing(schedule: PipelineSchedule, rank: int, slot: Slot, instead: str) -> NoReturn:
    _fail(
        schedule,
        f"rank {rank}: {schedule.slot_text(slot)}{instead} is missing",
        f"Add it, or correct the number of microbatches ({schedule.num_microbatches}) or chunks per rank"
        f" ({len(schedule.chunks_of(rank))}).",
    )


def _circle(schedule: PipelineSchedule, graph: SlotGraph, found: Walk) -> list[str]:
    """Ranks that wait for each other, one clause each, from the lowest rank of the circle on."""
    done = bytearray(len(graph.needs))
    for number in found.order:
        done[number] = 1
    stuck = next(rank for rank, number in enumerate(found.reached) if number < graph.starts[rank + 1])
    path: dict[int, int] = {}
    while stuck not in path:
        path[stuck] = next(need for need in graph.needs[found.reached[stuck]] if not done[need])
        stuck = graph.locate(path[stuck])[0]
    circle = list(path)[list(path).index(stuck) :]
    first = circle.index(min(circle))
    return [_clause(schedule, graph, found, rank, path[rank]) for rank in (*circle[first:], *circle[:first])]


def _clause(schedule: PipelineSchedule, graph: SlotGraph, found: Walk, rank: int, need: int) -> str:
    def text(number: int) -> str:
        at_rank, position = graph.locate(number)
        return schedule.slot_text(schedule.orders[at_rank][position])

    maker = graph.locate(need)[0]
    clause = f"rank {rank} at {text(found.reached[rank])} waits for {text(need)}"
    if maker == rank:
        return f"{clause}, which comes later in its own order"
    before = found.reached[maker]
    return f"{clause} of rank {maker}" + (f", which comes after {text(before)} there" if before != need else "")
