"""tap-plan: options, output, checking, failure."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tap_planner.errors import InfeasibleError, LimitReachedError, ModelError
from tap_planner.logs import NOTE
from tap_planner.plan import (
    Constraint,
    Nearness,
    PlanDocument,
    PlanOptions,
    PlanRequest,
    to_text,
    with_digests,
    write_plan,
)
from tap_planner_cli.console import show_warnings
from tap_planner_cli.errors import invoke
from tap_planner_cli.plan import command
from tests.cli.fake_api import FakeApi

Capture = pytest.CaptureFixture[str]


def _run(*arguments: str) -> int:
    return invoke(command, "tap-plan", ["model.onnx", "--cluster", "2x2:cpu-core", *arguments])


def test_the_plan_is_data(api: FakeApi, old_document: PlanDocument, capsys: Capture) -> None:
    """The plan goes to stdout, the summary to stderr."""
    assert _run() == 0
    captured = capsys.readouterr()
    assert captured.out == to_text(old_document)
    assert "1.235 ms predicted" in captured.err


def test_the_summary_of_inference(api: FakeApi, old_document: PlanDocument, capsys: Capture) -> None:
    """Latency, throughput and memory by kind take the place of what is about training."""
    memory = {"parameters": 3 << 30, "caches": 1 << 30, "inputs": 1 << 20, "outputs": 1 << 20}
    api.document = replace(
        old_document,
        options=replace(old_document.options, mode="infer"),
        model=replace(old_document.model, batch=8),
        predicted=replace(old_document.predicted, step_ns=2_000_000, memory_bytes=memory, tokens=24),
    )
    assert _run("--mode", "infer") == 0
    words = " ".join(capsys.readouterr().err.split())
    assert "latency 2.000 ms predicted" in words
    assert "throughput 4,000 samples/s, 12,000 tokens/s" in words
    assert "4.002 GiB per device: 3.000 GiB parameters, 1.000 GiB caches, 2.000 MiB inputs and outputs" in words
    assert "ZeRO" not in words and "recompute" not in words
    api.document = replace(api.document, predicted=replace(api.document.predicted, tokens=None))
    _run("--mode", "infer")
    assert "tokens" not in capsys.readouterr().err


def test_quiet_output_file(api: FakeApi, old_document: PlanDocument, tmp_path: Path, capsys: Capture) -> None:
    """With -o and -q nothing is printed."""
    assert _run("-o", str(tmp_path / "plan.json"), "-q") == 0
    assert (tmp_path / "plan.json").read_text() == to_text(old_document)
    assert capsys.readouterr() == ("", "")


def test_defaults(api: FakeApi) -> None:
    """Without options the request holds the documented defaults."""
    _run("-q")
    assert api.requests == [PlanRequest(model=Path("model.onnx"), cluster="2x2:cpu-core", options=PlanOptions())]


def test_all_options(api: FakeApi) -> None:
    """Every option reaches the request, typed."""
    arguments = (
        "-q --batch 8 --dim seq=16 --dim n=2 --shape x=4,8 --value k=-3 --value flag=true --batch-dim n "
        "--optimizer sgd --precision fp32 --loss sum --loss-output y --freeze emb* --train scale --mesh dp=2,tp=2 "
        "--max-axes 3 --allow-idle --gap 0.25% --zero 2 --microbatches 4 --recompute full --max-memory 1.5GiB "
        "--optimizer-states auto --overlap all --objective memory --constraint batch!=tp --constraint MatMul:tp=n"
    )
    assert _run(*arguments.split()) == 0
    (request,) = api.requests
    assert isinstance(request, PlanRequest)
    assert request.options == PlanOptions(
        mode="train",
        batch=8,
        precision="fp32",
        optimizer="sgd",
        optimizer_states="auto",
        loss="sum",
        loss_output="y",
        objective="memory",
        overlap="all",
        zero=2,
        microbatches=4,
        recompute="full",
        mesh="dp=2,tp=2",
        max_axes=3,
        allow_idle=True,
        gap_basis_points=25,
        max_memory_bytes=3 << 29,
        constraints=(
            Constraint(kind="batch", axis="tp", forbid=True),
            Constraint(kind="operator", pattern="MatMul", axis="tp", value="n", forbid=False),
        ),
        dims={"seq": 16, "n": 2},
        shapes={"x": (4, 8)},
        values={"k": -3, "flag": 1},
        batch_dim="n",
        freeze=("emb*",),
        train=("scale",),
    )


def test_environment(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options can be set by TAP_PLAN_ variables."""
    monkeypatch.setenv("TAP_PLAN_BATCH", "12")
    assert _run("-q") == 0
    (request,) = api.requests
    assert isinstance(request, PlanRequest)
    assert request.options.batch == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--zero", "4"], "'4', expected auto or a number from 0 to 3"),
        (["--max-memory", "80"], "'80' is no size with its unit"),
        (["--max-memory", "0GiB"], "'0GiB' is no size with its unit"),
        (["--dim", "seq"], "'seq', expected NAME=VALUE as seq=128"),
        (["--dim", "seq=0"], "'0' is no value for 'seq'"),
        (["--dim", "seq=1", "--dim", "seq=2"], "--dim seq is given twice"),
        (["--constraint", "batch"], "--constraint 'batch' is not understood"),
        (["--loss", "none"], "training needs a loss"),
        (["--mode", "infer", "--loss", "sum"], "--loss is for training"),
        (["-o", "absent/plan.json"], "the folder absent does not exist"),
        (["--optimizer-states", "fp8"], "'fp8' is not one of 'fp32', 'bf16', 'auto'"),
        (["--overlap", "tensor"], "'tensor' is not one of 'auto', 'none', 'data', 'all'"),
        (["--batch", "x"], "Invalid value for '--batch'"),
    ],
)
def test_wrong_options(api: FakeApi, arguments: list[str], message: str, capsys: Capture) -> None:
    """Wrong options exit with 2 before any work is done."""
    assert _run(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert "\n\nhint: " in err
    assert api.requests == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("model.onnx: no such file", hint="Check the path."), 2),
        (InfeasibleError("no plan fits", hint="Use more devices.", least_memory_bytes=5, limit_bytes=4), 3),
        (LimitReachedError("the limit was reached"), 4),
        (KeyboardInterrupt(), 130),
        (RuntimeError("a\nbug"), 70),
    ],
)
def test_failures(api: FakeApi, error: BaseException, code: int, tmp_path: Path, capsys: Capture) -> None:
    """Each failure has its exit code and one line, and leaves no plan."""
    api.error = error
    assert _run("-o", str(tmp_path / "plan.json")) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_bug_is_reported_in_one_line(api: FakeApi, capsys: Capture) -> None:
    """With -v the traceback comes too."""
    api.error = RuntimeError("a\nbug")
    assert _run() == 70
    assert capsys.readouterr().err.startswith("internal error: RuntimeError: a bug (fake_api.py:")
    assert _run("-v") == 70
    assert "Traceback" in capsys.readouterr().err


