"""Simulated steps of placements, one device a stage: closed forms on unlike devices, uneven parts and racks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from tap_planner.cluster import Cluster, Device, Mesh, load_cluster, parse_cluster
from tap_planner.cluster.subsets import restricted
from tap_planner.cost import CollectiveModel, ComputeModel, whole_operator_ns
from tap_planner.errors import ClusterError, UsageError
from tap_planner.graph import Operator
from tap_planner.operators import TRANSFER
from tap_planner.plan import unsplit_decisions
from tap_planner.program import Program, lower
from tap_planner.schedule import make_schedule
from tap_planner.simulate import TIED, Durations, Event, lower_bounds, predict, simulate
from tests.apply.random_plans import RandomPlan
from tests.device_placement.test_plans import known
from tests.search.models import bound, decoder
from tests.simulate.pipelines import cut, evenly, layer_starts, mlp, replicated

WIDTH, ROWS = 256, 64
SENT_BYTES = 4 * ROWS * WIDTH
"""Of what a layer makes, and of its gradient."""
UNLIKE = """name: unlike
library: nccl
node_groups:
  - {name: fast, nodes: 1, devices_per_node: 2, device: a100-sxm4-80gb}
  - {name: slow, nodes: 2, devices_per_node: 1, device: l4}
  - {name: host, nodes: 1, devices_per_node: 1, device: cpu-core}
inter_node:
  {bandwidth: 4 GB/s, nics_per_node: 2, latency: 7 us, paces: {direct: {efficiency: 0.5, latency: 1 us}}}
"""
"""Ranks 0 and 1 are A100s in one node, 2 and 3 are L4s in two, 4 is a CPU core; between nodes a byte takes 0.25 ns."""
NAMES = ("a100-sxm4-80gb", "a100-sxm4-80gb", "l4", "l4", "cpu-core")
RACKS = """name: racks
library: nccl
device: l4
levels:
  - {size: 2, kind: switch, bandwidth: 8 GB/s, latency: 1 us, paces: {direct: {efficiency: 1}}}
  - {name: rack, size: 2, bandwidth: 4 GB/s, latency: 2 us, nics: 1, paces: {direct: {efficiency: 1}}}
  - {name: spine, size: 2, bandwidth: 1 GB/s, latency: 4 us, nics: 1, paces: {direct: {efficiency: 1}}}
"""
RACK_LINES = ((1000, 8 * 10**9), (2000, 4 * 10**9), (4000, 10**9))
"""Latency and bytes per second, by level."""
UPDATE_BYTES = 12
"""Plain SGD in float32 reads a gradient and a parameter, and writes the parameter, of 4 bytes each."""


def unlike(library: str = "nccl") -> Cluster:
    """Four nodes of three kinds."""
    return replace(parse_cluster(UNLIKE, file="unlike"), library=library)


def layers(stages: int, *, training: bool = True) -> Program:
    """Two products with square matrices in each stage; one stage is no pipeline."""
    graph = mlp(2 * stages, width=WIDTH, rows=ROWS)
    whole = unsplit_decisions(graph, training=training, precision="fp32", optimizer="sgd")
    if stages == 1:
        return lower(graph, whole)
    return cut(graph, whole, layer_starts(2 * stages, stages), make_schedule("1f1b", stages, 1))


def works(program: Program, device_of: Callable[[int], Device]) -> list[tuple[int, int]]:
    """Per chunk what its operators take forward and backward, each on the device of its stage."""
    found: list[tuple[int, int]] = []
    for number, chunk in enumerate(program.chunks):
        compute = ComputeModel(device_of(program.stage_of(number)), "fp32")
        own = [program.graph.operators[index] for index in chunk.operators]
        times = [whole_operator_ns(compute, each.signature, gradients(each)) for each in own if each.type != TRANSFER]
        found.append((sum(ns for ns, _ in times), sum(ns for _, ns in times)))
    return found


def gradients(operator: Operator) -> list[bool]:
    """Of all operands but the model's input."""
    return [name != "x" for name in operator.inputs]


