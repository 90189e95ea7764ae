"""The plans under plans/ are what the planner answers today."""

from __future__ import annotations

import io
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from tap_planner import api
from tap_planner.plan import PlanDiff, Verdict, check_digests, read_plan
from tap_planner_cli.diff_text import print_diff
from tap_planner_cli.plan import command, make_options

ROOT = Path(__file__).parents[1]
PLANS = ROOT / "plans"
INDEX: dict[str, dict[str, str]] = yaml.safe_load((PLANS / "index.yaml").read_text(encoding="utf-8"))
CASES = [
    pytest.param(name, marks=[pytest.mark.full] if entry.get("slow") else [], id=name) for name, entry in INDEX.items()
]


def _text(difference: PlanDiff) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None, markup=False, emoji=False, highlight=False)
    print_diff(console, difference)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("name", CASES)
def test_planning_again_decides_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Re-planning with a reference plan's own options gives its decisions."""
    monkeypatch.chdir(ROOT)
    entry = INDEX[name]
    difference = api.check_plan(read_plan(PLANS / f"{name}.json"), Path(entry["model"]), entry["cluster"])
    if difference.verdict is Verdict.DECISIONS_CHANGED:
        pytest.fail(
            f"{name}: the planner decides differently now. If that is meant: python plans/regenerate.py {name}\n"
            + _text(difference),
            pytrace=False,
        )


@pytest.mark.parametrize("name", INDEX)
def test_reference_plan_stores_the_options_of_the_index(name: str) -> None:
    """A reference plan was made from its entry in index.yaml, and nobody has edited it since."""
    entry = INDEX[name]
    arguments = [entry["model"], "--cluster", entry["cluster"], *shlex.split(entry["options"])]
    with command.make_context("tap-plan", arguments) as context:
        wanted = make_options(context.params)
    document = read_plan(PLANS / f"{name}.json")
    check_digests(document)
    stored = document.options
    loss = {"loss_output": stored.loss_output} if wanted.loss_output is None else {}
    assert replace(wanted, **loss) == stored
    assert document.model.name == Path(entry["model"]).name


def test_every_reference_plan_is_listed() -> None:
    """plans/ holds the plans of index.yaml and no others."""
    assert {path.stem for path in PLANS.glob("*.json")} == set(INDEX)