def test_report(api: FakeApi, tmp_path: Path) -> None:
    """The report holds times, and the diagnosis when no plan fits."""
    report = tmp_path / "report.json"
    assert _run("-q", "--report", str(report)) == 0
    assert json.loads(report.read_text())["status"] == "optimal"
    api.error = InfeasibleError("no plan fits", least_memory_bytes=5, limit_bytes=4)
    assert _run("-q", "--report", str(report)) == 3
    written = json.loads(report.read_text())
    assert (written["status"], written["least_memory_bytes"], written["limit_bytes"]) == ("infeasible", 5, 4)


def test_check(api: FakeApi, old: str, new: str, capsys: Capture) -> None:
    """--check exits with 0 when the decisions are the same and with 1 when they are not, and prints the difference."""
    assert _run("--check", old) == 0
    assert "identical" in capsys.readouterr().out
    assert _run("--check", new) == 1
    assert "decisions changed" in capsys.readouterr().out


def test_check_ignores_the_prediction(
    api: FakeApi, old_document: PlanDocument, tmp_path: Path, capsys: Capture
) -> None:
    """A changed prediction with the same decisions is no drift."""
    slower = replace(old_document, predicted=replace(old_document.predicted, step_ns=2_000_000))
    write_plan(tmp_path / "slower.json", with_digests(slower))
    assert _run("--check", str(tmp_path / "slower.json")) == 0
    assert "same decisions" in capsys.readouterr().out


def test_check_takes_the_options_of_the_plan(api: FakeApi, old: str, capsys: Capture) -> None:
    """An option beside --check would be ignored, so it is refused."""
    assert _run("--check", old, "--batch-dim", "n") == 2
    assert "--batch-dim cannot be given with --check" in capsys.readouterr().err


def test_check_refuses_an_edited_plan(api: FakeApi, old: str, capsys: Capture) -> None:
    """A plan that somebody edited is not what the planner said."""
    path = Path(old)
    path.write_text(path.read_text().replace('"step_ns": 1234567', '"step_ns": 1234568'))
    assert _run("--check", old) == 2
    assert "edited" in capsys.readouterr().err


def test_stay_near(api: FakeApi, old_document: PlanDocument, tmp_path: Path) -> None:
    """The old plan is read, its path is not stored, and 1 % is the regret where nothing is said."""
    path = tmp_path / "old.json"
    write_plan(path, old_document)
    assert _run("--stay-near", str(path), "-q") == 0
    assert _run("--stay-near", str(path), "--max-regret", "0.5%", "-q") == 0
    assert _run("-q") == 0
    asked = [request.options for request in api.requests if isinstance(request, PlanRequest)]
    assert [options.max_regret_basis_points for options in asked] == [100, 50, None]
    assert api.old == [old_document, old_document, None]


