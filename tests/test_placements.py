"""Device placement from the command line: placed, certified, written, shown, checked again and run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import onnx.parser
import pytest

from tap_planner import api
from tap_planner.cluster import load_cluster
from tap_planner.device_placement import lower_bound_ns, place, placed_plan, priority_of, problem_of
from tap_planner.errors import InfeasibleError, LimitReachedError, UsageError
from tap_planner.graph import BindOptions, LossOptions, bind, load_model
from tap_planner.placements import as_played, build_problem
from tap_planner.plan import (
    ApplyRequest,
    PlanDocument,
    PlanOptions,
    PlanRequest,
    Verdict,
    diff_plans,
    expand,
    from_text,
    parse_place_rule,
    read_plan,
    schema,
    to_text,
    with_digests,
    write_plan,
)
from tap_planner.program import collectives
from tap_planner.requests import read_model
from tap_planner.simulate import predict
from tap_planner_cli.errors import invoke
from tap_planner_cli.plan import command as plan
from tap_planner_cli.show import command as show
from tests.device_placement.test_plans import INCEPTION, WEIGHTS
from tests.graph.models import add_weight, saved

DATA = Path(__file__).parent / "data"
DIMS = {"t5_tiny": {"seq": 16, "dec_seq": 16}, "llama_decode_tiny": {"past": 16}, "gpt2_tiny": {"seq": 16}}
BOX = """
name: box
library: gloo
node_groups:
  - {name: fast, device: a100-sxm4-80gb, nodes: 1, devices_per_node: 1}
  - {name: small, device: l4, nodes: 1, devices_per_node: 2}
  - {name: host, device: cpu-core, nodes: 1, devices_per_node: 1}
"""
THREE = "1x3:l4"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A fast GPU, two slow ones and a CPU."""
    path = tmp_path_factory.mktemp("box") / "box.yaml"
    path.write_text(BOX)
    return str(path)


