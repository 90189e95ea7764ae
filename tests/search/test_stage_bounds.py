"""What is proven of all pipeline stages together holds for every plan in stages: on like and on unlike devices."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tap_planner.cluster import Cluster, alike_stages, load_cluster, parse_cluster, parse_mesh, slowest_device
from tap_planner.cost import ComputeModel, PriceList, StageShare, prices_of, stage_prices
from tap_planner.folding import fold
from tap_planner.graph import Graph
from tap_planner.operators import ComputeKind
from tap_planner.schedule import Durations, PipelineSchedule, make_schedule, makespan
from tap_planner.search import CostedModel, Pipeline, Recompute, StrategyFilter, build_model, fold_assignment
from tap_planner.search.capacity import least_on
from tap_planner.search.graph_index import GraphIndex
from tap_planner.search.pricing import price_choices
from tap_planner.search.stage_weights import stage_shares
from tap_planner.sharding import block_hints
from tap_planner.simulate import price_program
from tests.schedule.pipelines import random_schedule
from tests.search.building import decisions_of, free_configuration, random_assignments
from tests.search.small_graphs import repeated_graphs
from tests.search.test_free_settings import CHECKS, PHASES
from tests.simulate.pipelines import cut

SCHEDULES = [("fill-drain", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2)]


# -- makespans ---------------------------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[random.Random, Pipeline, PipelineSchedule]:
    """A pipeline and its order."""
    chance = random.Random(seed)
    name, chunks = chance.choice(SCHEDULES)
    stages = chance.randint(2, 5)
    count = chance.randint(1, 9) if name in ("fill-drain", "1f1b") else stages * chance.randint(1, 3)
    pipeline = Pipeline(num_stages=stages, schedule=name, num_chunks=chunks)
    return chance, pipeline, make_schedule(name, stages, count, chunks)


def timed(chance: random.Random, schedule: PipelineSchedule) -> Durations:
    """Stages of any times: about alike, unlike, or one that takes nearly everything."""
    size, spread = schedule.num_virtual_stages, chance.choice([2, 20])
    forward = [20 + chance.randint(-spread, spread) for _ in range(size)]
    inputs, weights = ([chance.randint(0, 40) for _ in range(size)] for _ in range(2))
    if chance.random() < 0.4:
        longest = chance.randrange(size)
        forward[longest] *= chance.choice([1, 30])
        inputs[longest] *= chance.choice([0, 30])
    return Durations(forward_ns=tuple(forward), input_backward_ns=tuple(inputs), weight_backward_ns=tuple(weights))


@pytest.mark.parametrize("seed", range(400))
def test_no_makespan_is_below_its_passes(seed: int) -> None:
    """However the work lies on the stages, p makespans take at least what ``passes`` counts."""
    chance, pipeline, schedule = drawn(seed)
    times = timed(chance, schedule)
    passes = pipeline.passes(schedule.num_microbatches)
    forward, backward = sum(times.forward_ns), sum(times.input_backward_ns) + sum(times.weight_backward_ns)
    assert passes.forward <= passes.backward
    made = makespan(schedule, times).makespan_ns
    assert passes.forward * forward + passes.backward * backward <= pipeline.num_stages * made


@pytest.mark.parametrize("seed", range(400))
def test_no_makespan_is_below_a_mean_of_its_stages(seed: int) -> None:
    """The same where stages count unequally."""
    chance, pipeline, schedule = drawn(seed)
    times = timed(chance, schedule)
    draws = [chance.randint(0, 5) for _ in range(pipeline.num_stages)]
    parts = [Fraction(draw, max(sum(draws), 1)) for draw in draws]
    least = Fraction(0)
    for place in range(schedule.num_virtual_stages):
        stage = schedule.rank_and_chunk(place)[0]
        forward, backward = pipeline.stage_passes(stage, parts[stage], schedule.num_microbatches)
        later = times.input_backward_ns[place] + times.weight_backward_ns[place]
        least += forward * times.forward_ns[place] + backward * later
    assert least <= makespan(schedule, times).makespan_ns


def test_equal_stages_are_bounded_by_what_they_take() -> None:
    """Of equal stages, fill-drain takes just that, and 1F1B with nothing but backwards; with forwards it takes a bubble
    of forwards more."""
    for name, forward, backward, missing in (("fill-drain", 3, 7, 0), ("1f1b", 0, 7, 0), ("1f1b", 3, 7, 3 * 3)):
        pipeline = Pipeline(num_stages=4, schedule=name)
        times = Durations.uniform(4, forward_ns=forward, input_backward_ns=backward, weight_backward_ns=0)
        passes = pipeline.passes(8)
        made = makespan(pipeline.at(8), times).makespan_ns
        assert made - passes.forward * forward - passes.backward * backward == missing


@pytest.mark.parametrize("seed", range(60))
def test_every_stage_holds_as_many_microbatches(seed: int) -> None:
    """At some time each stage holds the activations of so many whole microbatches, and the first no fewer."""
    _, pipeline, schedule = drawn(seed)
    count = schedule.num_microbatches
    held: list[int] = []
    for stage, order in enumerate(schedule.orders):
        done = dict.fromkeys(range(len(schedule.chunks_of(stage))), 0)
        most = 0
        for slot in order:
            done[slot.chunk] += {"F": 1, "B": -1, "I": -1, "W": 0}[slot.work.value]
            most = max(most, min(done.values()))
        held.append(most)
    assert 1 <= pipeline.least_in_flight(count) <= min(held)
    assert pipeline.least_in_flight(count) <= pipeline.in_flight(count)


# -- plans -------------------------------------------------------------------------------------------------------


@cache
def cluster_of(kinds: str, nodes: int, each: int) -> Cluster:
    """Nodes of one kind of device, or of two unlike ones, with small launches."""
    if kinds == "like":
        like = load_cluster(f"{nodes}x{each}:a100-sxm4-80gb")
        return replace(like, device=replace(like.device, launch_ns=5, backward_launch_ns=20))
    groups = (("slow", "l4", 1), ("fast", "a100-sxm4-80gb", nodes - 1))
    entries = "".join(
        f"  - {{name: {name}, nodes: {count}, devices_per_node: {each}, device: {device}}}\n"
        for name, device, count in groups
    )
    text = f"name: unlike\nlibrary: nccl\nnode_groups:\n{entries}"
    unlike = parse_cluster(
        text + "inter_node: {bandwidth: 100 Gbit/s, nics_per_node: 1, latency: 5 us}\n", file="unlike"
    )
    found = [replace(g, device=replace(g.device, launch_ns=5, backward_launch_ns=20)) for g in unlike.node_groups]
    return replace(unlike, node_groups=tuple(found), device=slowest_device([group.device for group in found]))


@given(repeated_graphs(3), st.sampled_from(["like", "unlike"]), st.integers(0, 1 << 30))
@settings(max_examples=40, suppress_health_check=CHECKS, phases=PHASES, deadline=None)
def test_no_plan_in_stages_is_below_its_bound(graph: Graph, kinds: str, seed: int) -> None:
    """Random choices, cut anywhere: what the tables say of all stages together is no more than their objective, nor
    than the memory that they hold."""
    assume(graph.loss is not None)
    chance, pipeline, schedule = drawn(seed)
    stages, count = pipeline.num_stages, schedule.num_microbatches
    if chance.random() < 0.3:
        schedule = random_schedule(seed, chain=True)
        stages, count = schedule.num_stages, schedule.num_microbatches
        pipeline = Pipeline(num_stages=stages, schedule=schedule.name, num_chunks=schedule.num_chunks, order=schedule)
    assume(stages > 1 and schedule.num_virtual_stages <= len(graph.operators))
    shape = chance.choice(["dp=2,tp=2", "dp=2", "dp=1"])
    each = {"dp=2,tp=2": 4, "dp=2": 2, "dp=1": 1}[shape]
    cluster = cluster_of(kinds, stages, each)
    mesh = parse_mesh(f"pp={stages},{shape}", cluster)
    shares = () if kinds == "like" else stage_shares(graph, cluster, "fp32", pipeline, count)
    assert bool(shares) == (kinds == "unlike")
    hints = dict(block_hints(graph))
    model = build_model(GraphIndex(fold(graph)), cluster, mesh, "fp32", StrategyFilter(), hints, PriceList.TIME, shares)
    alone = replace(free_configuration(tuple(Recompute), (0, 1, 2, 3), len(mesh.axes)), microbatches=count)
    configuration = replace(alone, pipeline=pipeline)
    for assignment in random_assignments(model, seed, 4, per_class=False):
        choices = fold_assignment(model, assignment)
        found = price_choices(CostedModel(model, configuration), choices)
        least = price_choices(CostedModel(model, configuration, least=True), choices)
        decisions = decisions_of(model, alone, assignment)
        where = sorted({0, *chance.sample(range(1, len(graph.operators)), schedule.num_virtual_stages - 1)})
        program = cut(graph, decisions, [graph.operators[place].id for place in where], schedule)
        price = price_program(program, cluster)
        assert found.ns <= stages * price.objective_ns
        assert least.num_bytes <= sum(price.stage_bytes)


# -- what stages count -------------------------------------------------------------------------------------------


def test_stages_that_are_alike_count_alike() -> None:
    """Shares are those of unlike stages alone; two nodes of one kind in two groups are one stage's and the other's."""
    assert alike_stages(cluster_of("like", 4, 2), 4) == (0, 0, 0, 0)
    assert alike_stages(cluster_of("unlike", 4, 2), 4) == (0, 1, 1, 1)
    assert alike_stages(cluster_of("unlike", 4, 2), 2) == (0, 1)  # slow and fast nodes, and fast ones
    assert alike_stages(cluster_of("unlike", 4, 2), 8) == (0, 1, 2, 3, 2, 3, 2, 3)  # first and second of a node


def test_prices_of_stages_are_those_of_the_stage_that_counts_least() -> None:
    """Operators, collectives and updates: the least of what stages take, weighed, rounded down."""
    cluster = cluster_of("unlike", 3, 2)
    mesh = parse_mesh("pp=3,dp=2", cluster)
    devices = [(cluster.devices[kind],) for kind in (0, 1)]
    weights = [(Fraction(1, 3), Fraction(1, 2), Fraction(1, 4)), (Fraction(3, 2), Fraction(7, 4), Fraction(5, 4))]
    shares = [
        StageShare(stage=stage, devices=kinds, repeated=a, backward=b, once=c)
        for stage, (kinds, (a, b, c)) in enumerate(zip(devices, weights, strict=True))
    ]
    prices = stage_prices(PriceList.TIME, cluster, mesh, "bf16", shares)
    plain = prices_of(PriceList.TIME, cluster, mesh, "bf16")
    for flops, moved in ((10**12, 10**6), (10**6, 10**9), (0, 1)):
        for backward in (False, True):
            parts = []
            for (kind,), share in zip(devices, weights, strict=True):
                ns = ComputeModel(kind, "bf16").time_ns(flops, moved, ComputeKind.CONTRACTION, backward=backward)
                parts.append(int(share[backward] * ns))
            given_ns = prices.compute.time_ns(flops, moved, ComputeKind.CONTRACTION, backward=backward)
            assert given_ns == min(parts)
            whole = prices.compute.times_ns(
                np.array([flops]),
                np.array([moved]),
                ComputeKind.CONTRACTION,
                backward=backward,
            )
            assert whole.tolist() == [given_ns]
    for size in (1000, 10**8):
        costs = [plain.collectives.cost("all_reduce", (0,), size, stage).ns for stage in (0, 1)]
        assert costs[0] != costs[1] and max(costs) == plain.collectives.cost("all_reduce", (0,), size).ns
        expected = min(int(share[0] * ns) for share, ns in zip(weights, costs, strict=True))
        assert prices.collectives.cost("all_reduce", (0,), size).ns == expected
        rates = [plain.collectives.rate_ns("all_reduce", (0,), size, stage) for stage in (0, 1)]
        expected = min(int(share[2] * ns) for share, ns in zip(weights, rates, strict=True))
        assert prices.collectives.rate_ns("all_reduce", (0,), size) == expected


def test_stages_count_as_they_are_fast() -> None:
    """Of two stages the faster one counts as much more as it is faster; what all count together is a whole."""
    graph = _large()
    cluster = cluster_of("unlike", 2, 2)
    slow, fast = stage_shares(graph, cluster, "bf16", Pipeline(num_stages=2, schedule="zb-h1"), 8)
    times = [cluster.devices[kind].matrix_rate("bfloat16") or 0 for kind in (0, 1)]
    assert float(fast.once / slow.once) == pytest.approx(times[1] / times[0], rel=0.35)
    assert Fraction(199, 100) < slow.once + fast.once <= 2
    assert (slow.repeated, slow.backward) == (slow.once, slow.once)


@pytest.mark.parametrize(("schedule", "filled"), [("1f1b", 1), ("fill-drain", 1), ("zb-h1", 0)])
@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_everything_counts_alike_on_all_stages(schedule: str, filled: int, microbatches: int) -> None:
    """What a stage would take for everything counts the same on each, unless it is too much without a part already."""
    cluster = cluster_of("unlike", 4, 2)
    pipeline = Pipeline(num_stages=4, schedule=schedule)
    graph = _large()
    shares = {share.stage: share for share in stage_shares(graph, cluster, "bf16", pipeline, microbatches)}
    times = {
        stage: sum(least_on(graph, cluster.devices[kind], cluster.devices[kind : kind + 1], "bf16", 2))
        for stage, kind in ((0, 0), (1, 1))
    }
    assert sorted(shares) == [0, 1]
    counted = {stage: float(share.backward) * times[stage] for stage, share in shares.items()}
    parts = {s: share.backward * pipeline.passes(microbatches).backward / 4 - filled for s, share in shares.items()}
    slope = microbatches - filled
    assert parts[0] + 3 * parts[1] <= slope and parts[0] >= 0
    if parts[0]:
        assert counted[0] == pytest.approx(counted[1], rel=1e-4)
        assert float(parts[0] + 3 * parts[1]) == pytest.approx(slope, rel=1e-4)
    elif slope:
        assert counted[0] > counted[1]
    assert float(shares[0].once) * times[0] == pytest.approx(float(shares[1].once) * times[1], rel=1e-4)


def _large() -> Graph:
    """Products that are bound by FLOPs."""
    from tests.simulate.pipelines import mlp

    return mlp(4, width=8192, rows=8192)
