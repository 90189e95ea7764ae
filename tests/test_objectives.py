"""``--objective``: plans of least time, memory and communication, against each other and against what really runs."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import torch

from tap_planner import api
from tap_planner.apply import LockstepCommunicator, RandomWeights, synthetic_inputs
from tap_planner.apply.communicator import RecordingCommunicator
from tap_planner.apply.executor import StepExecutor
from tap_planner.apply.optimizer import make_optimizer
from tap_planner.apply.parameters import ParameterStore
from tap_planner.errors import InfeasibleError, PlanFormatError, UsageError
from tap_planner.plan import (
    PlanDocument,
    PlanOptions,
    PlanRequest,
    Verdict,
    diff_plans,
    expand,
    from_text,
    schema,
    to_text,
    write_plan,
)
from tap_planner_cli.diff import command as diff_command
from tap_planner_cli.errors import invoke
from tap_planner_cli.plan import command
from tap_planner_cli.show import command as show_command
from tests.graph.models import DATA

pytestmark = pytest.mark.usefixtures("without_buffers")

Capture = pytest.CaptureFixture[str]
GPT = DATA / "hm_gpt_tiny.onnx"
CLUSTER = "2x2:a100-sxm4-80gb"
TRAINING = PlanOptions(batch=8, loss="mean", dims={"seq": 64}, mesh="dp=2,tp=2", recompute="none")
INFERENCE = replace(TRAINING, mode="infer", loss=None, recompute="auto")
LIMIT = 950_000
REQUESTS = {
    "time": replace(TRAINING, max_memory_bytes=LIMIT, microbatches=1),
    "communication": replace(TRAINING, max_memory_bytes=LIMIT, microbatches=1, objective="communication"),
    "communication, microbatches": replace(TRAINING, max_memory_bytes=LIMIT, objective="communication"),
    "memory": replace(TRAINING, objective="memory"),
    "time, inference": replace(INFERENCE, max_memory_bytes=80_000),
    "communication, inference": replace(INFERENCE, max_memory_bytes=80_000, objective="communication"),
    "memory, inference": replace(INFERENCE, objective="memory"),
}
BYTES = {"float32": 2, "bfloat16": 2, "float64": 2, "int64": 8, "int32": 4, "bool": 1}
"""Of an element, in bf16 whatever the execution computes with."""


sending = pytest.mark.parametrize(
    "name",
    [
        "communication",
        "communication, inference",
        pytest.param("communication, microbatches", marks=pytest.mark.full),
    ],
)


@cache
def planned(name: str) -> PlanDocument:
    """A plan."""
    return api.make_plan(PlanRequest(model=GPT, cluster=CLUSTER, options=REQUESTS[name]))


def sent(calls: Iterable[tuple[str, int, int]]) -> Fraction:
    """What a rank sends in collectives given as (kind, ranks, bytes), by the closed forms, not rounded."""
    total = Fraction(0)
    for kind, ranks, num_bytes in calls:
        times = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}[kind]
        total += Fraction(times * num_bytes * (ranks - 1), ranks)
    return total


def slack(document: PlanDocument) -> tuple[int, int]:
    """By how much the list of collectives may send less than the objective (which rounds up for each call, of buckets
    for each parameter), and more (by the padding of buckets)."""
    decisions, counts = expand(document), {"less": 0, "more": 0}
    calls = sum(entry.count for entry in document.collectives)
    for bucket in decisions.buckets:
        shards = math.prod(decisions.mesh_shape[axis] for axis in bucket.zero_axes)
        of_bucket = 4 * decisions.microbatches  # at most so many collectives in a step
        counts["less"] += of_bucket * len(bucket.parameters)
        counts["more"] += of_bucket * 2 * 2 * shards
    return calls + counts["less"], counts["more"]


@sending
def test_the_objective_is_what_the_list_sends(name: str) -> None:
    """Sent bytes of the objective are those of the plan's own list of collectives, but for padding and rounding."""
    document = planned(name)
    sizes = {axis.name: axis.size for axis in document.mesh.axes}
    listed = sent(
        (entry.kind, math.prod(sizes[axis] for axis in entry.axes), entry.bytes)
        for entry in document.collectives
        for _ in range(entry.count)
    )
    less, more = slack(document)
    objective = document.certificate.objective_bytes
    assert objective is not None and objective > 0
    assert objective - less <= listed <= objective + more
    assert listed <= document.sent_bytes < listed + sum(entry.count for entry in document.collectives)


