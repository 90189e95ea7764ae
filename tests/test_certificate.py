"""Certificates: what plans claim is verified from the plan and the model alone, and nothing false passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.errors import ApplyError, PlanFormatError
from tap_planner.plan import PlanDocument, PlanOptions, PlanRequest, from_text, to_text, with_digests
from tap_planner_cli.errors import invoke
from tap_planner_cli.plan import command
from tests.graph.models import DATA

pytestmark = pytest.mark.usefixtures("without_buffers")

CLUSTER = "2x2:a100-sxm4-80gb"
GPT = PlanOptions(batch=8, loss="mean", dims={"seq": 64}, mesh="dp=2,tp=2")
LIMIT = 950_000
SENDING = replace(GPT, objective="communication", max_memory_bytes=LIMIT)
REQUESTS = {
    "no limit": ("hm_gpt_tiny", CLUSTER, replace(GPT, max_memory_bytes="none")),
    "limit": ("hm_gpt_tiny", CLUSTER, replace(GPT, max_memory_bytes=LIMIT)),
    "meshes": ("hm_gpt_tiny", "1x2:l4", replace(GPT, mesh=None, recompute="none")),
    "idle": ("hm_gpt_tiny", "1x3:l4", replace(GPT, mesh=None, recompute="none", allow_idle=True)),
    "target": ("hm_gpt_tiny", CLUSTER, replace(GPT, mesh=None, target="megatron", recompute="none")),
    "inference": ("hm_gpt_tiny", CLUSTER, replace(GPT, mode="infer", loss=None)),
    "communication": ("hm_gpt_tiny", CLUSTER, replace(SENDING, recompute="none", microbatches=1)),
    "communication, inference": ("hm_gpt_tiny", CLUSTER, replace(SENDING, mode="infer", loss=None)),
    "memory": ("hm_gpt_tiny", CLUSTER, replace(GPT, objective="memory", recompute="none")),
    "memory, meshes": ("hm_gpt_tiny", "1x2:l4", replace(GPT, objective="memory", mesh=None, recompute="none")),
    "memory, target": (
        *("hm_gpt_tiny", CLUSTER),
        replace(GPT, objective="memory", mesh=None, target="megatron", recompute="none"),
    ),
    "memory, inference": ("hm_gpt_tiny", CLUSTER, replace(GPT, objective="memory", mode="infer", loss=None)),
}


@cache
def planned(name: str) -> tuple[PlanDocument, Path]:
    """A plan as read from its text, and its model."""
    stem, cluster, options = REQUESTS[name]
    model = DATA / f"{stem}.onnx"
    text = to_text(api.make_plan(PlanRequest(model=model, cluster=cluster, options=options)))
    document = from_text(text)
    assert to_text(document) == text
    return document, model


@pytest.mark.parametrize("name", REQUESTS)
def test_certificates_hold(name: str) -> None:
    """Price, coverage and bounds are as the plan says, with the solver's bounds proven again."""
    document, model = planned(name)
    report = api.verify_certificate(document, model, replay=True)
    assert report.findings == () and report.passed
    for claim in document.claims:
        lagrangian = claim.bound if claim.lagrangian is None else claim.lagrangian
        assert 0 < lagrangian <= claim.bound <= claim.objective or claim.objective == 0
    assert any("(verified)" in line for line in report.lines()) and any(
        "proven again" in line for line in report.lines()
    )


def test_the_limit_binds() -> None:
    """The plan under the limit has bounds with multipliers: what the tests above verify is not only time."""
    document, _ = planned("limit")
    assert any(entry.multiplier[0] for entry in document.certificate.proof)
    assert document.predicted.total_memory_bytes <= LIMIT


def certificate(**changes: object) -> Callable[[PlanDocument], PlanDocument]:
    """A change of the certificate."""
    return lambda document: replace(document, certificate=replace(document.certificate, **changes))  # type: ignore[arg-type]


def proof(number: int, **changes: object) -> Callable[[PlanDocument], PlanDocument]:
    """A change of one entry of the proof."""

    def change(document: PlanDocument) -> PlanDocument:
        entries = list(document.certificate.proof)
        entries[number] = replace(entries[number], **changes)  # type: ignore[arg-type]
        return certificate(proof=tuple(entries))(document)

    return change


def bounded(document: PlanDocument) -> int:
    """Number of the entry with a multiplier whose bound is least."""
    entries = document.certificate.proof
    return min((n for n, entry in enumerate(entries) if entry.multiplier[0]), key=lambda n: entries[n].bound_ns)


def raised(document: PlanDocument) -> PlanDocument:
    """A bound above what elimination gives."""
    number = bounded(document)
    return proof(number, bound_ns=document.certificate.objective_ns + 1, solver_ns=None)(document)


