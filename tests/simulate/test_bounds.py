"""Simulated steps of random plans in random pipelines: no faster than their bounds, and every nanosecond accounted."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from tap_planner.cluster import Cluster, load_cluster
from tap_planner.graph import Graph
from tap_planner.program import Program, Send
from tap_planner.schedule import PipelineSchedule, make_schedule
from tap_planner.simulate import lower_bounds, predict, simulate
from tap_planner.simulate.durations import Durations
from tests.apply.random_plans import RandomPlan
from tests.schedule.pipelines import random_schedule
from tests.simulate.pipelines import LAYER_NS, cut, evenly, on_levels, plain_cluster, uniform
from tests.simulate.test_prediction import LEVELS, model_graph

SETTINGS = [(None, "mixed"), (0, "none"), (1, "none"), (2, "none"), (3, "full"), (None, "selective")]
everywhere = pytest.mark.parametrize(
    ("name", "seed"), list(itertools.product(("gpt2_tiny", "gshard_moe_tiny", "t5_tiny"), range(8)))
)
libraries = pytest.mark.parametrize("library", ["nccl", "gloo"])


@functools.cache
def graph_of(name: str) -> Graph:
    """A model with the batch of a microbatch."""
    return model_graph(name, 2)


def schedule_of(seed: int) -> PipelineSchedule:
    """A schedule of two stages and more, any order that can run or one that is known."""
    known = [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2)]
    if seed % 2:
        name, chunks = known[seed // 2 % len(known)]
        return make_schedule(name, 2 + seed % 3, 2 * (2 + seed % 3), chunks)
    return next(
        s for number in itertools.count(100 * seed) if (s := random_schedule(number, chain=True)).num_stages > 1
    )


def drawn(name: str, seed: int, library: str) -> tuple[Program, Cluster]:
    """A random plan in a random pipeline, four ranks in each stage and a node for each; some share out transfers."""
    zero, recompute = random.Random(seed).choice(SETTINGS)
    graph, schedule = graph_of(name), schedule_of(seed)
    plan = replace(RandomPlan(graph, (2, 2), seed, zero=zero, recompute=recompute).build(), precision="bf16")
    starts = evenly(graph, schedule.num_virtual_stages)
    scatter = ((), (1,), (0, 1))[seed % 3]
    program = cut(graph, on_levels(plan, LEVELS[2, 2]), starts, schedule, scatter)
    return program, replace(load_cluster(f"{schedule.num_stages}x4:a100-sxm4-80gb"), library=library)


@everywhere
@libraries
def test_no_step_is_faster_than_its_bounds(name: str, seed: int, library: str) -> None:
    """Neither one microbatch's way, nor any stage's work, nor any link's transfers fit into less than the step."""
    program, cluster = drawn(name, seed, library)
    timeline, bounds = simulate(program, cluster), lower_bounds(program, cluster)
    assert 0 < bounds.critical_path_ns <= timeline.step_ns
    assert 0 < bounds.stage_ns <= timeline.step_ns
    assert 0 < bounds.link_ns <= timeline.step_ns
    assert bounds.level_ns <= timeline.step_ns
    assert bounds.step_ns == max(bounds.critical_path_ns, bounds.stage_ns, bounds.link_ns, bounds.level_ns)


@everywhere
@libraries
def test_every_nanosecond_is_accounted_for(name: str, seed: int, library: str) -> None:
    """On each stage compute, exposed communication and bubble make up the step; nothing is hidden twice, and over gloo
    only transfers and their waiting differ."""
    program, cluster = drawn(name, seed, library)
    timeline = simulate(program, cluster)
    for stage in timeline.stages:
        assert stage.compute_ns + sum(stage.exposed_ns.values()) + stage.bubble_ns == timeline.step_ns
        assert stage.bubble_ns >= 0
        assert all(0 <= ns <= stage.communication_ns[kind] for kind, ns in stage.hidden_ns.items())
        if library == "gloo":
            assert not any(ns for kind, ns in stage.hidden_ns.items() if kind != "transfer")
    assert predict(program, cluster).step_ns == timeline.step_ns


@everywhere
@libraries
def test_streams_do_one_thing_at_a_time(name: str, seed: int, library: str) -> None:
    """On no stream of a stage do two events overlap, and slots come in the order of the schedule."""
    program, cluster = drawn(name, seed, library)
    assert program.decisions.pipeline is not None
    schedule = program.decisions.pipeline.schedule
    for stage in simulate(program, cluster).stages:
        by_stream = itertools.groupby(stage.events, key=lambda event: event.stream)
        for stream, events in by_stream:
            found = list(events)
            if stream != "background":  # which stands still while the main stream needs its links
                assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(found))
            if stream == "main":
                labels = [event.label for event in found if event.microbatch is not None]
                assert labels == [schedule.slot_text(slot) for slot in schedule.orders[stage.stage]]


@everywhere
def test_transfers_carry_what_the_program_sends(name: str, seed: int) -> None:
    """Every send to another stage is one event a microbatch, of the bytes of its tensor or gradient."""
    program, cluster = drawn(name, seed, "nccl")
    durations = Durations(program, cluster)
    expected: Counter[tuple[int, bool]] = Counter()
    for number, chunk in enumerate(program.chunks):
        stage = program.stage_of(number)
        for instruction in (*chunk.forward, *chunk.backward, *chunk.weights):
            if isinstance(instruction, Send) and _other_end(program, instruction) != stage:
                forward = instruction.phase.value == "forward"
                expected[stage, forward] += durations.transfer_bytes(instruction) * program.decisions.microbatches
    found: Counter[tuple[int, bool]] = Counter()
    received = 0
    for stage in simulate(program, cluster).stages:
        for event in stage.events:
            if event.kind == "send":
                found[stage.stage, event.label.startswith("activation")] += event.num_bytes
            elif event.kind == "receive":
                received += event.num_bytes
    assert found == expected
    assert received == sum(expected.values())


def _other_end(program: Program, instruction: Send) -> int:
    """The stage that a send goes to."""
    operator = program.graph.operators[instruction.operator]
    reads = program.stage_of(program.chunk_of(instruction.operator))
    if instruction.phase.value == "forward":
        return reads
    made_by = next(i for i, o in enumerate(program.graph.operators) if operator.inputs[0] in o.outputs)
    return program.stage_of(program.chunk_of(made_by))


def test_a_fill_and_drain_meets_the_bound_of_its_last_stage() -> None:
    """The bound of a stage has when its first microbatch can come: of the last stage, a bubble's forward half."""
    program, cluster = uniform(8, make_schedule("fill-drain", 4, 8)), plain_cluster(4)
    bounds = lower_bounds(program, cluster)
    assert bounds.stage_ns == pytest.approx((3 + 3 * 8) * 2 * LAYER_NS, rel=1e-4)
    assert bounds.critical_path_ns == pytest.approx(4 * 3 * 2 * LAYER_NS, rel=1e-4)
