"""Pipelines over unlike nodes: each stage at its own pace and within its own memory; certified, shown and run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tap_planner import api
from tap_planner.cluster import cluster_from_json, cluster_to_json, load_cluster
from tap_planner.errors import InfeasibleError, LimitReachedError
from tap_planner.plan import (
    ApplyRequest,
    PlanDocument,
    PlanOptions,
    PlanRequest,
    expand,
    from_text,
    to_text,
    with_digests,
    write_plan,
)
from tap_planner.simulate import lower_bounds, price_program, simulate
from tests.graph.models import DATA

pytestmark = pytest.mark.usefixtures("without_buffers")

MODEL = DATA / "hm_gpt_tiny.onnx"
GPT = PlanOptions(batch=32, loss="mean", dims={"seq": 64}, microbatches=8)
MANY, FEW = "4 GiB", "256 KiB"
MESHES = [
    ("pp=2,dp=2", "1f1b"),
    ("pp=2,tp=2", "zbv"),
    ("pp=4", "fill-drain"),
    ("pp=2,dp=2", "interleaved"),
    ("pp=4", "zb-h1"),
]


def kind(name: str, flops: int, memory: str) -> str:
    """A device of one line of YAML; its launches take next to no time, so that small models are bound by their work."""
    peaks = ", ".join(f"{dtype}: {flops} GFLOP/s" for dtype in ("bfloat16", "float16", "float32"))
    launches = "launch: 1 ns, backward_launch: 1 ns"
    return f"{{name: {name}, memory: {memory}, memory_bandwidth: {flops} GB/s, peak_flops: {{{peaks}}}, {launches}}}"


def cluster_file(folder: Path, *, slow: str = MANY, fast: str = MANY, first: str = "slow") -> str:
    """Two nodes of two devices, one kind three times as fast as the other, either of them first."""
    kinds = {"slow": kind("turtle", 400, slow), "fast": kind("hare", 1200, fast)}
    links = {"slow": 20, "fast": 60}
    names = ("slow", "fast") if first == "slow" else ("fast", "slow")
    groups = "".join(
        f"  - {{name: {name}, nodes: 1, devices_per_node: 2, device: {kinds[name]}, "
        f"intra_node: {{kind: nvswitch, bandwidth: {links[name]} GB/s, latency: 1 us}}}}\n"
        for name in names
    )
    path = folder / f"unlike-{first}-{slow}-{fast}.yaml".replace(" ", "")
    path.write_text(
        f"name: unlike\nlibrary: nccl\nnode_groups:\n{groups}"
        "inter_node: {bandwidth: 10 GB/s, nics_per_node: 1, latency: 2 us}\n"
    )
    return str(path)


def planned(cluster: str, **options: Any) -> PlanDocument:
    """The plan, written and read again."""
    return from_text(to_text(api.make_plan(PlanRequest(model=MODEL, cluster=cluster, options=replace(GPT, **options)))))


@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_certificates_hold(mesh: str, schedule: str, tmp_path: Path) -> None:
    """Coverage, bounds (the solver's proven again), price and prediction; no simulated step is below its bounds."""
    document = planned(cluster_file(tmp_path), mesh=mesh, schedule=schedule)
    assert api.verify_certificate(document, MODEL, replay=True).findings == ()
    program = api.lower_plan(document, MODEL)
    cluster = cluster_from_json(document.cluster)
    step = simulate(program, cluster).step_ns
    assert lower_bounds(program, cluster).step_ns <= step == document.predicted.step_ns
    assert document.certificate.bound_ns <= document.certificate.objective_ns


@pytest.mark.parametrize("first", ["slow", "fast"])
def test_each_stage_takes_what_it_takes_on_its_devices(first: str, tmp_path: Path) -> None:
    """Compute and collectives of each stage are those of a cluster of its own kind, and the fast stage has
    the larger part of the model: that is faster than either kind would be alone."""
    file = cluster_file(tmp_path, first=first)
    document = planned(file, mesh="pp=2,dp=2", schedule="fill-drain", recompute="none")
    program, cluster = api.lower_plan(document, MODEL), load_cluster(file)
    stages = simulate(program, cluster).stages
    for stage, group in enumerate(cluster.node_groups):
        alone = replace(
            cluster, device=group.device, levels=(replace(group.intra_node, size=2), cluster.levels[1]), node_groups=()
        )
        like = simulate(program, alone).stages[stage]
        assert stages[stage].compute_ns == like.compute_ns
        assert stages[stage].communication_ns == like.communication_ns
    operators = [len(chunk.operators) for chunk in program.chunks]
    fast = 0 if first == "fast" else 1
    assert operators[fast] > 1.5 * operators[1 - fast]
    whole = planned(file, mesh="dp=4", recompute="none")
    assert document.predicted.step_ns < whole.predicted.step_ns


def test_stages_on_the_same_kind_are_as_ever(tmp_path: Path) -> None:
    """Two groups whose devices differ in nothing that counts give the plan of a cluster of equal nodes."""
    text = Path(cluster_file(tmp_path)).read_text().replace("turtle", "hare").replace("20 GB/s", "60 GB/s")
    text = text.replace("400 G", "1200 G")
    (tmp_path / "same.yaml").write_text(text)
    (tmp_path / "other.yaml").write_text(text.replace("1200 GB/s", "1201 GB/s", 1))  # no merging: a little faster
    same, other = (planned(str(tmp_path / f"{name}.yaml"), mesh="pp=2,dp=2") for name in ("same", "other"))
    assert cluster_from_json(other.cluster).node_groups and not cluster_from_json(same.cluster).node_groups
    assert other.certificate.objective_ns == pytest.approx(same.certificate.objective_ns, rel=2e-3)
    assert other.certificate.bound_ns == pytest.approx(same.certificate.bound_ns, rel=2e-3)


def test_each_stage_may_use_its_own_memory(tmp_path: Path) -> None:
    """The stage on devices of much memory holds more than the others have; on devices of little, nothing fits."""
    free = planned(cluster_file(tmp_path), mesh="pp=2,dp=2", recompute="none", zero=0)
    held = price_program(api.lower_plan(free, MODEL), cluster_from_json(free.cluster)).stage_bytes
    tight = f"{int(held[0] * 1.02) // 1024} KiB"
    assert held[1] > 1.5 * held[0]
    file = cluster_file(tmp_path, slow=tight)
    document = planned(file, mesh="pp=2,dp=2", recompute="none", zero=0)
    assert expand(document).operators == expand(free).operators
    assert document.predicted.total_memory_bytes <= held[1]
    assert api.verify_certificate(document, MODEL, replay=True).findings == ()
    less = cluster_file(tmp_path, slow=f"{held[0] // 3 // 1024} KiB")
    smaller = planned(less, mesh="pp=2,dp=2")
    taken = price_program(api.lower_plan(smaller, MODEL), cluster_from_json(smaller.cluster)).stage_bytes
    assert taken[0] <= held[0] // 3 and smaller.certificate.objective_ns > free.certificate.objective_ns
    with pytest.raises((InfeasibleError, LimitReachedError)):
        planned(cluster_file(tmp_path, slow="64 KiB", fast="64 KiB"), mesh="pp=2,dp=2")


def test_a_stage_beyond_its_memory_is_found(tmp_path: Path) -> None:
    """A plan whose small stage holds more than it has is not what its certificate says."""
    document = planned(cluster_file(tmp_path), mesh="pp=2,dp=2", recompute="none", zero=0)
    small = load_cluster(cluster_file(tmp_path, slow=FEW))
    cluster = {**document.cluster, "node_groups": cluster_to_json(small)["node_groups"]}
    false = with_digests(replace(document, cluster=cluster))
    findings = api.verify_certificate(false, MODEL).findings
    assert any("on stage 0, the limit is" in finding for finding in findings), findings


@pytest.mark.parametrize("change", ["bound", "multiplier"])
def test_false_bounds_are_found(change: str, tmp_path: Path) -> None:
    """A bound that is too high, and one that speaks of the limit of all stages together, which bounds no plan."""
    document = planned(cluster_file(tmp_path), mesh="pp=2,dp=2")
    number = next(n for n, entry in enumerate(document.certificate.proof) if entry.by != "infeasible")
    entries = list(document.certificate.proof)
    changes: dict[str, Any] = {"multiplier": (1, 7)}
    if change == "bound":
        changes = {"bound_ns": entries[number].bound_ns * 3, "solver_ns": None, "by": "relaxed"}
    entries[number] = replace(entries[number], **changes)
    false = with_digests(replace(document, certificate=replace(document.certificate, proof=tuple(entries))))
    findings = api.verify_certificate(false, MODEL).findings
    wanted = "which elimination does not give" if change == "bound" else "bounds no plan in stages"
    assert any(wanted in finding for finding in findings), findings


@pytest.mark.parametrize(("mesh", "schedule"), MESHES[:2])
def test_plans_run(mesh: str, schedule: str, tmp_path: Path) -> None:
    """Stages of unlike sizes train as one process does, with the collectives that the plan lists."""
    document = planned(cluster_file(tmp_path), mesh=mesh, schedule=schedule, microbatches=4)
    path = tmp_path / "plan.json"
    write_plan(path, document)
    outcome = api.apply_plan(ApplyRequest(plan=path, model=MODEL, init_random=True, verify=True, seed=3))
    assert outcome.passed, "\n".join(outcome.lines())


def test_the_search_is_over_all_pipelines(tmp_path: Path) -> None:
    """With everything open, the plan is at least as fast as each that is asked for, and its certificate covers all."""
    file = cluster_file(tmp_path)
    document = planned(file, stages="auto", schedule="auto", microbatches="auto")
    assert api.verify_certificate(document, MODEL).findings == ()
    for mesh in ("dp=4", "pp=2,dp=2", "pp=4"):
        assert document.predicted.step_ns <= planned(file, mesh=mesh, microbatches="auto").predicted.step_ns
