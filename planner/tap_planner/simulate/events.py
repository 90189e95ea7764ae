"""Events and the curve of memory of a stage, from what was played."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tap_planner.schedule import Work
from tap_planner.simulate.closing import OPTIMIZER, Ending
from tap_planner.simulate.memory import profile_of
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.playback import Played, Sent
from tap_planner.simulate.sending import StageOrder

MAIN = "main"
"""Stream of operators and the communication that they wait for."""
BACKGROUND = "background"
"""Stream of reductions and gathers that run behind it."""
SEND = "send"
"""Kind of transfers to other stages, and their stream; where each direction has links of its own, two streams."""
RECEIVE = "receive"
"""The same of transfers from other stages."""

_KINDS = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.INPUT_BACKWARD: "input_backward",
    Work.WEIGHT_BACKWARD: "weight_backward",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a stream of a stage does in one go (the background may stand still meanwhile)."""

    stream: str
    """``main``, ``background``, ``send`` and ``receive``, or for each direction ``send next`` and the like."""
    kind: str
    """``forward``, ``backward``, ``input_backward``, ``weight_backward``, ``optimizer``, ``send``, ``receive``, or a
    kind of communication."""
    label: str
    """A slot as ``F3.1``, or what is communicated."""
    start_ns: int
    end_ns: int
    microbatch: int | None = None
    chunk: int | None = None
    """Index into ``Program.chunks``."""
    num_bytes: int = 0
    """What one rank sends or receives of another stage."""


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """What a rank holds from a time on, beside what is there all the time."""

    time_ns: int
    activation_bytes: int
    working_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """A stage's step, slot by slot."""

    stage: int
    suffixes: tuple[str, ...]
    """By chunk of the Program: what labels of its slots end with."""
    passes: tuple[Pass, ...]
    order: StageOrder
    played: Played
    endings: tuple[Ending, ...]


def events_of(record: StageRecord) -> tuple[Event, ...]:
    """All events of a stage, by stream and time."""
    found = [*_slots(record), *_background(record), *_transfers(record), *_endings(record)]
    return tuple(sorted(found, key=lambda event: (event.stream, event.start_ns, event.end_ns)))


def _slots(record: StageRecord) -> Iterator[Event]:
    played = record.played
    for index, microbatch, start, run in zip(
        record.order.passes, record.order.microbatches, played.starts_ns, played.runs, strict=True
    ):
        given = record.passes[index]
        begin = 0
        for work, position in given.works:
            end = run.offsets_ns[position]
            yield Event(
                stream=MAIN,
                kind=_KINDS[work],
                label=f"{work.value}{microbatch}{record.suffixes[given.chunk]}",
                start_ns=start + begin,
                end_ns=start + end,
                microbatch=microbatch,
                chunk=given.chunk,
            )
            begin = end


def _background(record: StageRecord) -> Iterator[Event]:
    order, played = record.order, record.played
    for index, microbatch, start, run in zip(
        order.passes, order.microbatches, played.starts_ns, played.runs, strict=True
    ):
        for span in run.spans:
            if span.end_ns == span.start_ns:
                continue
            yield Event(
                stream=BACKGROUND,
                kind=span.kind,
                label=span.kind,
                start_ns=start + span.start_ns,
                end_ns=start + span.end_ns,
                microbatch=microbatch,
                chunk=record.passes[index].chunk,
            )
    for span in played.spans:
        yield Event(stream=BACKGROUND, kind=span.kind, label=span.kind, start_ns=span.start_ns, end_ns=span.end_ns)


def _transfers(record: StageRecord) -> Iterator[Event]:
    for sent in record.played.transfers:
        for kind, stage in zip((SEND, RECEIVE), sent[0].route.stages, strict=True):
            if stage == record.stage:
                yield _transfer(record, kind, sent)


def _transfer(record: StageRecord, kind: str, sent: Sent) -> Event:
    out, microbatch, start_ns, end_ns = sent
    route = out.route
    chunk = route.chunks[0 if kind == SEND else 1]
    what = "activation" if route.forward else "gradient"
    return Event(
        stream=f"{kind} {out.direction}" if out.direction else kind,
        kind=kind,
        label=f"{what} {microbatch}{record.suffixes[chunk]}",
        start_ns=start_ns,
        end_ns=end_ns,
        microbatch=microbatch,
        chunk=chunk,
        num_bytes=route.num_bytes,
    )


def _endings(record: StageRecord) -> Iterator[Event]:
    for ending in record.endings:
        if ending.end_ns > ending.start_ns:
            yield Event(
                stream=MAIN if ending.kind == OPTIMIZER else BACKGROUND,
                kind=ending.kind,
                label=ending.label,
                start_ns=ending.start_ns,
                end_ns=ending.end_ns,
            )


def memory_of(record: StageRecord) -> tuple[MemoryPoint, ...]:
    """What a stage holds of activations and working memory from each time on."""
    activations = working = 0
    points: list[MemoryPoint] = [MemoryPoint(0, 0, 0)]
    played = record.played
    for index, start, run in zip(record.order.passes, played.starts_ns, played.runs, strict=True):
        for position, change in record.passes[index].changes:
            activations += change.activations
            working += change.working
            points.append(MemoryPoint(start + run.offsets_ns[position], activations, working))
    return tuple(points)


def memory_of_slots(record: StageRecord) -> tuple[MemoryPoint, ...]:
    """The same at the begin, the peak and the end of every slot only."""
    activations = working = 0
    points: list[MemoryPoint] = [MemoryPoint(0, 0, 0)]
    profiles = [profile_of(each) for each in record.passes]
    played = record.played
    for index, start, run in zip(record.order.passes, played.starts_ns, played.runs, strict=True):
        after, peak, position = profiles[index]
        points.append(MemoryPoint(start, activations, working))
        at_peak = (activations + peak.activations, working + peak.working)
        points.append(MemoryPoint(start + run.offsets_ns[position], *at_peak))
        activations, working = activations + after.activations, working + after.working
        points.append(MemoryPoint(start + run.offsets_ns[-1], activations, working))
    return tuple(points)