@pytest.fixture(scope="module")
def inception(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Inception-like CNN."""
    folder = tmp_path_factory.mktemp("inception")
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 20]>\n{INCEPTION}')
    for name, shape in WEIGHTS.items():
        add_weight(model, name, shape)
    saved(folder, model)
    return folder / "model.onnx"


def request(model: str | Path, cluster: str, **options: object) -> PlanRequest:
    """A question for a placement, if nothing else is said."""
    path = DATA / f"{model}.onnx" if isinstance(model, str) else model
    given = {"precision": "fp32", "method": "device-placement", **options}
    if isinstance(model, str):
        given = {"batch": 8, "dims": DIMS.get(model, {}), **given}
    if given.get("mode") != "infer":
        given = {"loss": "mean", **given}
    return PlanRequest(model=path, cluster=cluster, options=PlanOptions(**given))  # type: ignore[arg-type]


def placed(model: str | Path, cluster: str, **options: object) -> PlanDocument:
    """The plan."""
    return api.make_plan(request(model, cluster, **options))


def loads_of(document: PlanDocument) -> tuple[tuple[int, ...], ...]:
    """Places of the devices that are used, by stage."""
    assert document.placement is not None
    return tuple(load.place for load in document.placement.devices)


@pytest.mark.parametrize("name", ["inception", pytest.param("t5_tiny", marks=pytest.mark.full), "unet_tiny"])
def test_plans_run_on_three_processes(name: str, request_inception: Path, tmp_path: Path) -> None:
    """What is planned for three devices runs on three gloo processes as on a single one."""
    model = request_inception if name == "inception" else DATA / f"{name}.onnx"
    rules = tuple(parse_place_rule(text) for text in PULLED_APART[name])
    document = placed(name if name != "inception" else model, THREE, places=rules)
    assert len(loads_of(document)) == 3
    path = tmp_path / "plan.json"
    write_plan(path, document)
    outcome = api.apply_plan(ApplyRequest(plan=path, model=model, init_random=True, verify=True, seed=3, nproc=3))
    assert outcome.passed, outcome.lines()
    assert api.verify_certificate(read_plan(path), model).passed


PULLED_APART = {
    "inception": ("a: 0", "b: 1", "c: 2"),
    "t5_tiny": ("m.encoder.*: 0", "m.decoder.block.0.*: 1", "m.decoder.block.1.*: 2"),
    "unet_tiny": ("m.down_blocks.*: 0", "m.mid_block.*: 1", "m.up_blocks.*: 2"),
}
"""Rules under which all three devices have something to do."""


@pytest.fixture
def request_inception(inception: Path) -> Path:
    """The same, for tests that are parametrised by name."""
    return inception


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(pytest.param("t5_tiny", mode, marks=pytest.mark.full) for mode in ("train", "infer")),
        *(pytest.param("unet_tiny", mode, marks=pytest.mark.full) for mode in ("train", "infer")),
        *(("resnet_small", mode) for mode in ("train", "infer")),
        *(("dlrm_tiny", mode) for mode in ("train", "infer")),
        ("llama_decode_tiny", "infer"),
    ],
)
def test_plans_are_what_they_say(name: str, mode: str, box: str) -> None:
    """The prediction is the simulator's for the devices of the plan, collectives are those of its Program, the text
    keeps everything and satisfies the schema, its certificate holds, and planning again changes nothing."""
    document = placed(name, box, mode=mode)
    model = DATA / f"{name}.onnx"
    assert document.placement is not None and document.mesh.axes == ()
    text = to_text(document)
    jsonschema.Draft202012Validator(schema()).validate(json.loads(text))
    assert to_text(from_text(text)) == text
    program = api.lower_plan(document, model)
    cluster = load_cluster(box)
    ranks = [cluster.places().index(place) for place in document.mesh.ranks]
    prediction = predict(program, cluster, ranks)
    assert api.simulate_plan(document, model) == prediction
    assert document.predicted.step_ns == prediction.step_ns
    if document.pipeline.num_stages > 1:
        assert api.simulate_program(document, program).step_ns == prediction.step_ns
    counted = {(c.phase.value, c.kind, c.elements, c.count) for c in collectives(program)}
    assert {(e.phase, e.kind, e.elements, e.count) for e in document.collectives} == counted
    for load in document.placement.devices:
        assert load.limit_bytes is not None and load.total_memory_bytes <= load.limit_bytes
    assert api.verify_certificate(from_text(text), model).passed
    assert api.check_plan(document, model, box).verdict is Verdict.IDENTICAL


def test_a_step_is_no_longer_than_on_one_device(box: str) -> None:
    """Whatever the graph gains, the fastest device alone is always among what is compared."""
    for name in ("gpt2_tiny", "resnet_small", "dlrm_tiny"):
        document = placed(name, box)
        assert document.placement is not None
        alone = next(outcome for outcome in document.placement.orders if not outcome.order)
        assert document.predicted.step_ns <= alone.makespan_ns
        assert document.certificate.bound_ns <= document.certificate.objective_ns


def test_small_graphs_are_solved(inception: Path) -> None:
    """CP-SAT proves that the placement of a small graph is the fastest, beyond what is known without it; the proof is
    claimed, and with replay proven again."""
    document = placed(inception, "1x2:l4")
    certificate = document.certificate
    assert certificate.status == "optimal" and certificate.space["solved"] == 1
    assert certificate.simple_bound_ns is not None and certificate.simple_bound_ns < certificate.bound_ns
    graph = bind(load_model(inception), BindOptions(training=True, loss=LossOptions(kind="mean")))
    built = problem_of(graph, load_cluster("1x2:l4"), precision="fp32", training=True)
    assert certificate.simple_bound_ns == lower_bound_ns(built.problem)
    for replay in (False, True):
        report = api.verify_certificate(document, inception, replay=replay)
        assert report.passed
        assert any(("proven again" if replay else "claimed") in line for line in report.lines())


def test_rules_are_kept(box: str) -> None:
    """On listed devices, on those of a node group, and together on one."""
    rules = ("m.mid_block.*: host", "m.up_blocks.0.*: 1-2", "m.up_blocks.0.*: together", "conv2d: 0")
    document = placed("unet_tiny", box, places=tuple(map(parse_place_rule, rules)))
    on = devices_by_parameter(document)
    assert {place for name, place in on.items() if name.startswith("m.mid_block.")} == {(2, 0)}
    upper = {place for name, place in on.items() if name.startswith("m.up_blocks.0.")}
    assert len(upper) == 1 and upper <= {(1, 0), (1, 1)}
    assert api.verify_certificate(document, DATA / "unet_tiny.onnx").passed


def devices_by_parameter(document: PlanDocument) -> dict[str, tuple[int, ...]]:
    """Where each parameter is read."""
    decisions = expand(document)
    pipeline = decisions.pipeline
    assert pipeline is not None
    found: dict[str, tuple[int, ...]] = {}
    names = {parameter.name for parameter in decisions.parameters}
    for chunk, begin in enumerate(pipeline.chunks):
        end = (*pipeline.chunks, len(decisions.operators))[chunk + 1]
        place = document.mesh.ranks[pipeline.stage_of(chunk)]
        for operator in decisions.operators[begin:end]:
            for operand in operator.inputs:
                if operand is not None and operand.tensor in names:
                    found[operand.tensor] = place
    return found


def test_one_order_and_a_seed(box: str) -> None:
    """Only the order that is asked for is tried; a seed gives the same plan again."""
    document = placed("resnet_small", box, traversal_order="bfs")
    assert document.placement is not None
    assert {outcome.order for outcome in document.placement.orders} == {"bfs", ""}
    first, second = (placed("resnet_small", THREE, traversal_order="random:7") for _ in range(2))
    assert to_text(first) == to_text(second)
    assert first.placement is not None and "random:7" in {outcome.order for outcome in first.placement.orders}


def test_the_faster_kind_of_plan_is_taken(box: str, caplog: pytest.LogCaptureFixture) -> None:
    """Matrix products of many samples are split, a small CNN is placed where one of the devices is far slower; either
    plan says what it was compared with, and verifies."""
    with caplog.at_level("INFO", logger="tap_planner"):
        split = placed("gpt2_tiny", "1x2:l4", method="auto", dims={"seq": 128}, batch=512)
        assert split.placement is None and split.options.method == "auto"
        assert "sharding is taken" in caplog.text
        caplog.clear()
        whole = placed("resnet_small", box, method="auto")
        assert whole.placement is not None and "device placement is taken" in caplog.text
    assert split.predicted.step_ns <= placed("gpt2_tiny", "1x2:l4", dims={"seq": 128}, batch=512).predicted.step_ns
    assert whole.predicted.step_ns == placed("resnet_small", box).predicted.step_ns
    assert api.verify_certificate(split, DATA / "gpt2_tiny.onnx").passed
    assert api.verify_certificate(whole, DATA / "resnet_small.onnx").passed


def test_what_fits_nowhere_is_said() -> None:
    """Proven where a single group is too large or everything together is; the rest may be split."""
    with pytest.raises(InfeasibleError, match=r"no device placement of unet_tiny.onnx fits: .* lacks") as caught:
        placed("unet_tiny", THREE, max_memory_bytes=1 << 20)
    assert caught.value.least_memory_bytes > caught.value.limit_bytes
    with pytest.raises((InfeasibleError, LimitReachedError)):
        placed("unet_tiny", THREE, max_memory_bytes=1 << 20, method="auto")


def test_a_limit_for_all_is_no_more_than_a_device_has(box: str) -> None:
    """An A100's worth of memory on a box with smaller devices; each has its own limit, or the one given."""
    for given, expected in (("device", None), (60 << 30, 60 << 30), (1 << 30, 1 << 30), ("none", "none")):
        document = placed(
            "resnet_small", box, max_memory_bytes=given, places=tuple(map(parse_place_rule, ("relu_1: 3",)))
        )
        assert document.placement is not None
        for load in document.placement.devices:
            own = load_cluster(box).devices[load.place[0]].memory_bytes
            wanted = None if expected == "none" else own if expected is None else min(own, int(expected))
            assert load.limit_bytes == wanted


@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("name", ["t5_tiny", "unet_tiny"])
def test_a_plan_takes_what_was_played(name: str, training: bool, box: str) -> None:
    """The order of the plan alone, forward and backward, gives the makespan by which its placement was chosen."""
    path, given = DATA / f"{name}.onnx", {"precision": "fp32", "method": "device-placement", "batch": 2}
    options = PlanOptions(
        **given, dims=DIMS.get(name, {}), mode="train" if training else "infer", loss="mean" if training else None
    )  # type: ignore[arg-type]
    read = read_model(path, load_cluster(box), options)
    built = build_problem(read)
    for tried in place(built.problem, evaluations=30).tries[:6]:
        priority = priority_of(built.problem, tried)
        found = placed_plan(read.graph, built, tried.placement, priority, precision="fp32", loss_output="y")
        assert as_played(built, read, tried.placement, found.decisions) == tried.makespan_ns


def test_differences_are_of_devices(box: str) -> None:
    """An operator that lies elsewhere is said to; transfers and stretches follow from that. Against split operators
    what changes is how they are split."""
    old, new = (placed("resnet_small", box, places=(parse_place_rule(f"relu_1: {on}"),)) for on in ("1", "2"))
    difference = diff_plans(old, new)
    assert difference.verdict is Verdict.DECISIONS_CHANGED
    fields = [field for change in difference.operators for field in change.fields]
    assert {field.name for field in fields} == {"device"} and ("1.0", "1.1") in {(f.old, f.new) for f in fields}
    assert not any("@" in change.name for change in difference.operators)
    assert {"cuts", "chunks"}.isdisjoint(change.name for change in difference.mesh)
    split = placed("resnet_small", "1x2:l4", method="sharding")
    changed = diff_plans(placed("resnet_small", "1x2:l4"), split)
    assert any(field.name == "device" and field.new is None for each in changed.operators for field in each.fields)
    assert any(each.name == "method" for each in changed.options)


Edit = Callable[[PlanDocument], PlanDocument]


def _certificate(**changes: object) -> Edit:
    return lambda document: replace(document, certificate=replace(document.certificate, **changes))  # type: ignore[arg-type]


def _predicted(**changes: object) -> Edit:
    return lambda document: replace(document, predicted=replace(document.predicted, **changes))  # type: ignore[arg-type]


def _first_load(document: PlanDocument) -> PlanDocument:
    section = document.placement
    assert section is not None
    first = replace(section.devices[0], compute_ns=1)
    return replace(document, placement=replace(section, devices=(first, *section.devices[1:])))


def _swapped_ranks(document: PlanDocument) -> PlanDocument:
    return replace(document, mesh=replace(document.mesh, ranks=document.mesh.ranks[::-1]))


EDITS: dict[str, tuple[Edit, str]] = {
    "objective": (_certificate(objective_ns=1), "objective_ns: 1, the plan takes"),
    "bound above": (_certificate(bound_ns=1 << 50), "bound_ns: .*, expected"),
    "no bound": (_certificate(simple_bound_ns=0), "simple_bound_ns: 0, expected"),
    "gap": (_certificate(gap_basis_points=1), "gap_basis_points: 1, expected"),
    "status": (_certificate(status="optimal"), "status: optimal, but the gap is"),
    "step": (_predicted(step_ns=5), "predicted: .* the simulated plan gives"),
    "load": (_first_load, r"placement.devices\[0\]: .*, expected"),
    "ranks": (_swapped_ranks, "objective_ns|placement.devices|may not lie"),
}


@pytest.fixture(scope="module")
def pulled_apart(box: str) -> PlanDocument:
    """A plan on two kinds of device."""
    return placed("unet_tiny", box, places=(parse_place_rule("m.mid_block.*: small"),))


@pytest.mark.parametrize("what", EDITS)
def test_edited_certificates_do_not_hold(what: str, pulled_apart: PlanDocument) -> None:
    """Whatever is claimed too well is found, even if digests are made to fit."""
    document = pulled_apart
    assert document.certificate.status == "feasible"
    edit, expected = EDITS[what]
    report = api.verify_certificate(with_digests(edit(document)), DATA / "unet_tiny.onnx")
    assert not report.passed
    found = "\n".join(report.lines())
    assert re.search(expected, found), found
    unsigned = api.verify_certificate(edit(document), DATA / "unet_tiny.onnx")
    assert "edited after it was written" in "\n".join(unsigned.lines())


REFUSED = {
    "mesh": ({"mesh": "dp=3"}, "--mesh dp=3 with --method device-placement"),
    "stages": ({"stages": 2}, "--stages 2 with --method"),
    "zero": ({"zero": 2}, "--zero 2 with --method"),
    "microbatches": ({"microbatches": 4}, "--microbatches 4 with --method"),
    "recompute": ({"recompute": "full"}, "--recompute full with --method"),
    "objective": ({"objective": "memory"}, "--objective memory with --method"),
    "cost": ({"cost": "volume"}, "--cost volume with --method"),
    "target": ({"target": "megatron"}, "--target megatron with --method"),
    "moments": ({"optimizer_states": "auto"}, "--optimizer-states auto with --method"),
    "auto with rules": (
        {"method": "auto", "places": (parse_place_rule("conv2d: 0"),)},
        "--place 'conv2d: 0' with --method auto",
    ),
    "order of sharding": ({"method": "sharding", "traversal_order": "bfs"}, "--order bfs is for device placement"),
    "rules of sharding": (
        {"method": "sharding", "places": (parse_place_rule("conv2d: 0"),)},
        "--place 'conv2d: 0' is for device placement",
    ),
    "no such rank": ({"places": (parse_place_rule("conv2d: 0,3"),)}, "device 3, .* has 0 to 2"),
    "no such group": ({"places": (parse_place_rule("conv2d: cpu"),)}, "no node group is called 'cpu', .* has no node"),
    "no such name": ({"places": (parse_place_rule("conv3d: 0"),)}, "nothing in unet_tiny.onnx is called 'conv3d'"),
    "contradiction": (
        {"places": (parse_place_rule("conv2d: 0"), parse_place_rule("conv2d: 1"))},
        "other rules forbid 'conv2d' all of these devices",
    ),
    "apart and together": (
        {"places": tuple(map(parse_place_rule, ("conv2d: 0", "silu*: 1", "conv2d: together", "silu*: together")))}
        | {"places": tuple(map(parse_place_rule, ("conv2d: 0", "conv2d_1: 1", "conv2d*: together")))},
        "is kept on one device with others that are not allowed where it is",
    ),
    "no such order": ({"traversal_order": "topi"}, "unknown order 'topi'|topi"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_go_together_is_refused(what: str) -> None:
    """With the option and its value named."""
    options, message = REFUSED[what]
    with pytest.raises(UsageError, match=message):
        placed("unet_tiny", THREE, **options)


def test_from_the_command_line(box: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planned, shown with its devices and orders, verified, and refused with the place of a wrong value."""
    path, model = tmp_path / "plan.json", str(DATA / "unet_tiny.onnx")
    given = [model, "--cluster", box, "--batch", "4", "--loss", "mean"]
    place = ["--method", "device-placement", "--place", "m.mid_block.*: small"]
    assert invoke(plan, "tap-plan", [*given, *place, "-o", str(path)]) == 0
    said = capsys.readouterr().err
    assert "won:" in said and "placement" in said and "one device takes" in said
    assert invoke(show, "tap-show", [str(path)]) == 0
    shown = capsys.readouterr().out
    for text in (
        "Placement: ",
        "l4",
        "What each order made",
        "stretches of operators",
        "m.mid_block.*: small",
    ):
        assert text in shown
    assert "Block " not in shown
    assert invoke(show, "tap-show", [str(path), "--program", "--timeline", "--model", model]) == 0
    assert "Timeline" in capsys.readouterr().out
    assert invoke(plan, "tap-plan", ["--verify-certificate", str(path), "--model", model]) == 0
    assert "played again" in capsys.readouterr().out
    assert invoke(plan, "tap-plan", [*given, "--order", "topi"]) == 2
    assert "--order 'topi', expected one of auto, topo" in capsys.readouterr().err
    assert invoke(plan, "tap-plan", [*given, "--method", "device-placement", "--place", "conv2d"]) == 2
    assert "--place 'conv2d' is not understood" in capsys.readouterr().err
    assert invoke(plan, "tap-plan", [*given, "--method", "auto", "--alternatives", "2"]) == 2
    assert "--alternatives shows plans of split operators" in capsys.readouterr().err
    assert invoke(plan, "tap-plan", [*given, "--method", "auto", "--grid", "zero"]) == 2
    assert "--method auto with a grid" in capsys.readouterr().err
