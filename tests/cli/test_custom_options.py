"""--custom-rule and --custom-ops."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tap_planner.operators import custom_rule
from tap_planner.plan import ApplyRequest, PlanRequest
from tap_planner_cli import apply, plan
from tap_planner_cli.errors import invoke
from tests.cli.fake_api import FakeApi

Capture = pytest.CaptureFixture[str]


def _plan(*arguments: str) -> int:
    return invoke(plan.command, "tap-plan", ["model.onnx", "--cluster", "2x2:cpu-core", *arguments])


def _file(folder: Path, name: str, *types: str) -> str:
    lines = [f"  {type}: {{inputs: [b], outputs: [b]}}\n" for type in types]
    (folder / name).write_text("operators:\n" + "".join(lines))
    return str(folder / name)


def test_rules_reach_the_request(api: FakeApi, tmp_path: Path) -> None:
    """Several files are read, in order."""
    first, second = _file(tmp_path, "a.yaml", "x::B", "x::A"), _file(tmp_path, "b.yaml", "x::C")
    assert _plan("-q", "--custom-rule", first, "--custom-rule", second) == 0
    (request,) = api.requests
    assert isinstance(request, PlanRequest)
    expected = tuple(custom_rule(type=type, inputs=["b"], outputs=["b"]) for type in ("x::B", "x::A", "x::C"))
    assert request.options.custom_rules == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "rules.yaml: the file of custom rules cannot be read: No such file or directory"),
        ("operators: {x::A: {inputs: [b], output: [b]}}", "rules.yaml:1: operators.x::A.output: unknown key 'output'"),
        ("operators: {x::A: {inputs: [b], outputs: [c]}}", "the size of factor 'c' is not determined"),
    ],
)
def test_wrong_rules(api: FakeApi, tmp_path: Path, text: str | None, message: str, capsys: Capture) -> None:
    """A wrong file exits with 2 before any work is done, with place and hint."""
    if text is not None:
        (tmp_path / "rules.yaml").write_text(text)
    assert _plan("--custom-rule", str(tmp_path / "rules.yaml")) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert "\n\nhint: " in err
    assert api.requests == []


def test_a_check_takes_the_rules_of_the_plan(api: FakeApi, old: str, tmp_path: Path, capsys: Capture) -> None:
    """--custom-rule cannot be given with --check."""
    assert _plan("--check", old, "--custom-rule", _file(tmp_path, "a.yaml", "x::A")) == 2
    assert "--custom-rule cannot be given with --check" in capsys.readouterr().err


def test_functions_reach_the_request(api: FakeApi, old: str) -> None:
    """Files of functions are passed on, in order; nothing is run by naming them."""
    arguments = [old, "--model", "m.onnx", "--custom-ops", "a.py", "--custom-ops", "b.py"]
    assert invoke(apply.command, "tap-apply", arguments) == 0
    (request,) = api.requests
    assert isinstance(request, ApplyRequest)
    assert request.custom_ops == (Path("a.py"), Path("b.py"))


def test_code_is_run_only_when_asked_for(api: FakeApi, old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike other options --custom-ops cannot come from the environment, and its help says that it runs code."""
    monkeypatch.setenv("TAP_APPLY_CUSTOM_OPS", "evil.py")
    monkeypatch.setenv("TAP_APPLY_SEED", "3")
    assert invoke(apply.command, "tap-apply", [old, "--model", "m.onnx"]) == 0
    (request,) = api.requests
    assert isinstance(request, ApplyRequest)
    assert (request.custom_ops, request.seed) == ((), 3)
    text = " ".join(CliRunner().invoke(apply.command, ["--help"]).output.split())
    assert "--custom-ops FILE.py RUNS THE CODE of a Python file" in text
