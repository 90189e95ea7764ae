"""Pipelines from the command line: planned, certified, written, shown, checked again and run."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.cluster import cluster_from_json
from tap_planner.errors import InfeasibleError, TapError
from tap_planner.plan import (
    ApplyRequest,
    PlanDocument,
    PlanOptions,
    PlanRequest,
    Verdict,
    expand,
    parse_constraint,
    read_plan,
    with_digests,
    write_plan,
)
from tap_planner.program import SumTied, collectives
from tap_planner.schedule import to_text as order_text
from tap_planner.simulate import lower_bounds, price_program, simulate
from tap_planner_cli.errors import invoke
from tap_planner_cli.plan import command as plan
from tap_planner_cli.show import command as show

DATA = Path(__file__).parent / "data"
CLUSTER = str(Path(__file__).parents[1] / "plans" / "demo-cluster.yaml")
SCHEDULES = [
    ("1f1b", "pp=2,dp=2", None),
    ("fill-drain", "pp=4", None),
    ("interleaved", "pp=2,tp=2", 2),
    ("zbv", "pp=2,dp=2", None),
]


def request(mesh: str, **options: object) -> PlanRequest:
    """GPT-2 on four slow devices."""
    given = {"batch": 8, "dims": {"seq": 16}, "precision": "fp32", "loss": "mean", "mesh": mesh, **options}
    return PlanRequest(model=DATA / "gpt2_tiny.onnx", cluster=CLUSTER, options=PlanOptions(**given))  # type: ignore[arg-type]


def planned(mesh: str, **options: object) -> PlanDocument:
    """Its plan."""
    return api.make_plan(request(mesh, **options))


@pytest.mark.parametrize(("schedule", "mesh", "chunks"), SCHEDULES)
def test_plans_run_and_are_what_they_say(schedule: str, mesh: str, chunks: int | None, tmp_path: Path) -> None:
    """Outputs, gradients, updated parameters and collectives of every stage are those of a single process; the bound is
    below the objective, and no simulated step is below what must take its time."""
    document = planned(mesh, schedule=schedule, chunks=chunks)
    certificate = document.certificate
    assert document.pipeline.schedule == schedule
    assert 0 < certificate.bound_ns <= certificate.objective_ns
    decisions = expand(document)
    assert decisions.pipeline is not None and decisions.num_ranks == 4
    program = api.lower_plan(document, DATA / "gpt2_tiny.onnx")
    cluster = api.prepare_search(request(mesh)).cluster
    assert price_program(program, cluster).objective_ns == certificate.objective_ns
    assert simulate(program, cluster).step_ns == document.predicted.step_ns
    assert lower_bounds(program, cluster).step_ns <= document.predicted.step_ns
    path = tmp_path / "plan.json"
    write_plan(path, document)
    outcome = api.apply_plan(
        ApplyRequest(plan=path, model=DATA / "gpt2_tiny.onnx", init_random=True, verify=True, seed=3)
    )
    assert outcome.passed, "\n".join(outcome.lines())


@pytest.mark.parametrize(("schedule", "mesh", "chunks"), SCHEDULES)
def test_certificates_hold(schedule: str, mesh: str, chunks: int | None) -> None:
    """The certificate is verified from plan and model; one that claims more, or another plan, is not."""
    document = planned(mesh, schedule=schedule, chunks=chunks, microbatches=4)
    assert api.verify_certificate(document, DATA / "gpt2_tiny.onnx").findings == ()
    claimed = replace(document.certificate, bound_ns=document.certificate.objective_ns)
    found = api.verify_certificate(replace(document, certificate=claimed), DATA / "gpt2_tiny.onnx").findings
    assert any("bound_ns" in finding for finding in found)


def test_the_same_plan_again() -> None:
    """Planned twice, the text is the same; --check finds no drift."""
    document = planned("pp=2,dp=2")
    assert document == planned("pp=2,dp=2")
    assert api.check_plan(document, DATA / "gpt2_tiny.onnx", CLUSTER).verdict is Verdict.IDENTICAL


@pytest.mark.full
def test_a_limit_holds_for_every_stage() -> None:
    """Under a limit below what the fullest stage of the fastest plan needs, every stage fits, at a price."""

    def llama(**options: object) -> PlanDocument:
        given = {"batch": 64, "dims": {"seq": 2048}, "loss": "mean", "mesh": "pp=4,dp=2,tp=2", "microbatches": 16}
        asked = PlanOptions(**(given | options))  # type: ignore[arg-type]
        return api.make_plan(PlanRequest(model=DATA / "hm_llama3_8b.onnx", cluster="2x8:a100-sxm4-80gb", options=asked))

    free = llama()
    limit = free.predicted.total_memory_bytes * 7 // 10
    found = llama(max_memory_bytes=limit)
    assert found.predicted.total_memory_bytes <= limit
    assert found.certificate.objective_ns > free.certificate.objective_ns
    assert found.certificate.bound_ns >= free.certificate.bound_ns


def test_nothing_fits() -> None:
    """A limit below the least memory is refused with what is needed per device."""
    with pytest.raises(InfeasibleError, match=r"at least .* per device"):
        planned("pp=2,dp=2", microbatches=4, max_memory_bytes=10_000)


def test_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Summary and table name stages, schedule and cuts; the JSON has the stage of every part."""
    path = tmp_path / "plan.json"
    given = f"{DATA / 'gpt2_tiny.onnx'} --cluster {CLUSTER} --batch 8 --dim seq=16 --loss mean"
    staged = f"--mesh pp=2,tp=2 --schedule interleaved -o {path}"
    assert invoke(plan, "tap-plan", f"{given} {staged}".split()) == 0
    assert "pp=2 x tp=2, interleaved with 2 parts a stage" in " ".join(capsys.readouterr().err.split())
    stages = json.loads(path.read_text(encoding="utf-8"))["pipeline"]["stages"]
    assert [stage["stage"] for stage in stages] == [0, 1, 0, 1]
    assert invoke(show, "tap-show", [str(path)]) == 0
    shown = capsys.readouterr().out
    assert "2 stages" in shown and stages[1]["first"] in shown
    document = read_plan(path)
    program = api.lower_plan(document, DATA / "gpt2_tiny.onnx")
    busiest = api.simulate_program(document, program).busiest
    rows = dict(re.findall(r"^(compute|communication|hidden|bubble) .*? (-?[0-9.]+) %$", shown, re.MULTILINE))
    assert sum(map(float, rows.values())) == pytest.approx(100, abs=0.2)
    assert float(rows["bubble"]) == pytest.approx(100 * busiest.bubble_ns / busiest.step_ns, abs=0.06)