def weighted(document: PlanDocument) -> PlanDocument:
    """A multiplier under which the bound does not hold."""
    entry = document.certificate.proof[bounded(document)]
    return proof(bounded(document), multiplier=(entry.multiplier[0] * 64, entry.multiplier[1]))(document)


def shortened(document: PlanDocument) -> PlanDocument:
    """A leaf left out."""
    return certificate(proof=document.certificate.proof[1:])(document)


def overreaching(document: PlanDocument) -> PlanDocument:
    """A bound of all larger microbatch counts, said to come from the graph of the least of them: nothing is divided."""
    entries = document.certificate.proof
    number = next(n for n, entry in enumerate(entries) if entry.and_more and entry.multiplier[0])
    return proof(number, graph_of=None)(document)


def excluded(document: PlanDocument) -> PlanDocument:
    """The plan's own part of the space, said not to fit."""
    return proof(bounded(document), by="infeasible", bound_ns=0, multiplier=(0, 1), solver_ns=None)(document)


def cheaper(document: PlanDocument) -> PlanDocument:
    """A better objective than the plan has."""
    return certificate(objective_ns=document.certificate.objective_ns - 1)(document)


def smaller(document: PlanDocument) -> PlanDocument:
    """Less memory than the plan needs."""
    memory = dict(document.predicted.memory_bytes)
    memory["activations"] -= 1
    return replace(document, predicted=replace(document.predicted, memory_bytes=memory))


def dropped(document: PlanDocument) -> PlanDocument:
    """A plan without its redistributions."""
    return replace(document, folded=replace(document.folded, redistributions=()))


def restrategised(document: PlanDocument) -> PlanDocument:
    """An operator whose strategy is not that of its placements."""
    number, operator = next(
        (number, operator)
        for number, block in enumerate(document.folded.blocks)
        for operator in block.operators
        if set(operator.strategy) != {"none"}
    )
    blocks = list(document.folded.blocks)
    operators = tuple(replace(o, strategy=("none", "none")) if o is operator else o for o in blocks[number].operators)
    blocks[number] = replace(blocks[number], operators=operators)
    return replace(document, folded=replace(document.folded, blocks=tuple(blocks)))


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (cheaper, "objective_ns"),
        (certificate(bound_ns=1 << 60), "bound_ns"),
        (certificate(lagrangian_bound_ns=1 << 60), "lagrangian_bound_ns"),
        (certificate(gap_basis_points=0, status="optimal", bound_ns=1), "gap_basis_points"),
        (raised, "which elimination does not give"),
        (weighted, "which elimination does not give"),
        (shortened, "is not covered"),
        (overreaching, "says nothing of all larger counts"),
        (excluded, "claims that nothing fits"),
        (proof(0, mesh="dp=4"), "is about nothing that is in the space"),
        (proof(0, microbatches=(3,)), "a microbatch count that is not in the space"),
        (smaller, "memory_bytes"),
        (dropped, "nothing brings"),
        (restrategised, "its placements are not those of strategy"),
    ],
)
def test_tampering_is_found(tamper: Callable[[PlanDocument], PlanDocument], message: str) -> None:
    """Each false claim is found although the digests fit; with the old digests those are found as well."""
    document, model = planned("limit")
    report = api.verify_certificate(with_digests(tamper(document)), model)
    assert not report.passed
    assert any(message in finding for finding in report.findings), report.findings
    assert not any(finding.startswith("digests") for finding in report.findings)


def needs(number: int, **changes: object) -> Callable[[PlanDocument], PlanDocument]:
    """A change of one entry of the proof of least memory."""

    def change(document: PlanDocument) -> PlanDocument:
        entries = list(document.certificate.memory_proof)
        entries[number] = replace(entries[number], **changes)  # type: ignore[arg-type]
        return certificate(memory_proof=tuple(entries))(document)

    return change


def more(field: str, by: int = 1) -> Callable[[PlanDocument], PlanDocument]:
    """A figure of the certificate that is larger (smaller) by so much."""
    return lambda document: certificate(**{field: getattr(document.certificate, field) + by})(document)


def forgotten(document: PlanDocument) -> PlanDocument:
    """A part of the proof of least memory left out."""
    return certificate(memory_proof=document.certificate.memory_proof[1:])(document)


