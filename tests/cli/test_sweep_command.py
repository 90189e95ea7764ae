"""tap-plan --grid: tables, files, exit codes, and what is said."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tap_planner.plan import read_plan
from tap_planner.sweep import Outcome, Status, Sweep, SweepProgress
from tap_planner_cli.errors import invoke
from tap_planner_cli.plan import command
from tap_planner_cli.sweep import _progress
from tests.sweep.tiny_sweeps import CLUSTER, MODEL

Capture = pytest.CaptureFixture[str]
GIVEN = [str(MODEL), "--cluster", CLUSTER, "--batch=8", "--dim=seq=16", "--precision=fp32", "--loss=mean"]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 120 characters, unless a test wants another."""
    monkeypatch.setenv("COLUMNS", "120")


def _run(*arguments: str) -> int:
    return invoke(command, "tap-plan", [*GIVEN, *arguments])


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("width", ["80", "120"])
def test_the_table(width: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best combination first, each with step, rate, memory and gap; what is impossible with its number; no line is
    wider than the terminal, nor is a row broken."""
    monkeypatch.setenv("COLUMNS", width)
    assert _run("--grid", "pp,dp,tp,schedule=zbv|1f1b,microbatches=2|3,zero=0") == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert all(len(line) <= int(width) for line in lines)
    assert lines[0].split()[:4] == ["pp", "dp", "tp", "schedule"]
    table = lines[1 : lines.index("") - 1]
    steps = [line.split(" ms")[0].split()[-1] for line in table]
    assert len(steps) == 9 and steps == sorted(steps, key=float)
    assert table[0].startswith("*") and all("iB" in line and line.count(" %") == 1 for line in table)
    assert sum(" - " in line for line in table) == 3, "with one stage there is no schedule"
    assert ["9", "--microbatches", "3", "does", "not", "divide", "the", "batch", "8"] in [
        line.split() for line in lines
    ]
    assert "18 combinations: 9 planned, 9 impossible" in captured.err


def test_nothing_is_cut_off(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row has no room in the terminal it is longer than that, and whole."""
    monkeypatch.setenv("COLUMNS", "40")
    grid = "pp=1,dp,tp=1,microbatches=2,zero=0,recompute=selective,optimizer-states=bf16"
    assert _run("--grid", grid, "-q") == 0
    head, row, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["pp", "dp", "tp", "mb", "zero", "recompute", "states", "step", "samples/s", "memory", "gap"]
    assert row.split()[:8] == ["*", "1", "4", "1", "2", "0", "selective", "bf16"]
    assert row.rstrip().endswith("0.00 %")


def test_what_the_planner_chooses_is_shown(capsys: Capture) -> None:
    """Mesh and microbatches are columns where the grid leaves them open, and only there."""
    assert _run("--grid", "zero=0|3", "-q") == 0
    heads = capsys.readouterr().out.splitlines()[0].split()
    assert heads[:3] == ["zero", "mesh", "microbatches"]
    assert _run("--grid", "zero=0|3", "--mesh", "dp=4", "--microbatches", "2", "-q") == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:2] == ["zero", "step"]


def test_top(capsys: Capture) -> None:
    """--top shows so many rows, and says how many there are besides."""
    assert _run("--grid", "dp,tp,zero", "--top", "2", "-q") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[3] == "... and 10 more"


def test_csv_and_json_hold_the_same(tmp_path: Path, capsys: Capture) -> None:
    """The name of the file says its form; both have all rows with all figures, those without a plan with a reason."""
    grid = "pp=1|2,dp,tp,microbatches=2|3"
    for name in ("grid.csv", "grid.json"):
        assert _run("--grid", grid, "-q", "-o", str(tmp_path / name)) == 0
    assert capsys.readouterr() == ("", "")
    rows = _rows((tmp_path / "grid.csv").read_text())
    document = json.loads((tmp_path / "grid.json").read_text())
    assert document["grid"] == {"pp": [1, 2], "dp": None, "tp": None, "microbatches": [2, 3]}
    assert len(rows) == len(document["rows"]) == 10
    for row, other in zip(rows, document["rows"], strict=True):
        assert row["status"] == other["status"] and row["rank"] == str(other["rank"] or "")
        assert [row[name] for name in ("pp", "dp", "tp", "microbatches")] == list(map(str, other["values"].values()))
        for key in ("step_ns", "objective_ns", "memory_bytes", "gap_basis_points", "decisions", "reason", "mesh"):
            assert row[key] == str(other.get(key, ""))
        assert bool(row["reason"]) == (row["status"] == "impossible")
        if row["step_ns"]:
            assert row["pareto"] == str(int(other["pareto"]))
            assert float(row["samples_per_s"]) == pytest.approx(8e9 / int(row["step_ns"]), rel=1e-3)


