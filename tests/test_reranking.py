"""Plans within the gap are re-ranked by their prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from tap_planner import api
from tap_planner.cluster import part_of
from tap_planner.plan import PlanDocument, PlanOptions, PlanRequest
from tap_planner.program import lower
from tap_planner.search import search
from tap_planner.simulate import predict

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("gap_basis_points", [0, 2000, 9000])
def test_the_fastest_prediction_within_the_gap_ships(gap_basis_points: int, mode: str) -> None:
    """The plan that ships is predicted no slower than any that the search found within the gap, and its certificate
    speaks of its own objective."""
    loss = "mean" if mode == "train" else None
    options = PlanOptions(batch=8, loss=loss, mode=mode, dims={"seq": 128}, gap_basis_points=gap_basis_points)
    request = PlanRequest(model=DATA / "hm_gpt_tiny.onnx", cluster="2x4:a100-sxm4-80gb", options=options)
    document = api.make_plan(request)
    prepared = api.prepare_search(request)
    result = search(prepared.request)
    found = (result, *result.runners_up)
    if gap_basis_points > (0 if mode == "train" else 2000):
        assert len(found) > 1, "a wide gap leaves several meshes"
    steps = {
        predict(lower(one.folded.graph, one.decisions), part_of(prepared.cluster, one.mesh)).step_ns: one
        for one in reversed(found)
    }
    assert document.predicted.step_ns == min(steps)
    if mode == "infer":
        assert all(step >= one.objective_ns for step, one in steps.items()), "else plans were left out wrongly"
    assert document.certificate.objective_ns == steps[min(steps)].objective_ns
    least = result.bound_ns
    assert all(one.objective_ns * (1 - prepared.request.gap) <= least for one in found)


def noted(caplog: pytest.LogCaptureFixture, options: PlanOptions) -> tuple[PlanDocument, list[str]]:
    """A plan of two layers of LLaMA on two nodes, and what is noted of plans beyond the gap."""
    request = PlanRequest(model=DATA / "llama3_8b_2l.onnx", cluster="2x4:a100-sxm4-80gb", options=options)
    with caplog.at_level(1, "tap_planner"):
        document = api.make_plan(request)
    return document, [record.getMessage() for record in caplog.records if "knows no overlap" in record.getMessage()]


def test_a_plan_beyond_the_gap_that_is_predicted_faster_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    """The note says by how much, as prediction and objective of the other plan have it; its mesh alone gives none."""
    options = PlanOptions(batch=64, loss="mean", dims={"seq": 512}, max_memory_bytes="none")
    document, notes = noted(caplog, options)
    request = PlanRequest(model=DATA / "llama3_8b_2l.onnx", cluster="2x4:a100-sxm4-80gb", options=options)
    prepared = api.prepare_search(request)
    contenders = search(prepared.request).contenders
    assert 1 <= len(contenders) <= 2
    limit = document.certificate.objective_ns
    assert all(limit < other.objective_ns <= 1.05 * limit for other in contenders)
    steps = {predict(lower(o.folded.graph, o.decisions), prepared.cluster).step_ns: o for o in contenders}
    fastest = steps[min(steps)]
    assert min(steps) < 0.98 * document.predicted.step_ns
    saved, more = 1 - min(steps) / document.predicted.step_ns, fastest.objective_ns / limit - 1
    assert len(notes) == 1
    assert notes[0].startswith(f"a plan on the mesh {fastest.mesh} is predicted {saved:.1%} faster")
    assert f"is {more:.1%} larger; see --mesh {fastest.mesh}" in notes[0]
    caplog.clear()
    alone, none = noted(caplog, replace(options, mesh=str(fastest.mesh)))
    assert none == []
    assert alone.predicted.step_ns < 0.98 * document.predicted.step_ns


def test_where_overlap_is_no_matter_nothing_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    """With nothing hidden the prediction goes by the objective; another price or objective has its own order."""
    options = PlanOptions(batch=64, loss="mean", dims={"seq": 512}, max_memory_bytes="none")
    for other in (replace(options, overlap="none"), replace(options, cost="volume")):
        assert noted(caplog, other)[1] == []


def test_a_model_without_work_has_no_contenders(tmp_path: Path) -> None:
    """A graph that only passes its input on takes no time on any mesh: there is nothing to compare."""
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", value[:1], value[1:]))
    onnx.save(model, tmp_path / "model.onnx")
    options = PlanOptions(batch=8, mode="infer")
    request = PlanRequest(model=tmp_path / "model.onnx", cluster="2x4:l4", options=options)
    document = api.make_plan(request)
    assert document.predicted.step_ns == document.certificate.objective_ns == 0
    assert search(api.prepare_search(request).request).contenders == ()
