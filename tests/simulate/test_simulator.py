"""Simulated steps: without a pipeline the prediction's, with one the rules of docs/simulator.md in closed form."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tap_planner import api
from tap_planner.cluster import Mesh, MeshAxis, cluster_from_json, load_cluster
from tap_planner.cost import CollectiveModel
from tap_planner.errors import UsageError
from tap_planner.plan import Overlap, read_plan
from tap_planner.program import Program, lower
from tap_planner.schedule import make_schedule
from tap_planner.simulate import (
    BLOCKING,
    GATHER,
    GRADIENT,
    TIED,
    TRANSFER,
    Event,
    StageTimeline,
    predict,
    price_program,
    simulate,
)
from tap_planner.simulate.durations import Durations
from tap_planner.simulate.holding import held_for_backward
from tests.apply.random_plans import RandomPlan
from tests.schedule.pipelines import schedule_of
from tests.search.models import bound, decoder
from tests.simulate.pipelines import (
    LAYER_BYTES,
    LAYER_NS,
    SLOT_SLACK_NS,
    layer_starts,
    mlp,
    plain_cluster,
    replicated,
    uniform,
)
from tests.simulate.test_prediction import LEVELS, model_graph, placed

ROOT = Path(__file__).parents[2]
QUICK = ("gpt2_tiny-demo", "resnet_small-1x8", "gshard_moe_tiny-1x8", "t5_tiny-2x8")


def random_program(name: str, mesh: tuple[int, ...], seed: int, zero: int | None, recompute: str) -> Program:
    """A random plan of two microbatches."""
    graph = model_graph(name, 2)
    plan = RandomPlan(graph, mesh, seed, zero=zero, recompute=recompute, microbatches=2).build()
    return placed(lower(graph, replace(plan, precision="bf16")), LEVELS[mesh])


plans = pytest.mark.parametrize(
    ("name", "mesh", "seed", "zero", "recompute"),
    [
        (name, mesh, seed, *setting)
        for (name, mesh), (seed, setting) in itertools.product(
            itertools.product(("gpt2_tiny", "gshard_moe_tiny", "t5_tiny"), ((2, 2), (4,))),
            enumerate([(None, "mixed"), (0, "none"), (1, "full"), (2, "none"), (3, "full"), (None, "selective")]),
        )
    ],
)


# -- without a pipeline ------------------------------------------------------------------------------------------------


@plans
@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_without_a_pipeline_it_is_the_prediction(
    name: str, mesh: tuple[int, ...], seed: int, zero: int | None, recompute: str, library: str
) -> None:
    """Streams that run in time hide what is counted as hidden, kind by kind, and the step is the same to the ns."""
    program = random_program(name, mesh, seed, zero, recompute)
    cluster = replace(load_cluster("2x2:a100-sxm4-80gb"), library=library)
    prediction, timeline = predict(program, cluster), simulate(program, cluster)
    (stage,) = timeline.stages
    assert timeline.step_ns == prediction.step_ns
    assert stage.compute_ns == prediction.compute_ns
    assert sum(stage.communication_ns.values()) == prediction.communication_ns
    assert {kind: stage.hidden_ns.get(kind, 0) for kind in (GRADIENT, GATHER)} == prediction.hidden
    assert stage.bubble_ns == 0


@pytest.mark.parametrize("name", ["gpt2_tiny", "gshard_moe_tiny", "t5_tiny"])
@pytest.mark.parametrize(("seed", "recompute"), [(1, "none"), (2, "none"), (3, "selective"), (4, "selective")])
def test_at_the_end_of_forward_it_holds_what_memory_model_m_counts(name: str, seed: int, recompute: str) -> None:
    """Releases of instructions and the rules of model M, which know nothing of each other, leave the same bytes; but
    for copies in a placement that is there already, made for the sake of another gradient."""
    program, cluster = random_program(name, (2, 2), seed, 0, recompute), load_cluster("2x2:a100-sxm4-80gb")
    (stage,) = simulate(program, cluster).stages
    durations = Durations(program, cluster)
    (given,) = stage.record.passes
    end = given.works[0][1]
    made = sum(held.activations for position, held in given.changes if position < end)
    released = sum(min(held.activations, 0) for position, held in given.changes if position == end)
    expected = sum(durations.tensor_bytes(*entry) for entry in held_for_backward(program, with_working=False))
    placed_once = {(o.tensor, o.placement) for operator in program.decisions.operators for o in operator.outputs}
    copies = [(r.tensor, r.to) for r in program.decisions.redistributions]
    if len(set(copies)) == len(copies) and placed_once.isdisjoint(copies):
        assert made + released == expected
    else:
        assert made + released >= expected


@plans
def test_at_the_end_nothing_is_held(
    name: str, mesh: tuple[int, ...], seed: int, zero: int | None, recompute: str
) -> None:
    """All that a microbatch made is gone when it is done, and the peak is that of the curve."""
    program = random_program(name, mesh, seed, zero, recompute)
    (stage,) = simulate(program, load_cluster("2x2:a100-sxm4-80gb")).stages
    curve = stage.memory_curve
    assert (curve[-1].activation_bytes, curve[-1].working_bytes) == (0, 0)
    most = max(point.activation_bytes + point.working_bytes for point in curve)
    assert stage.memory.peak_bytes == stage.memory.stored_bytes + most
    price = price_program(program, load_cluster("2x2:a100-sxm4-80gb"))
    assert stage.memory.stored_bytes == price.parameter_bytes + price.gradient_bytes + price.optimizer_bytes


@pytest.mark.parametrize("name", QUICK)
def test_reference_plans(name: str) -> None:
    """The plans under plans/ take as long in time as they are predicted to."""
    entry = yaml.safe_load((ROOT / "plans" / "index.yaml").read_text(encoding="utf-8"))[name]
    document = read_plan(ROOT / "plans" / f"{name}.json")
    program, cluster = api.lower_plan(document, ROOT / entry["model"]), cluster_from_json(document.cluster)
    step_ns = simulate(program, cluster).step_ns
    assert step_ns == predict(program, cluster).step_ns == document.predicted.step_ns


# -- transfers ---------------------------------------------------------------------------------------------------------


def main_events(stage: StageTimeline) -> list[Event]:
    """Slots of a stage."""
    return [event for event in stage.events if event.stream == "main" and event.microbatch is not None]


def test_a_slow_link_sends_one_after_the_other() -> None:
    """Two stages, m forwards and backwards, and a link that takes twice a forward, as long as a backward: it is busy
    from the first forward to the last, then from the first backward on."""
    m, ns = 6, 2 * LAYER_NS
    program = uniform(2, make_schedule("fill-drain", 2, m))
    cluster = plain_cluster(2, bytes_per_s=LAYER_BYTES * 10**9 // ns)
    timeline = simulate(program, cluster)
    expected = LAYER_NS + m * ns + LAYER_NS + (m + 1) * 2 * LAYER_NS + ns
    assert timeline.step_ns == pytest.approx(expected, abs=8 * m * SLOT_SLACK_NS)
    first = timeline.stages[0]
    sends = [event for event in first.events if event.kind == "send"]
    assert [event.end_ns - event.start_ns for event in sends] == [ns] * m
    assert all(after.start_ns == before.end_ns for before, after in itertools.pairwise(sends))
    assert {event.num_bytes for event in sends} == {LAYER_BYTES}


@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_where_nothing_overlaps_a_stage_waits_for_what_it_sends(library: str) -> None:
    """Over gloo, or where that is asked for, a forward and its transfer follow each other on the stage that sends."""
    m, ns = 6, 2 * LAYER_NS
    program = uniform(2, make_schedule("fill-drain", 2, m))
    cluster = plain_cluster(2, bytes_per_s=LAYER_BYTES * 10**9 // ns, library=library)
    timeline = simulate(program, cluster, overlap=None if library == "gloo" else Overlap.NONE)
    expected = m * (LAYER_NS + ns) + LAYER_NS + m * (2 * LAYER_NS + ns) + 2 * LAYER_NS
    assert timeline.step_ns == pytest.approx(expected, abs=8 * m * SLOT_SLACK_NS)
    assert all(stage.exposed_ns[TRANSFER] >= m * ns for stage in timeline.stages)


def test_transfers_in_one_direction_share_the_links_of_a_stage() -> None:
    """What stage 0 sends to stages 1 and 2 goes one after the other, and what comes to stage 2 from stages 0 and 1."""
    schedule = make_schedule("1f1b", 4, 1)
    graph = mlp(4, skip=(0, 2))
    program = replicated(graph, ("y", "y1", "y2", "y3"), schedule)
    ns = 4 * LAYER_NS
    timeline = simulate(program, plain_cluster(4, bytes_per_s=LAYER_BYTES * 10**9 // ns))
    sends = [event for event in timeline.stages[0].events if event.stream == "send next"]
    assert [event.end_ns - event.start_ns for event in sends] == [ns, ns]
    assert sends[1].start_ns == sends[0].end_ns
    second, third = (main_events(timeline.stages[stage])[0] for stage in (1, 2))
    assert second.start_ns == sends[0].end_ns
    received = [event for event in timeline.stages[2].events if event.stream == "receive next"]
    assert received[0].end_ns == sends[1].end_ns  # that of stage 1 comes while this one has the link, and waits
    assert received[1].start_ns == max(second.end_ns, received[0].end_ns)
    assert third.start_ns == received[1].end_ns


def test_nothing_is_sent_inside_a_stage() -> None:
    """At the turn of a vee both chunks lie on one stage, and the second begins when the first ends."""
    schedule = make_schedule("zbv", 2, 1)
    timeline = simulate(uniform(4, schedule), plain_cluster(2, bytes_per_s=10**9))
    down, up = (event for event in main_events(timeline.stages[1]) if event.kind == "forward")
    assert up.start_ns == down.end_ns
    chunks = {event.chunk for stage in timeline.stages for event in stage.events if event.kind == "send"}
    assert chunks == {0, 1, 2, 3}
    assert sum(event.kind == "send" for stage in timeline.stages for event in stage.events) == 4


@pytest.mark.parametrize(
    ("name", "chunks"), [("fill-drain", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2)]
)
def test_what_is_sent_is_received(name: str, chunks: int) -> None:
    """Bytes of the events are those of the Program: one tensor across each border between stages, and its gradient."""
    schedule = make_schedule(name, 4, 8, chunks)
    timeline = simulate(uniform(8, schedule), plain_cluster(4))
    borders = sum(
        schedule.rank_and_chunk(stage)[0] != schedule.rank_and_chunk(stage + 1)[0]
        for stage in range(schedule.num_virtual_stages - 1)
    )
    for kind in ("send", "receive"):
        events = [event for stage in timeline.stages for event in stage.events if event.kind == kind]
        assert sum(event.num_bytes for event in events) == 2 * borders * 8 * LAYER_BYTES


# -- the end of the step -----------------------------------------------------------------------------------------------

WIDE, FEW = 8192, 8
"""Of layers so large that each is a bucket of its own."""


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2)])
def test_reductions_follow_their_gradients(name: str, chunks: int) -> None:
    """A bucket is reduced when the last of its gradients is made and the bucket before is done, whatever the stage does
    then, but for what transfers over the same links take meanwhile; the step ends when all are done."""
    p, m, per_chunk = 2, 4, 2
    schedule = make_schedule(name, p, m, chunks)
    count = schedule.num_virtual_stages
    graph = mlp(per_chunk * count, width=WIDE, rows=FEW)
    program = replicated(graph, layer_starts(per_chunk * count, count), schedule, ranks=2)
    cluster = plain_cluster(1, nodes=2 * p, bytes_per_s=2 * 10**12)
    timeline = simulate(program, cluster)
    sent = sum(e.end_ns - e.start_ns for e in timeline.stages[0].events if e.kind in ("send", "receive")) // m
    mesh = Mesh(axes=(MeshAxis(name="a", size=2),), num_stages=p)
    each = CollectiveModel(cluster, mesh).cost("all_reduce", (0,), 4 * WIDE * WIDE).ns
    for stage in timeline.stages:
        layers = list(_last_backwards(stage, per_chunk))
        clock = 0
        spans = [e for e in stage.events if e.stream == "background" and e.end_ns - e.start_ns >= each]
        assert len(spans) == len(layers) == per_chunk * chunks
        for made, span in zip(sorted(layers), spans, strict=True):
            clock = max(clock, made) + each
            assert span.end_ns == pytest.approx(clock, abs=4 * SLOT_SLACK_NS + 40 + sent)
        slots_end = main_events(stage)[-1].end_ns
        assert stage.exposed_ns[GRADIENT] == pytest.approx(max(clock - slots_end, 0), abs=100 + sent)
        assert stage.hidden_ns[GRADIENT] > 0


def _last_backwards(stage: StageTimeline, per_chunk: int) -> Iterator[int]:
    """When the last gradient of each layer's matrix is made: layers of a chunk from the last to the first."""
    final: dict[int | None, Event] = {}
    for event in main_events(stage):
        if event.kind in ("backward", "weight_backward"):
            final[event.chunk] = event
    for event in final.values():
        time = (event.end_ns - event.start_ns) // per_chunk
        yield from (event.start_ns + (layer + 1) * time for layer in range(per_chunk))


