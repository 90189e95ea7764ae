"""Plans within the gap are re-ranked by their prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.cluster import part_of
from tap_planner.plan import PlanOptions, PlanRequest
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
