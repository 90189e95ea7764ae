"""``--optimizer-states``: moments in bfloat16 where they are asked for, or where they pay; plan, proof and run."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tap_planner import api
from tap_planner.choosing import SHARE, choose_states
from tap_planner.errors import InfeasibleError, LimitReachedError, UsageError
from tap_planner.plan import (
    ApplyRequest,
    PlanDocument,
    PlanOptions,
    PlanRequest,
    StatesOutcome,
    Verdict,
    from_text,
    to_text,
    with_digests,
    write_plan,
)
from tap_planner.requests import PreparedSearch
from tap_planner.search import SearchResult, search_parts
from tap_planner.search import search as search_space
from tap_planner_cli.errors import invoke
from tap_planner_cli.plan import command
from tests.graph.models import DATA

pytestmark = pytest.mark.usefixtures("without_buffers")

MODEL = DATA / "hm_gpt_tiny.onnx"
CLUSTER = "2x2:a100-sxm4-80gb"
OPTIONS = PlanOptions(batch=8, loss="mean", dims={"seq": 16}, precision="fp32", mesh="dp=4", zero=0, recompute="none")
FASTER, EQUAL, ONLY = 1_000_000, 1_300_000, 280_000
"""Limits under which bfloat16 moments make the step 10 % faster, not even 0.1 %, and are the only ones that fit."""
TIGHT = 470_000
"""With one microbatch the same at any ZeRO level."""


def request(limit: int, states: str, **changes: object) -> PlanRequest:
    """A request under a limit."""
    options = replace(OPTIONS, max_memory_bytes=limit, optimizer_states=states)
    return PlanRequest(model=MODEL, cluster=CLUSTER, options=replace(options, **changes))  # type: ignore[arg-type]


@cache
def planned(limit: int, states: str) -> PlanDocument:
    """A plan, as read from its text."""
    text = to_text(api.make_plan(request(limit, states)))
    document = from_text(text)
    assert to_text(document) == text
    return document


def trained(document: PlanDocument) -> int:
    """Elements of all trained parameters."""
    return sum(
        int(np.prod(entry.decision.shape)) * len(entry.buckets)
        for entry in document.folded.parameters
        if entry.decision.trainable
    )


def test_memory_in_closed_form() -> None:
    """Whole on every device at ZeRO 0: two moments of 4 or of 2 bytes a trained element, and no master at fp32."""
    for states, per_element in (("fp32", 8), ("bf16", 4)):
        document = planned(EQUAL, states)
        assert document.predicted.memory_bytes["optimizer"] == per_element * trained(document) > 0
        assert document.optimizer_states == states


def test_smaller_moments_are_never_worse() -> None:
    """Whatever fits with float32 moments fits with bfloat16 ones, and takes no longer."""
    for limit in (FASTER, EQUAL):
        wide, narrow = planned(limit, "fp32").certificate, planned(limit, "bf16").certificate
        assert narrow.bound_ns <= narrow.objective_ns <= wide.objective_ns


# -- auto ------------------------------------------------------------------------------------------------------


def test_auto_keeps_float32_that_costs_little() -> None:
    """Both are planned and shown; the plan is that with float32, bit by bit but for the option and the comparison."""
    document, wide, narrow = (planned(EQUAL, states) for states in ("auto", "fp32", "bf16"))
    assert wide.certificate.objective_ns <= narrow.certificate.objective_ns * (1 + SHARE)
    assert document.optimizer_states == "fp32"
    assert document.digests is not None and wide.digests is not None
    assert document.digests.decisions == wide.digests.decisions
    choice = document.certificate.states
    assert choice is not None
    for found, given in ((choice.fp32, wide.certificate), (choice.bf16, narrow.certificate)):
        assert (found.objective_ns, found.bound_ns) == (given.objective_ns, given.bound_ns)
    certificate = replace(document.certificate, states=None)
    options = replace(document.options, optimizer_states="fp32")
    assert to_text(with_digests(replace(document, certificate=certificate, options=options))) == to_text(wide)


def test_auto_takes_bfloat16_that_pays() -> None:
    """More than 2 % faster: the decisions, and their digest, are those of bf16."""
    document, wide, narrow = (planned(FASTER, states) for states in ("auto", "fp32", "bf16"))
    assert wide.certificate.objective_ns > narrow.certificate.objective_ns * (1 + SHARE)
    assert document.optimizer_states == "bf16" and document.options.optimizer_states == "auto"
    assert document.digests is not None and narrow.digests is not None and wide.digests is not None
    assert document.digests.decisions == narrow.digests.decisions != wide.digests.decisions
    assert document.certificate.bound_ns == narrow.certificate.bound_ns


def test_auto_takes_bfloat16_that_alone_fits() -> None:
    """With float32 nothing fits, and the plan says what that would need."""
    with pytest.raises(InfeasibleError) as caught:
        api.make_plan(request(ONLY, "fp32"))
    document = planned(ONLY, "auto")
    choice = document.certificate.states
    assert document.optimizer_states == "bf16" and choice is not None
    assert choice.fp32 == StatesOutcome(least_memory_bytes=caught.value.least_memory_bytes)
    assert caught.value.least_memory_bytes > ONLY >= document.predicted.total_memory_bytes


def test_auto_where_one_search_finds_nothing() -> None:
    """A search that gives up proves nothing: the other plan is taken, and nothing is said of what the first needs."""
    prepared = api.prepare_search(request(EQUAL, "auto"))

    def search(space: PreparedSearch) -> SearchResult:
        if space.request.optimizer_states == "fp32":
            raise LimitReachedError("no plan was found")
        return search_parts(space.requests, search_space)

    space, result = choose_states(prepared, search)
    assert space.request.optimizer_states == result.decisions.optimizer_states == "bf16"
    assert result.states is not None and result.states.fp32 == StatesOutcome()


def test_a_plan_near_an_old_one_keeps_its_moments() -> None:
    """Within the regret nothing about the moments changes; beyond it they do."""
    near = {"optimizer_states": "auto", "max_regret_basis_points": 100}
    old = planned(EQUAL, "bf16")
    kept = api.make_plan(PlanRequest(model=MODEL, cluster=CLUSTER, options=replace(old.options, **near)), old)  # type: ignore[arg-type]
    assert kept.optimizer_states == "bf16" and kept.certificate.near is not None
    assert kept.certificate.near.changes == 0
    old = planned(FASTER, "fp32")
    moved = api.make_plan(PlanRequest(model=MODEL, cluster=CLUSTER, options=replace(old.options, **near)), old)  # type: ignore[arg-type]
    assert moved.optimizer_states == "bf16"


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "sgd"}, {"precision": "fp64"}, {"mode": "infer", "loss": None}, {"target": "deepspeed"}],
    ids=str,
)
def test_without_a_choice_auto_is_float32(changes: dict[str, object]) -> None:
    """No moments, float64 moments, no training, a framework without such an optimizer: one search, nothing compared."""
    document = api.make_plan(request(1 << 40, "auto", **{"gap_basis_points": 500, **changes}))
    assert document.optimizer_states == "fp32" and document.certificate.states is None


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--optimizer", "sgd"], "--optimizer sgd keeps no moments"),
        (["--precision", "fp64"], "--precision fp64 is for checking numbers"),
        (["--mode", "infer"], "inference has no optimizer"),
        (["--target", "deepspeed"], "--target deepspeed does not keep float32 master values"),
        (["--target", "transformers"], "--target transformers does not keep float32 master values"),
        (["--target", "megatron", "--zero", "0"], "--target megatron has ZeRO 1 with --optimizer-states bf16"),
    ],
)
def test_bfloat16_moments_that_are_refused(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, in one line, before the search."""
    arguments = [str(MODEL), "--cluster", CLUSTER, "--batch", "8", "--dim", "seq=16", "--optimizer-states", "bf16"]
    assert invoke(command, "tap-plan", [*arguments, *given]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err and captured.out == ""


@pytest.mark.parametrize(("target", "levels"), [("megatron", {1}), ("torchtitan", {0, 2, 3})])
def test_targets_with_moments_in_bfloat16(target: str, levels: set[int]) -> None:
    """The ZeRO levels at which the framework can have them."""
    options = replace(OPTIONS, mesh="dp=2,tp=2", zero="auto", target=target, optimizer_states="bf16", precision="bf16")
    prepared = api.prepare_search(PlanRequest(model=DATA / "hm_llama_tiny.onnx", cluster=CLUSTER, options=options))
    assert {level for part in prepared.requests for level in part.zero_levels} == levels
    assert {part.optimizer_states for part in prepared.requests} == {"bf16"}


def test_what_is_refused_without_the_command_line() -> None:
    """The same through the API, and a type that there is not."""
    with pytest.raises(UsageError, match="optimizer states 'fp8', expected fp32, bf16 or auto"):
        api.prepare_search(request(EQUAL, "fp8"))
    with pytest.raises(UsageError, match="does not keep float32 master values"):
        api.prepare_search(request(EQUAL, "bf16", target="deepspeed"))


# -- what follows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "states"), [(FASTER, "bf16"), (FASTER, "auto"), (EQUAL, "auto"), (ONLY, "auto")])
def test_certificates_hold(limit: int, states: str) -> None:
    """Price, coverage and bounds are those of the moments that were chosen."""
    report = api.verify_certificate(planned(limit, states), MODEL, replay=True)
    assert report.findings == ()


@pytest.mark.parametrize(("states", "pretended"), [("fp32", "bf16"), ("bf16", "fp32"), ("auto", "fp32")])
def test_other_moments_than_planned_are_found(states: str, pretended: str) -> None:
    """A plan that says its moments are others is not what its options ask for, or not what its price is."""
    document = planned(FASTER, states)
    false = with_digests(replace(document, optimizer_states=pretended))
    report = api.verify_certificate(false, MODEL)
    wanted = "objective_ns" if states == "auto" else f"optimizer.states: {pretended}, the options ask for {states}"
    assert any(wanted in finding for finding in report.findings), report.findings


def test_planning_again_and_comparing() -> None:
    """--check finds nothing to change; a diff names the moments, and calls it another plan."""
    document = planned(FASTER, "auto")
    assert api.check_plan(document, MODEL, CLUSTER).verdict is Verdict.IDENTICAL
    difference = api.diff_plans(planned(FASTER, "fp32"), planned(FASTER, "bf16"))
    assert difference.verdict is Verdict.DECISIONS_CHANGED
    assert [(c.old, c.new) for c in difference.mesh if c.name == "optimizer_states"] == [("fp32", "bf16")]
    same = replace(planned(EQUAL, "fp32"), optimizer_states="bf16")
    assert api.diff_plans(planned(EQUAL, "fp32"), with_digests(same)).verdict is Verdict.DECISIONS_CHANGED


def test_a_plan_with_small_moments_verifies(tmp_path: Path) -> None:
    """tap-apply --verify: the update is that of a single process with the same moments."""
    path = tmp_path / "plan.json"
    write_plan(path, planned(FASTER, "bf16"))
    outcome = api.apply_plan(ApplyRequest(plan=path, model=MODEL, verify=True, init_random=True))
    assert outcome.passed, outcome.lines()


def test_bfloat16_moments_are_a_remedy() -> None:
    """Where nothing fits the change is listed if a plan fits with it, after what does not change the numbers."""
    with pytest.raises(InfeasibleError) as caught:
        api.make_plan(request(TIGHT, "fp32", zero="auto", microbatches=1))
    error = caught.value
    kinds = [remedy.kind for remedy in error.remedies]
    assert "states" in kinds and "states" not in error.conflicts
    remedy = error.remedies[kinds.index("states")]
    assert remedy.options == ("--optimizer-states", "bf16")
    assert all(kind in ("nodes", "memory") for kind in kinds[kinds.index("states") + 1 :])
    document = api.make_plan(request(TIGHT, "bf16", zero="auto", microbatches=1))
    assert document.certificate.objective_ns <= remedy.objective_ns * 1.002
    assert remedy.memory_bytes <= TIGHT


@pytest.mark.full
def test_remedies_of_an_open_choice_say_which_moments_they_are_for() -> None:
    """With auto every change was planned with bfloat16 moments, and says so; the least memory is theirs."""
    with pytest.raises(InfeasibleError) as caught:
        api.make_plan(request(200_000, "auto", zero="auto"))
    with pytest.raises(InfeasibleError) as narrow:
        api.make_plan(request(200_000, "bf16", zero="auto"))
    error = caught.value
    assert error.least_memory_bytes == narrow.value.least_memory_bytes
    assert error.remedies and all(r.options[-2:] == ("--optimizer-states", "bf16") for r in error.remedies if r.options)
    assert all("with --optimizer-states bf16: a step of" in remedy.text for remedy in error.remedies)


def test_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The summary has both figures; tap-show names the moments."""
    from tap_planner_cli.show import command as show

    given = ["--batch", "8", "--dim", "seq=16", "--loss", "mean", "--precision", "fp32", "--mesh", "dp=4"]
    given += ["--zero", "0", "--recompute", "none", "--max-memory", f"{FASTER}B", "--optimizer-states", "auto"]
    arguments = [str(MODEL), "--cluster", CLUSTER, *given]
    plan = tmp_path / "plan.json"
    assert invoke(command, "tap-plan", [*arguments, "-o", str(plan)]) == 0
    words = " ".join(capsys.readouterr().err.split())
    figures = re.search(
        r"moments bf16, ([\d.]+) (\w+); with fp32 ([\d.]+) (\w+) \(\+([\d.]+)%(?:, at least [\d.]+ \w+)?\)", words
    )
    assert "bf16 moments" in words and figures is not None and figures[2] == figures[4]
    assert float(figures[3]) / float(figures[1]) - 1 == pytest.approx(float(figures[5]) / 100, abs=1e-3)
    assert invoke(show, "tap-show", [str(plan)]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "training with adamw (bf16 moments)" in words and f"with fp32 {figures[3]} {figures[4]}" in words
