"""Traces in Perfetto: what its trace processor finds in them is what was simulated, and nothing is lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tap_planner.program import lower
from tap_planner.schedule import make_schedule
from tap_planner.simulate import Timeline, simulate, to_trace, write_trace
from tests.perfetto import PerfettoError, Row, page_of, query
from tests.simulate.pipelines import layer_starts, mlp, plain_cluster, replicated, uniform
from tests.simulate.test_placed_links import CLUSTERS, known

Change = Callable[[list[dict[str, Any]]], object]
"""Of a trace's events."""

THREADS = """
SELECT process.name AS stage, thread.name AS stream, is_main_thread
FROM thread JOIN process USING (upid) WHERE upid != 0 ORDER BY pid, stream
"""
TOTALS = """
SELECT process.name AS stage, thread.name AS stream, category AS kind, count(*) AS slices, sum(dur) AS ns
FROM slice JOIN thread_track ON track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)
GROUP BY stage, stream, kind
"""
SLICES = """
SELECT process.name AS stage, thread.name AS stream, slice.name, ts, dur
FROM slice JOIN thread_track ON track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)
ORDER BY pid, stream, ts, dur
"""
OVERLAPS = """
SELECT name, ts, depth, before FROM (
    SELECT name, ts, dur, depth, max(ts + dur) OVER (
        PARTITION BY track_id ORDER BY ts, dur ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS before FROM slice
) WHERE before > ts OR dur < 0 OR (depth > 0 AND dur > 0)
"""
"""Slices without length may lie in the one that begins where they are."""
PEAKS = """
SELECT stage, max(bytes) AS bytes FROM (
    SELECT stage, sum(value) AS bytes FROM (
        SELECT pid, process.name AS stage, value, row_number() OVER (PARTITION BY track_id ORDER BY counter.id) AS point
        FROM counter JOIN process_counter_track AS track ON track_id = track.id JOIN process USING (upid)
        WHERE track.name IN ('memory stored', 'memory activations', 'memory working')
    ) GROUP BY stage, pid, point
) GROUP BY stage
"""
"""Each point of the memory is one value on each of three tracks."""


def pipeline(name: str, stages: int, chunks: int = 1, *, bytes_per_s: int = 10**10) -> Timeline:
    """Of stages that send to each other."""
    schedule = make_schedule(name, stages, 2 * stages, chunks)
    return simulate(uniform(12, schedule), plain_cluster(stages, bytes_per_s=bytes_per_s))


def reduced(name: str, chunks: int, zero: int) -> Timeline:
    """Of stages of two ranks that sum gradients, in the background where they can."""
    schedule = make_schedule(name, 2, 4, chunks)
    count = schedule.num_virtual_stages
    program = replicated(
        mlp(2 * count, width=4096, rows=8), layer_starts(2 * count, count), schedule, ranks=2, zero=zero
    )
    return simulate(program, plain_cluster(1, nodes=4, bytes_per_s=2 * 10**12))


def placed(name: str, *, training: bool, seed: int) -> Timeline:
    """Of devices that send to all others; many a part takes no time."""
    found = known(name, training, CLUSTERS["2x4"]).drawn(seed)
    return simulate(lower(found.graph, found.decisions), CLUSTERS["2x4"], devices=found.devices)


