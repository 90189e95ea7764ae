"""Certificates on unlike nodes, and of plans that stay near to an old one: they hold, and what is false is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tap_planner import api
from tap_planner.plan import (
    PlanDocument,
    PlanOptions,
    PlanRequest,
    from_text,
    to_text,
    with_digests,
    write_plan,
)
from tap_planner_cli.errors import invoke
from tap_planner_cli.plan import command
from tests.graph.models import DATA

pytestmark = pytest.mark.usefixtures("without_buffers")

MODEL = DATA / "hm_gpt_tiny.onnx"
GPT = PlanOptions(batch=8, loss="mean", dims={"seq": 64}, recompute="none")
LARGE, SMALL = 1_600 * 1024, 800 * 1024
"""Memory of the devices of the two nodes."""
Tamper = Callable[[PlanDocument], PlanDocument]


def certificate(document: PlanDocument, **changes: Any) -> PlanDocument:
    """A change of the certificate, with digests that fit."""
    return with_digests(replace(document, certificate=replace(document.certificate, **changes)))


# -- unlike nodes ------------------------------------------------------------------------------------------------


def cluster_file(folder: Path) -> str:
    """Two nodes of two devices: in the first they have twice the memory, and faster links."""

    def node(name: str, memory: int, bandwidth: int) -> str:
        device = (
            f"{{name: kind-{name}, memory: {memory // 1024} KiB, memory_bandwidth: 1 TB/s, peak_flops: "
            "{bfloat16: 100 TFLOP/s, float16: 100 TFLOP/s, float32: 50 TFLOP/s}}"
        )
        links = f"{{kind: nvswitch, bandwidth: {bandwidth} GB/s, latency: 3 us}}"
        return f"  - {{name: {name}, nodes: 1, devices_per_node: 2, device: {device}, intra_node: {links}}}\n"

    path = folder / "unlike.yaml"
    nodes = node("a", LARGE, 300) + node("b", SMALL, 100)
    path.write_text(
        f"name: unlike\nnode_groups:\n{nodes}inter_node: {{bandwidth: 25 GB/s, nics_per_node: 1, latency: 10 us}}\n"
    )
    return str(path)


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PlanDocument]:
    """Plans on all devices, and on those that are best."""
    cluster = cluster_file(tmp_path_factory.mktemp("unlike"))
    settings = replace(GPT, zero=1, microbatches=2, gap_basis_points=200)
    made = {
        "all": api.make_plan(PlanRequest(model=MODEL, cluster=cluster, options=settings)),
        "some": api.make_plan(PlanRequest(model=MODEL, cluster=cluster, options=replace(settings, allow_idle=True))),
    }
    return {name: from_text(to_text(document)) for name, document in made.items()}


@pytest.mark.parametrize("name", ["all", "some"])
def test_certificates_on_unlike_nodes_hold(unlike: dict[str, PlanDocument], name: str) -> None:
    """Each mesh under the limit of the devices that it uses, with the solver's bounds proven again."""
    report = api.verify_certificate(unlike[name], MODEL, replay=True)
    assert report.findings == ()


def test_a_plan_on_the_larger_devices_may_use_their_memory(unlike: dict[str, PlanDocument]) -> None:
    """What is verified above needs both limits: the plan on some devices does not fit on the others."""
    document = unlike["some"]
    assert document.mesh.num_left_out == 2
    assert SMALL < document.predicted.total_memory_bytes <= LARGE
    assert unlike["all"].predicted.total_memory_bytes <= SMALL


def part_of_the_space(document: PlanDocument, mesh: str) -> list[int]:
    """Numbers of the entries of the proof about meshes that begin so."""
    return [n for n, entry in enumerate(document.certificate.proof) if entry.mesh.startswith(mesh)]


def entry(document: PlanDocument, number: int, **changes: Any) -> PlanDocument:
    """A change of one entry of the proof."""
    entries = list(document.certificate.proof)
    entries[number] = replace(entries[number], **changes)
    return certificate(document, proof=tuple(entries))


@pytest.mark.parametrize("mesh", ["dp=2@0-1", "dp=4"])
def test_false_bounds_on_unlike_nodes_are_found(unlike: dict[str, PlanDocument], mesh: str) -> None:
    """A bound that is too high, a part that is left out, one that is said not to fit: on the whole and on a part."""
    document = unlike["some"]
    number = part_of_the_space(document, mesh)[0]
    objective = document.certificate.objective_ns
    false = entry(document, number, bound_ns=100 * objective, solver_ns=None, by="relaxed")
    findings = api.verify_certificate(false, MODEL).findings
    assert any("which elimination does not give" in finding for finding in findings), findings
    kept = tuple(e for n, e in enumerate(document.certificate.proof) if n not in part_of_the_space(document, mesh))
    findings = api.verify_certificate(certificate(document, proof=kept), MODEL).findings
    assert any(finding.startswith(f"proof: {mesh}") and "is not covered" in finding for finding in findings), findings
    if document.certificate.proof[number].by != "infeasible":
        false = entry(document, number, by="infeasible", bound_ns=0, multiplier=(0, 1), solver_ns=None)
        findings = api.verify_certificate(false, MODEL).findings
        assert any("claims that nothing fits" in finding for finding in findings), findings


