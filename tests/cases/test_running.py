"""Cases about applying: trivial graphs, plans for something else, ranks that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tap_planner.apply.runner
from tests.cases.running import (
    Case,
    assert_any_plan_runs_as_elsewhere,
    assert_equal_outputs,
    assert_runs_as_elsewhere,
    bound_graph,
    execute,
    run,
)

TRIVIAL = Case("outputs_inputs_passthrough")


def test_outputs_that_are_inputs_or_weights(tmp_path: Path) -> None:
    """Inner values, inputs and initializers are returned; what nobody needs costs nothing."""
    planned = assert_runs_as_elsewhere(TRIVIAL, tmp_path)
    assert [operator.type for operator in planned.operators] == ["Relu", "Exp"]
    assert not planned.decisions.parameters and planned.document.predicted.memory_bytes["parameters"] == 0
    assert_any_plan_runs_as_elsewhere(TRIVIAL, planned, tmp_path)


@pytest.mark.parametrize("stem", ["identity", "no_nodes"])
def test_graphs_without_operators(stem: str, tmp_path: Path) -> None:
    """One Identity, or no node at all, has a trivial plan that every command accepts."""
    planned = assert_runs_as_elsewhere(TRIVIAL, tmp_path, stem=stem)
    assert not planned.operators and planned.document.certificate.status == "optimal"
    assert planned.document.predicted.step_ns == 0
    assert f"{stem}.onnx on case" in planned.tables()
    assert run("tap-show", "--program", planned.path, "--model", planned.model).code == 0
    assert run("tap-diff", planned.path, planned.path, "--exit-code").code == 0
    checked = run("tap-plan", planned.model, "--cluster", TRIVIAL.cluster, "--check", planned.path)
    assert checked.code == 0, checked.err
    trained = TRIVIAL.plan(tmp_path, stem=stem, mode="train")
    assert [operator.type for operator in trained.decisions.operators] == ["Loss"]


@pytest.mark.parametrize("stem", ["identity", pytest.param("no_nodes", marks=pytest.mark.full)])
def test_graphs_without_operators_on_two_processes(stem: str, tmp_path: Path) -> None:
    """The trivial plan runs and verifies on two real processes."""
    planned = TRIVIAL.plan(tmp_path, "--cluster", "1x2:cpu-core", "--precision", "fp32", stem=stem)
    verified = planned.apply("--verify", "--nproc", "2", "--inputs", TRIVIAL.inputs(tmp_path, stem))
    assert verified.code == 0, verified.out + verified.err


OTHER = Case("plan_for_other_model_or_shape")


def test_plans_for_something_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model, another batch, another number of processes: refused before any process starts."""
    planned = assert_runs_as_elsewhere(OTHER, tmp_path)

    def start(*arguments: object) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr(tap_planner.apply.runner, "run_processes", start)
    for processes in ((), ("--nproc", "4")):
        other = run("tap-apply", planned.path, "--model", OTHER.model("other"), *processes)
        other.refused(5, "other.onnx", "the plan was made for")
    planned.apply("--nproc", "3").refused(5, "4 ranks, got 3")
    small = tmp_path / "small.npz"
    np.savez(small, x=np.zeros((6, 8), np.float32))
    planned.apply("--inputs", small).refused(5, "'x'", "[6, 8]", "[8, 8]")


def test_a_plan_is_for_its_batch(tmp_path: Path) -> None:
    """With 6 in place of 8 the graph is another: --check plans anew and shows no false agreement."""
    eight = OTHER.plan(tmp_path)
    kept = tmp_path / "eight.json"
    kept.write_bytes(eight.path.read_bytes())
    six = OTHER.plan(tmp_path, "--batch", "6", bind=False)
    assert six.document.model.graph_digest != eight.document.model.graph_digest
    assert run("tap-diff", kept, six.path, "--exit-code").code == 1
    assert bound_graph(eight.job()).batch == 8


def test_the_other_model_has_a_plan_of_its_own(tmp_path: Path) -> None:
    """The case's second model computes what it should when it is planned itself."""
    planned = assert_runs_as_elsewhere(OTHER, tmp_path, stem="other")
    assert_equal_outputs(execute(planned.job(), OTHER.inputs(tmp_path, "other")), OTHER.outputs("other"))


FAILS = Case("rank_fails_midway")


def test_a_wrong_input_is_refused_by_name(tmp_path: Path) -> None:
    """An input of another shape is said before anything runs."""
    planned = assert_runs_as_elsewhere(FAILS, tmp_path)
    np.savez(tmp_path / "wrong.npz", x=np.zeros((8, 63), np.float32))
    planned.apply("--inputs", tmp_path / "wrong.npz").refused(5, "'x'", "[8, 63]", "[8, 64]")


def _children(pid: int) -> list[int]:
    """Processes that a process started, oldest first."""
    tasks = Path(f"/proc/{pid}/task/{pid}/children")
    return sorted(int(word) for word in tasks.read_text().split()) if tasks.exists() else []


def _ranks(pid: int) -> list[int]:
    """Processes that hold the ranks of a job, oldest first: its server of processes has forked them."""
    servers = [child for child in _children(pid) if b"forkserver" in _command_line(child)]
    return [rank for server in servers for rank in _children(server)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _cpu_ticks(pid: int) -> int:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    """Rank 1 is killed while the others work together: the job ends with its name and cause, and leaves no process."""
    batch = ("--constraint", "a:dp=m", "--constraint", "y:dp=m")
    planned = FAILS.plan(tmp_path, "--mesh", "dp=4", "--zero", "0", "--precision", "fp32", *batch, mode="train")
    assert planned.document.collectives, "ranks must have something to wait for"
    program = str(Path(sys.executable).with_name("tap-apply"))
    command = [program, planned.path, "--model", planned.model, "--nproc", "4", "--steps", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 120
        while len(_ranks(job.pid)) < 4 or min(_cpu_ticks(rank) for rank in _ranks(job.pid)) < 200:
            assert time.monotonic() < deadline and job.poll() is None, job.communicate()
            time.sleep(0.2)
        ranks = _ranks(job.pid)
        os.kill(ranks[1], signal.SIGKILL)
        out, err = job.communicate(timeout=60)
    assert job.returncode == 5, out + err
    assert "rank 1 failed: its process ended with exit code -9" in err and "Traceback" not in err
    assert not any(Path(f"/proc/{rank}").exists() and b"forkserver" in _command_line(rank) for rank in ranks)