@pytest.mark.parametrize(("schedule", "mesh", "chunks"), SCHEDULES)
def test_a_step_is_shown_in_time(
    schedule: str,
    mesh: str,
    chunks: int | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The picture holds each kind of work as long as it takes, the trace ends with the step, and the program has the
    order of every stage."""
    monkeypatch.setenv("COLUMNS", "160")
    document = planned(mesh, schedule=schedule, chunks=chunks, microbatches=4)
    write_plan(tmp_path / "plan.json", document)
    given = [str(tmp_path / "plan.json"), "--model", str(DATA / "gpt2_tiny.onnx"), "--timeline", "--program"]
    assert invoke(show, "tap-show", [*given, "--trace", str(tmp_path / "trace.json")]) == 0
    captured = capsys.readouterr()
    assert "trace.json: open it in https://ui.perfetto.dev" in captured.err
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    end = max(event["ts"] + event["dur"] for event in trace if event["ph"] == "X")
    assert end * 1000 == pytest.approx(document.predicted.step_ns, rel=1e-9)
    stages = document.pipeline.num_stages
    drawn = [line.split()[2] for line in captured.out.splitlines() if re.fullmatch(r"stage +\d+ [FBIWO.]+", line)]
    assert len(drawn) == stages
    program = api.lower_plan(document, DATA / "gpt2_tiny.onnx")
    timeline = api.simulate_program(document, program)
    names = ["forward", "backward", "input_backward", "weight_backward", "optimizer"]
    letters = dict(zip(names, "FBIWO", strict=True))
    for stage, picture in zip(timeline.stages, drawn, strict=True):
        spent = Counter[str]()
        for event in stage.events:
            if event.stream == "main":
                spent[letters[event.kind]] += event.end_ns - event.start_ns
        for letter, took in spent.items():
            assert picture.count(letter) / len(picture) == pytest.approx(took / timeline.step_ns, abs=0.06)
        order = program.decisions.pipeline
        assert order is not None
        slots = " ".join(map(order.schedule.slot_text, order.schedule.orders[stage.stage]))
        assert slots in " ".join(captured.out.split())


def test_a_long_step_is_shown_at_both_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where slots are too short to be seen in the whole step, its begin and its end are drawn, so that every slot of
    the shortest kind has two characters; what a character stands for is said, and how much is shown."""
    monkeypatch.setenv("COLUMNS", "30")
    document = planned("pp=2,dp=2", microbatches=8)
    write_plan(tmp_path / "plan.json", document)
    given = [str(tmp_path / "plan.json"), "--model", str(DATA / "gpt2_tiny.onnx"), "--timeline"]
    assert invoke(show, "tap-show", given) == 0
    out = capsys.readouterr().out
    drawn = [found[1:] for found in re.findall(r"^stage (\d+) ([FB.O]+) ~ ([FB.O]+)$", out, re.MULTILINE) if found]
    assert len(drawn) == 2
    timeline = api.simulate_program(document, api.lower_plan(document, DATA / "gpt2_tiny.onnx"))
    forward = [e for e in timeline.stages[0].events if (e.stream, e.kind) == ("main", "forward")]
    per = sorted(e.end_ns - e.start_ns for e in forward)[len(forward) // 2] / 2
    for stage, (begin, end) in zip(timeline.stages, drawn, strict=True):
        assert len(begin) == len(end) <= 26
        for text, first in ((begin, 0), (end, timeline.step_ns - per * len(end))):
            for letter, kind in (("F", "forward"), ("B", "backward")):
                spent = sum(
                    max(0, min(event.end_ns, first + per * len(text)) - max(event.start_ns, first))
                    for event in stage.events
                    if (event.stream, event.kind) == ("main", kind)
                )
                assert text.count(letter) == pytest.approx(spent / per, abs=2)
    assert "the first and the last" in " ".join(out.split())


def test_a_step_is_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a plan nothing is drawn; a trace that cannot be written is refused before anything is read."""
    for option in (["--timeline"], ["--program"], ["--trace", str(tmp_path / "t.json")]):
        assert invoke(show, "tap-show", ["--cluster", CLUSTER, *option]) == 2
        assert f"{option[0]} is of a plan" in capsys.readouterr().err
    assert invoke(show, "tap-show", [str(tmp_path / "none.json"), "--trace", str(tmp_path / "no" / "t.json")]) == 2
    assert "t.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "dp=4", "schedule": "zbv"}, "--schedule zbv: there is one stage"),
        ({"mesh": "dp=4", "chunks": 2}, "--chunks: there is one stage"),
        ({"mesh": "pp=2,dp=2", "chunks": 3}, "--chunks 3: --schedule 1f1b has 1"),
        ({"mesh": "pp=2,dp=2", "mode": "infer", "loss": None}, "--mode infer with pipeline stages"),
        ({"mesh": "pp=2,dp=2", "objective": "memory"}, "--objective memory with pipeline stages"),
        ({"mesh": "pp=2,dp=2", "schedule": "interleaved", "microbatches": 1}, "a multiple of 2 stages"),
    ],
)
def test_what_does_not_go_together(options: dict[str, object], message: str) -> None:
    """Options that pipelines do not have are named."""
    with pytest.raises(TapError, match=message):
        api.make_plan(request(**options))  # type: ignore[arg-type]


ORDER = """# The second microbatch goes in before the first comes back, and parameters wait.
rank 0: F0 F1 I0 F2 W0 I1 F3 W1 I2 W2 I3 W3
rank 1: F0 B0 F1 B1 F2 I2 F3 W2 B3
"""


PLACED = """chunks: 0 1 0
rank 0: F0.0 F1.0 F0.1 B0.1 F2.0 F1.1 B1.1 B0.0 F3.0 F2.1 B2.1 B1.0 F3.1 B3.1 B2.0 B3.0
rank 1: F0 F1 B0 F2 B1 F3 B2 B3
"""
"""The ends of the model, embedding and head, on one stage."""


def in_order(tmp_path: Path, text: str = ORDER, more: str = "") -> tuple[int, Path]:
    """Plan with an order of one's own from the command line."""
    (tmp_path / "mine.txt").write_text(text, encoding="utf-8")
    given = f"-q {DATA / 'gpt2_tiny.onnx'} --cluster {CLUSTER} --batch 8 --dim seq=16 --loss mean --precision fp32"
    path = tmp_path / "plan.json"
    arguments = f"{given} --schedule {tmp_path / 'mine.txt'} --mesh pp=2,dp=2 -o {path} {more}"
    return invoke(plan, "tap-plan", arguments.split()), path


@pytest.mark.parametrize("text", [ORDER, PLACED], ids=["order", "placed"])
def test_an_order_of_ones_own(text: str, tmp_path: Path) -> None:
    """It is planned, certified, stored whole (the file is not read again), found again and run; with chunks where the
    order says they lie."""
    code, path = in_order(tmp_path, text)
    assert code == 0
    (tmp_path / "mine.txt").unlink()
    document = read_plan(path)
    pipeline = expand(document).pipeline
    assert pipeline is not None and document.pipeline.schedule == "mine" and document.pipeline.microbatches == 4
    lines = [" ".join(map(pipeline.schedule.slot_text, order)) for order in pipeline.schedule.orders]
    wanted = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("rank")]
    assert [line.replace(".0", "") for line in lines] == [line.replace(".0", "") for line in wanted]
    model = DATA / "gpt2_tiny.onnx"
    assert api.verify_certificate(document, model).findings == ()
    assert api.check_plan(document, model, CLUSTER).verdict is Verdict.IDENTICAL
    other = planned("pp=2,dp=2", schedule="zb-h1", microbatches=4)
    foreign = replace(document, options=replace(document.options, schedule="zb-h1", order=()))
    assert api.verify_certificate(foreign, model).findings != ()
    assert api.verify_certificate(replace(other, options=document.options), model).findings != ()
    outcome = api.apply_plan(ApplyRequest(plan=path, model=model, init_random=True, verify=True, seed=3))
    assert outcome.passed, "\n".join(outcome.lines())


def test_ends_on_one_stage_share_the_embedding(tmp_path: Path) -> None:
    """Where embedding and head lie on one stage, whose parts are so much shorter, no gradient is summed over stages."""
    code, path = in_order(tmp_path, PLACED)
    assert code == 0
    document = read_plan(path)
    program = api.lower_plan(document, DATA / "gpt2_tiny.onnx")
    assert not any(isinstance(instruction, SumTied) for instruction in program.step)
    apart = api.lower_plan(planned("pp=2,dp=2", microbatches=4), DATA / "gpt2_tiny.onnx")
    assert any(isinstance(instruction, SumTied) for instruction in apart.step)
    chunks = [len(chunk.operators) for chunk in program.chunks]
    assert chunks[0] + chunks[2] < 2 * chunks[1]


def test_the_order_of_a_known_schedule_gives_its_plan(tmp_path: Path) -> None:
    """1F1B written out costs and needs what 1F1B does; what is proven does not know its bubble."""
    known = planned("pp=2,dp=2", microbatches=4)
    pipeline = expand(known).pipeline
    assert pipeline is not None
    text = order_text(pipeline.schedule).replace("name: 1f1b", "name: written-out")
    code, path = in_order(tmp_path, text)
    document = read_plan(path)
    assert code == 0 and document.pipeline.schedule == "written-out"
    assert document.certificate.objective_ns <= known.certificate.objective_ns * 1.001
    assert document.predicted.total_memory_bytes == known.predicted.total_memory_bytes
    assert document.certificate.bound_ns <= known.certificate.bound_ns


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("rank 0: F0 B0\n", "", "is for 1 stages, --mesh pp=2,dp=2 has 2"),
        ("rank 0: F0 B0\nrank 1: F0\n", "", "rank 1: B0 (or I0 and W0) is missing"),
        ("rank 0: F0 B0 F1 B1\nrank 1: F0 F1 B0 B1", "", "the ranks wait for each other"),
        ("rank 0: F0 G0\n", "", "'G0', expected F, B, I or W"),
        (f"name: 1f1b\n{ORDER}", "", "called '1f1b', which is the name of another one"),
        (ORDER, "--microbatches 8", "--microbatches 8: the order 'mine' has 4"),
        (ORDER, "--chunks 2", "--chunks 2: the order 'mine' has 1"),
        (ORDER, "--batch 6", "a batch of 6 cannot be cut in the 4 microbatches"),
        (ORDER, "--schedule 1f1d", "no such file, and not one of"),
        (PLACED.replace("rank 0", "reads: - 0 0\nrank 0"), "", "reads what chunk 1 makes, which 'reads' does not say"),
    ],
)
def test_orders_that_do_not_fit(
    text: str, more: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An order that cannot run, or is for something else, is refused, and nothing is written."""
    code, path = in_order(tmp_path, text, more)
    assert code == 2 and message in " ".join(capsys.readouterr().err.split())
    assert not path.exists()


def test_staying_near_is_for_plans_without_stages() -> None:
    """An old plan of a pipeline, and any old plan for a pipeline, is refused."""
    staged, flat = planned("pp=2,dp=2"), planned("dp=4")
    with pytest.raises(TapError, match="--stay-near: the old plan has pipeline stages"):
        api.make_plan(request("dp=4"), staged)
    with pytest.raises(TapError, match="--stay-near: what is planned has pipeline stages"):
        api.make_plan(request("pp=2,dp=2"), flat)


def test_alternatives_are_for_an_open_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    """There is no other mesh than the one that is asked for."""
    given = f"{DATA / 'gpt2_tiny.onnx'} --cluster {CLUSTER} --batch 8 --dim seq=16 --loss mean"
    assert invoke(plan, "tap-plan", f"{given} --mesh pp=2,tp=2 --alternatives 2".split()) == 2
    assert "--alternatives shows plans on other meshes, --mesh pp=2,tp=2 allows one" in capsys.readouterr().err


# -- transfers that are shared out ---------------------------------------------------------------------------------

WHOLE = ("batch!=tp", "Add:tp=none", "LayerNormalization:tp=none")
"""Rules under which both ranks of a stage hold all that lies between blocks."""


def test_transfers_are_shared_out_where_that_is_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both devices of a node have what the other node needs: each sends half of it over the slow network. The plan
    says so, its certificate holds, and it runs; whole transfers would take longer."""
    model, path, rules = DATA / "gpt2_tiny.onnx", tmp_path / "plan.json", tuple(map(parse_constraint, WHOLE))
    asked = request("pp=2,tp=2", batch=64, zero=0, constraints=rules)
    document = api.make_plan(replace(asked, cluster="2x2:cpu-core"))
    assert document.pipeline.scatter == ("tp",)
    assert api.verify_certificate(document, model).findings == ()
    write_plan(path, document)
    outcome = api.apply_plan(ApplyRequest(plan=path, model=model, init_random=True, verify=True, seed=3))
    assert outcome.passed, "\n".join(outcome.lines())
    assert invoke(show, "tap-show", [str(path), "--program", "--model", str(model)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "transfers shared out over tp" in shown and "gathered over tp" in shown
    whole = with_digests(replace(document, pipeline=replace(document.pipeline, scatter=())))
    cluster = cluster_from_json(document.cluster)
    programs = [api.lower_plan(one, model) for one in (document, whole)]
    shared_ns, whole_ns = (simulate(program, cluster).step_ns for program in programs)
    assert document.predicted.step_ns == shared_ns < whole_ns
    sent = [sum(e.count * e.elements for e in collectives(program) if e.kind == "send_recv") for program in programs]
    assert 2 * sent[0] == sent[1]