def test_a_bound_for_the_wrong_devices_is_found(unlike: dict[str, PlanDocument]) -> None:
    """What bounds a mesh on the larger devices is no bound for the same mesh on others that the space has not."""
    document = unlike["some"]
    number = part_of_the_space(document, "dp=2@0-1")[0]
    findings = api.verify_certificate(entry(document, number, mesh="dp=2@1-2"), MODEL).findings
    assert any("is about nothing that is in the space" in finding for finding in findings), findings


def test_other_devices_than_planned_are_found(unlike: dict[str, PlanDocument]) -> None:
    """The plan's ranks on the devices with less memory: no mesh of the space lies there so, or it does not fit."""
    document = unlike["some"]
    moved = replace(document.mesh, ranks=tuple((1, device) for _, device in document.mesh.ranks))
    findings = api.verify_certificate(with_digests(replace(document, mesh=moved)), MODEL).findings
    assert any(finding.startswith(("mesh:", "memory_bytes:")) for finding in findings), findings


# -- near an old plan --------------------------------------------------------------------------------------------

CLUSTER = "2x2:a100-sxm4-80gb"


@cache
def old() -> PlanDocument:
    """A plan to stay near to."""
    options = replace(GPT, mesh="dp=2,tp=2", microbatches=1, max_memory_bytes=1_200_000)
    return api.make_plan(PlanRequest(model=MODEL, cluster=CLUSTER, options=options))


@cache
def near() -> PlanDocument:
    """A plan that stays near to it under a smaller limit."""
    limited = {"microbatches": 1, "max_memory_bytes": 950_000, "max_regret_basis_points": 300}
    options = replace(GPT, mesh="dp=2,tp=2", **limited)  # type: ignore[arg-type]
    document = from_text(to_text(api.make_plan(PlanRequest(model=MODEL, cluster=CLUSTER, options=options), old())))
    assert document.certificate.near is not None and document.certificate.near.changes > 0
    return document


def test_a_plan_that_stays_near_verifies() -> None:
    """Its price, its legality and the bound of the ordinary search, with and without the old plan."""
    for given in (None, old()):
        report = api.verify_certificate(near(), MODEL, old=given)
        assert report.findings == ()
        counted = "counted again" if given is not None else "claimed; the old plan in --stay-near counts them again"
        (line,) = (line for line in report.lines() if line.startswith("near the old plan"))
        assert f"({counted})" in line


def nearness(document: PlanDocument, **changes: Any) -> PlanDocument:
    """A change of what is said of the old plan."""
    assert document.certificate.near is not None
    return certificate(document, near=replace(document.certificate.near, **changes))


@pytest.mark.parametrize(
    ("tamper", "message", "needs_old"),
    [
        (lambda d: certificate(d, near=None), "near: missing", False),
        (lambda d: nearness(d, regret_basis_points=301), "300 are allowed", False),
        (
            lambda d: nearness(d, regret_basis_points=d.certificate.gap_basis_points + 1),
            "but the gap to all plans is",
            False,
        ),
        (lambda d: nearness(d, operators=1000), "decisions", False),
        (lambda d: nearness(d, operators=d.certificate.near.operators + 1), "near: operators", True),
        (lambda d: nearness(d, parameters=0), "near: parameters", True),
        (lambda d: nearness(d, regions=1), "near: regions", True),
        (lambda d: nearness(d, compared=d.certificate.near.compared + 1), "near: compared", True),
    ],
)
def test_what_is_false_about_the_old_plan_is_found(tamper: Tamper, message: str, needs_old: bool) -> None:
    """Regret and counts; some of them only with the old plan at hand."""
    report = api.verify_certificate(tamper(near()), MODEL, old=old() if needs_old else None)
    assert any(message in finding for finding in report.findings), report.findings


def test_counts_are_claims_without_the_old_plan() -> None:
    """Other counts pass, and the report says that they are claimed."""
    assert near().certificate.near is not None
    false = nearness(near(), parameters=0)
    report = api.verify_certificate(false, MODEL)
    assert report.passed and any("claimed; the old plan" in line for line in report.lines())


def test_another_old_plan_is_found() -> None:
    """Against a plan that it does not stay near to the counts are others; a plan that stays near to none says so."""
    report = api.verify_certificate(near(), MODEL, old=near())
    assert any(finding.startswith("near: parameters") for finding in report.findings)
    report = api.verify_certificate(old(), MODEL, old=near())
    assert any("does not say that it stays near" in finding for finding in report.findings)


def test_a_dearer_plan_is_found() -> None:
    """The price of a plan that stays near is that of its decisions, not that of the best plan."""
    document = near()
    false = certificate(document, objective_ns=document.certificate.bound_ns, gap_basis_points=0, status="optimal")
    report = api.verify_certificate(false, MODEL)
    assert any(finding.startswith("objective_ns") for finding in report.findings)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--stay-near beside --verify-certificate is the old plan to count from."""
    for name, document in (("near", near()), ("old", old())):
        write_plan(tmp_path / f"{name}.json", document)
    arguments = ["--verify-certificate", str(tmp_path / "near.json"), "--model", str(MODEL)]
    assert invoke(command, "tap-plan", [*arguments, "--stay-near", str(tmp_path / "old.json")]) == 0
    assert "(counted again)" in capsys.readouterr().out
    assert invoke(command, "tap-plan", [*arguments, "--stay-near", str(tmp_path / "near.json")]) == 1
    assert "near: parameters" in capsys.readouterr().out
