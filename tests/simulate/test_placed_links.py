"""What transfers between the devices of a placement share: closed forms, and steps as long as they were played."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from onnx import TensorProto, helper

from tap_planner.cluster import Cluster, load_cluster, parse_cluster
from tap_planner.device_placement import PlacedPlan, play
from tap_planner.graph import BindOptions, bind
from tap_planner.plan import cut_decisions, unsplit_decisions
from tap_planner.program import Program, lower
from tap_planner.schedule import PipelineSchedule, Slot, Work
from tap_planner.simulate import StageTimeline, Timeline, lower_bounds, simulate, to_trace
from tests.device_placement.test_plans import BOX, Case, known
from tests.search.models import Nodes, model_file
from tests.simulate.test_placed_devices import RACKS, ROWS, WIDTH, sent_ns, works

Product = tuple[str, int, str]
"""What it makes, the stage that makes it, and what it reads."""
JOINED: tuple[Product, ...] = (("a", 0, "x"), ("b", 1, "x"), ("y", 2, "a b"))
SPREAD: tuple[Product, ...] = (("a", 0, "x"), ("b", 1, "a"), ("c", 2, "a"))
PAIRS: tuple[Product, ...] = (("a", 0, "x"), ("b", 1, "x"), ("c", 2, "a"), ("d", 3, "b"))
CROSSED: tuple[Product, ...] = (("a", 0, "x"), ("b", 1, "x"), ("c", 1, "a"), ("d", 0, "b"))
QUEUED: tuple[Product, ...] = (*JOINED[:2], ("c", 1, "b"), ("d", 3, "c"), ("y", 2, "a b"))


def products(given: Sequence[Product]) -> Program:
    """Products with square matrices, or the sum of two things, each in a chunk of its own; for inference."""
    nodes = Nodes()
    for name, _, read in given:
        operands = read.split()
        if len(operands) == 1:
            nodes.add("MatMul", [*operands, nodes.weight(f"w_{name}", WIDTH, WIDTH)], name)
        else:
            nodes.add("Add", operands, name)
    read_names = {each for _, _, read in given for each in read.split()}
    outputs = [name for name, _, _ in given if name not in read_names]
    graph = helper.make_graph(
        nodes.nodes,
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in outputs],
        nodes.initializers,
    )
    names = [name for name, _, _ in given]
    places = tuple(stage for _, stage, _ in given)
    schedule = PipelineSchedule(
        name="placed",
        num_stages=max(places) + 1,
        num_microbatches=1,
        num_chunks=max(map(places.count, places)),
        places=places,
        reads=tuple(tuple(sorted(names.index(n) for n in read.split() if n != "x")) for _, _, read in given),
        orders=tuple(order(places.count(stage)) for stage in range(max(places) + 1)),
    )
    whole = bind(model_file(graph), BindOptions(batch=ROWS, training=False))
    decisions = unsplit_decisions(whole, training=False, precision="fp32")
    return lower(*cut_decisions(whole, decisions, names, schedule))


def order(chunks: int) -> tuple[Slot, ...]:
    """All chunks forward, then (which inference leaves out) all back."""
    forward = tuple(Slot(Work.FORWARD, 0, chunk) for chunk in range(chunks))
    return (*forward, *(Slot(Work.BACKWARD, 0, chunk) for chunk in reversed(range(chunks))))


def line(cluster: Cluster, level: int) -> int:
    """A transfer over a level of a cluster of L4s, all NICs together."""
    link = cluster.levels[level]
    pace = link.pace("direct")
    rate = link.nics * link.bandwidth_bytes_per_s * pace.efficiency_permille // 1000
    return sent_ns(cluster, link.latency_ns + pace.latency_ns, rate)


def transfers(timeline: Timeline) -> list[tuple[int, int, int]]:
    """Start, end and the stage that sends, by time."""
    sends = [(e.start_ns, e.end_ns, s.stage) for s in timeline.stages for e in s.events if e.kind == "send"]
    return sorted(sends)


def product_ns(program: Program, cluster: Cluster) -> int:
    """The first product, as all others take."""
    return works(program, lambda _: cluster.device)[0][0]


def test_two_stages_that_send_to_a_third_queue_at_its_way_in() -> None:
    """One after the other, the first in the program first; the sum waits for both."""
    program, cluster = products(JOINED), load_cluster("1x3:l4")
    made, sent = product_ns(program, cluster), line(cluster, 0)
    timeline = simulate(program, cluster, devices=(0, 1, 2))
    assert transfers(timeline) == [(made, made + sent, 0), (made + sent, made + 2 * sent, 1)]
    added = works(program, lambda _: cluster.device)[2][0]
    assert timeline.step_ns == made + 2 * sent + added
    assert lower_bounds(program, cluster, devices=(0, 1, 2)).link_ns == 2 * sent


@pytest.mark.parametrize("devices", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (2, 1, 0)], ids=str)
def test_a_stage_that_sends_to_two_others_queues_at_its_way_out(devices: tuple[int, ...]) -> None:
    """One after the other, to devices by their ranks whatever the stages' numbers."""
    program, cluster = products(SPREAD), load_cluster("1x3:l4")
    made, sent = product_ns(program, cluster), line(cluster, 0)
    timeline = simulate(program, cluster, devices=devices)
    assert transfers(timeline) == [(made, made + sent, 0), (made + sent, made + 2 * sent, 0)]
    assert timeline.step_ns == 2 * made + 2 * sent
    first = 1 if devices[1] < devices[2] else 2
    arrived = {s.stage: e.end_ns for s in timeline.stages for e in s.events if e.kind == "receive"}
    assert arrived == {first: made + sent, 3 - first: made + 2 * sent}
    assert lower_bounds(program, cluster, devices=devices).link_ns == 2 * sent


