"""Jobs in lockstep and with local gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tap_planner.apply import ApplyJob, apply_job
from tap_planner.apply.launch import run_processes
from tap_planner.errors import ApplyError
from tap_planner.graph import BindOptions, LossOptions, bind, load_model
from tests.apply.random_plans import RandomPlan
from tests.graph.models import DATA

_PATH = DATA / "gpt2_tiny.onnx"
_OPTIONS = BindOptions(batch=4, dims={"seq": 8}, training=True, loss=LossOptions(kind="cross-entropy"))


@pytest.fixture(scope="module")
def job() -> ApplyJob:
    """Training GPT-2 on 2x2 with ZeRO 2 and two microbatches in float32."""
    model = load_model(_PATH)
    part = bind(model, replace(_OPTIONS, batch=2))
    plan = RandomPlan(part, (2, 2), 1, zero=2, microbatches=2, loss_kind="cross-entropy")
    return ApplyJob(
        model=_PATH,
        options=_OPTIONS,
        decisions=replace(plan.build(), precision="fp32"),
        graph_digest=bind(model, _OPTIONS).digest,
        random_weights=True,
    )


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-3), ("bf16", 0.1)])
def test_losses_do_not_depend_on_the_mesh(job: ApplyJob, precision: str, tolerance: float) -> None:
    """Three steps on 2x2 give the losses of one rank, in each precision."""
    model = load_model(_PATH)
    alone = RandomPlan(bind(model, _OPTIONS), (1,), 0, loss_kind="cross-entropy").build()
    expected = apply_job(replace(job, decisions=replace(alone, precision="fp64"), steps=3))
    made = apply_job(replace(job, decisions=replace(job.decisions, precision=precision), steps=3))
    assert expected is not None and made is not None
    assert len(made.losses) == 3
    np.testing.assert_allclose(made.losses, expected.losses, rtol=tolerance)


def test_outputs_are_brought_together(job: ApplyJob) -> None:
    """Where asked for, the outputs of all microbatches come back whole, by their ONNX names."""
    result = apply_job(replace(job, keep_outputs=True))
    assert result is not None
    ((name, logits),) = result.outputs
    assert (name, logits.shape) == ("logits", (4, 8, 101))


def test_processes_verify(job: ApplyJob) -> None:
    """Four gloo processes verify as lockstep does, with the same number of collectives."""
    result = apply_job(replace(job, verify=True), num_processes=4)
    lockstep = apply_job(replace(job, verify=True))
    assert result is not None and result.report is not None and lockstep is not None
    assert result.report.passed, "\n".join(result.report.lines())
    assert result.num_collectives == lockstep.num_collectives > 0


def test_a_failing_rank_ends_the_job_with_its_error(job: ApplyJob) -> None:
    """What one rank reports is the job's error; nothing hangs."""
    with pytest.raises(ApplyError, match=r"rank \d failed: .* 28 of 28"):
        run_processes(replace(job, random_weights=False), 4)