def test_a_table_as_text_in_a_file(tmp_path: Path, capsys: Capture) -> None:
    """A file of text has all rows; beside it the first ten are shown on stderr, and where it is."""
    assert _run("--grid", "dp,tp,zero", "-o", str(tmp_path / "grid.txt")) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len((tmp_path / "grid.txt").read_text().splitlines()) == 14
    assert "... and 2 more" in captured.err and "grid.txt" in "".join(captured.err.split())
    assert _run("--grid", "dp,tp", "-q", "--format", "csv", "-o", str(tmp_path / "grid.txt")) == 0
    assert len(_rows((tmp_path / "grid.txt").read_text())) == 3


def test_formats_on_stdout(capsys: Capture) -> None:
    """CSV and JSON on stdout are data alone."""
    assert _run("--grid", "dp,tp", "--format", "csv") == 0
    assert [row["rank"] for row in _rows(capsys.readouterr().out)] == ["1", "2", "3"]
    assert _run("--grid", "dp,tp", "--format", "json") == 0
    assert [row["rank"] for row in json.loads(capsys.readouterr().out)["rows"]] == [1, 2, 3]


@pytest.mark.parametrize(
    "given",
    [
        "--grid pp=1,dp,tp --schedule zbv --chunks 2 --freeze *bias --freeze *.bias --gap=1%",
        "--grid=pp=2,dp=2,tp --grid microbatches --schedule interleaved -v --constraint batch!=tp",
        "--grid recompute --optimizer sgd --no-zero",
    ],
)
def test_the_command_of_the_best_row(
    given: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that is printed plans the first row, also where it takes options that say nothing there."""
    assert _run(*given.split(), "--format", "json") == 0
    captured = capsys.readouterr()
    best = json.loads(captured.out)["rows"][0]
    printed = captured.err.splitlines()[-1]
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(printed)
    assert program == "tap-plan" and invoke(command, "tap-plan", [*words, "-q"]) == 0
    document = read_plan(tmp_path / "plan.json")
    assert document.digests is not None and document.digests.decisions == best["decisions"]
    assert document.predicted.step_ns == best["step_ns"]


def test_the_default_grid(capsys: Capture) -> None:
    """--sweep is a grid of stages, axes and microbatches."""
    assert _run("--sweep", "--microbatches", "8", "-q", "--format", "csv") == 0
    rows = _rows(capsys.readouterr().out)
    assert list(rows[0])[2:5] == ["pp", "dp", "tp"] and len(rows) == 6


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--max-memory", "200kB", "--grid", "dp=4,tp,zero=0|1"],
            3,
            "no combination fits; dp=4, tp=1, zero=1 needs the least: no plan fits",
        ),
        (["--microbatches", "3", "--grid", "dp,tp"], 2, "no combination is possible; dp=1, tp=4: --microbatches 3"),
        (
            ["--max-memory", "700kB", "--zero", "0", "--microbatches", "2", "--recompute", "none", "--grid", "pp=4,dp"],
            4,
            "no plan was found for any combination; pp=4, dp=1: the fullest stage",
        ),
    ],
)
def test_exit_codes_without_a_plan(arguments: list[str], code: int, message: str, capsys: Capture) -> None:
    """Where no combination has a plan the exit code is that of one which has none, and the table is still shown."""
    assert _run(*arguments) == code
    captured = capsys.readouterr()
    assert message in captured.err and captured.out


def test_failures_are_told(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A combination that fails by a bug is an error on stderr; where all do the exit code says so, and the same command
    plans them again."""
    run = Sweep.run

    def broken(self: Sweep, on_progress: Callable[[SweepProgress], None]) -> None:
        run(self, on_progress)
        last = len(self.combinations) - 1
        self.outcomes = {last: Outcome(status=Status.FAILED, reason="AssertionError: a bug")}

    monkeypatch.setattr(Sweep, "run", broken)
    path = tmp_path / "grid.csv"
    assert _run("--grid", "dp,tp", "-o", str(path)) == 70
    assert "error: 1 of 1 combinations failed, the first (dp=4, tp=1) with: AssertionError" in capsys.readouterr().err
    assert (tmp_path / "grid.csv.partial").exists()
    monkeypatch.undo()
    assert _run("--grid", "dp,tp", "-o", str(path)) == 0
    assert not (tmp_path / "grid.csv.partial").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "dp", "--check", "plan.json"], "--check is about one plan, --grid makes many"),
        (["--grid", "dp", "--alternatives", "2"], "--alternatives is about one plan"),
        (["--grid", "dp", "--stay-near", "plan.json"], "--stay-near is about one plan"),
        (["--grid", "dp", "--verify-certificate", "plan.json"], "--verify-certificate is about one plan"),
        (["--grid", "dp", "--report", "report.json"], "--report is about one plan"),
        (["--grid", "dp", "--mesh", "dp=4"], "--grid dp varies the mesh, --mesh dp=4 fixes it"),
        (["--grid", "zero", "--zero", "1"], "--grid zero varies what --zero fixes"),
        (["--grid", "zero", "--no-zero"], "--grid zero varies what --zero fixes"),
        (["--grid", "microbatchs"], "(did you mean 'microbatches'?)"),
        (["--grid", "dp", "--sweep"], "--sweep stands for a grid"),
        (["--grid", "dp", "-o", "plan.yaml"], "its name ends in .csv, .json, .txt"),
        (["--grid", "dp", "-o", "absent/grid.csv"], "the folder absent does not exist"),
        (["--grid", "dp", "--resume", "absent/state"], "the folder absent does not exist"),
        (["--top", "3"], "--top is for a sweep"),
        (["--format", "csv"], "--format is for a sweep"),
        (["--resume", "state"], "--resume is for a sweep"),
    ],
)
def test_what_does_not_go_together(
    arguments: list[str], message: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options about one plan, and options about a sweep without one, are named with a hint."""
    monkeypatch.chdir(tmp_path)
    assert _run(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err and "\n\nhint: " in err


def test_a_sweep_needs_a_cluster(capsys: Capture) -> None:
    """As every plan does."""
    assert invoke(command, "tap-plan", [str(MODEL), "--grid", "dp"]) == 2
    assert "Missing option '--cluster'" in capsys.readouterr().err


def _interrupted(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    run = Sweep.run

    def some(self: Sweep, on_progress: Callable[[SweepProgress], None]) -> None:
        def stop(progress: SweepProgress) -> None:
            if progress.done == count:
                raise KeyboardInterrupt

        run(self, stop)

    monkeypatch.setattr(Sweep, "run", some)


def test_an_interruption_loses_nothing(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """With -o the same command goes on where it was, and removes what it kept when the table is written."""
    arguments = ["--grid", "dp,tp,zero=0|1", "-o", str(tmp_path / "grid.csv")]
    with monkeypatch.context() as patched:
        _interrupted(patched, 2)
        assert _run(*arguments) == 130
    err = capsys.readouterr().err
    assert "note: 2 of 6 combinations are kept in" in err and "error: interrupted" in err
    assert [path.name for path in tmp_path.iterdir()] == ["grid.csv.partial"]
    assert _run(*arguments) == 0
    assert "6 planned; 2 of them known from before" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["grid.csv"]


def test_an_interruption_without_a_file_shows_what_there_is(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file what was planned until then is printed."""
    _interrupted(monkeypatch, 2)
    assert _run("--grid", "dp,tp", "--format", "csv") == 130
    captured = capsys.readouterr()
    assert len(_rows(captured.out)) == 2
    assert "note: 2 of 3 combinations are shown; with -o or --resume they are kept" in captured.err


def test_a_file_to_go_on_from_is_kept(tmp_path: Path, capsys: Capture) -> None:
    """With --resume the file stays, and serves a larger grid."""
    state = ["--resume", str(tmp_path / "state")]
    assert _run("--grid", "dp,tp,zero=0", *state) == 0
    assert _run("--grid", "dp,tp,zero=0|1", *state) == 0
    assert "3 of them known from before" in " ".join(capsys.readouterr().err.split())


def test_progress_is_for_terminals(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stderr is no terminal, and with -q, there is no bar."""
    assert _run("--grid", "dp,tp") == 0
    assert "planning" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert _run("--grid", "dp,tp", "-q") == 0
    assert capsys.readouterr().err == ""


def test_the_bar() -> None:
    """It counts what is known, and says the rate and the best step so far."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100, color_system=None)
    best = Outcome(status=Status.PLANNED, step_ns=1_500_000)
    with _progress(console, shown=True) as on_progress:
        on_progress(SweepProgress(done=3, total=10, best=None))
        on_progress(SweepProgress(done=5, total=10, best=best))
    shown = text.getvalue()
    assert "3/10" in shown and "5/10" in shown and "best 1.500 ms" in shown and "/s" in shown