CASES: dict[str, Callable[[], Timeline]] = {
    "interleaved": lambda: pipeline("interleaved", 2, 2),
    "zb-h1": lambda: pipeline("zb-h1", 4),
    "zbv, half a minute long": lambda: pipeline("zbv", 3, 2, bytes_per_s=10**6),
    "behind the backward": lambda: reduced("1f1b", 1, 0),
    "ZeRO 3": lambda: reduced("interleaved", 2, 3),
    "trained on eight devices": lambda: placed("gpt2_tiny", training=True, seed=0),
    "inferred on eight devices": lambda: placed("t5_tiny", training=False, seed=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A timeline, and what Perfetto found in its trace."""

    timeline: Timeline
    threads: list[Row]
    totals: list[Row]
    slices: list[Row]
    overlaps: list[Row]
    peaks: list[Row]


@pytest.fixture(scope="module", params=CASES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Every case, written and opened; that raises where anything is lost."""
    timeline = CASES[request.param]()
    path = tmp_path_factory.mktemp("opened") / "trace.json"
    write_trace(timeline, path)
    threads, totals, slices, overlaps, peaks = query(path, THREADS, TOTALS, SLICES, OVERLAPS, PEAKS)
    return Opened(timeline=timeline, threads=threads, totals=totals, slices=slices, overlaps=overlaps, peaks=peaks)


def test_threads_are_the_streams_of_stages(opened: Opened) -> None:
    """A process for each stage, a thread for each of its streams, of which ``main`` is the main one."""
    assert [tuple(row.values()) for row in opened.threads] == [
        (f"stage {stage.stage}", stream, int(stream == "main"))
        for stage in opened.timeline.stages
        for stream in sorted({event.stream for event in stage.events})
    ]


def test_slots_are_as_many_and_as_long(opened: Opened) -> None:
    """Per stage, stream and kind."""
    slices, ns = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for stage in opened.timeline.stages:
        for event in stage.events:
            key = (f"stage {stage.stage}", event.stream, event.kind)
            slices[key] += 1
            ns[key] += event.end_ns - event.start_ns
    found = {(row["stage"], row["stream"], row["kind"]): (row["slices"], row["ns"]) for row in opened.totals}
    assert found == {key: (count, ns[key]) for key, count in slices.items()}


def test_slots_are_where_they_were_played(opened: Opened) -> None:
    """To the nanosecond; the last one ends with the step."""
    assert [tuple(row.values()) for row in opened.slices] == [
        (f"stage {stage.stage}", event.stream, event.label, event.start_ns, event.end_ns - event.start_ns)
        for stage in opened.timeline.stages
        for event in stage.events
    ]
    assert max(row["ts"] + row["dur"] for row in opened.slices) == opened.timeline.step_ns


def test_a_stream_does_one_thing_at_a_time(opened: Opened) -> None:
    """No slice begins before the one before has ended, and none that takes time is drawn below another."""
    assert opened.overlaps == []


def test_counters_rise_to_the_peak(opened: Opened) -> None:
    """The most that the three kinds of memory add up to is what the stage needs, also if that is there for no time."""
    assert {row["stage"]: row["bytes"] for row in opened.peaks} == {
        f"stage {stage.stage}": stage.memory.peak_bytes for stage in opened.timeline.stages
    }


def write_changed(path: Path, change: Change) -> Path:
    """A trace of a small pipeline, spoilt."""
    document: dict[str, Any] = json.loads(json.dumps(to_trace(pipeline("1f1b", 2))))
    change(document["traceEvents"])
    path.write_text(json.dumps(document))
    return path


def slots(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the first stage's main stream."""
    return [event for event in events if event["ph"] == "X" and event["tid"] == 1]


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (lambda events: slots(events)[1].pop("ts"), "json_tokenizer_failure"),
        (lambda events: slots(events)[1].pop("dur"), "json_parser_failure"),
        (lambda events: slots(events)[1].update(ts=slots(events)[0]["dur"] / 2), "drop_overlapping_complete_event"),
        (lambda events: events[-1]["args"].update(working=""), "json_parser_failure"),
    ],
    ids=["no time", "no duration", "overlap", "no number"],
)
def test_what_is_lost_of_a_trace_is_an_error(change: Change, lost: str, tmp_path: Path) -> None:
    """Events that the import drops are not passed over."""
    with pytest.raises(PerfettoError, match=rf"^trace\.json: error \w*{lost}\w* \(\d+\)$"):
        query(write_changed(tmp_path / "trace.json", change), "SELECT 1")


def test_what_is_no_trace_is_an_error(tmp_path: Path) -> None:
    """A file that ends too early, and one that is none."""
    path = tmp_path / "trace.json"
    whole = json.dumps(to_trace(pipeline("1f1b", 2)))
    for text, says in ((whole[: len(whole) // 2], "incomplete"), ("no trace", "Unknown trace type")):
        path.write_text(text)
        with pytest.raises(PerfettoError, match=says):
            query(path, "SELECT 1")


def test_a_wrong_statement_is_an_error(tmp_path: Path) -> None:
    """It is not taken for one that finds nothing."""
    with pytest.raises(PerfettoError, match="no such table: slots"):
        query(write_changed(tmp_path / "trace.json", len), "SELECT 1", "SELECT * FROM slots", "SELECT 2")


def test_another_layout_of_the_wheel_is_named(tmp_path: Path) -> None:
    """Files are found whatever their folder is called; where one is missing, or all are there twice, an error is."""
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "engine_bundle.js").touch()
        with pytest.raises(PerfettoError, match=r"expected one engine_bundle\.js"):
            page_of(tmp_path)
        (tmp_path / version / "trace_processor.wasm").touch()
        if version == "v1":
            assert page_of(tmp_path) == tmp_path / version
    with pytest.raises(PerfettoError, match=r"expected one engine_bundle\.js"):
        page_of(tmp_path)