@sending
def test_the_objective_is_what_execution_sends(name: str) -> None:
    """All ranks run in lockstep, and what rank 0 is seen to send is the objective, but for padding and rounding."""
    document = planned(name)
    program = api.lower_plan(document, GPT)
    whole = api.prepare_search(PlanRequest(model=GPT, cluster=CLUSTER, options=document.options)).graph
    shape = program.decisions.mesh_shape
    recorder = RecordingCommunicator(LockstepCommunicator(shape))
    store = ParameterStore(program, recorder, RandomWeights(program.graph), torch.float64)
    optimizer = make_optimizer("adamw") if document.options.mode == "train" else None
    StepExecutor(program, recorder, store, optimizer, dtype=torch.float64).run(synthetic_inputs(whole))
    issued = recorder.issued[0]
    assert issued
    seen = sent((i.kind, math.prod(shape[axis] for axis in i.axes), i.elements * BYTES[i.dtype]) for i in issued)
    less, more = slack(document)
    objective = document.certificate.objective_bytes
    assert objective is not None
    assert objective - less <= seen <= objective + more


@pytest.mark.parametrize("kind", ["", ", inference"])
def test_each_plan_is_best_at_its_own(kind: str) -> None:
    """Under one limit the plan of least time is no slower, and that of least communication sends no more; that of least
    memory needs no more than either. Here they are three different plans."""
    time, sending, memory = (planned(f"{name}{kind}") for name in ("time", "communication", "memory"))
    objective = sending.certificate.objective_bytes
    assert objective is not None
    less, _ = slack(sending)
    assert objective - less <= time.sent_bytes
    assert time.certificate.bound_ns <= sending.certificate.objective_ns
    assert sending.certificate.bound_bytes is not None and sending.certificate.bound_bytes <= objective
    least = memory.certificate.objective_bytes or 0
    assert least == memory.predicted.total_memory_bytes == memory.certificate.bound_bytes
    assert least < min(time.predicted.total_memory_bytes, sending.predicted.total_memory_bytes)
    assert memory.certificate.objective_ns > time.certificate.objective_ns
    assert len({document.digests.decisions for document in (time, sending, memory) if document.digests}) == 3


def least_memory_minus_one() -> PlanRequest:
    """A request that nothing fits."""
    least = planned("memory").certificate.objective_bytes
    assert least is not None
    options = replace(TRAINING, objective="memory", max_memory_bytes=least - 1)
    return PlanRequest(model=GPT, cluster=CLUSTER, options=options)