def test_processes_have_the_environment_of_their_call(
    job: ApplyJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that forks the ranks lives on: what it was started with is not what a later call has."""
    says = tmp_path / "says.py"
    says.write_text("import os\nraise RuntimeError(os.environ['TAP_TEST_CALL'])\n")
    for call in ("first", "second"):
        monkeypatch.setenv("TAP_TEST_CALL", call)
        with pytest.raises(ApplyError, match=f"rank . failed: .*{call}"):
            run_processes(replace(job, custom_ops=(says,)), 4)


def test_absent_weights_are_refused(job: ApplyJob) -> None:
    """Without the weights file the error says what is missing and how random ones are made."""
    with pytest.raises(ApplyError, match="28 of 28") as caught:
        apply_job(replace(job, random_weights=False))
    assert "--init random" in caught.value.hint and caught.value.exit_code == 5


def test_another_graph_is_refused(job: ApplyJob) -> None:
    """A model that is bound to another graph than the plan's is refused before anything runs."""
    with pytest.raises(ApplyError, match="the plan was made for 0123"):
        apply_job(replace(job, graph_digest="0123" * 16))


def test_wrong_number_of_processes(job: ApplyJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of processes must be that of the mesh, whether we start them or a launcher did."""
    with pytest.raises(ApplyError, match="2x2 has 4 ranks, got 3"):
        apply_job(job, num_processes=3)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ApplyError, match="2x2 has 4 ranks, got 2"):
        apply_job(job)


@pytest.fixture(scope="module")
def leaving_out(job: ApplyJob) -> ApplyJob:
    """The same model on 2 of 3 devices, the first and the last."""
    part = bind(load_model(_PATH), replace(_OPTIONS, batch=2))
    plan = RandomPlan(part, (2,), 1, zero=2, microbatches=2, loss_kind="cross-entropy")
    return replace(job, decisions=replace(plan.build(), precision="fp32"), devices=(0, 2), num_devices=3)


def test_ranks_are_where_their_devices_are(leaving_out: ApplyJob) -> None:
    """With one process a device the mesh lies on those that the plan names; with fewer, on the first; others refuse."""
    assert leaving_out.members(3) == (0, 2)
    assert leaving_out.members(2) == (0, 1)
    for world in (1, 4):
        with pytest.raises(ApplyError, match=f"mesh 2 has 2 ranks, got {world} processes") as caught:
            leaving_out.members(world)
        assert "start 2 to 3 processes" in caught.value.hint


def test_idle_processes_wait(leaving_out: ApplyJob) -> None:
    """Two of three processes verify the plan, the one between them is idle until they are done."""
    result = apply_job(replace(leaving_out, verify=True), num_processes=3)
    assert result is not None and result.report is not None
    assert result.report.passed, "\n".join(result.report.lines())
    assert result.num_ranks == 2 and result.num_collectives > 0


@pytest.mark.full
def test_a_failing_rank_ends_idle_processes(leaving_out: ApplyJob) -> None:
    """The job ends with the error of the rank, not with a process that waits for ever."""
    with pytest.raises(ApplyError, match=r"rank \d failed: .* 28 of 28"):
        run_processes(replace(leaving_out, random_weights=False), 3)


def launched(job: ApplyJob, processes: int, folder: Path) -> list[str]:
    """What each process of a torchrun job says: PASSED, None, or the result."""
    import pickle

    (folder / "job").write_bytes(pickle.dumps(job))
    script = folder / "main.py"
    script.write_text(
        "import os, pathlib, pickle, sys\n"
        "import torch\n"
        "torch.set_num_threads(1)\n"
        "from tap_planner.apply import apply_job\n"
        "if __name__ == '__main__':\n"
        "    result = apply_job(pickle.load(open(sys.argv[1], 'rb')), backend='gloo')\n"
        "    said = 'PASSED' if result is not None and result.report.passed else str(result)\n"
        "    pathlib.Path(sys.argv[1] + os.environ['RANK']).write_text(said)\n"
    )
    run_under_torchrun(processes, script, folder / "job")
    return [(folder / f"job{rank}").read_text() for rank in range(processes)]


def run_under_torchrun(processes: int, script: Path, argument: Path) -> None:
    """Run a script with one argument in so many processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    run = subprocess.run(
        [*launcher, script, argument],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_launcher_with_axes_that_lie_otherwise(job: ApplyJob, tmp_path: Path) -> None:
    """The second process holds the third rank, and what is gathered comes in the order of ranks all the same."""
    laid = replace(job, verify=True, devices=(0, 2, 1, 3), num_devices=4)
    assert launched(laid, 4, tmp_path) == ["PASSED", "None", "None", "None"]


def test_processes_take_the_numbers_of_their_ranks(tmp_path: Path) -> None:
    """Under torchrun each process says its coordinates, and what it gathers over one axis and over both."""
    script = tmp_path / "main.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "import torch\n"
        "from tap_planner.apply import ProcessGroupCommunicator\n"
        "ranks = ProcessGroupCommunicator((2, 2), 'gloo', members=(0, 2, 1, 3))\n"
        "own = [torch.tensor([int(os.environ['RANK'])])]\n"
        "said = [ranks.all_gather(own, axes)[0].ravel().tolist() for axes in ((0,), (1,), (0, 1))]\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(f'{ranks.ranks[0]} {said}')\n"
        "ranks.close()\n"
    )
    run_under_torchrun(4, script, tmp_path)
    assert [(tmp_path / str(process)).read_text() for process in range(4)] == [
        "(0, 0) [[0, 1], [0, 2], [0, 2, 1, 3]]",
        "(1, 0) [[0, 1], [1, 3], [0, 2, 1, 3]]",
        "(0, 1) [[2, 3], [0, 2], [0, 2, 1, 3]]",
        "(1, 1) [[2, 3], [1, 3], [0, 2, 1, 3]]",
    ]


def test_launcher(job: ApplyJob, tmp_path: Path) -> None:
    """Under torchrun every process joins the launcher's group; rank 0 has the result, the others None."""
    assert launched(replace(job, verify=True), 4, tmp_path) == ["PASSED", "None", "None", "None"]


@pytest.mark.full
def test_launcher_with_more_processes_than_ranks(leaving_out: ApplyJob, tmp_path: Path) -> None:
    """Processes of a launcher whose devices the plan leaves out wait and say nothing."""
    job = replace(leaving_out, verify=True, devices=(1, 2))
    assert launched(job, 3, tmp_path) == ["None", "PASSED", "None"]


def test_importing_the_planner_imports_no_torch() -> None:
    """Planning must not pay for torch: only apply imports it."""
    code = "import sys, tap_planner, tap_planner.api; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
