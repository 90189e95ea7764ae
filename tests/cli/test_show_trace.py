"""tap-show --trace: what Perfetto reads of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.plan import write_plan
from tap_planner_cli.errors import invoke
from tap_planner_cli.show import command as show
from tests.perfetto import query
from tests.test_pipelines import DATA, planned

SLOTS = """
SELECT process.name AS stage, thread.name AS stream, slice.name, ts, dur
FROM slice JOIN thread_track ON track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)
ORDER BY pid, stream, ts, dur
"""


@pytest.mark.parametrize(
    ("mesh", "schedule", "chunks"),
    [("pp=2,dp=2", "zbv", None), ("pp=2,tp=2", "interleaved", 2), ("pp=4", "1f1b", None)],
)
def test_the_trace_opens_in_perfetto(mesh: str, schedule: str, chunks: int | None, tmp_path: Path) -> None:
    """Nothing is lost, and its slices are the events of the plan's step, which is as long as predicted."""
    document = planned(mesh, schedule=schedule, chunks=chunks, microbatches=4)
    plan, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    write_plan(plan, document)
    model = DATA / "gpt2_tiny.onnx"
    assert invoke(show, "tap-show", [str(plan), "--model", str(model), "--trace", str(trace)]) == 0
    (slices,) = query(trace, SLOTS)
    timeline = api.simulate_program(document, api.lower_plan(document, model))
    assert [tuple(row.values()) for row in slices] == [
        (f"stage {stage.stage}", event.stream, event.label, event.start_ns, event.end_ns - event.start_ns)
        for stage in timeline.stages
        for event in stage.events
    ]
    assert max(row["ts"] + row["dur"] for row in slices) == document.predicted.step_ns
