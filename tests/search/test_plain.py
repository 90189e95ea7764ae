"""ZeRO levels that only save memory which is not needed are not chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.plan import PlanDocument, PlanOptions, PlanRequest, expand
from tests.bench.instances import light_models

DATA = Path(__file__).parents[1] / "data"
SQUEEZENET = next(instance.path for instance in light_models() if instance.name == "light_squeezenet")
CASES = [
    (SQUEEZENET, str(DATA / "clusters" / "quick-1x8.yaml"), {}),
    (DATA / "resnet_small.onnx", "2x4:a100-sxm4-80gb", {}),
    (DATA / "hm_gpt_tiny.onnx", "2x4:a100-sxm4-80gb", {"seq": 16}),
]


def planned(model: Path, cluster: str, dims: dict[str, int], **given: object) -> PlanDocument:
    """A plan for one microbatch."""
    options = PlanOptions(batch=64, loss="mean", dims=dims, microbatches=1, gap_basis_points=0, **given)  # type: ignore[arg-type]
    return api.make_plan(PlanRequest(model=model, cluster=cluster, options=options))


def levels(document: PlanDocument) -> set[int]:
    """ZeRO levels in use."""
    return {parameter.zero_level for parameter in expand(document).parameters if parameter.bucket is not None}


@pytest.mark.parametrize(("model", "cluster", "dims"), CASES, ids=[case[0].stem for case in CASES])
def test_no_level_is_higher_than_what_it_saves(model: Path, cluster: str, dims: dict[str, int]) -> None:
    """With one microbatch levels 1 and 2 cost the same by objective A: the lower one reduces in fewer pieces."""
    free = planned(model, cluster, dims)
    assert max(levels(free), default=0) <= 1
    report = api.verify_certificate(free, model, replay=True)
    assert report.passed, report.lines()


def test_a_level_is_as_high_as_the_limit_asks() -> None:
    """Where the lower level does not fit, the higher one stays, at the same time."""
    model, cluster, dims = CASES[0]
    free = planned(model, cluster, dims)
    saving = planned(model, cluster, dims, max_memory_bytes=free.predicted.total_memory_bytes - 1)
    assert saving.certificate.objective_ns == free.certificate.objective_ns
    assert max(levels(saving)) >= 2
    assert saving.predicted.total_memory_bytes < free.predicted.total_memory_bytes


def test_the_prediction_gains() -> None:
    """A network of many small parameters is predicted as fast as with the best level that is given."""
    model, cluster, dims = CASES[0]
    fixed = [planned(model, cluster, dims, zero=level).predicted.step_ns for level in (0, 1, 2, 3)]
    assert planned(model, cluster, dims).predicted.step_ns <= 1.01 * min(fixed)
