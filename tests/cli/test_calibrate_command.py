"""tap-calibrate: options, output, failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tap_planner.api import CalibrateRequest
from tap_planner.cluster import calibration_text
from tap_planner.errors import ApplyError, ClusterError
from tap_planner_cli.calibrate import command
from tap_planner_cli.errors import invoke
from tests.cli.fake_api import CALIBRATION, FakeApi

Capture = pytest.CaptureFixture[str]


def _run(*arguments: str) -> int:
    return invoke(command, "tap-calibrate", ["--cluster", "1x4:cpu-core", *arguments])


def test_the_calibration_is_data(api: FakeApi, capsys: Capture) -> None:
    """The file's text goes to stdout, figures and residuals to stderr."""
    assert _run() == 0
    out, err = capsys.readouterr()
    assert out == calibration_text(CALIBRATION)
    assert "float32 25 GFLOP/s, memory 9 GB/s, node 1 GB/s" in err
    assert "matrix forward" in err and "3.1 %" in err and "12.0 %" in err


def test_quiet_output_file(api: FakeApi, tmp_path: Path, capsys: Capture) -> None:
    """With -o and -q nothing is printed."""
    assert _run("-o", str(tmp_path / "c.json"), "-q") == 0
    assert (tmp_path / "c.json").read_text() == calibration_text(CALIBRATION)
    assert capsys.readouterr() == ("", "")


def test_options(api: FakeApi) -> None:
    """Every option reaches the request, typed."""
    assert _run("-q", "--nproc", "4", "--budget", "1.5min") == 0
    assert api.requests == [CalibrateRequest(cluster="1x4:cpu-core", nproc=4, budget_s=90.0)]


def test_report(api: FakeApi, tmp_path: Path) -> None:
    """Wall time and residuals go to the report, not into the calibration."""
    assert _run("-q", "--report", str(tmp_path / "r.json")) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["seconds"] >= 0
    assert report["fit"] == [{"kind": "matrix forward", "rows": 7, "median_permille": 31, "worst_permille": 120}]


def test_other_ranks_say_nothing(api: FakeApi, tmp_path: Path, capsys: Capture) -> None:
    """Under a launcher only the first process writes."""
    api.calibration = None
    assert _run("-o", str(tmp_path / "c.json")) == 0
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize("budget", ["60", "0s", "-1s", "1 day", "s"])
def test_a_budget_is_a_time(api: FakeApi, budget: str, capsys: Capture) -> None:
    """A bare number, zero and unknown units are refused with an example."""
    assert _run("--budget", budget) == 2
    assert "expected for example 60s" in capsys.readouterr().err


def test_a_folder_that_does_not_exist(api: FakeApi, tmp_path: Path, capsys: Capture) -> None:
    """It fails before anything is measured."""
    assert _run("-o", str(tmp_path / "absent" / "c.json")) == 2
    assert "does not exist" in capsys.readouterr().err
    assert not api.requests


@pytest.mark.parametrize(("error", "code"), [(ApplyError("no GPU"), 5), (ClusterError("wrong"), 2)])
def test_failures_leave_no_file(api: FakeApi, error: Exception, code: int, tmp_path: Path, capsys: Capture) -> None:
    """What fails has its exit code, and a file that was there stays as it was."""
    api.error = error
    (tmp_path / "c.json").write_text("old")
    assert _run("-o", str(tmp_path / "c.json")) == code
    assert capsys.readouterr().err.startswith(f"error: {error}")
    assert (tmp_path / "c.json").read_text() == "old"


def test_options_are_frozen() -> None:
    """The set of options is a contract; changing it is a decision."""
    found = {option for param in command.params for option in param.opts if option.startswith("-")}
    assert found == {
        *("--budget", "--cluster", "--color", "--nproc", "--output", "--quiet", "--report", "--verbose", "--version"),
        *("-o", "-q", "-v"),
    }
