"""Sweeps: the plans of tap-plan, kept as they come, whoever makes them."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.errors import InfeasibleError, UsageError
from tap_planner.plan import PlanRequest
from tap_planner.requests import PreparedSearch
from tap_planner.sweep import Status, Sweep, SweepProgress
from tests.sweep.tiny_sweeps import CLUSTER, MODEL, sweep_of, swept, timeless

GRID = "dp,tp,zero=0|1"
"""Six combinations."""


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ("pp,dp,tp,microbatches=4|8", {}),
        ("pp=2,dp,tp=1,schedule,chunks", {}),
        ("zero,recompute=none|full", {}),
        ("microbatches,optimizer-states", {"mesh": "dp=2,tp=2"}),
        ("dp,tp", {"objective": "communication"}),
        ("batch=4|8,dp,tp=2", {"batch": None}),
        ("pp,recompute=none|full", {}),
        ("zero=0|1", {"stages": "auto", "schedule": "auto"}),
    ],
)
def test_each_row_is_the_plan_of_its_options(grid: str, options: dict[str, object]) -> None:
    """Decisions, prediction, bound and memory of every row are those of a plan that is made by itself."""
    sweep = swept(grid, **options)
    assert len(sweep.rows) >= 2
    for row in sweep.rows:
        request = PlanRequest(model=MODEL, cluster=CLUSTER, options=row.combination.options)
        document = api.make_plan(request)
        outcome = row.outcome
        assert document.digests is not None and outcome.decisions == document.digests.decisions
        assert outcome.step_ns == document.predicted.step_ns
        assert outcome.memory_bytes == document.predicted.total_memory_bytes
        certificate = document.certificate
        assert (outcome.objective_ns, outcome.bound_ns) == (certificate.objective_ns, certificate.bound_ns)
        assert outcome.gap_basis_points == certificate.gap_basis_points
        assert outcome.microbatches == document.pipeline.microbatches


def test_processes_change_nothing() -> None:
    """One, two or three processes find the same, in the same order."""
    alone = swept("pp,dp,tp,microbatches=2|3", processes=1)
    for processes in (2, 3):
        together = swept("pp,dp,tp,microbatches=2|3", processes=processes)
        assert timeless(together) == timeless(alone)
        order = [row.combination.shown for row in alone.rows]
        assert [row.combination.shown for row in together.rows] == order


def test_what_has_no_plan_is_listed() -> None:
    """Combinations that cannot be, or of which none was found that fits, are rows with their reason, beside plans."""
    grid = "pp,dp,tp=1|2,schedule=1f1b|interleaved,microbatches=2|3"
    sweep = swept(grid, zero=0, recompute="none", max_memory_bytes=700_000)
    by_status = {status: [row for row in sweep.rows if row.outcome.status is status] for status in Status}
    assert [len(by_status[status]) for status in (Status.INFEASIBLE, Status.FAILED)] == [0, 0]
    assert all((row.outcome.memory_bytes or 0) <= 700_000 for row in by_status[Status.PLANNED])
    assert by_status[Status.PLANNED] and by_status[Status.NOT_FOUND]
    assert all("no plan was found" in row.outcome.reason for row in by_status[Status.NOT_FOUND])
    reasons = {row.outcome.reason for row in by_status[Status.IMPOSSIBLE]}
    assert "--microbatches 3 does not divide the batch 8" in reasons
    assert "--microbatches 2: --schedule interleaved wants a multiple of 4 stages" in reasons


def test_what_does_not_fit_says_what_it_needs() -> None:
    """A row that is proven not to fit has the least memory that it needs, which is what planning it says."""
    sweep = swept("dp=4,tp,zero=0|3", max_memory_bytes=200_000, microbatches=8, recompute="full")
    for row in sweep.rows:
        request = PlanRequest(model=MODEL, cluster=CLUSTER, options=row.combination.options)
        with pytest.raises(InfeasibleError) as caught:
            api.make_plan(request)
        assert row.outcome.status is Status.INFEASIBLE and row.outcome.limit_bytes == 200_000
        assert row.outcome.least_memory_bytes == caught.value.least_memory_bytes
    assert len({row.outcome.least_memory_bytes for row in sweep.rows}) > 1


def test_notes_of_single_plans_are_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """What there is to note of one combination is not said in a sweep, what there is to say of the model once."""
    logging.getLogger("tap_planner").propagate = True
    with caplog.at_level(logging.INFO, logger="tap_planner"):
        swept("batch=4|8,dp,tp", batch=None, loss=None)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["no loss was given"]


def test_a_bug_in_one_combination_is_its_own() -> None:
    """An error that is no answer is listed with its row, and is not kept."""
    sweep = sweep_of(GRID)
    plan = sweep.plan

    def broken(prepared: PreparedSearch) -> object:
        assert prepared.options.zero != 1, "one nanosecond too many"
        return plan(prepared)

    sweep.plan = broken  # type: ignore[assignment]
    sweep.run()
    assert [row.outcome.status for row in sweep.rows] == [Status.PLANNED] * 3 + [Status.FAILED] * 3
    assert "AssertionError: one nanosecond too many" in sweep.rows[-1].outcome.reason


# -- going on ----------------------------------------------------------------------------------------------------


def _interrupt_after(sweep: Sweep, count: int) -> None:
    def on_progress(progress: SweepProgress) -> None:
        if progress.done == count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep.run(on_progress)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupted_sweep_goes_on(processes: int, tmp_path: Path) -> None:
    """What was found before an interruption is not planned again, and the end is that of a sweep in one go."""
    state = tmp_path / "state"
    _interrupt_after(sweep_of(GRID, state=state, processes=processes), 2)
    assert len(state.read_text().splitlines()) == 3
    again = swept(GRID, state=state, processes=processes)
    assert again.num_kept == 2
    assert timeless(again) == timeless(swept(GRID))
    nothing_left = sweep_of(GRID, state=state)
    nothing_left.plan = lambda prepared: pytest.fail("planned again")
    nothing_left.run()
    assert timeless(nothing_left) == timeless(again)


@pytest.mark.parametrize("cut", [1, 30, 100_000])
def test_a_line_that_was_cut_off_is_planned_again(cut: int, tmp_path: Path) -> None:
    """A file whose last line is half written (or the first one) is gone on with, and is whole again."""
    state = tmp_path / "state"
    swept(GRID, state=state)
    whole = state.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    state.write_bytes(whole[: max(len(whole) - cut, 20)] if cut > 1000 else whole[: last + cut])
    again = swept(GRID, state=state)
    assert again.num_kept == (0 if cut > 1000 else 5)
    lines = state.read_text().splitlines()
    assert len(lines) == 7 and all(json.loads(line) for line in lines)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"gap_basis_points": 50}, "option gap_basis_points"), ({"precision": "bf16"}, "option precision")],
)
def test_a_file_of_other_options_is_refused(options: dict[str, object], what: str, tmp_path: Path) -> None:
    """A file of other options is named with what differs, and left as it is."""
    state = tmp_path / "state"
    _interrupt_after(sweep_of(GRID, state=state), 2)
    before = state.read_bytes()
    with pytest.raises(UsageError, match=f"holds a sweep with another {what}$"):
        swept(GRID, state=state, **options)
    assert state.read_bytes() == before


@pytest.mark.parametrize(
    ("key", "what"), [("version", "version of tap-planner"), ("model", "model"), ("cluster", "cluster")]
)
def test_a_file_of_other_inputs_is_refused(key: str, what: str, tmp_path: Path) -> None:
    """Outcomes of another version, model or cluster are not taken for this one's."""
    state = tmp_path / "state"
    _interrupt_after(sweep_of(GRID, state=state), 1)
    head, *rest = state.read_text().splitlines()
    state.write_text("\n".join([json.dumps({**json.loads(head), key: "other"}), *rest, ""]))
    with pytest.raises(UsageError, match=f"holds a sweep with another {what}$"):
        swept(GRID, state=state)