@pytest.mark.parametrize(
    ("name", "tamper", "message"),
    [
        ("communication", more("objective_bytes", -1), "objective_bytes: "),
        ("communication", more("objective_ns", -1), "objective_ns: "),
        ("communication", certificate(bound_bytes=1 << 60), "bound_bytes: "),
        ("communication", certificate(lagrangian_bound_bytes=1 << 60), "lagrangian_bound_bytes: "),
        ("communication", raised, "bytes, which elimination does not give"),
        ("communication", weighted, "bytes, which elimination does not give"),
        ("communication", shortened, "is not covered"),
        ("communication", excluded, "claims that nothing fits"),
        ("communication", smaller, "memory_bytes"),
        ("memory", more("objective_bytes", -1), "objective_bytes: "),
        ("memory", certificate(bound_bytes=1 << 60), "bound_bytes: "),
        ("memory", more("objective_ns", -1), "objective_ns: "),
        ("memory", more("gap_basis_points"), "gap_basis_points: "),
        ("memory", more("time_gap_basis_points"), "time_gap_basis_points: "),
        ("memory", certificate(time_gap_basis_points=None), "time_gap_basis_points: "),
        ("memory", needs(-1, bound_ns=1 << 40), "memory_proof: "),
        ("memory", needs(0, by="infeasible", bound_ns=0), "memory_proof: "),
        ("memory", needs(0, by="split"), "by splitting operators"),
        ("memory", needs(0, microbatches=(3,)), "a microbatch count that is not in the space"),
        ("memory", needs(0, mesh="dp=4"), "is about nothing that is in the space"),
        ("memory", needs(0, multiplier=(1, 2)), "claims more than a bound of memory"),
        ("memory", forgotten, "is not covered"),
        ("memory", shortened, "is not covered"),
        ("memory", proof(-1, bound_ns=1 << 60, solver_ns=None), "which elimination does not give"),
        ("memory", smaller, "memory_bytes"),
    ],
)
def test_tampering_with_other_objectives_is_found(
    name: str, tamper: Callable[[PlanDocument], PlanDocument], message: str
) -> None:
    """The same where bytes are the objective."""
    document, model = planned(name)
    report = api.verify_certificate(with_digests(tamper(document)), model)
    assert any(message in finding for finding in report.findings), report.findings
    assert not any(finding.startswith("digests") for finding in report.findings)


def test_another_objective_is_another_claim() -> None:
    """A plan of one objective does not pass for one of another."""
    document, model = planned("memory")
    time = with_digests(replace(document, options=replace(document.options, objective="time")))
    assert not api.verify_certificate(time, model).passed
    for name, objective in (("communication", "time"), ("memory", "communication"), ("no limit", "memory")):
        document, model = planned(name)
        other = with_digests(replace(document, options=replace(document.options, objective=objective)))
        with pytest.raises(PlanFormatError, match="holds none"):
            api.verify_certificate(other, model)


def test_a_solvers_bound_is_proven_again() -> None:
    """What the solver is said to have proven passes unless it is replayed."""
    document, model = planned("limit")
    objective = document.certificate.objective_ns
    entries = tuple(replace(e, solver_ns=objective + 1) if e.solver_ns else e for e in document.certificate.proof)
    false = with_digests(certificate(proof=entries)(document))
    assert api.verify_certificate(false, model).passed
    report = api.verify_certificate(false, model, replay=True)
    assert any("the solver does not give again" in finding for finding in report.findings)


def test_edited_and_other_plans() -> None:
    """An edited plan is a finding; another model and a plan without proof are refused."""
    document, model = planned("no limit")
    edited = certificate(space={"meshes": 2})(document)
    assert any("was edited" in finding for finding in api.verify_certificate(edited, model).findings)
    with pytest.raises(ApplyError, match="the plan was made for"):
        api.verify_certificate(document, DATA / "hm_llama_tiny.onnx")
    with pytest.raises(PlanFormatError, match="holds none"):
        api.verify_certificate(certificate(proof=(), lagrangian_bound_ns=None)(document), model)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 where all holds, 1 where not, 2 for what cannot be read, 5 for another model; no cluster is needed."""
    document, model = planned("limit")
    paths = {name: tmp_path / f"{name}.json" for name in ("good", "false", "bad")}
    paths["good"].write_text(to_text(document))
    paths["false"].write_text(to_text(with_digests(cheaper(document))))
    paths["bad"].write_text("{}")

    def run(name: str, file: Path = model, *more: str) -> int:
        return invoke(command, "tap-plan", ["--verify-certificate", str(paths[name]), "--model", str(file), *more])

    assert run("good") == 0
    out = capsys.readouterr().out
    assert "(verified)" in out and "(claimed; --replay proves it again)" in out
    assert run("false") == 1
    assert "the lowered plan costs" in capsys.readouterr().out
    assert run("bad") == 2 and run("good", model, "--batch", "4") == 2
    assert run("good", DATA / "hm_llama_tiny.onnx") == 5
    assert invoke(command, "tap-plan", ["--verify-certificate", str(paths["good"])]) == 2
    assert "Missing argument 'MODEL'" in capsys.readouterr().err
