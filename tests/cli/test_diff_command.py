"""tap-diff: formats, exit codes, limits."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tap_planner.plan import PlanDocument, diff_plans, with_digests, write_plan
from tap_planner_cli.diff import command
from tap_planner_cli.diff_markdown import MAX_CHARACTERS, TAG, code, diff_to_markdown
from tap_planner_cli.errors import invoke

Capture = pytest.CaptureFixture[str]


def _run(*arguments: str) -> int:
    return invoke(command, "tap-diff", arguments)


def test_text(old: str, new: str, capsys: Capture) -> None:
    """The verdict comes first; changes are folded, with symbols, units and a legend."""
    assert _run(old, new) == 0
    out = capsys.readouterr().out
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0] == "decisions changed"
    assert lines[1].startswith("legend:")
    assert "~  step time                     1.235 ms   1.400 ms   +165.4 us  +13.40 %" in lines
    assert "~ h.{i}.fc  (i = 2..10)" in lines
    assert "     strategy.tp          n -> none" in lines
    assert "- h.{i}.proj  (i = 2..10)" in lines
    assert "\x1b" not in out


def test_identical(old: str, capsys: Capture) -> None:
    """Equal plans are one line."""
    assert _run(old, old, "--exit-code", "--fail-on", "decisions", "--fail-on", "step_time>0%") == 0
    assert capsys.readouterr().out == "the plans are identical\n"


def test_colour(old: str, new: str, capsys: Capture) -> None:
    """Colour comes only when asked for or on a terminal."""
    _run(old, new, "--color", "always")
    assert "\x1b[33m~" in capsys.readouterr().out


def test_json(old: str, new: str, capsys: Capture) -> None:
    """The JSON holds the typed diff."""
    assert _run(old, new, "--format", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "decisions changed"
    step = next(change for change in document["predicted"] if change["name"] == "step_ns")
    assert (step["delta"], step["basis_points"]) == (165_433, 1340)
    assert {entity["kind"] for entity in document["operators"]} == {"changed"}


def test_markdown(old: str, new: str, capsys: Capture) -> None:
    """The comment begins with its hidden tag and holds the verdict and a table."""
    assert _run(old, new, "--format", "markdown") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{TAG}\n### tap-diff: decisions changed\n")
    assert "| step time | 1.235 ms | 1.400 ms | +165.4 us (+13.40 %) |" in text
    assert text.count("<details>") == text.count("</details>")


def test_long_markdown_is_cut(old_document: PlanDocument) -> None:
    """A comment never exceeds what the forge takes, and ends with closed details and a note."""
    folded = old_document.folded
    names = {f"t{'x' * (i % 50)}{i}y": i for i in range(2000)}
    model = replace(old_document.model, dims=names)
    text = diff_to_markdown(diff_plans(old_document, with_digests(replace(old_document, model=model, folded=folded))))
    assert len(text) <= MAX_CHARACTERS
    assert "cut here" in text[-200:]
    assert text.count("<details>") == text.count("</details>")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a", "`a`"), ("a|b", "`a\\|b`"), ("a`b", "``a`b``"), ("`", "`` ` ``"), ("a\nb<x>", "`a b<x>`"), ("", "` `")],
)
def test_names_cannot_break_out(name: str, expected: str) -> None:
    """A name from a model file stays inside its code span and its table cell."""
    assert code(name).replace("  ", " ") == expected.replace("  ", " ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], 0),
        (["--exit-code"], 1),
        (["--fail-on", "decisions"], 1),
        (["--fail-on", "step_time>5%"], 1),
        (["--fail-on", "step_time>13.41%"], 0),
        (["--fail-on", "step_time>13.4%"], 1),
        (["--fail-on", "memory>0%", "--fail-on", "compute_time>0%"], 0),
    ],
)
def test_exit_codes(old: str, new: str, arguments: list[str], expected: int, capsys: Capture) -> None:
    """1 is a difference that was asked for, or a limit that was passed."""
    assert _run(old, new, *arguments) == expected
    err = capsys.readouterr().err
    assert err.startswith("failed: ") == (expected == 1 and "--fail-on" in arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.json", "absent.json"], "error: absent.json: the plan cannot be read: No such file"),
        (["one.json"], "error: Missing argument 'NEW'"),
        (["a", "b", "--fromat", "json"], "error: no such option: --fromat"),
        (["a", "b", "--fail-on", "speed>5%"], "error: Invalid value for '--fail-on': 'speed>5%' is no limit"),
    ],
)
def test_wrong_input(arguments: list[str], message: str, capsys: Capture) -> None:
    """Wrong input exits with 2, an error and a hint."""
    assert _run(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert "\n\nhint: " in err


def test_edited_plans_can_be_compared(old_document: PlanDocument, old: str, tmp_path: Path, capsys: Capture) -> None:
    """A plan whose digests do not fit is compared by what it says."""
    text = Path(old).read_text().replace('"step_ns": 1234567', '"step_ns": 1234568')
    (tmp_path / "edited.json").write_text(text)
    assert _run(old, str(tmp_path / "edited.json")) == 0
    assert "same decisions" in capsys.readouterr().out


def test_control_characters_are_escaped(old_document: PlanDocument, old: str, tmp_path: Path, capsys: Capture) -> None:
    """A name from a model file cannot steer the terminal."""
    model = replace(old_document.model, name="\x1b[31mevil\x07")
    write_plan(tmp_path / "evil.json", with_digests(replace(old_document, model=model)))
    assert _run(old, str(tmp_path / "evil.json")) == 0
    out = capsys.readouterr().out
    assert "\\x1b[31mevil\\x07" in out
    assert "\x1b" not in out


def test_imports_nothing_heavy(old: str, new: str) -> None:
    """tap-diff starts without the packages that planning and applying need."""
    code = (
        "import sys; from tap_planner_cli.diff import command; from tap_planner_cli.errors import invoke; "
        f"invoke(command, 'tap-diff', [{old!r}, {new!r}]); "
        "print(sorted({'onnx', 'ortools', 'torch', 'scipy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_path())
    assert result.stdout.splitlines()[-1] == "[]"


def _path() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{root / 'planner'}:{root / 'cli'}"}