def test_a_larger_grid_takes_what_is_known(tmp_path: Path) -> None:
    """A file serves any grid of the same options: what both have is planned once."""
    state = tmp_path / "state"
    swept("dp,tp,zero=0", state=state)
    assert swept("zero=1|0,dp,tp", state=state).num_kept == 3


@pytest.mark.parametrize("text", ["dp,tp\n1,2\n", "half a line", '{"kind": "other"}\n'])
def test_a_file_of_something_else_is_left_alone(text: str, tmp_path: Path) -> None:
    """A file that is no state of a sweep is refused, and not touched."""
    state = tmp_path / "notes.txt"
    state.write_text(text)
    with pytest.raises(UsageError, match="is no state of a sweep"):
        swept(GRID, state=state)
    assert state.read_text() == text


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"key": "a"}', '{"key": "a", "outcome": {"status": "x"}}', '{"key": "a", "outcome": {"batch": "8"}}'],
)
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    """A whole line that cannot be understood is named by its number."""
    state = tmp_path / "state"
    _interrupt_after(sweep_of(GRID, state=state), 1)
    with state.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UsageError, match="line 3 cannot be read"):
        swept(GRID, state=state)


def test_one_sweep_at_a_time_writes_to_a_file(tmp_path: Path) -> None:
    """A second sweep with the same file, in another process, is refused while the first one runs."""
    state = tmp_path / "state"
    script = (
        f"import fcntl; file = open({str(state)!r}, 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(UsageError, match="another sweep is writing to it"):
            swept(GRID, state=state)
    assert swept("dp", state=state).rows


def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    """After SIGKILL in the middle, with workers, the file has what was found, and the same sweep ends as if nothing had
    been."""
    state = tmp_path / "state"
    root = Path(__file__).parents[2]
    script = (
        "from tests.sweep.tiny_sweeps import swept; from pathlib import Path; "
        f"swept('pp,dp,tp,microbatches', state=Path({str(state)!r}), processes=2)"
    )
    path = os.pathsep.join(map(str, (root, root / "planner", root / "cli")))
    with subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}) as process:
        while not state.exists() or state.read_bytes().count(b"\n") < 4:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    again = swept("pp,dp,tp,microbatches", state=state)
    assert 3 <= again.num_kept < len(again.rows)
    assert timeless(again) == timeless(swept("pp,dp,tp,microbatches"))


def test_progress_is_told() -> None:
    """Once at the start, and with every outcome, with the best so far."""
    told: list[SweepProgress] = []
    sweep = sweep_of(GRID)
    sweep.run(told.append)
    assert [progress.done for progress in told] == list(range(7))
    assert {progress.total for progress in told} == {6}
    assert told[0].best is None and told[-1].best == sweep.rows[0].outcome
    assert [replace(row.outcome, seconds=0) for row in sweep.rows if row.rank == 1]


def test_a_lost_combination_is_listed() -> None:
    """A combination whose processes are killed each time is a row that failed; the others are planned."""
    sweep = sweep_of(GRID, processes=2)
    plan = sweep.plan

    def killed(prepared: PreparedSearch) -> object:
        if prepared.options.mesh == "dp=4" and prepared.options.zero == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return plan(prepared)

    sweep.plan = killed  # type: ignore[assignment]
    sweep.run()
    *others, last = sweep.rows
    assert {row.outcome.status for row in others} == {Status.PLANNED} and len(others) == 5
    assert last.outcome.status is Status.FAILED
    assert last.outcome.reason.startswith("two processes that planned it were lost (signal 9")
