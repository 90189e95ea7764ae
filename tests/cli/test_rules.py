"""tap-plan: rules on the space, and the framework that must be able to express the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tap_planner.plan import Constraint, PlanRequest
from tap_planner_cli.errors import invoke
from tap_planner_cli.plan import command
from tests.cli.fake_api import FakeApi

Capture = pytest.CaptureFixture[str]

FILE = """\
# what our frameworks do
constraints:
  - fix: "layers.*.mlp.*: tp"
  - forbid: "lm_head: tp=row|column"
  - replicate: "*.bias"
  - "batch!=tp"
"""


def _run(*arguments: str) -> int:
    return invoke(command, "tap-plan", ["model.onnx", "--cluster", "2x2:cpu-core", *arguments])


def test_all_rules(api: FakeApi, tmp_path: Path) -> None:
    """Every option of the kind reaches the request, in this order, and once each."""
    path = tmp_path / "rules.yaml"
    path.write_text(FILE)
    given = ("--fix", "mlp.*: tp", "--forbid", "lm_head: tp", "--replicate", "gate.*", "--constraint", "batch!=tp")
    assert _run("-q", *given, "--constraints", str(path), "--target", "megatron", "--no-zero") == 0
    (request,) = api.requests
    assert isinstance(request, PlanRequest)
    assert request.options.constraints == (
        Constraint(kind="operator", pattern="mlp.*", axis="tp"),
        Constraint(kind="operator", pattern="lm_head", axis="tp", forbid=True),
        Constraint(kind="replicate", pattern="gate.*"),
        Constraint(kind="batch", axis="tp", forbid=True),
        Constraint(kind="operator", pattern="layers.*.mlp.*", axis="tp"),
        Constraint(kind="operator", pattern="lm_head", axis="tp", value="row|column", forbid=True),
        Constraint(kind="replicate", pattern="*.bias"),
    )
    assert [rule.origin for rule in request.options.constraints] == [
        *("--fix", "--forbid", "--replicate", "--constraint", "rules.yaml:3", "rules.yaml:4", "rules.yaml:5"),
    ]
    assert (request.options.target, request.options.zero) == ("megatron", 0)


def test_no_zero(api: FakeApi, capsys: Capture) -> None:
    """--no-zero is --zero 0, and contradicts any other level."""
    assert _run("-q", "--no-zero", "--zero", "0") == 0
    assert isinstance(api.requests[0], PlanRequest) and api.requests[0].options.zero == 0
    assert _run("-q", "--no-zero", "--zero", "2") == 2
    assert "--no-zero and --zero 2 exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["none", "selective", "full", "auto"])
def test_recompute(api: FakeApi, setting: str) -> None:
    """All settings are accepted."""
    assert _run("-q", "--recompute", setting) == 0
    assert isinstance(api.requests[0], PlanRequest) and api.requests[0].options.recompute == setting


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--fix", "mlp"), "--fix 'mlp' is not understood, expected"),
        (("--fix", "mlp: tp=="), "--fix 'mlp: tp==' is not understood"),
        (("--forbid", "mlp: tp!=n"), "--forbid 'mlp: tp!=n': what is forbidden must be a split"),
        (("--forbid", "mlp: replicate"), "--forbid 'mlp: replicate': what is forbidden must be a split"),
        (("--replicate", " "), "an empty pattern"),
        (("--constraints", "absent.yaml"), "absent.yaml: the file of constraints cannot be read"),
        (("--target", "magatron"), "magatron"),
    ],
)
def test_wrong_rules(api: FakeApi, arguments: tuple[str, ...], says: str, capsys: Capture) -> None:
    """What cannot be read is an error in one line, before any work."""
    assert _run(*arguments) == 2
    assert says in capsys.readouterr().err
    assert api.requests == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "rules.yaml:1: the file is empty"),
        ("fixes: []", "rules.yaml:1: fixes: unknown key 'fixes'"),
        (
            "constraints:\n  - fix: 'mlp: tp'\n    forbid: 'a: tp'\n",
            "rules.yaml:2: constraints[0]: 2 rules in one entry",
        ),
        (
            "constraints:\n  - fix: 'mlp: tp'\n  - fixx: 'a: tp'\n",
            "rules.yaml:3: constraints[1].fixx: unknown key 'fixx'",
        ),
        ("constraints:\n\n  - fix: 'mlp tp'\n", "rules.yaml:3 'mlp tp' is not understood"),
        ("constraints:\n  - fix: [mlp, tp]\n", "rules.yaml:2: constraints[0].fix: a list found, expected a rule"),
        ("constraints:\n  - fix: mlp.*: tp\n", "rules.yaml:2: not valid YAML"),
        ("constraints:\n  - replicate: *.bias\n", "rules.yaml:2"),
        ("constraints: 3", "rules.yaml:1: constraints: '3' found, expected a list of rules"),
    ],
)
def test_wrong_files(api: FakeApi, text: str, says: str, tmp_path: Path, capsys: Capture) -> None:
    """Errors in a file of rules name file and line, and say what to do."""
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    assert _run("--constraints", str(path)) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err and "hint: " in err
    assert api.requests == []


def test_rules_are_not_for_checking(api: FakeApi, old: str, capsys: Capture) -> None:
    """--check takes the rules of the plan."""
    assert _run("--check", old, "--target", "megatron") == 2
    assert "--target cannot be given with --check" in capsys.readouterr().err
