"""Nothing fits: what conflicts is a conflict, what helps helps, and the command line says both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tap_planner import api, remedies
from tap_planner.cluster import load_cluster
from tap_planner.errors import InfeasibleError, Remedy
from tap_planner.growing import enlarged
from tap_planner.plan import PlanDocument, PlanOptions, PlanRequest
from tap_planner.probing import Prober
from tap_planner.requests import PreparedSearch
from tap_planner_cli.errors import invoke
from tap_planner_cli.plan import command, make_options

pytestmark = pytest.mark.usefixtures("without_buffers")

DATA = Path(__file__).parent / "data"
MODEL = DATA / "hm_gpt_tiny.onnx"
CLUSTER = "2x2:a100-sxm4-80gb"
GIVEN = ("--batch", "8", "--precision", "fp32", "--loss", "mean")
SHORT = ("--dim", "seq=16")
CASES: dict[str, tuple[str, ...]] = {
    "memory": ("--max-memory", "250000B", "--mesh", "dp=4"),
    "recompute": ("--recompute", "none", "--max-memory", "460000B", "--microbatches", "1", "--mesh", "tp=4"),
    "microbatches": ("--recompute", "none", "--max-memory", "350000B", "--microbatches", "1", "--mesh", "dp=4"),
    "mesh": ("--batch", "6", "--dim", "seq=22", "--max-memory", "288000B", "--mesh", "dp=2,tp=2"),
    "rule": ("--max-memory", "800000B", "--mesh", "dp=4", "--zero", "0", "--replicate", "*.weight"),
    "target": ("--max-memory", "400000B", "--target", "megatron"),
}
CONFLICTS = {
    "memory": (),
    "recompute": ("--recompute none", "--microbatches 1"),
    "microbatches": ("--microbatches 1",),
    "mesh": ("--mesh dp=2,tp=2",),
    "rule": ("--zero 0", "--replicate '*.weight:replicate'"),
    "target": ("--target megatron",),
}
LOOSE: dict[str, dict[str, Any]] = {
    "--zero": {"zero": "auto"},
    "--recompute": {"recompute": "auto"},
    "--microbatches": {"microbatches": "auto"},
    "--mesh": {"mesh": None},
    "--replicate": {"constraints": ()},
    "--target": {"target": None},
}
FAST = ("microbatches",)
TOGETHER = ("--max-memory", "283000B", "--mesh", "dp=4", "--recompute", "none", "--microbatches", "1")


def options_of(*given: str) -> PlanOptions:
    """Options as the command line reads them; of one that is given twice the last counts."""
    length = () if "--dim" in given else SHORT
    with command.make_context("tap-plan", [str(MODEL), "--cluster", CLUSTER, *GIVEN, *length, *given]) as context:
        return make_options(context.params)


def planned(options: PlanOptions, cluster: str = CLUSTER) -> PlanDocument:
    """The plan, with the gap that users get."""
    return api.make_plan(PlanRequest(model=MODEL, cluster=cluster, options=options))


def failure(options: PlanOptions, cluster: str = CLUSTER) -> InfeasibleError:
    """The answer that nothing fits."""
    with pytest.raises(InfeasibleError) as caught:
        planned(options, cluster)
    return caught.value


def applied(remedy: Remedy, given: tuple[str, ...]) -> PlanDocument:
    """The plan with the change, as a user would make it."""
    if not remedy.options:
        loose = {"rule": {"constraints": ()}, "target": {"target": None}}[remedy.kind]
        return planned(replace(options_of(*given), **loose))
    change, cluster = list(remedy.options), CLUSTER
    if "--cluster" in change:
        at = change.index("--cluster")
        cluster = change[at + 1]
        del change[at : at + 2]
    kept = tuple(word for word in given if word != "--no-zero") if "--zero" in change else given
    return planned(options_of(*kept, *change), cluster)


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in CASES])
def test_what_is_said_is_true(case: str) -> None:
    """Without an option that conflicts, and with each change that is listed, a plan fits, as fast as promised."""
    options = options_of(*CASES[case])
    error = failure(options)
    assert f"{error.least_memory_bytes - error.limit_bytes} bytes are missing" in error.message
    assert error.conflicts == CONFLICTS[case]
    for conflict in error.conflicts:
        assert conflict in error.message
        document = planned(replace(options, **LOOSE[conflict.split()[0]]))
        assert document.predicted.total_memory_bytes <= error.limit_bytes
    kinds = [remedy.kind for remedy in error.remedies]
    assert case in kinds and len(kinds) == len(set(kinds))
    assert set(kinds) >= {conflict.split()[0][2:].replace("replicate", "rule") for conflict in error.conflicts}
    for remedy in error.remedies:
        document = applied(remedy, CASES[case])
        assert document.certificate.objective_ns <= remedy.objective_ns * 1.002, remedy.text
    assert error.hints == tuple(remedy.text for remedy in error.remedies)
    ranks = [
        ({"states": 1, "memory": 2, "nodes": 2}.get(remedy.kind, 0), remedy.objective_ns) for remedy in error.remedies
    ]
    assert ranks == sorted(ranks)  # the first change no number and need no other machine, the faster ones first


@pytest.mark.full
def test_options_that_conflict_only_together() -> None:
    """Neither alone is the reason: both are named, and of a third one, which is not needed, nothing is said."""
    options = options_of(*TOGETHER)
    error = failure(options)
    text = "--recompute none and --microbatches 1"
    assert error.conflicts == ()
    assert error.remedies[0].kind == "together" and error.hints[0].startswith(f"Leave {text} out together")
    assert f"{text} together conflict with that limit: without them a plan fits" in error.message
    planned(replace(options, recompute="auto", microbatches="auto"))
    failure(replace(options, recompute="auto"))
    failure(replace(options, microbatches="auto"))


@pytest.mark.full
def test_the_memory_is_exact() -> None:
    """With one byte less than the remedy says nothing fits."""
    options = options_of(*CASES["memory"])
    (remedy,) = (remedy for remedy in failure(options).remedies if remedy.kind == "memory")
    wanted = int(remedy.options[1].removesuffix("B"))
    assert f"--max-memory {wanted}B" in remedy.text
    assert planned(replace(options, max_memory_bytes=wanted)).predicted.total_memory_bytes <= wanted
    assert failure(replace(options, max_memory_bytes=wanted - 1)).least_memory_bytes == wanted


def test_without_effort_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that could not be checked is not listed; what holds anyway is still said."""
    monkeypatch.setattr(remedies, "Prober", lambda: Prober(left=0))
    error = failure(options_of(*CASES["mesh"]))
    assert (error.conflicts, error.remedies) == ((), ())
    assert error.hints == (error.hint,) and "such devices" in error.hint