def test_one_byte_less_is_too_little(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """With the least memory for a limit there is a plan; with one byte less none, and the command exits with 3."""
    least = planned("memory").certificate.objective_bytes or 0
    options = replace(TRAINING, objective="memory", max_memory_bytes=least)
    document = api.make_plan(PlanRequest(model=GPT, cluster=CLUSTER, options=options))
    assert document.predicted.total_memory_bytes == least
    monkeypatch.setattr(api, "diagnose", lambda prepared, failure: failure)  # what would help takes its time
    with pytest.raises(InfeasibleError) as caught:
        api.make_plan(least_memory_minus_one())
    assert (caught.value.least_memory_bytes, caught.value.limit_bytes) == (least, least - 1)
    given = ["--batch", "8", "--dim", "seq=64", "--loss", "mean", "--recompute", "none", "--mesh", "dp=2,tp=2"]
    given += ["--objective", "memory", "--max-memory", f"{least - 1}B"]
    assert invoke(command, "tap-plan", [str(GPT), "--cluster", CLUSTER, *given]) == 3
    assert f"every plan needs at least 0.00 GB per device ({least} bytes)" in capsys.readouterr().err


@pytest.mark.full
def test_remedies_speak_of_times() -> None:
    """Changes with which a plan fits are searched for the least time, and say so."""
    with pytest.raises(InfeasibleError, match="1 byte is missing") as caught:
        api.make_plan(least_memory_minus_one())
    assert caught.value.remedies
    assert all("ms or less with --objective time" in remedy.text for remedy in caught.value.remedies)


def test_plans_round_trip_and_keep_to_the_schema() -> None:
    """What is written is read again, and holds the fields of its objective only."""
    for name in ("time", "communication", "memory", "memory, inference"):
        document = planned(name)
        text = to_text(document)
        assert from_text(text) == document and to_text(from_text(text)) == text
        written = json.loads(text)
        jsonschema.validate(written, schema())
        certificate, objective = written["certificate"], document.options.objective
        assert ("objective" in written["options"]) == (objective != "time")
        assert ("objective_bytes" in certificate) == ("bound_bytes" in certificate) == (objective != "time")
        assert ("bound_ns" in certificate) == (objective != "communication")
        assert ("memory_proof" in certificate) == ("time_gap_basis_points" in certificate) == (objective == "memory")
        bounds = {key for entry in certificate["proof"] for key in entry if key.startswith("bound")}
        assert bounds <= {"bound_bytes" if objective == "communication" else "bound_ns"}
    broken = json.loads(to_text(planned("memory")))
    broken["certificate"].pop("bound_bytes")
    with pytest.raises(PlanFormatError, match="bound_bytes"):
        from_text(json.dumps(broken))


def test_without_a_limit_nothing_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever repeats all work has nothing to say: that is the answer, proven, and a warning says what it costs."""
    options = PlanOptions(batch=64, loss="mean", dims={"seq": 512}, max_memory_bytes="none", objective="communication")
    request = PlanRequest(model=DATA / "hm_llama3_8b.onnx", cluster="1x8:a100-sxm4-80gb", options=options)
    with caplog.at_level(logging.INFO, logger="tap_planner"):
        document = api.make_plan(request)
    certificate = document.certificate
    assert (certificate.objective_bytes, certificate.bound_bytes, certificate.status) == (0, 0, "optimal")
    assert document.collectives == () and document.sent_bytes == 0
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert f"a step takes {certificate.objective_ns / 1e6:.3f} ms" in warning
    times = re.search(r"operators take (\d+\.\d) times as long as split over all devices", warning)
    assert times is not None and 6 < float(times[1]) <= 8, "eight devices, and a floor of launches"
    assert "--objective time finds the fastest plan" in warning
    assert not any("are proven faster" in record.getMessage() for record in caplog.records)


def test_what_does_not_go_together(tmp_path: Path, capsys: Capture) -> None:
    """A regret of time makes no sense with another objective, on the command line and in the library."""
    path = tmp_path / "old.json"
    write_plan(path, planned("time"))
    arguments = [str(GPT), "--cluster", CLUSTER, "--stay-near", str(path), "--objective", "memory"]
    assert invoke(command, "tap-plan", arguments) == 2
    assert "--stay-near allows a regret of time, the objective is memory" in capsys.readouterr().err
    options = replace(TRAINING, objective="communication", max_regret_basis_points=100)
    with pytest.raises(UsageError, match="regret of time"):
        api.make_plan(PlanRequest(model=GPT, cluster=CLUSTER, options=options), planned("time"))
    assert invoke(command, "tap-plan", [str(GPT), "--cluster", CLUSTER, "--objective", "space"]) == 2


def test_a_check_plans_with_the_same_objective() -> None:
    """A plan of least memory is what planning with its own options gives again."""
    old = planned("memory")
    assert api.check_plan(old, GPT, CLUSTER).verdict is Verdict.IDENTICAL


def test_commands(tmp_path: Path, capsys: Capture) -> None:
    """Summary, report, tap-show and tap-diff speak of bytes where these are the objective, and still of times."""
    paths = {name: tmp_path / f"{name}.json" for name in ("time", "communication", "memory")}
    report = tmp_path / "report.json"
    given = [str(GPT), "--cluster", CLUSTER, "--batch", "8", "--dim", "seq=64", "--loss", "mean", "--recompute", "none"]
    limit = [f"--max-memory={LIMIT}B", "--microbatches=1"]
    limits = {"time": limit, "communication": limit, "memory": []}
    said, reported = {}, {}
    for name, path in paths.items():
        more = ["--objective", name, "--mesh", "dp=2,tp=2", "-o", str(path), "--report", str(report), *limits[name]]
        assert invoke(command, "tap-plan", [*given, *more]) == 0
        said[name] = " ".join(capsys.readouterr().err.split())
        reported[name] = json.loads(report.read_text())
    assert "sent by a device in a step" in said["communication"] and "by objective A" in said["communication"]
    assert "per device; in that memory" in said["memory"]
    assert set(reported["time"]) == {"wall_ms", "status", "objective_ns", "bound_ns", "decisions"}
    assert set(reported["communication"]) == set(reported["time"]) - {"bound_ns"} | {"objective_bytes", "bound_bytes"}
    assert set(reported["memory"]) == set(reported["time"]) | {"objective_bytes", "bound_bytes"}

    shown = {}
    for name, path in paths.items():
        assert invoke(show_command, "tap-show", [str(path)]) == 0
        shown[name] = capsys.readouterr().out
    assert "of memory per device, proven optimal" in shown["memory"] and "in that memory" in shown["memory"]
    assert "sent by a device in a step" in shown["communication"] and "by objective A" in shown["communication"]
    assert "memory per device," not in shown["time"]

    assert invoke(diff_command, "tap-diff", [str(paths["time"]), str(paths["communication"])]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "objective time -> communication" in words and "sent by a device" in words
    assert "objective_bytes none ->" in words and "-> none" in words
    assert invoke(diff_command, "tap-diff", [str(paths["time"]), str(paths["memory"]), "--format", "json"]) == 0
    diff = json.loads(capsys.readouterr().out)
    assert {"name": "objective", "old": "time", "new": "memory"} in diff["options"]
    least = json.loads(paths["memory"].read_text())["certificate"]["objective_bytes"]
    assert {"name": "objective_bytes", "old": None, "new": least} in diff["certificate"]


def test_diffs_of_plans_of_time_are_as_before() -> None:
    """Nothing is said of objectives where there is nothing to say."""
    diff = diff_plans(planned("time"), planned("time, inference"))
    assert not any("objective" in change.name for change in diff.options)
    assert {change.name for change in diff.certificate} <= {"objective_ns", "bound_ns", "gap_basis_points", "status"}


@pytest.mark.parametrize("objective", ["memory", pytest.param("communication", marks=pytest.mark.full)])
def test_alternatives(objective: str, tmp_path: Path, capsys: Capture) -> None:
    """The best plans on other meshes, by the objective, none better than the plan's own bound."""
    report = tmp_path / "report.json"
    arguments = [str(GPT), "--cluster", CLUSTER, "--batch", "8", "--dim", "seq=64", "--loss", "mean"]
    arguments += ["--recompute", "none", "--alternatives", "2", "--report", str(report), "--objective", objective]
    arguments += [] if objective == "memory" else ["--max-memory", f"{LIMIT}B"]
    assert invoke(command, "tap-plan", [*arguments, "-o", str(tmp_path / "plan.json")]) == 0
    assert "The best plans on other meshes" in capsys.readouterr().err
    found = json.loads(report.read_text())
    (other,) = found["alternatives"]
    assert other["objective_bytes"] >= max(other["bound_bytes"], found["bound_bytes"])
    assert ("bound_ns" in other) == (objective == "memory")
    assert objective == "communication" or other["objective_bytes"] == other["memory_bytes"]


def test_least_memory_over_meshes_and_on_fewer_devices() -> None:
    """The mesh is chosen too; with idle devices allowed the least is no more, and all meshes count as looked at."""
    found = {}
    for idle in (False, True):
        options = replace(TRAINING, mesh=None, objective="memory", allow_idle=idle)
        document = api.make_plan(PlanRequest(model=GPT, cluster="1x3:l4", options=options))
        found[idle] = document.certificate
    least = {idle: certificate.objective_bytes for idle, certificate in found.items()}
    assert least[True] is not None and least[False] is not None and least[True] <= least[False]
    assert found[True].space["meshes"] > found[False].space["meshes"] == 1
