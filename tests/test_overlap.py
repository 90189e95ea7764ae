"""``--overlap``: what the runtime that is to run a plan hides concerns the prediction, and the plan keeps it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.errors import PlanFormatError, UsageError
from tap_planner.plan import Overlap, PlanDocument, PlanOptions, PlanRequest, Verdict, from_text, overlap_of, to_text
from tap_planner.simulate import PRODUCT
from tap_planner_cli.errors import invoke
from tap_planner_cli.show import command
from tests.graph.models import DATA

MODEL = DATA / "hm_gpt_tiny.onnx"
CLUSTER = "2x2:a100-sxm4-80gb"
STAGED = "pp=2,tp=2"


@cache
def planned(overlap: str, mesh: str = "dp=2,tp=2", cluster: str = CLUSTER) -> PlanDocument:
    """A plan, as read from its text."""
    options = PlanOptions(batch=8, loss="mean", dims={"seq": 16}, mesh=mesh, zero=1, overlap=overlap, microbatches=2)
    text = to_text(api.make_plan(PlanRequest(model=MODEL, cluster=cluster, options=options)))
    document = from_text(text)
    assert to_text(document) == text
    return document


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", STAGED])
def test_what_is_hidden_shortens_the_step_alone(mesh: str) -> None:
    """Nothing waits longer with more overlap; with one mesh objective, bound and what is decided are the same."""
    documents = [planned(overlap, mesh) for overlap in ("none", "data", "all")]
    steps = [document.predicted.step_ns for document in documents]
    assert steps == sorted(steps, reverse=True)
    assert (steps[0] > steps[1]) == (mesh == STAGED)  # without stages all gradients are one bucket, made at the end
    assert {document.certificate.objective_ns for document in documents} == {documents[0].certificate.objective_ns}
    assert {document.certificate.bound_ns for document in documents} == {documents[0].certificate.bound_ns}
    assert all("overlap" in document.certificate.not_in_objective for document in documents)
    digests = [document.digests for document in documents]
    assert None not in digests and len({d.decisions for d in digests if d}) == 1 < len({d.plan for d in digests if d})


@pytest.mark.parametrize(
    ("library", "option", "overlap"), [("nccl", "data", Overlap.DATA), ("gloo", "none", Overlap.NONE)]
)
def test_auto_is_what_the_library_can(library: str, option: str, overlap: Overlap) -> None:
    """Without the option everything but products hides over nccl, and nothing over gloo; the plan does not mention it,
    as those that were written before there was one."""
    assert overlap_of("auto", library) is overlap_of(option, library) is overlap
    cluster = CLUSTER if library == "nccl" else "2x2:cpu-core"
    usual, given = planned("auto", cluster=cluster), planned(option, cluster=cluster)
    assert usual.predicted == given.predicted
    assert '"overlap":' not in to_text(usual)
    assert usual.options == replace(given.options, overlap="auto")
    assert f'"overlap": "{option}"' in to_text(given)


@pytest.mark.parametrize("overlap", ["none", "data", "all"])
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", STAGED])
def test_a_plan_is_simulated_with_its_own(overlap: str, mesh: str) -> None:
    """What shows or checks a plan predicts the step that is written in it."""
    document = planned(overlap, mesh)
    assert api.simulate_plan(document, MODEL).step_ns == document.predicted.step_ns
    program = api.lower_plan(document, MODEL)
    timeline = api.simulate_program(document, program)
    assert timeline.step_ns == document.predicted.step_ns
    assert any(PRODUCT in stage.communication_ns for stage in timeline.stages) <= (overlap == "all")
    assert api.check_plan(document, MODEL, CLUSTER).verdict is Verdict.IDENTICAL
    assert api.verify_certificate(document, MODEL).passed


def test_what_is_shown_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``tap-show`` names what was asked for, and nothing where nothing was."""
    for overlap in ("auto", "all"):
        path = tmp_path / f"{overlap}.json"
        path.write_text(to_text(planned(overlap, STAGED)), encoding="utf-8")
        assert invoke(command, "tap-show", [str(path), "--timeline", "--model", str(MODEL)]) == 0
        assert ("tap-apply hides nothing" in capsys.readouterr().out) == (overlap == "all")


def test_a_diff_names_it() -> None:
    """Options and prediction differ; what would run is the same."""
    difference = api.diff_plans(planned("data"), planned("all"))
    assert difference.verdict is Verdict.SAME_DECISIONS
    assert [(c.name, c.old, c.new) for c in difference.options] == [("overlap", "data", "all")]


@pytest.mark.parametrize("overlap", ["data", "all"])
def test_gloo_hides_nothing(overlap: str) -> None:
    """Its collectives need the cores that compute."""
    options = PlanOptions(batch=8, loss="mean", dims={"seq": 16}, overlap=overlap)
    with pytest.raises(UsageError, match=f"--overlap {overlap}: the cluster's library is gloo") as raised:
        api.make_plan(PlanRequest(model=MODEL, cluster="2x2:cpu-core", options=options))
    assert "nccl" in raised.value.hint


def test_wrong_values_are_refused() -> None:
    """Of the library's users, of plans, and where whole operators lie on devices."""
    options = PlanOptions(batch=8, loss="mean", dims={"seq": 16}, overlap="tensor")
    with pytest.raises(UsageError, match="--overlap tensor: expected auto, none, data, all"):
        api.make_plan(PlanRequest(model=MODEL, cluster=CLUSTER, options=options))
    placed = replace(options, overlap="none", method="device-placement")
    with pytest.raises(UsageError, match="--overlap none with --method device-placement"):
        api.make_plan(PlanRequest(model=MODEL, cluster=CLUSTER, options=placed))
    with pytest.raises(PlanFormatError, match=r"options\.overlap"):
        from_text(to_text(planned("all")).replace('"overlap": "all"', '"overlap": "most"'))
