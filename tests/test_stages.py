"""The number of stages, the schedule and the microbatches left to the search."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tap_planner import api, staging
from tap_planner.errors import InfeasibleError, LimitReachedError, TapError
from tap_planner.plan import (
    ApplyRequest,
    PlanDocument,
    PlanOptions,
    PlanRequest,
    Verdict,
    expand,
    read_plan,
    to_text,
    write_plan,
)
from tap_planner.processes import use_processes
from tap_planner.search import NothingFasterError, search, split_ns
from tap_planner_cli.errors import invoke
from tap_planner_cli.plan import command as plan

DATA = Path(__file__).parent / "data"
CLUSTER = str(Path(__file__).parents[1] / "plans" / "demo-cluster.yaml")
MODEL = DATA / "gpt2_tiny.onnx"


def request(**options: object) -> PlanRequest:
    """GPT-2 on four slow devices, everything open."""
    given = {"batch": 8, "dims": {"seq": 16}, "precision": "fp32", "loss": "mean", "stages": "auto", "schedule": "auto"}
    return PlanRequest(model=MODEL, cluster=CLUSTER, options=PlanOptions(**(given | options)))  # type: ignore[arg-type]


def planned(**options: object) -> PlanDocument:
    """Its plan."""
    return api.make_plan(request(**options))


def every_pipeline(**options: object) -> list[PlanDocument]:
    """The plan of every pipeline and microbatch count by itself, where there is one."""
    found: list[PlanDocument] = []
    for part in api.prepare_search(request(**options)).requests:
        if part.pipeline is None:
            continue
        pipeline = part.pipeline
        chunks = pipeline.num_chunks if pipeline.schedule in ("interleaved", "zbv") else None
        alone = {"stages": pipeline.num_stages, "schedule": pipeline.schedule, "chunks": chunks}
        try:
            found.append(planned(**(options | alone | {"microbatches": part.microbatches})))
        except (InfeasibleError, LimitReachedError):
            continue
    return found


@pytest.mark.full
@pytest.mark.parametrize("limit", ["none", 700_000])
def test_no_pipeline_by_itself_is_faster(limit: str | int) -> None:
    """On a small model, where every part is searched and cut: the plan is that which is predicted fastest of all, fits,
    and the bound holds for all."""
    document = planned(max_memory_bytes=limit)
    alone = every_pipeline(max_memory_bytes=limit)
    try:
        alone.append(planned(max_memory_bytes=limit, stages=1, schedule="1f1b"))
    except InfeasibleError:
        assert limit != "none"
    assert len(alone) > 5
    assert limit == "none" or document.predicted.total_memory_bytes <= int(limit)
    assert document.predicted.step_ns <= min(other.predicted.step_ns for other in alone)
    assert document.certificate.bound_ns <= min(other.certificate.objective_ns for other in alone)
    if limit == "none":  # under a limit, parts of which no plan fits have bounds, too
        assert document.certificate.bound_ns >= min(other.certificate.bound_ns for other in alone)


def test_the_plan_runs_and_is_verified(tmp_path: Path) -> None:
    """Its certificate is verified from plan and model, planning again gives it again, and it computes what a single
    process does."""
    document = planned(stages=2)
    assert document.pipeline.num_stages == 2
    assert api.verify_certificate(document, MODEL).findings == ()
    assert api.check_plan(document, MODEL, CLUSTER).verdict is Verdict.IDENTICAL
    write_plan(tmp_path / "plan.json", document)
    assert read_plan(tmp_path / "plan.json") == document
    given = ApplyRequest(plan=tmp_path / "plan.json", model=MODEL, init_random=True, verify=True, seed=3)
    outcome = api.apply_plan(given)
    assert outcome.passed, "\n".join(outcome.lines())


def test_certificates_of_open_stages() -> None:
    """Parts of unlike numbers of stages are verified each in its own unit; a part that is missing, a bound that is too
    high and a part that does not exist are found."""
    document = planned()
    certificate = document.certificate
    assert {entry.mesh.startswith("pp=") for entry in certificate.proof} == {True, False}
    assert api.verify_certificate(document, MODEL).findings == ()
    part = certificate.proof[-1].part
    without = replace(certificate, proof=tuple(entry for entry in certificate.proof if entry.part != part))
    assert any("is not covered" in f for f in findings(document, proof=without.proof))
    assert any("bound_ns" in f for f in findings(document, bound_ns=certificate.objective_ns))
    higher = replace(certificate.proof[-1], bound_ns=certificate.proof[-1].bound_ns * 2 + 10_000_000, by="relaxed")
    assert findings(document, proof=(*certificate.proof[:-1], higher)) != ()
    beyond = replace(certificate.proof[-1], part=10_000)
    assert any("part 10000" in f for f in findings(document, proof=(*certificate.proof[:-1], beyond)))


def findings(document: PlanDocument, **changed: object) -> tuple[str, ...]:
    """What is wrong with a certificate of which something was changed."""
    certificate = replace(document.certificate, **changed)  # type: ignore[arg-type]
    return api.verify_certificate(replace(document, certificate=certificate), MODEL).findings


def test_a_schedule_is_not_hidden_by_another(tmp_path: Path) -> None:
    """A plan whose pipeline is not in the space that its options ask for is found out."""
    document = planned(stages=2, schedule="zb-h1")
    other = replace(document, options=replace(document.options, schedule="1f1b"))
    assert any("is not in the space" in finding for finding in api.verify_certificate(other, MODEL).findings)


def test_the_number_of_processes_changes_nothing() -> None:
    """The same bytes whether lanes run side by side or by turns."""
    texts: list[str] = []
    for count in (1, 2):
        with use_processes(count):
            texts.append(to_text(planned(stages=2, schedule="1f1b")))
    assert texts[0] == texts[1]


def test_what_a_part_takes_at_least() -> None:
    """No plan of a part is faster than a perfect split with the bubble."""
    for part in api.prepare_search(request()).requests:
        if part.pipeline is not None:
            assert 0 < split_ns(part) <= search(part).objective_ns
            with pytest.raises(NothingFasterError):
                search(replace(part, ceiling_ns=split_ns(part)))


def test_enough_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are left for want of effort are bounded by what they take at least: the certificate holds, with a
    larger gap."""
    whole = planned()
    monkeypatch.setattr(staging, "MAX_SEARCHED", 1)
    monkeypatch.setattr(staging, "MAX_CUT", 1)
    document = planned()
    assert sum(entry.by == "split" for entry in document.certificate.proof) > sum(
        entry.by == "split" for entry in whole.certificate.proof
    )
    assert document.certificate.bound_ns <= whole.certificate.bound_ns
    assert document.predicted.step_ns >= whole.predicted.step_ns
    assert api.verify_certificate(document, MODEL).findings == ()


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The choice is told with what other numbers of stages would take, and stored with what was asked for."""
    path = tmp_path / "plan.json"
    given = f"{MODEL} --cluster {CLUSTER} --batch 8 --dim seq=16 --loss mean --precision fp32 -o {path}"
    assert invoke(plan, "tap-plan", f"{given} --stages auto --schedule auto".split()) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "the best plans of other numbers of stages: dp=2,tp=2 " in told
    stored = json.loads(path.read_text(encoding="utf-8"))["options"]
    assert (stored["stages"], stored["schedule"]) == ("auto", "auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--stages 3", "--stages 3: 4 devices cannot be shared out among so many stages"),
        ("--stages 2 --mesh dp=4", "--stages 2: --mesh dp=4 says how many stages there are"),
        ("--stages auto --objective memory", "--objective memory with pipeline stages (--stages auto)"),
        ("--stages auto --target megatron", "--target megatron with pipeline stages (--stages auto)"),
        ("--stages auto --alternatives 2", "--alternatives shows plans without pipeline"),
        ("--stages auto --schedule auto --chunks 3", "--chunks 3: --schedule auto tries 1, 2, 4"),
        ("--schedule auto", "--schedule auto: there is one stage"),
        ("--stages 4 --microbatches 1 --schedule interleaved", "wants a multiple of 4 stages"),
    ],
)
def test_what_does_not_go_together(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be asked for together is named, with what to do."""
    given = f"{MODEL} --cluster {CLUSTER} --batch 8 --dim seq=16 --loss mean"
    assert invoke(plan, "tap-plan", f"{given} {options}".split()) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_old_plans_stay_plans_of_one_stage() -> None:
    """Staying near to an old plan is for spaces without pipelines."""
    old = planned(stages=1, schedule="1f1b")
    with pytest.raises(TapError, match="what is planned has pipeline stages"):
        api.make_plan(request(), old)