def prepared(cluster: str, **options: Any) -> PreparedSearch:
    """A search of the model."""
    made = PlanOptions(batch=8, dims={"seq": 16}, loss="mean", **options)
    return api.prepare_search(PlanRequest(model=MODEL, cluster=cluster, options=made))


def test_a_larger_cluster(tmp_path: Path) -> None:
    """A shorthand grows to a shorthand, a file by its nodes, a mesh along its outermost axis; unlike nodes do not."""
    grown = enlarged(prepared(CLUSTER, mesh="dp=2,tp=2"), 4)
    assert grown is not None and grown.cluster == load_cluster("4x2:a100-sxm4-80gb")
    assert grown.given == ("--cluster", "4x2:a100-sxm4-80gb", "--mesh", "dp=4,tp=2")
    assert grown.text == "Use --cluster 4x2:a100-sxm4-80gb --mesh dp=4,tp=2 (4 more devices)"
    assert enlarged(prepared(CLUSTER, mesh="dp=2,tp=2"), 3) is None
    grown = enlarged(prepared(CLUSTER, mesh="pp=2,dp=2"), 4)
    assert grown is not None and grown.given[2:] == ("--mesh", "pp=2,dp=4")
    file = tmp_path / "cluster.yaml"
    file.write_text("name: ours\nnodes: 1\ndevices_per_node: 4\ndevice: a100-sxm4-80gb\n")
    grown = enlarged(prepared(str(file)), 3)
    assert grown is not None and (grown.cluster.num_devices, grown.given) == (12, ())
    assert grown.text == "Set nodes to 3 in the cluster file (8 more devices)"
    file.write_text(
        "node_groups:\n  - {name: a, nodes: 1, devices_per_node: 2, device: l4}\n"
        "  - {name: b, nodes: 1, devices_per_node: 2, device: a100-sxm4-80gb}\n"
        "inter_node: {bandwidth: 25 GB/s, nics_per_node: 1, latency: 10 us}\n"
    )
    assert enlarged(prepared(str(file)), 3) is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 3; one line of error, one hint a line, and the same in the report."""
    report = tmp_path / "report.json"
    arguments = [str(MODEL), "--cluster", CLUSTER, *GIVEN, *SHORT, *CASES["microbatches"], "--report", str(report)]
    assert invoke(command, "tap-plan", arguments) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    first, empty, *hints = [line for line in captured.err.splitlines() if not line.startswith("warning:")]
    assert first.startswith("error: no plan fits: every plan needs at least") and empty == ""
    assert "--microbatches 1 conflicts with that limit" in first
    written = json.loads(report.read_text())
    diagnosis = written["diagnosis"]
    assert written["status"] == "infeasible"
    assert hints == [f"hint: {remedy['text']}" for remedy in diagnosis["remedies"]]
    assert diagnosis["conflicts"] == ["--microbatches 1"]
    assert diagnosis["missing_bytes"] == diagnosis["least_memory_bytes"] - diagnosis["limit_bytes"] > 0
    assert diagnosis["limit_bytes"] == 350_000
    assert diagnosis["remedies"][0]["kind"] == "microbatches"
    assert all(remedy["objective_ns"] > 0 for remedy in diagnosis["remedies"])
