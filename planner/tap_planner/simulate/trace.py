"""A timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show.

One process per stage, one thread per stream, a counter for the memory. Format: "Trace Event Format" (Google, 2016),
JSON object form: complete events (``X``), counters (``C``) and metadata (``M``); times in microseconds.

Processes and threads are numbered as by Linux: none is 0, no two threads share a number, the main one has that of its
process. Perfetto takes the latter and a thread 0 for one (src/trace_processor/importers/common/process_tracker.cc): two
streams would be drawn as one, without what overlaps.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from tap_planner.errors import UsageError
from tap_planner.files import write_whole
from tap_planner.simulate.events import MAIN, Event, MemoryPoint
from tap_planner.simulate.timeline import StageTimeline, Timeline

_NS_PER_US = 1000


def to_trace(timeline: Timeline) -> dict[str, object]:
    """The trace as a JSON document."""
    numbers = itertools.count(len(timeline.stages) + 1)
    events = [event for stage in timeline.stages for event in _stage_events(stage, numbers)]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the trace to a file.

    Raises:
        UsageError: the file cannot be written.
    """
    text = json.dumps(to_trace(timeline)) + "\n"
    write_whole(path, lambda file: file.write(text.encode()), UsageError, "Choose another place for the trace.")


def _stage_events(stage: StageTimeline, numbers: Iterator[int]) -> Iterator[dict[str, object]]:
    """What a stage does; ``numbers`` are those that threads may have."""
    process = stage.stage + 1
    yield _metadata("process_name", process, process, f"stage {stage.stage}")
    threads: dict[str, int] = {}
    for event in stage.events:
        if event.stream not in threads:
            threads[event.stream] = process if event.stream == MAIN else next(numbers)
            yield _metadata("thread_name", process, threads[event.stream], event.stream)
        yield _complete(event, process, threads[event.stream])
    yield from _counters(stage, process)


def _metadata(what: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _complete(event: Event, process: int, thread: int) -> dict[str, object]:
    known = {"microbatch": event.microbatch, "chunk": event.chunk, "bytes": event.num_bytes or None}
    return {
        "ph": "X",
        "name": event.label,
        "cat": event.kind,
        "pid": process,
        "tid": thread,
        "ts": event.start_ns / _NS_PER_US,
        "dur": (event.end_ns - event.start_ns) / _NS_PER_US,
        "args": {key: value for key, value in known.items() if value is not None},
    }


def _counters(stage: StageTimeline, process: int) -> Iterator[dict[str, object]]:
    """Bytes by kind, three times a slot; of several changes at one time the highest, then the last."""
    for time_ns, changes in itertools.groupby(sorted(stage.memory_of_slots, key=_time_ns), key=_time_ns):
        points = list(changes)
        highest = max(points, key=lambda point: point.activation_bytes + point.working_bytes)
        for point in dict.fromkeys((highest, points[-1])):
            yield {
                "ph": "C",
                "name": "memory",
                "pid": process,
                "ts": time_ns / _NS_PER_US,
                "args": {
                    "stored": stage.memory.stored_bytes,
                    "activations": point.activation_bytes,
                    "working": point.working_bytes,
                },
            }


def _time_ns(point: MemoryPoint) -> int:
    return point.time_ns