def test_stay_near_says_what_is_wrong(
    api: FakeApi, old_document: PlanDocument, tmp_path: Path, capsys: Capture
) -> None:
    """A regret without an old plan, an old plan that is not there, is no plan, or was edited; with --check."""
    assert _run("--max-regret", "2%") == 2
    assert "--max-regret is for --stay-near" in capsys.readouterr().err
    assert _run("--stay-near", str(tmp_path / "none.json")) == 2
    assert "none.json" in capsys.readouterr().err
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    assert _run("--stay-near", str(broken)) == 2
    assert "broken.json" in capsys.readouterr().err
    edited = tmp_path / "edited.json"
    edited.write_text(to_text(old_document).replace('"microbatches": 1', '"microbatches": 2'))
    assert _run("--stay-near", str(edited)) == 2
    assert "edited" in capsys.readouterr().err
    assert _run("--stay-near", str(edited), "--check", str(edited)) == 2
    assert "--stay-near cannot be given with --check" in capsys.readouterr().err
    assert not api.requests


def test_the_summary_of_a_plan_that_stays_near(api: FakeApi, old_document: PlanDocument, capsys: Capture) -> None:
    """What changes, what that costs, and no warning about a gap that was allowed."""
    near = Nearness(
        regret_basis_points=91, microbatches=0, operators=0, parameters=2, regions=24, compared=100, changes_of_best=90
    )
    certificate = replace(old_document.certificate, near=near, status="feasible", gap_basis_points=95)
    api.document = replace(old_document, certificate=certificate)
    assert _run() == 0
    words = " ".join(capsys.readouterr().err.split())
    assert "26 of 100 decisions of the old plan change (0 operators, 2 parameters, 24 regions), 0.91 %" in words
    assert "fewer are not proven to be impossible" in words and "warning" not in words


def test_options_are_frozen() -> None:
    """The set of options is a contract; changing it is a decision."""
    found = {option for param in command.params for option in param.opts if option.startswith("-")}
    assert found == {
        *("--batch", "--batch-dim", "--check", "--cluster", "--color", "--constraint", "--dim", "--freeze", "--gap"),
        *("--allow-idle", "--alternatives", "--cost", "--custom-rule", "--max-regret", "--stay-near"),
        *("--model", "--objective", "--replay", "--verify-certificate"),
        *("--constraints", "--fix", "--forbid", "--no-zero", "--replicate", "--target"),
        *("--loss",),
        *("--loss-output", "--max-axes", "--max-memory", "--mesh", "--microbatches", "--mode", "--optimizer"),
        *("--optimizer-states", "--processes", "--schedule", "--chunks", "--stages"),
        *("--grid", "--sweep", "--format", "--top", "--resume"),
        *("--method", "--order", "--overlap", "--place"),
        *("--output", "--precision", "--quiet", "--recompute", "--report", "--shape", "--train", "--value"),
        *("--verbose", "--version", "--zero", "-o", "-q", "-v"),
    }


@pytest.mark.parametrize(("flags", "shown"), [({"quiet": True}, 0), ({}, 2), ({"verbose": True}, 3)])
def test_what_is_said_besides_the_plan(flags: dict[str, bool], shown: int, capsys: Capture) -> None:
    """Warnings and important notes are always said, with -v also what else there is to note, with -q nothing."""
    show_warnings(**{"quiet": False, "verbose": False, **flags})
    for level in (logging.WARNING, NOTE, logging.INFO):
        logging.getLogger("tap_planner").log(level, "said")
    assert capsys.readouterr().err.splitlines() == ["warning: said", "note: said", "note: said"][:shown]


def test_alternatives(tmp_path: Path, capsys: Capture) -> None:
    """The best plans on other meshes are shown and reported, in order, none better than the plan's own bound."""
    report = tmp_path / "report.json"
    model = Path(__file__).parents[1] / "data" / "hm_gpt_tiny.onnx"
    arguments = [str(model), "--cluster", "2x4:a100-sxm4-80gb", "--batch", "8", "--dim", "seq=64", "--loss", "mean"]
    arguments += ["--alternatives", "3", "--report", str(report), "-o", str(tmp_path / "plan.json")]
    assert invoke(command, "tap-plan", arguments) == 0
    assert "The best plans on other meshes" in capsys.readouterr().err
    found = json.loads(report.read_text())
    others = found["alternatives"]
    assert len(others) == len({other["mesh"] for other in others}) == 2, "eight devices have three meshes"
    bounds = [found["bound_ns"], *(other["bound_ns"] for other in others)]
    assert all(other["objective_ns"] >= bound for other, bound in zip(others, bounds, strict=False))
    assert all(other["objective_ns"] >= other["bound_ns"] for other in others)