def test_sums_of_tied_parameters_wait_for_both_stages() -> None:
    """Both stages that hold the embedding sum its gradient when the later one is done, over the link between them."""
    graph = bound(decoder("gpt", layers=2, tied=True), batch=4, dims={"seq": 16})
    starts = (graph.operators[0].id, graph.operators[len(graph.operators) // 2].id)
    program = replicated(graph, starts, make_schedule("1f1b", 2, 4))
    cluster = load_cluster("2x1:a100-sxm4-80gb")
    timeline = simulate(program, cluster)
    tied = [[event for event in stage.events if event.kind == TIED] for stage in timeline.stages]
    assert [(event.label, event.start_ns, event.end_ns) for event in tied[0]] == [
        (event.label, event.start_ns, event.end_ns) for event in tied[1]
    ]
    assert tied[0][0].label == "embed.w"
    assert tied[0][0].start_ns == max(main_events(stage)[-1].end_ns for stage in timeline.stages)
    shape = next(p.shape for p in program.decisions.parameters if p.name == "embed.w")
    mesh = Mesh(axes=(MeshAxis(name="pp", size=2),))
    expected = CollectiveModel(cluster, mesh).cost("all_reduce", (0,), 4 * shape[0] * shape[1]).ns
    assert sum(event.end_ns - event.start_ns for event in tied[0] if event.label == "embed.w") == expected
    held = sum(stage.memory.parameter_bytes for stage in timeline.stages)
    whole = sum(4 * _elements(p.shape) for p in program.decisions.parameters)
    assert held == whole + 4 * sum(_elements(p.shape) for p in program.decisions.parameters if p.name in _tied(program))


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _tied(program: Program) -> set[str]:
    return {getattr(instruction, "parameter", "") for instruction in program.step}


# -- accounting --------------------------------------------------------------------------------------------------------


def test_the_prediction_of_a_pipeline_is_its_busiest_stage() -> None:
    """Compute, communication, what of it is hidden, and the bubble add up to the simulated step."""
    program = uniform(8, make_schedule("1f1b", 4, 8))
    cluster = plain_cluster(4, bytes_per_s=10**10)
    timeline, prediction = simulate(program, cluster), predict(program, cluster)
    assert prediction.step_ns == timeline.step_ns
    assert prediction.bubble_ns == min(stage.bubble_ns for stage in timeline.stages) > 0
    assert prediction.compute_ns == timeline.busiest.compute_ns
    assert set(prediction.hidden) == {GRADIENT, GATHER, TRANSFER}
    assert prediction.hidden[TRANSFER] > 0 and BLOCKING not in prediction.hidden


def test_both_parts_of_a_backward_take_as_long_as_the_whole() -> None:
    """Where each part by itself would take a launch, they share the one of the whole."""
    schedule = make_schedule("zb-h1", 2, 2)
    program = uniform(4, schedule)
    cluster = plain_cluster(2)
    launching = replace(cluster, device=replace(cluster.device, backward_launch_ns=10 * LAYER_NS))
    for durations in (Durations(program, cluster), Durations(program, launching)):
        for index, operator in enumerate(program.graph.operators):
            inputs, weights = durations.parts_ns(index)
            assert inputs + weights == durations.operator_ns(index)[1]
            if operator.type == "MatMul":
                assert weights == durations.operator_ns(index)[1] // 2
    assert Durations(program, launching).operator_ns(1)[1] == 10 * LAYER_NS


def _reordered(*orders: str) -> Program:
    """A Program of two stages whose schedule was changed after it was lowered."""
    program = uniform(2, make_schedule("1f1b", 2, 2))
    pipeline = program.decisions.pipeline
    assert pipeline is not None
    changed = replace(pipeline, schedule=schedule_of(*orders, m=2))
    return replace(program, decisions=replace(program.decisions, pipeline=changed))


def test_stages_that_wait_for_each_other_are_refused() -> None:
    """An order that cannot run is an error with a remedy, not an endless wait."""
    with pytest.raises(UsageError, match="wait for each other") as caught:
        simulate(_reordered("F0 B0 F1 B1", "F1 F0 B0 B1"), plain_cluster(2))
    assert caught.value.hint


def test_a_slot_that_is_missing_is_named() -> None:
    """What is sent to a slot that is in no order has nowhere to go."""
    with pytest.raises(UsageError, match="no slot of stage 1 receives microbatch 1"):
        simulate(_reordered("F0 F1 B0 B1", "F0 B0"), plain_cluster(2))
