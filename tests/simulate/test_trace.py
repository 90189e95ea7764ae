"""Traces: the document that Perfetto reads."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tap_planner.errors import UsageError
from tap_planner.schedule import make_schedule
from tap_planner.simulate import Timeline, simulate, to_trace, write_trace
from tests.simulate.pipelines import plain_cluster, uniform

NUMBER = {"type": "number", "minimum": 0}
COUNT = {"type": "integer", "minimum": 0}
NUMBERED = {"type": "integer", "minimum": 1}
KINDS = {
    "X": {"required": ["name", "cat", "pid", "tid", "ts", "dur"], "properties": {"ts": NUMBER, "dur": NUMBER}},
    "C": {
        "required": ["name", "pid", "ts", "args"],
        "properties": {"ts": NUMBER, "args": {"type": "object", "additionalProperties": COUNT}},
    },
    "M": {"required": ["name", "pid", "args"], "properties": {"name": {"enum": ["process_name", "thread_name"]}}},
}
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["ph"],
                "properties": {
                    "ph": {"enum": list(KINDS)},
                    "name": {"type": "string", "minLength": 1},
                    "cat": {"type": "string"},
                    "pid": NUMBERED,
                    "tid": NUMBERED,
                },
                "allOf": [
                    {"if": {"properties": {"ph": {"const": kind}}}, "then": schema} for kind, schema in KINDS.items()
                ],
            },
        },
    },
}
"""What "Trace Event Format" (Google, 2016) asks of complete events, counters and metadata."""


def timeline() -> Timeline:
    """Of a small pipeline."""
    return simulate(uniform(8, make_schedule("interleaved", 2, 4, 2)), plain_cluster(2, bytes_per_s=10**10))


def test_the_trace_follows_the_format() -> None:
    """Every event has the fields that its kind needs, also when it has been through JSON."""
    document = json.loads(json.dumps(to_trace(timeline())))
    jsonschema.validate(document, SCHEMA)
    assert {event["ph"] for event in document["traceEvents"]} == set(KINDS)


def test_the_trace_has_every_event_where_it_belongs() -> None:
    """A process for each stage, a thread for each stream, and times in microseconds that are exact to the ns."""
    given = timeline()
    events = json.loads(json.dumps(to_trace(given)))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert processes == {1: "stage 0", 2: "stage 1"}
    for stage in given.stages:
        found = [e for e in events if e["ph"] == "X" and e["pid"] == stage.stage + 1]
        shown = [
            (
                threads[e["pid"], e["tid"]],
                e["cat"],
                e["name"],
                round(e["ts"] * 1000),
                round((e["ts"] + e["dur"]) * 1000),
            )
            for e in found
        ]
        assert shown == [(e.stream, e.kind, e.label, e.start_ns, e.end_ns) for e in stage.events]


def test_counters_follow_the_memory() -> None:
    """The counters rise to the peak, and end at what is there all the time."""
    given = timeline()
    for stage in given.stages:
        counters = [e for e in to_trace(given)["traceEvents"] if e["ph"] == "C" and e["pid"] == stage.stage + 1]  # type: ignore[union-attr,index]
        times = [event["ts"] for event in counters]
        assert times == sorted(times) and max(map(times.count, times)) <= 2
        assert all(event["args"]["stored"] == stage.memory.stored_bytes for event in counters)
        assert counters[-1]["args"] == {"stored": stage.memory.stored_bytes, "activations": 0, "working": 0}
        most = max(event["args"]["activations"] + event["args"]["working"] for event in counters)
        assert most == stage.memory.activation_bytes + stage.memory.working_bytes > 0


def test_a_trace_is_written_whole(tmp_path: Path) -> None:
    """The file holds the document; where there is no folder for it, an error says so."""
    write_trace(timeline(), tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == json.loads(json.dumps(to_trace(timeline())))
    with pytest.raises(UsageError, match="cannot be written") as caught:
        write_trace(timeline(), tmp_path / "nowhere" / "trace.json")
    assert caught.value.hint