def test_a_decoder_of_two_kinds_of_blocks() -> None:
    """A model without a single run of repeats, T5, is cut too."""
    options = PlanOptions(batch=8, dims={"seq": 16, "dec_seq": 16}, loss="mean", stages=2, schedule="auto")
    document = api.make_plan(PlanRequest(model=DATA / "t5_tiny.onnx", cluster=CLUSTER, options=options))
    assert document.pipeline.num_stages == 2 and expand(document).num_stages == 2
    assert api.verify_certificate(document, DATA / "t5_tiny.onnx").findings == ()


def test_what_did_not_fit_is_no_worse_with_more_microbatches() -> None:
    """Parts whose plan did not fit once it was cut make those of as many microbatches or fewer less likely; not those
    of more, in which stages hold less, nor other schedules."""
    prepared = api.prepare_search(request())
    found = staging._Search(prepared, lambda *_: None, lambda _: None)  # type: ignore[arg-type,return-value]
    parts = [number for number, part in enumerate(prepared.requests) if part.pipeline is not None]
    keys = {n: (p.num_stages, p.schedule, p.num_chunks) for n in parts if (p := prepared.requests[n].pipeline)}
    before = {number: found._expected_ns(number) for number in parts}
    found._failed[2, "1f1b", 1] = [4]
    for number in parts:
        is_less_likely = keys[number] == (2, "1f1b", 1) and (prepared.requests[number].microbatches or 0) <= 4
        times = staging.FAILED if is_less_likely else 1.0
        assert found._expected_ns(number) == pytest.approx(before[number] * times)
    assert {prepared.requests[n].microbatches for n in parts if keys[n] == (2, "1f1b", 1)} >= {2, 4, 8}
