"""Wrong input to the installed commands: one clear error with a hint, the right exit code, nothing half written."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
GPT2 = str(DATA / "gpt2_tiny.onnx")
BIN = Path(sys.executable).parent
PLAN = ("tap-plan", GPT2, "--batch", "8", "--dim", "seq=16", "--precision", "fp32", "--loss", "mean")

CLUSTER = """\
name: c
device: cpu-core
nodes: 1
devices_per_node: 2
"""


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder."""
    program = str(BIN / arguments[0])
    return subprocess.run(
        [program, *arguments[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1", **environment},
        timeout=120,
        check=False,
    )


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A wrong call."""

    name: str
    arguments: tuple[str, ...]
    code: int
    says: tuple[str, ...]
    """What stderr must name: place, value, remedy."""
    files: dict[str, str] = field(default_factory=dict)


CASES = (
    Wrong(
        name="missing file",
        arguments=("tap-plan", "absent.onnx", "--cluster", "1x2:cpu-core", "-o", "out.json"),
        code=2,
        says=("absent.onnx", "hint:"),
    ),
    Wrong(
        name="not ONNX",
        arguments=("tap-plan", "text.onnx", "--cluster", "1x2:cpu-core", "-o", "out.json"),
        code=2,
        says=("text.onnx", "ONNX"),
        files={"text.onnx": "this is no model"},
    ),
    Wrong(
        name="git-lfs pointer",
        arguments=("tap-plan", "p.onnx", "--cluster", "1x2:cpu-core", "-o", "out.json"),
        code=2,
        says=("p.onnx", "git lfs pull"),
        files={"p.onnx": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"},
    ),
    Wrong(
        name="unbound dim",
        arguments=("tap-plan", GPT2, "--batch", "8", "--cluster", "1x2:cpu-core", "-o", "out.json"),
        code=2,
        says=("seq", "--dim"),
    ),
    Wrong(
        name="misspelt dim",
        arguments=("tap-plan", GPT2, "--batch", "8", "--dim", "sec=16", "--cluster", "1x2:cpu-core", "-o", "out.json"),
        code=2,
        says=("sec", "seq"),
    ),
    Wrong(
        name="unknown key in cluster.yaml",
        arguments=(*PLAN, "--cluster", "c.yaml", "-o", "out.json"),
        code=2,
        says=("c.yaml:5", "devices_per_nod", "devices_per_node"),
        files={"c.yaml": CLUSTER + "devices_per_nod: 2\n"},
    ),
    Wrong(
        name="unknown unit in cluster.yaml",
        arguments=(*PLAN, "--cluster", "c.yaml", "-o", "out.json"),
        code=2,
        says=("c.yaml:5", "300 GBps", "GB/s"),
        files={"c.yaml": CLUSTER + "intra_node: {bandwidth: 300 GBps}\n"},
    ),
    Wrong(
        name="bare number in cluster.yaml",
        arguments=(*PLAN, "--cluster", "c.yaml", "-o", "out.json"),
        code=2,
        says=("c.yaml:5", "300", "GB/s"),
        files={"c.yaml": CLUSTER + "intra_node: {bandwidth: 300}\n"},
    ),
    Wrong(
        name="unknown device",
        arguments=(*PLAN, "--cluster", "1x2:h100-sxm5", "-o", "out.json"),
        code=2,
        says=("h100-sxm5", "h100-sxm5-80gb"),
    ),
    Wrong(
        name="mesh that is not the cluster",
        arguments=(*PLAN, "--cluster", "1x2:cpu-core", "--mesh", "dp=2,tp=2", "-o", "out.json"),
        code=2,
        says=("4", "2"),
    ),
    Wrong(
        name="microbatches that do not divide",
        arguments=(*PLAN, "--cluster", "1x2:cpu-core", "--microbatches", "3", "-o", "out.json"),
        code=2,
        says=("3", "8", "divisor"),
    ),
    Wrong(
        name="constraint on an unknown axis",
        arguments=(*PLAN, "--cluster", "1x2:cpu-core", "--constraint", "batch!=pp", "-o", "out.json"),
        code=2,
        says=("pp", "dp"),
    ),
    Wrong(
        name="rule that names nothing",
        arguments=(*PLAN, "--cluster", "1x2:cpu-core", "--fix", "h.*.mpl.*: dp", "-o", "out.json"),
        code=2,
        says=("--fix 'h.*.mpl.*:dp'", "no operator, parameter or tensor", "hint: Did you mean", "mlp.c_"),
    ),
    Wrong(
        name="rules that exclude each other",
        arguments=(
            *(*PLAN, "--cluster", "1x2:cpu-core", "--fix", "h.*.mlp.*: dp=row", "--constraints", "rules.yaml"),
            *("-o", "out.json"),
        ),
        code=2,
        says=(
            "--fix 'h.*.mlp.*:dp=row' and rules.yaml:2 '*.mlp.*.weight:dp!=row' exclude each other",
            "addmm",
            "hint:",
        ),
        files={"rules.yaml": "constraints:\n  - forbid: '*.mlp.*.weight: dp=row'\n"},
    ),
    Wrong(
        name="file of rules without quotes",
        arguments=(*PLAN, "--cluster", "1x2:cpu-core", "--constraints", "rules.yaml", "-o", "out.json"),
        code=2,
        says=("rules.yaml:2", "not valid YAML", "hint: Put each rule in quotes"),
        files={"rules.yaml": "constraints:\n  - fix: mlp.*: tp\n"},
    ),
    Wrong(
        name="target that cannot split the model",
        arguments=(*PLAN, "--cluster", "1x2:cpu-core", "--mesh", "tp=2", "--target", "megatron", "-o", "out.json"),
        code=2,
        says=("--target megatron leaves operator 'embedding' (Gather)", "v (unevenly)", "hint:"),
    ),
    Wrong(
        name="rules that do not fit the memory",
        arguments=(
            *(*PLAN, "--cluster", "1x2:cpu-core", "--max-memory", "800kB", "--replicate", "*", "--no-zero"),
            *("-o", "out.json"),
        ),
        code=3,
        says=("--zero 0 and --replicate '*:replicate' each conflict with that limit", "hint: Drop --replicate"),
    ),
    Wrong(
        name="too large for the memory",
        arguments=(*PLAN, "--cluster", "1x2:cpu-core", "--max-memory", "200kB", "-o", "out.json"),
        code=3,
        says=("at least", "bytes", "hint:"),
    ),
    Wrong(
        name="unreadable plan",
        arguments=("tap-apply", "plan.json", "--model", GPT2),
        code=2,
        says=("plan.json",),
        files={"plan.json": '{"format_version": "1.0"'},
    ),
    Wrong(
        name="plan of a later major version",
        arguments=("tap-show", "plan.json"),
        code=2,
        says=("2.0", "1"),
        files={"plan.json": '{"format_version": "2.0", "kind": "tap.plan"}'},
    ),
    Wrong(
        name="unknown option",
        arguments=("tap-plan", GPT2, "--cluster", "1x2:cpu-core", "--zeros", "1"),
        code=2,
        says=("--zeros", "--zero"),
    ),
)


def assert_clear(result: subprocess.CompletedProcess[str], code: int, says: tuple[str, ...]) -> None:
    """The exit code is right; stderr holds one error line, and no traceback."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    for words in says:
        assert words in result.stderr


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_input(case: Wrong, tmp_path: Path) -> None:
    """Every wrong call names place, value and remedy, exits with its code and leaves no file."""
    for name, text in case.files.items():
        (tmp_path / name).write_text(text)
    result = run(tmp_path, *case.arguments)
    assert_clear(result, case.code, case.says)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(case.files)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of gpt2_tiny for two CPU cores."""
    folder = tmp_path_factory.mktemp("plan")
    result = run(folder, *PLAN, "--cluster", "1x2:cpu-core", "-o", "plan.json")
    assert result.returncode == 0, result.stderr
    return folder / "plan.json"


def test_plan_of_another_model(plan: Path, tmp_path: Path) -> None:
    """A plan is refused with exit 5 when the model gives another graph."""
    result = run(tmp_path, "tap-apply", str(plan), "--model", str(DATA / "hm_gpt_tiny.onnx"), "--init", "random")
    assert result.returncode == 5, result.stderr
    assert "Traceback" not in result.stderr and "hint:" in result.stderr


def test_wrong_world_size(plan: Path, tmp_path: Path) -> None:
    """A plan for two ranks is refused with exit 5 on four processes."""
    result = run(tmp_path, "tap-apply", str(plan), "--model", GPT2, "--init", "random", "--nproc", "4")
    assert_clear(result, 5, ("4", "2", "hint:"))


def test_absent_weights(tmp_path: Path) -> None:
    """Without the weights a plan is made, and applying it needs --init random: exit 5 names the first absent one."""
    model = str(DATA / "hm_gpt_tiny.onnx")
    made = run(
        tmp_path,
        *("tap-plan", model, "--batch", "4", "--dim", "seq=8", "--cluster", "1x2:cpu-core", "--precision", "fp32"),
        *("-o", "plan.json"),
    )
    assert made.returncode == 0, made.stderr
    result = run(tmp_path, "tap-apply", "plan.json", "--model", model)
    assert_clear(result, 5, ("model.embed_tokens.weight", "--init random"))


def test_edited_plan(plan: Path, tmp_path: Path) -> None:
    """A plan that was edited is refused."""
    text = plan.read_text()
    changed = tmp_path / "edited.json"
    changed.write_text(text.replace('"microbatches": 1', '"microbatches": 2'))
    assert changed.read_text() != text
    result = run(tmp_path, "tap-apply", "edited.json", "--model", GPT2, "--init", "random")
    assert_clear(result, 2, ("edited", "hint:"))


def test_existing_plan_survives_a_failure(plan: Path, tmp_path: Path) -> None:
    """A failing tap-plan leaves the plan that was there before untouched."""
    kept = tmp_path / "out.json"
    kept.write_bytes(plan.read_bytes())
    result = run(tmp_path, *PLAN, "--cluster", "1x2:cpu-core", "--max-memory", "200kB", "-o", "out.json")
    assert result.returncode == 3
    assert kept.read_bytes() == plan.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