@pytest.mark.parametrize(
    ("text", "devices", "level", "queued"),
    [
        ("2x2:l4", (0, 1, 2, 3), 1, True),
        ("2x2:l4", (3, 2, 0, 1), 1, True),
        ("2x2:l4", (0, 2, 1, 3), 0, False),
        ("1x4:l4", (0, 1, 2, 3), 0, False),
        ("3x2:l4", (0, 1, 2, 4), 1, True),
        ("3x2:l4", (0, 2, 4, 5), 1, True),
        ("4x1:l4", (0, 1, 2, 3), 1, False),
        (RACKS, (0, 1, 2, 3), 1, True),
        (RACKS, (0, 4, 2, 6), 1, False),
        (RACKS, (0, 2, 4, 6), 2, True),
        (RACKS, (0, 2, 5, 7), 2, True),
    ],
)
def test_two_pairs_of_devices_queue_where_nodes_and_racks_are_left(
    text: str, devices: tuple[int, ...], level: int, queued: bool
) -> None:
    """Out of one node, or into one, one after the other at its NICs; within a node, and between four nodes, at once."""
    cluster = parse_cluster(text, file="racks") if "\n" in text else load_cluster(text)
    program = products(PAIRS)
    made, sent = product_ns(program, cluster), line(cluster, level)
    timeline = simulate(program, cluster, devices=devices)
    later = made + sent if queued else made
    assert transfers(timeline) == [(made, made + sent, 0), (later, later + sent, 1)]
    assert timeline.step_ns == later + sent + made
    assert lower_bounds(program, cluster, devices=devices).link_ns == (2 * sent if queued else sent)


@pytest.mark.parametrize(("text", "level"), [("1x2:l4", 0), ("2x1:l4", 1)])
def test_ways_out_and_in_are_apart(text: str, level: int) -> None:
    """Two devices that send to each other do so at once."""
    program, cluster = products(CROSSED), load_cluster(text)
    made, sent = product_ns(program, cluster), line(cluster, level)
    timeline = simulate(program, cluster, devices=(0, 1))
    assert transfers(timeline) == [(made, made + sent, 0), (made, made + sent, 1)]
    assert timeline.step_ns == 2 * made + sent


def test_what_waits_keeps_its_place_on_every_channel() -> None:
    """A transfer that queues at a way in holds up what its device sends later, to whomever: first come first served."""
    program, cluster = products(QUEUED), load_cluster("1x4:l4")
    made, sent = product_ns(program, cluster), line(cluster, 0)
    assert made < sent, "the last transfer is asked for before its device's first one has begun"
    timeline = simulate(program, cluster, devices=(0, 1, 2, 3))
    assert [send[:2] for send in transfers(timeline)] == [(made + n * sent, made + (n + 1) * sent) for n in range(3)]


def test_streams_of_transfers_have_no_direction() -> None:
    """One thread for what a device sends and one for what it receives, in the trace too."""
    timeline = simulate(products(SPREAD), load_cluster("1x3:l4"), devices=(0, 1, 2))
    assert [{event.stream for event in stage.events} - {"main"} for stage in timeline.stages] == [
        {"send"},
        {"receive"},
        {"receive"},
    ]
    events = to_trace(timeline)["traceEvents"]
    assert isinstance(events, list)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"main", "send", "receive"}


# -- random placements ---------------------------------------------------------------------------------------------

CLUSTERS = {**{text: load_cluster(f"{text}:l4") for text in ("1x3", "2x2", "2x4")}, "box": BOX}
drawn = pytest.mark.parametrize(
    ("name", "training", "seed"),
    [*itertools.product(("t5_tiny", "unet_tiny", "gpt2_tiny"), (True, False), range(2))],
)


def renumbered(found: PlacedPlan, order: Sequence[int]) -> PlacedPlan:
    """The same plan and devices with other numbers of stages: ``order`` says what each stage was before."""
    pipeline = found.decisions.pipeline
    assert pipeline is not None
    now = {before: stage for stage, before in enumerate(order)}
    schedule = replace(
        pipeline.schedule,
        places=tuple(now[stage] for stage in pipeline.schedule.places),
        orders=tuple(pipeline.schedule.orders[before] for before in order),
    )
    decisions = replace(found.decisions, pipeline=replace(pipeline, schedule=schedule))
    return replace(found, decisions=decisions, devices=tuple(found.devices[before] for before in order))


