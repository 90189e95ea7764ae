"""Plans whose axes split in another order than they lie: found, written, read, certified, compared and run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from tap_planner import api
from tap_planner.cluster import cluster_from_json
from tap_planner.errors import PlanFormatError, UsageError
from tap_planner.plan import (
    ApplyRequest,
    PlanDocument,
    PlanOptions,
    PlanRequest,
    diff_plans,
    from_text,
    to_text,
    write_plan,
)
from tap_planner.simulate import lower_bounds, simulate
from tests.graph.models import DATA

MODEL = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / "light_vgg19.onnx"
GPT = DATA / "hm_gpt_tiny.onnx"
CNN = PlanOptions(batch=128, precision="fp16", loss="mean", max_memory_bytes="none")
LAID = "dp=2,tp=2/tp,dp"
GPT_ON_FOUR = PlanOptions(batch=8, loss="mean", dims={"seq": 16}, precision="fp32")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two nodes of two devices and a slow network."""
    path = tmp_path_factory.mktemp("cluster") / "slow.yaml"
    link = "{bandwidth: 25 Gbit/s, nics_per_node: 1, transport: ethernet}"
    path.write_text(f"name: slow\ndevice: v100-sxm2-32gb\nnodes: 2\ndevices_per_node: 2\ninter_node: {link}\n")
    return str(path)


def planned(model: Path, cluster: str, options: PlanOptions) -> PlanDocument:
    """The plan, written and read again."""
    return from_text(to_text(api.make_plan(PlanRequest(model=model, cluster=cluster, options=options))))


@pytest.fixture(scope="module")
def found(cluster: str) -> PlanDocument:
    """VGG-19: samples are split over both axes, and its large matrices over the one that leaves the node."""
    return planned(MODEL, cluster, CNN)


def test_the_search_finds_it(found: PlanDocument, cluster: str) -> None:
    """It is faster than the best plan on the axes as listed, and just what is found where it is asked for."""
    assert found.mesh.order == (1, 0)
    assert found.mesh.ranks == ((0, 0), (1, 0), (0, 1), (1, 1))
    listed = planned(MODEL, cluster, replace(CNN, mesh="dp=2,tp=2"))
    assert listed.mesh.order == ()
    assert listed.certificate.bound_ns > found.certificate.objective_ns
    assert planned(MODEL, cluster, replace(CNN, mesh=LAID)).folded == found.folded


def test_certificate_and_prediction(found: PlanDocument) -> None:
    """The certificate holds for both orders, and the simulator goes by the order of the plan."""
    checked = api.verify_certificate(found, MODEL, replay=True)
    assert checked.findings == ()
    assert {entry.mesh for entry in found.certificate.proof} == {"dp=4", "dp=2,tp=2", LAID}
    program = api.lower_plan(found, MODEL)
    assert program.decisions.order == (1, 0)
    step = api.simulate_program(found, program).step_ns
    assert step == found.predicted.step_ns
    listed = replace(program, decisions=replace(program.decisions, order=()))
    assert api.simulate_program(found, listed).step_ns != step


def test_another_order_is_no_plan_of_the_space(found: PlanDocument) -> None:
    """Ranks that lie otherwise than the order says are found by verification."""
    wrong = replace(found, mesh=replace(found.mesh, order=()))
    assert any("mesh:" in finding for finding in api.verify_certificate(wrong, MODEL).findings)


@pytest.mark.parametrize("order", [["tp", "dp"], ["tp"], ["tp", "tp"], ["tp", "ep"]])
def test_wrong_orders_are_refused(found: PlanDocument, order: list[str]) -> None:
    """The order has each axis once and is another than the listed one; the place is named."""
    data = json.loads(to_text(found))
    data["mesh"]["device_order"] = order
    with pytest.raises(PlanFormatError, match=r"mesh\.device_order"):
        from_text(json.dumps(data))


def test_comparison_names_the_order(found: PlanDocument, cluster: str) -> None:
    """CI sees that axes lie otherwise, and so where the ranks are."""
    listed = planned(MODEL, cluster, replace(CNN, mesh="dp=2,tp=2"))
    changed = {change.name for change in diff_plans(listed, found).mesh}
    assert {"split_order", "ranks"} <= changed


def test_many_ranks_are_written_short() -> None:
    """128 ranks are a shape, not a list, whichever way the axes lie."""
    options = replace(GPT_ON_FOUR, batch=128, mesh="dp=16,tp=8/tp,dp")
    document = api.make_plan(PlanRequest(model=GPT, cluster="16x8:v100-sxm2-32gb", options=options))
    text = to_text(document)
    assert json.loads(text)["mesh"]["ranks"] == {"order": "row-major", "shape": [16, 8]}
    assert from_text(text) == document
    assert document.mesh.ranks[:3] == ((0, 0), (1, 0), (2, 0))
    assert document.mesh.ranks[16:18] == ((0, 1), (1, 1))


@pytest.mark.parametrize("mesh", [LAID, "pp=2,dp=2,tp=2/tp,dp"])
def test_processes_verify_it(mesh: str, tmp_path: Path) -> None:
    """Run on gloo processes it is single-process training, with stages as well; no step beats its lower bounds."""
    stages = 2 if "pp" in mesh else 1
    options = replace(GPT_ON_FOUR, mesh=mesh, microbatches=2)
    document = planned(GPT, f"2x{2 * stages}:v100-sxm2-32gb", options)
    assert document.mesh.order == (1, 0)
    assert api.verify_certificate(document, GPT).findings == ()
    program = api.lower_plan(document, GPT)
    used = cluster_from_json(document.cluster)
    assert lower_bounds(program, used).step_ns <= simulate(program, used).step_ns == document.predicted.step_ns
    path = tmp_path / "plan.json"
    write_plan(path, document)
    request = ApplyRequest(plan=path, model=GPT, nproc=4 * stages, init_random=True, verify=True)
    result = api.apply_plan(request).result
    assert result is not None and result.report is not None
    assert result.report.passed, "\n".join(result.report.lines())


def test_frameworks_split_as_axes_lie(cluster: str) -> None:
    """A target has no such mesh, and its own search does not look there."""
    with pytest.raises(
        UsageError, match="splits by the axes of the mesh dp=2,tp=2/tp,dp in the order in which they lie"
    ):
        planned(GPT, cluster, replace(GPT_ON_FOUR, mesh=LAID, target="torchtitan"))


def test_what_is_sent_does_not_depend_on_it(cluster: str) -> None:
    """Where bytes are least, or priced by their volume, meshes are looked at once."""
    for options in (replace(CNN, cost="volume"), replace(CNN, objective="communication")):
        document = planned(MODEL, cluster, options)
        assert {entry.mesh for entry in document.certificate.proof} <= {"dp=4", "dp=2,tp=2"}