def update_ns(program: Program, stage: int, device: Device) -> int:
    """Memory traffic of the update, parameter by parameter."""
    shapes = {parameter.name: parameter.shape for parameter in program.decisions.parameters}
    rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency_permille
    counts = [WIDTH * (WIDTH if len(shapes[name]) > 1 else 1) for name in program.parameters[stage]]
    return sum(-(-count * UPDATE_BYTES * 10**12 // rate) for count in counts)


def sent_ns(cluster: Cluster, latency_ns: int, bytes_per_s: int) -> int:
    """A transfer of ``SENT_BYTES``, with the launch of the call."""
    return cluster.collective_launch_ns + latency_ns + -(-SENT_BYTES * 10**9 // bytes_per_s)


def sends(program: Program, cluster: Cluster, devices: Sequence[int]) -> Mapping[tuple[int, str], set[int]]:
    """What transfers take, by the stage that sends and what it sends."""
    found: dict[tuple[int, str], set[int]] = {}
    for stage in simulate(program, cluster, devices=devices).stages:
        for event in stage.events:
            if event.kind == "send":
                key = stage.stage, event.label.partition(" ")[0]
                found.setdefault(key, set()).add(event.end_ns - event.start_ns)
    return found


@pytest.mark.parametrize("library", ["nccl", "gloo"])
@pytest.mark.parametrize("devices", [(1, 2), (2, 1), (2, 4), (4, 0), (3, 2)], ids=str)
def test_a_chain_of_two_takes_all_its_parts(devices: tuple[int, int], library: str) -> None:
    """Forward, a transfer, forward and backward, a transfer, backward, and the update: each on its own device, to the
    nanosecond. The last stage updates while the first one still works; over gloo once its gradient has been sent."""
    program, cluster = layers(2), unlike(library)
    kinds = [load_cluster(f"1x1:{NAMES[rank]}").device for rank in devices]
    (forward, backward), (later, later_backward) = works(program, kinds.__getitem__)
    sent = sent_ns(cluster, 8000, 4 * 10**9)
    updates = [update_ns(program, stage, kinds[stage]) for stage in (0, 1)]
    turn = forward + sent + later + later_backward
    ends = [turn + sent + backward + updates[0], turn + (sent if library == "gloo" else 0) + updates[1]]
    timeline = simulate(program, cluster, devices=devices)
    assert timeline.step_ns == max(ends)
    assert [stage.compute_ns for stage in timeline.stages] == [
        forward + backward + updates[0],
        later + later_backward + updates[1],
    ]
    assert predict(program, cluster, devices).step_ns == timeline.step_ns


def test_who_is_slow_follows_the_devices() -> None:
    """A stage computes for as long as on a cluster of its kind alone, whichever stage has that kind."""
    program = layers(2)
    alone = {
        name: [stage.compute_ns for stage in simulate(program, load_cluster(f"1x2:{name}")).stages]
        for name in ("a100-sxm4-80gb", "cpu-core")
    }
    for devices in ((0, 4), (4, 0)):
        timeline = simulate(program, unlike(), devices=devices)
        expected = [alone[NAMES[rank]][stage] for stage, rank in enumerate(devices)]
        assert [stage.compute_ns for stage in timeline.stages] == expected
    assert alone["a100-sxm4-80gb"][0] < alone["cpu-core"][0]


def test_devices_that_do_not_lie_evenly() -> None:
    """Two devices of a node and one of another, which are no part of the cluster that a mesh could use: the first
    transfer stays inside, the second goes over the network."""
    cluster, devices = load_cluster("2x4:a100-sxm4-80gb"), (0, 1, 4)
    with pytest.raises(ClusterError, match="do not lie evenly"):
        restricted(cluster, devices)
    inside, outside = (
        sent_ns(
            cluster,
            level.latency_ns + level.pace("direct").latency_ns,
            level.nics * level.bandwidth_bytes_per_s * level.pace("direct").efficiency_permille // 1000,
        )
        for level in cluster.levels
    )
    program = layers(3)
    assert sends(program, cluster, devices) == {
        (0, "activation"): {inside},
        (1, "activation"): {outside},
        (1, "gradient"): {inside},
        (2, "gradient"): {outside},
    }
    ways = sum(forward + backward for forward, backward in works(program, lambda _: cluster.device))
    updated = update_ns(program, 0, cluster.device)
    assert simulate(program, cluster, devices=devices).step_ns == ways + 2 * (inside + outside) + updated


def test_racks() -> None:
    """With three levels a transfer is that of the outermost that parts the two devices: node, rack, spine."""
    cluster, devices = parse_cluster(RACKS, file="racks"), (3, 2, 0, 4)
    expected: dict[tuple[int, str], set[int]] = {}
    for stage, line in enumerate(RACK_LINES):
        sent = sent_ns(cluster, *line)
        expected |= {(stage, "activation"): {sent}, (stage + 1, "gradient"): {sent}}
    assert sends(layers(4), cluster, devices) == expected


@pytest.mark.parametrize("rank", [0, 2, 4])
@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
def test_one_device_is_timed_as_itself(rank: int, training: bool) -> None:
    """A plan without a pipeline takes what it takes on a cluster of that device alone."""
    program, alone = layers(1, training=training), load_cluster(f"1x1:{NAMES[rank]}")
    assert predict(program, unlike(), (rank,)) == predict(program, alone)
    timeline = simulate(program, unlike(), devices=(rank,))
    assert timeline.step_ns == simulate(program, alone).step_ns == predict(program, alone).step_ns
    assert lower_bounds(program, unlike(), devices=(rank,)) == lower_bounds(program, alone)


@pytest.mark.parametrize("name", ["t5_tiny", "gpt2_tiny"])
@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_two_equal_devices_in_order(name: str, library: str) -> None:
    """Saying that two stages are the ranks of a node of equal devices changes nothing: with two, all goes one way."""
    plan = known(name, True, load_cluster("1x2:l4")).drawn(1)
    program, cluster = lower(plan.graph, plan.decisions), replace(load_cluster("1x2:l4"), library=library)
    assert plan.devices == (0, 1)
    plain, placed = simulate(program, cluster), simulate(program, cluster, devices=plan.devices)
    assert placed.step_ns == plain.step_ns
    assert [_events(stage.events) for stage in placed.stages] == [_events(stage.events) for stage in plain.stages]
    assert predict(program, cluster, plan.devices) == predict(program, cluster)
    assert lower_bounds(program, cluster, devices=plan.devices) == lower_bounds(program, cluster)


def _events(events: Sequence[Event]) -> list[tuple[str, int, int]]:
    return [(event.label, event.start_ns, event.end_ns) for event in events]


@pytest.mark.parametrize("library", ["nccl", "gloo"])
@pytest.mark.parametrize(
    ("name", "training", "seed"), [*itertools.product(("t5_tiny", "gpt2_tiny"), (True, False), range(4))]
)
def test_no_placed_step_is_faster_than_its_bounds(name: str, training: bool, seed: int, library: str) -> None:
    """Any operator on any of five unlike devices: every bound holds, and every nanosecond is accounted for."""
    plan, cluster = known(name, training, unlike()).drawn(seed), unlike(library)
    program = lower(plan.graph, plan.decisions)
    timeline = simulate(program, cluster, devices=plan.devices)
    bounds = lower_bounds(program, cluster, devices=plan.devices)
    assert 0 < bounds.step_ns <= timeline.step_ns
    for stage in timeline.stages:
        assert stage.compute_ns + sum(stage.exposed_ns.values()) + stage.bubble_ns == timeline.step_ns
        assert stage.bubble_ns >= 0


@pytest.mark.parametrize("devices", [(0, 1), (1, 4), (3, 2)], ids=str)
def test_tied_gradients_are_summed_between_their_devices(devices: tuple[int, int]) -> None:
    """An embedding that two stages read is summed over the links between the two devices, in a node or beyond."""
    graph, cluster = bound(decoder("gpt", layers=2, tied=True), batch=4, dims={"seq": 16}), unlike()
    program = replicated(graph, evenly(graph, 2), make_schedule("1f1b", 2, 1))
    shape = next(p.shape for p in program.decisions.parameters if p.name == "embed.w")
    model = CollectiveModel(cluster, Mesh(axes=(), num_stages=cluster.num_devices))
    expected = model.among("all_reduce", devices, 4 * math.prod(shape)).ns
    for stage in simulate(program, cluster, devices=devices).stages:
        tied = [event for event in stage.events if event.kind == TIED and event.label == "embed.w"]
        assert [event.end_ns - event.start_ns for event in tied] == [expected]


def test_devices_that_do_not_fit() -> None:
    """Which stage, what was given and what was expected; every entry says the same."""
    program, cluster = layers(2), unlike()
    cases = {
        (0,): "devices: 1 ranks, expected 2, one for each stage",
        (0, 1, 2): "devices: 3 ranks, expected 2, one for each stage",
        (0, 5): "devices[1]: rank 5, expected 0 to 4 in the cluster unlike",
        (-1, 0): "devices[0]: rank -1, expected 0 to 4 in the cluster unlike",
        (3, 3): "devices[1]: rank 3, expected another one, as it is the device of stage 0",
    }
    for devices, message in cases.items():
        for ask in (simulate, lower_bounds, predict):
            with pytest.raises(UsageError) as caught:
                ask(program, cluster, devices=devices)
            assert caught.value.message == message and "placed plan" in caught.value.hint
    with pytest.raises(UsageError, match="expected 1, one for each stage"):
        predict(layers(1), cluster, (0, 1))


def test_stages_of_several_devices_have_no_one_device() -> None:
    """A mesh axis of two ranks is refused; one of a single rank is none."""
    graph = mlp(2, width=WIDTH, rows=ROWS)
    split, whole = (
        lower(graph, replace(RandomPlan(graph, mesh, 0).build(), precision="fp32")) for mesh in ((2,), (1,))
    )
    with pytest.raises(UsageError, match=r"the mesh axis0=2 in every stage, expected one device"):
        predict(split, unlike(), (0,))
    assert predict(whole, unlike(), (2,)) == predict(whole, load_cluster("1x1:l4"))


def test_operators_are_timed_once_per_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike operators on two devices of one kind share their time, and on another kind have another one."""
    timed: list[str] = []

    def counting(compute: ComputeModel, *given: object, **named: object) -> tuple[int, int]:
        timed.append(compute.device.name)
        return 1, 1

    monkeypatch.setattr("tap_planner.simulate.durations.operator_times_ns", counting)
    program = layers(3)
    durations = Durations(program, unlike(), devices=(2, 3, 4))
    for index, operator in enumerate(program.graph.operators):
        if operator.type == "MatMul":
            durations.operator_ns(index)
    assert timed == ["l4", "cpu-core"]