@pytest.mark.parametrize("library", ["nccl", "gloo"])
@pytest.mark.parametrize("text", ["2x2", "2x4"])
@drawn
def test_numbers_of_stages_do_not_matter(name: str, training: bool, seed: int, text: str, library: str) -> None:
    """With stages numbered in any other way, each device does the same at the same times."""
    cluster = replace(CLUSTERS[text], library=library)
    found = known(name, training, CLUSTERS[text]).drawn(seed)
    order = random.Random(seed).sample(range(len(found.devices)), k=len(found.devices))
    assert order != sorted(order)
    times = []
    for plan in (found, renumbered(found, order)):
        timeline = simulate(lower(plan.graph, plan.decisions), cluster, devices=plan.devices)
        by_device = zip(plan.devices, timeline.stages, strict=True)
        times.append({device: (s.events, s.compute_ns, s.exposed_ns, s.memory) for device, s in by_device})
    assert times[0] == times[1]


@pytest.mark.parametrize("library", ["nccl", "gloo"])
@pytest.mark.parametrize("text", ["2x2", "2x4", "box"])
@drawn
def test_channels_carry_one_transfer_at_a_time(name: str, training: bool, seed: int, text: str, library: str) -> None:
    """No two transfers overlap on a device's way out or in, nor out of a node or into one; the busiest of these is the
    bound of the links, and no step is faster than any bound."""
    cluster = replace(CLUSTERS[text], library=library)
    found = known(name, training, CLUSTERS[text]).drawn(seed)
    program = lower(found.graph, found.decisions)
    timeline = simulate(program, cluster, devices=found.devices)
    bounds = lower_bounds(program, cluster, devices=found.devices)
    spans: dict[tuple[str, str, int], list[tuple[int, int]]] = {}
    for out, _, start, _ in timeline.stages[0].record.played.transfers:
        ends = [found.devices[stage] for stage in out.route.stages]
        nodes = [cluster.places()[end][0] for end in ends]
        ways = [("device", ends), *([("node", nodes)] if nodes[0] != nodes[1] else [])]
        for (what, numbers), (side, way) in itertools.product(ways, enumerate(("out", "in"))):
            spans.setdefault((what, way, numbers[side]), []).append((start, start + out.ns))
    assert any(what == "node" for what, _, _ in spans), "nothing leaves a node"
    for each in spans.values():
        each.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(each))
    assert bounds.link_ns == max(sum(end - start for start, end in each) for each in spans.values())
    assert 0 < bounds.step_ns <= timeline.step_ns
    for device, stage in zip(found.devices, timeline.stages, strict=True):
        for kind, way in (("send", "out"), ("receive", "in")):
            shown = [(e.start_ns, e.end_ns) for e in stage.events if e.stream == e.kind == kind]
            assert shown == spans.get(("device", way, device), [])
        came_ns = sum(end - start for start, end in spans.get(("device", "in", device), []))
        assert stage.communication_ns.get("transfer", 0) == came_ns + (sent_by(stage) if library == "gloo" else 0)
        assert stage.compute_ns + sum(stage.exposed_ns.values()) + stage.bubble_ns == timeline.step_ns
        assert stage.bubble_ns >= 0 and all(ns >= 0 for ns in stage.hidden_ns.values())


def sent_by(stage: StageTimeline) -> int:
    """What a stage's transfers take to others."""
    return sum(event.end_ns - event.start_ns for event in stage.events if event.kind == "send")


def ratio(case: Case, cluster: Cluster, seed: int, *, listed: bool) -> float:
    """Simulated to played, of any placement; tasks in any order of priority, or as listed."""
    draw, problem = random.Random(seed), case.built.problem
    placement = [draw.randrange(problem.num_devices) for _ in range(problem.num_groups)]
    priority = list(range(problem.num_tasks))
    if not listed:
        draw.shuffle(priority)
    found = case.plan(placement, priority)
    step = simulate(lower(found.graph, found.decisions), cluster, devices=found.devices).step_ns
    return step / play(case.built.problem, placement, priority).makespan_ns


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "drawn"])
@pytest.mark.parametrize("text", CLUSTERS)
@drawn
def test_any_placement_takes_what_was_played(name: str, training: bool, seed: int, text: str, listed: bool) -> None:
    """Within a twentieth, on clusters where transfers run behind what stages do. What makes the difference:

    - a device runs its chunks back in the reverse of the order in which they ran forward, whatever was played;
    - gradients of what several operators of a device read are summed there and sent once; played they are sent one by
      one;
    - the optimizer runs at the end; played it belongs to the backward of a parameter's first reader, and delays that;
    - a view goes where it is read from the chunk that it is in, and what is read by itself and as a view goes twice;
      played, what it is a view of goes, once, as soon as it has been made;
    - of what several devices send at one time, the program's order says what comes first; played, the numbers of tasks.
    """
    cluster = CLUSTERS[text]
    assert ratio(known(name, training, cluster), cluster, seed, listed=listed) == pytest.approx(1, abs=0.05)
