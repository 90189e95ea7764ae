"""Pipeline schedules for tests, and what their definition says of them, slot by slot."""

from __future__ import annotations

import itertools
import random

from tap_planner.schedule import ChunkOrder, Durations, PipelineSchedule, Slot, Work, make_schedule

F, B, I, W = Work.FORWARD, Work.BACKWARD, Work.INPUT_BACKWARD, Work.WEIGHT_BACKWARD  # noqa: E741

KINDS = (("fill-drain", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2))
"""Names with a number of chunks per rank."""


def schedules(ranks: range, microbatches: range) -> list[PipelineSchedule]:
    """All schedules of these sizes."""
    return [
        make_schedule(name, p, m, v)
        for (name, v), p, m in itertools.product(KINDS, ranks, microbatches)
        if name != "interleaved" or m % p == 0
    ]


def slots(text: str) -> tuple[Slot, ...]:
    """Slots from letters with a microbatch and maybe a chunk."""
    found: list[Slot] = []
    for word in text.split():
        microbatch, _, chunk = word[1:].partition(".")
        found.append(Slot(Work(word[0]), int(microbatch), int(chunk or 0)))
    return tuple(found)


def schedule_of(*orders: str, m: int, v: int = 1, chunk_order: ChunkOrder = ChunkOrder.INTERLEAVED) -> PipelineSchedule:
    """A schedule from the orders of its ranks."""
    return PipelineSchedule(
        name="mine",
        num_stages=len(orders),
        num_microbatches=m,
        num_chunks=v,
        chunk_order=chunk_order,
        orders=tuple(map(slots, orders)),
    )


Key = tuple[Work, int, int]
"""Work, microbatch, virtual stage."""


def stage_of(schedule: PipelineSchedule, rank: int, chunk: int) -> int:
    """The virtual stage, by walking through the model and seeing which ranks it comes by."""
    p, v = schedule.num_stages, schedule.num_chunks
    down = list(range(p))
    visited = [*down, *reversed(down)] if schedule.chunk_order is ChunkOrder.VEE else down * v
    if schedule.places:
        visited = list(schedule.places)
    return [stage for stage, visitor in enumerate(visited) if visitor == rank][chunk]


def keys(schedule: PipelineSchedule) -> list[list[Key]]:
    """Per rank its slots by virtual stage."""
    return [
        [(slot.work, slot.microbatch, stage_of(schedule, rank, slot.chunk)) for slot in order]
        for rank, order in enumerate(schedule.orders)
    ]


def needed(key: Key, schedule: PipelineSchedule, everything: set[Key]) -> list[Key]:
    """What a slot waits for, from the definition of forward and backward."""
    work, i, stage = key
    chunks = range(schedule.num_virtual_stages)
    pairs = [(source, reader) for reader in chunks for source in schedule.reads[reader]] if schedule.reads else None
    if pairs is None:
        pairs = list(itertools.pairwise(chunks))
    if work is F:
        return [(F, i, source) for source, reader in pairs if reader == stage]
    if work is W:
        return [(I, i, stage)]
    readers = [reader for source, reader in pairs if source == stage]
    return [(F, i, stage), *((kind, i, r) for r in readers for kind in (B, I) if (kind, i, r) in everything)]


def random_schedule(seed: int, *, chain: bool = False) -> PipelineSchedule:
    """An order that can run, as it is drawn by running: any slot that is ready comes next on its rank; ``chain``: every
    chunk reads of the one before it."""
    draw = random.Random(seed)
    vee = draw.random() < 0.3
    p, m, v = draw.randint(1, 4), draw.randint(1, 4), 2 if vee else draw.randint(1, 3)
    places: tuple[int, ...] = ()
    if draw.random() < 0.4:  # anywhere, of some ranks more than of others
        drawn = [*range(p), *draw.choices(range(p), k=draw.randint(0, 2 * p))]
        places = tuple(draw.sample(drawn, k=len(drawn)))
        v, vee = max(map(places.count, places)), False
    chunks = range(len(places) or p * v)
    reads: tuple[tuple[int, ...], ...] = ()
    if not chain and draw.random() < 0.5:  # some wait for several, some for none
        reads = tuple(tuple(sorted(draw.sample(range(chunk), k=min(chunk, draw.randint(0, 2))))) for chunk in chunks)
    empty = PipelineSchedule(
        name="random",
        num_stages=p,
        num_microbatches=m,
        num_chunks=v,
        chunk_order=ChunkOrder.VEE if vee else ChunkOrder.INTERLEAVED,
        places=places,
        reads=reads,
        orders=(),
    )
    everything: set[Key] = set()
    place: dict[Key, tuple[int, int]] = {}
    for rank, chunk, i in itertools.product(range(p), range(v), range(m)):
        if places and chunk >= places.count(rank):
            continue
        works = (F, B) if draw.random() < 0.5 else (F, I, W)
        for work in works:
            key = (work, i, stage_of(empty, rank, chunk))
            everything.add(key)
            place[key] = (rank, chunk)
    orders: list[list[Slot]] = [[] for _ in range(p)]
    done: set[Key] = set()
    left = sorted(everything, key=lambda key: (key[0].value, *key[1:]))
    while left:
        key = draw.choice([key for key in left if done.issuperset(needed(key, empty, everything))])
        left.remove(key)
        done.add(key)
        rank, chunk = place[key]
        orders[rank].append(Slot(key[0], key[1], chunk))
    return PipelineSchedule(
        name="random",
        num_stages=p,
        num_microbatches=m,
        num_chunks=v,
        chunk_order=empty.chunk_order,
        places=places,
        reads=reads,
        orders=tuple(map(tuple, orders)),
    )


def random_durations(schedule: PipelineSchedule, seed: int) -> Durations:
    """Other times for every virtual stage."""
    draw = random.Random(seed)

    def times() -> tuple[int, ...]:
        return tuple(draw.randint(1, 30) for _ in range(schedule.num_virtual_stages))

    return Durations(
        forward_ns=times(), input_backward_ns=times(), weight_backward_ns=times(), transfer_ns=draw.randint(0, 9)
    )
