"""The benchmark of the controls runs: its rows come out on small models as they do on large ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import controls
from tests.bench.controls import Request, Session

TINY = Request.of(
    "hm_gpt_tiny", "--cluster 2x2:a100-sxm4-80gb --batch 8 --dim seq=64 --loss mean --mesh dp=2,tp=2 --recompute none"
)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """Runs the installed command in a folder of its own."""
    return Session(controls.DATA, tmp_path)


def test_a_rule_has_a_price(session: Session) -> None:
    """A forbidden split costs time; the row says by how much, and how to ask for it."""
    (found,) = controls.rule(session, TINY, "--forbid", "layers.*.mlp.*: tp")
    assert str(found["command"]).endswith("--recompute none --forbid 'layers.*.mlp.*: tp'")
    free, kept = (session.ask(TINY).ns, session.ask(TINY.plus("--forbid", "layers.*.mlp.*: tp")).ns)
    assert found["figure"] == f"{100 * (kept - free) / free:+.2f} % time" and kept >= free


def test_a_conflict_through_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The module's own command writes the rows that it prints."""
    path = tmp_path / "controls.json"
    rows = controls.main(["--cases", "conflict", "--json", str(path), "--markdown"])
    assert json.loads(path.read_text(encoding="utf-8")) == rows
    header, _, line = capsys.readouterr().out.splitlines()
    assert header.startswith("| control | command |") and "`tap-plan hm_llama3_8b.onnx " in line
    assert "exclude each other" in line and len(rows) == 1


@pytest.mark.full
def test_all_controls_on_small_models(session: Session, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every control gives its rows, and holds what it promises, on models of two layers."""
    llama = Request.of(
        "hm_llama_tiny", "--cluster 2x2:a100-sxm4-80gb --batch 8 --dim seq=16 --precision fp32 --loss cross-entropy"
    )
    fixed = llama.plus("--mesh", "dp=2,tp=2", "--max-memory", "none")
    apart = Session(controls.DATA, tmp_path_factory.mktemp("apart"))
    workspace = apart.ask(TINY).plan.predicted.memory_bytes["workspace"]
    tight = TINY.plus("--microbatches", "1", "--max-memory", f"{workspace + 400_000}B")
    rows = [
        *controls.stay_near(session, TINY, (), ("--batch", "16")),
        *controls.alternatives(session, llama, 2),
        *controls.target(session, fixed, "megatron"),
        *controls.objective(session, TINY, "memory"),
        *controls.objective(session, TINY.plus("--fix", "batch=dp"), "communication"),
        *controls.infeasible(session, tight),
    ]
    names = [str(found["control"]) for found in rows]
    assert names[:5] == ["--stay-near", "--alternatives", "--target megatron", *names[3:5]]
    assert names.count("no plan fits") == 1 and names.count("its remedy") >= 1
