"""A placement -> the plan that runs it: devices are stages, and work on chunks of the graph as they were played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tap_planner.device_placement.building import Built
from tap_planner.device_placement.timeline import play
from tap_planner.graph import Graph, reordered
from tap_planner.operators import ComputeKind, record_of
from tap_planner.plan import Decisions, cut_decisions, unsplit_decisions
from tap_planner.schedule import PipelineSchedule, Slot, Work

__all__ = ["PlacedPlan", "placed_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPlan:
    """A plan of device placement."""

    graph: Graph
    """In the order in which operators were played, with transfers."""
    decisions: Decisions
    """Without a pipeline where one device does everything."""
    devices: tuple[int, ...]
    """Per stage, its device; devices that have nothing to do are left out."""


@dataclass(slots=True, kw_only=True)
class _Chunk:
    """Operators that a device runs one after the other, without waiting for another one or being waited for."""

    device: int
    operators: list[int] = field(default_factory=list)
    is_closed: bool = False
    """Whether another device reads what its last operator makes."""


def placed_plan(
    graph: Graph,
    built: Built,
    placement: Sequence[int],
    priority: Sequence[int],
    *,
    precision: str,
    optimizer: str = "adamw",
    optimizer_states: str = "fp32",
    loss_output: str = "",
    name: str = "placed",
) -> PlacedPlan:
    """Play a placement and write it as a pipeline of one microbatch.

    A tensor goes once to every device that reads it: the first chunk there receives it, and later ones take it from
    that. A chunk begins where an operator reads what another device has made, and ends behind one whose result another
    device reads; so nothing is sent later than it is made, nor waited for earlier than it is read, forward and
    backward. A chunk ends also where its device did something else between the backwards of two of its operators. A
    device runs its chunks forward in the order in which they were played, then backward in the order in which these
    were, as far as every chunk comes after those that read it.

    Args:
        graph: bound with the whole batch.
        built: what was placed of it.
        placement: per group, its device.
        priority: per task, what a device runs first of what is ready (``Placing.priority``).
        precision: as ``built`` was made for.
        optimizer: the same.
        optimizer_states: the same.
        loss_output: ONNX name of the output that the loss reads.
        name: of the order, as plans show it.
    """
    timeline = play(built.problem, tuple(placement), priority)
    device_of = [0] * len(graph.operators)
    for group, members in enumerate(built.operators):
        for index in members:
            device_of[index] = placement[group]
    sources = _sources(graph)
    devices = tuple(sorted(set(device_of)))
    backward_ns = _backward_starts(built, timeline.start_ns.tolist())
    forward_ns = [int(ns) for ns in timeline.start_ns[: len(graph.operators)]]
    chunks = _split(_chunks(graph, sources, device_of, forward_ns), backward_ns)
    moved = graph
    if len(devices) > 1:
        moved = reordered(graph, [graph.operators[index].id for chunk in chunks for index in chunk.operators])
    whole = unsplit_decisions(
        moved,
        training=bool(built.problem.is_backward.any()),
        precision=precision,
        optimizer=optimizer,
        optimizer_states=optimizer_states,
        loss_output=loss_output,
    )
    if len(devices) == 1:
        return PlacedPlan(graph=graph, decisions=whole, devices=devices)
    stage_of = {device: stage for stage, device in enumerate(devices)}
    places = tuple(stage_of[chunk.device] for chunk in chunks)
    reads = _reads(graph, chunks)
    later = _backwards(chunks, reads, backward_ns)
    schedule = PipelineSchedule(
        name=name,
        num_stages=len(devices),
        num_microbatches=1,
        num_chunks=max(map(places.count, places)),
        places=places,
        reads=reads,
        orders=tuple(_order(places, later, stage) for stage in range(len(devices))),
    )
    starts = [graph.operators[chunk.operators[0]].id for chunk in chunks]
    cut, decisions = cut_decisions(moved, whole, starts, schedule)
    return PlacedPlan(graph=cut, decisions=decisions, devices=devices)


def _sources(graph: Graph) -> list[set[int]]:
    """Per operator, those whose results it reads."""
    makers = {name: index for index, operator in enumerate(graph.operators) for name in operator.outputs}
    return [{makers[name] for name in operator.inputs if name in makers} for operator in graph.operators]


def _chunks(
    graph: Graph, sources: Sequence[set[int]], device_of: Sequence[int], start_ns: Sequence[int]
) -> list[_Chunk]:
    """In the order in which their first operators were played, the loss last of all; a view counts as started with what
    makes its operand, as it is sent when that is made, and no operator as started later than a reader of it.

    Args:
        graph: the graph.
        sources: per operator, those whose results it reads.
        device_of: per operator, its device.
        start_ns: per operator, when it was played forward.
    """
    sent = {source for index, read in enumerate(sources) for source in read if device_of[source] != device_of[index]}
    started = list(start_ns)
    for index, read in enumerate(sources):
        if read and record_of(graph.operators[index].signature).kind is ComputeKind.VIEW:
            started[index] = max(started[source] for source in read)
    for index in reversed(range(len(sources))):
        for source in sources[index]:
            started[source] = min(started[source], started[index])
    loss = None if graph.loss is None else len(sources) - 1
    found: list[_Chunk] = []
    current: dict[int, _Chunk] = {}
    for index in sorted(range(len(sources)), key=lambda index: (index == loss, started[index], index)):
        device = device_of[index]
        chunk = current.get(device)
        waits = any(device_of[source] != device for source in sources[index])
        if chunk is None or chunk.is_closed or waits or (index == loss and chunk is not found[-1]):
            chunk = current[device] = _Chunk(device=device)
            found.append(chunk)
        chunk.operators.append(index)
        chunk.is_closed = index in sent
    return found


def _split(chunks: Sequence[_Chunk], backward_ns: Mapping[int, int]) -> list[_Chunk]:
    """Chunks whose backwards were played without anything in between.

    Args:
        chunks: in their order.
        backward_ns: by operator that has a backward, when that was played.
    """
    following: dict[int, int] = {}
    for device in {chunk.device for chunk in chunks}:
        own = (index for chunk in chunks if chunk.device == device for index in chunk.operators if index in backward_ns)
        played = sorted(own, key=lambda index: (backward_ns[index], -index))
        following.update(pairwise(played))
    found: list[_Chunk] = []
    for chunk in chunks:
        current: _Chunk | None = None
        last: int | None = None
        for index in chunk.operators:
            is_apart = last is not None and index in backward_ns and following.get(index) != last
            if current is None or is_apart:
                current = _Chunk(device=chunk.device)
                found.append(current)
            current.operators.append(index)
            last = index if index in backward_ns else last
    return found


def _reads(graph: Graph, chunks: Sequence[_Chunk]) -> tuple[tuple[int, ...], ...]:
    """Per chunk, those that it gets what it reads from: where that is made, or, of another device, the first chunk of
    its own device that reads it, too."""
    made_in = {
        name: number
        for number, chunk in enumerate(chunks)
        for index in chunk.operators
        for name in graph.operators[index].outputs
    }
    first: dict[tuple[str, int], int] = {}
    found: list[tuple[int, ...]] = []
    for number, chunk in enumerate(chunks):
        read: set[int] = set()
        for name in {name for index in chunk.operators for name in graph.operators[index].inputs}:
            maker = None if name is None else made_in.get(name)
            if name is None or maker is None or maker == number:
                continue
            is_own = chunks[maker].device == chunk.device
            earlier = number if is_own else first.setdefault((name, chunk.device), number)
            read.add(maker if earlier == number else earlier)
        found.append(tuple(sorted(read)))
    return tuple(found)


def _backward_starts(built: Built, start_ns: Sequence[int]) -> dict[int, int]:
    """By operator that has a backward, when that was played."""
    tasks = zip(built.task_operator, built.problem.is_backward.tolist(), start_ns, strict=True)
    return {index: start for index, is_backward, start in tasks if is_backward}


def _backwards(chunks: Sequence[_Chunk], reads: Sequence[Sequence[int]], backward_ns: Mapping[int, int]) -> list[int]:
    """Chunks in the order of their backwards: as their first ones were played, but each after all that read it."""
    begins = [0] * len(chunks)
    for number in reversed(range(len(chunks))):  # readers come later, so that they are known
        played = [backward_ns[index] for index in chunks[number].operators if index in backward_ns]
        begins[number] = max(begins[number], min(played, default=0))
        for source in reads[number]:
            begins[source] = max(begins[source], begins[number])
    return sorted(range(len(chunks)), key=lambda number: (begins[number], -number))


def _order(places: Sequence[int], later: Sequence[int], stage: int) -> tuple[Slot, ...]:
    """What a stage does: all its chunks forward, then back in their order.

    Args:
        places: by chunk its stage.
        later: chunks in the order of their backwards.
        stage: the stage.
    """
    own = [number for number, on in enumerate(places) if on == stage]
    numbers = {number: count for count, number in enumerate(own)}
    forward = tuple(Slot(Work.FORWARD, 0, count) for count in range(len(own)))
    return (*forward, *(Slot(Work.BACKWARD, 0, numbers[number]) for number in later if number in numbers))
