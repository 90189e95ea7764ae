"""Memory model M of pipelines holds what a simulated step holds between its slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.plan import PlanOptions, PlanRequest
from tap_planner.simulate import price_program, simulate

DATA = Path(__file__).parents[1] / "data"
CLUSTER = str(Path(__file__).parents[2] / "plans" / "demo-cluster.yaml")


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv"])
@pytest.mark.parametrize("model", ["gpt2_tiny", pytest.param("hm_llama_tiny", marks=pytest.mark.full)])
def test_what_is_held_between_slots_is_counted(model: str, schedule: str, recompute: str) -> None:
    """Activations in flight, and, where the backward is in two parts, what products and their gradients wait with for
    the later one: no stage ever holds more of them than the plan counts, and the fullest holds most of it."""
    options = PlanOptions(
        batch=16,
        dims={"seq": 64},
        precision="fp32",
        loss="mean",
        mesh="pp=2,dp=2",
        schedule=schedule,
        recompute=recompute,
        zero=0,
        microbatches=8,
    )
    request = PlanRequest(model=DATA / f"{model}.onnx", cluster=CLUSTER, options=options)
    cluster = api.prepare_search(request).cluster
    program = api.lower_plan(api.make_plan(request), DATA / f"{model}.onnx")
    price = price_program(program, cluster)
    stages = simulate(program, cluster).stages
    stored = [stage.memory.stored_bytes for stage in stages]
    points = [stage.memory_of_slots for stage in stages]
    between = [
        max(p.activation_bytes + p.working_bytes for p in (*held[1::3], *held[3::3])) for held in points
    ]  # a slot's begin, peak and end
    counted = price.memory_bytes - price.workspace_bytes
    most = max(one + other for one, other in zip(stored, between, strict=True))
    assert most <= counted
    assert counted <= 1.2 * max(stage.memory.peak_bytes for stage in stages)
