"""Problems made of graphs and clusters: against plans for one device, closed forms and a diamond by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from tap_planner.api import make_plan
from tap_planner.cluster import Cluster, Mesh, load_cluster, parse_cluster
from tap_planner.cost import CollectiveModel
from tap_planner.device_placement import ORDERS, Shared, lower_bound_ns, order_groups, place, play
from tap_planner.device_placement.building import Built, problem_of
from tap_planner.device_placement.topology import device_places, links_of
from tap_planner.errors import UsageError
from tap_planner.graph import BindOptions, Graph, LossOptions, bind, load_model
from tap_planner.plan import PlanDocument, PlanOptions, PlanRequest
from tests.graph.models import DATA, add_weight, data_model, saved, symbols

MODELS = ("gpt2_tiny", "bert_tiny", "t5_tiny", "resnet_small", "gshard_moe_tiny", "dlrm_tiny", "vit_tiny", "unet_tiny")
ONE = "1x1:v100-sxm2-32gb"
PLAIN = """name: plain
library: nccl
device:
  name: plain
  memory: 1 GiB
  peak_flops: {float32: 1 TFLOP/s}
  memory_bandwidth: 100 GB/s
  matrix_efficiency: 1
  memory_efficiency: 1
nodes: 1
devices_per_node: 2
intra_node: {kind: switch, bandwidth: 10 GB/s, latency: 1 us, paces: {direct: {efficiency: 1}}}
reserved_memory: 256 MiB
"""
"""A FLOP takes 0.001 ns, a byte of memory 0.01 ns, a byte of the link 0.1 ns."""
UNLIKE = """name: unlike
library: nccl
node_groups:
  - {name: fast, nodes: 1, devices_per_node: 2, device: a100-sxm4-80gb}
  - {name: slow, nodes: 2, devices_per_node: 1, device: cpu-core}
inter_node:
  {bandwidth: 10 GB/s, nics_per_node: 2, latency: 7 us, paces: {direct: {efficiency: 0.5, latency: 1 us}}}
"""
SEND_NS = 20_000
"""What any call of nccl takes besides."""


def model_graph(name: str, *, training: bool) -> Graph:
    """A model of tests/data at batch 8."""
    model = data_model(name)
    return bind(model, BindOptions(batch=8, dims=dims_of(name), training=training, ends=not training, loss=MEAN))


MEAN = LossOptions(kind="mean")


def dims_of(name: str) -> dict[str, int]:
    """Sizes of symbolic dims beside the batch."""
    return {dim: 16 for dim in ("seq", "dec_seq", "past") if dim in symbols(data_model(name))}


def built(name: str, cluster: str, *, training: bool, precision: str = "fp32") -> tuple[Graph, Built]:
    """A model of tests/data on a cluster."""
    graph = model_graph(name, training=training)
    return graph, problem_of(graph, load_cluster(cluster), precision=precision, training=training)


def text_graph(folder: Path, body: str, weights: dict[str, tuple[int, ...]], **options: object) -> Graph:
    """A graph of ONNX text at batch 16, trained unless said otherwise."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 20]>\n{body}')
    for name, shape in weights.items():
        add_weight(model, name, shape)
    given = {"training": True, "loss": MEAN, "batch": 16, **options}
    return bind(saved(folder, model), BindOptions(**given))  # type: ignore[arg-type]


def plain() -> Cluster:
    """Two devices on which times are easily said."""
    return parse_cluster(PLAIN, file="plain.yaml")


def diamond(folder: Path, *, training: bool = True) -> Graph:
    """``a`` forks, ``y`` joins; training adds a loss."""
    body = """agraph (float[batch, 4] x) => (float[batch, 8] y) {
        a = MatMul (x, w)
        l = MatMul (a, u)
        r = MatMul (a, v)
        y = Add (l, r)
    }"""
    return text_graph(folder, body, {"w": (4, 8), "u": (8, 8), "v": (8, 8)}, training=training, ends=not training)


def edges_of(found: Built) -> set[tuple[int, int, int]]:
    """(Producer, reader, bytes) of all tensors."""
    problem = found.problem
    pairs = zip(problem.edge_tensor.tolist(), problem.edge_consumer.tolist(), strict=True)
    return {(int(problem.tensor_producer[t]), reader, int(problem.tensor_bytes[t])) for t, reader in pairs}


# -- one device: what tap-plan says ------------------------------------------------------------------------------


def plan_of(name: str, *, mode: str, precision: str) -> PlanDocument:
    """Tap-plan's plan for one device."""
    options = PlanOptions(
        batch=8,
        dims=dims_of(name),
        mode=mode,  # type: ignore[arg-type]
        precision=precision,
        loss="mean" if mode == "train" else None,
        recompute="none" if mode == "train" else "auto",
        microbatches=1,
    )
    return make_plan(PlanRequest(model=DATA / f"{name}.onnx", cluster=ONE, options=options))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_one_device_takes_what_a_plan_on_it_takes(name: str, precision: str) -> None:
    """Time and memory of a training step on one device are those of tap-plan's plan for one device."""
    _, found = built(name, ONE, training=True, precision=precision)
    everything = (0,) * found.problem.num_groups
    predicted = plan_of(name, mode="train", precision=precision).predicted
    expected = predicted.step_ns, predicted.total_memory_bytes
    assert (int(found.problem.task_ns.sum()), *found.problem.memory_bytes(everything)) == expected


@pytest.mark.parametrize("name", [*MODELS, "llama_decode_tiny"])
def test_one_device_takes_what_a_plan_on_it_takes_in_inference(name: str) -> None:
    """The same in inference, with caches where the model has them."""
    _, found = built(name, ONE, training=False)
    everything = (0,) * found.problem.num_groups
    predicted = plan_of(name, mode="infer", precision="fp32").predicted
    expected = predicted.step_ns, predicted.total_memory_bytes
    assert (int(found.problem.task_ns.sum()), *found.problem.memory_bytes(everything)) == expected


@pytest.mark.parametrize(
    ("name", "training"),
    [*((name, training) for name in MODELS for training in (True, False)), ("llama_decode_tiny", False)],
)
def test_every_operator_is_in_one_group(name: str, training: bool) -> None:
    """Groups share out the operators, count by their first one, and every order lists all groups."""
    graph, found = built(name, "1x2:l4", training=training)
    assert sorted(index for members in found.operators for index in members) == list(range(len(graph.operators)))
    assert [members[0] for members in found.operators] == sorted(members[0] for members in found.operators)
    assert list(found.task_operator[: len(graph.operators)]) == list(range(len(graph.operators)))
    for order in ORDERS:
        assert sorted(order_groups(found.problem, order)) == list(range(found.problem.num_groups))


# -- a diamond by hand -------------------------------------------------------------------------------------------


def test_diamond_tensors(tmp_path: Path) -> None:
    """``a`` is one tensor with two readers; its gradient comes from each of them; only the loss needs a tie."""
    found = problem_of(diamond(tmp_path), plain(), precision="fp32", training=True)
    a, left, right, y, loss = range(5)
    back = {operator: 9 - operator for operator in range(5)}
    assert found.task_operator == (0, 1, 2, 3, 4, 4, 3, 2, 1, 0)
    full = 16 * 8 * 4
    forward = {(a, left, full), (a, right, full), (left, y, full), (right, y, full), (y, loss, full)}
    gradients = {
        (back[reader], back[maker], size) for maker, reader, size in forward
    }  # each reader's backward to the maker's
    assert edges_of(found) == forward | gradients | {(loss, back[loss], 0)}
    assert len(found.problem.tensor_bytes) == 4 + 5 + 1


def test_diamond_times(tmp_path: Path) -> None:
    """Closed forms: FLOPs and bytes at the device's pace, and 28 bytes an element for AdamW's update."""
    found = problem_of(diamond(tmp_path), plain(), precision="fp32", training=True)
    times = found.problem.task_ns[:, 0].tolist()

    def product(k: int, gradients: int) -> tuple[int, int]:
        """Forward and backward of [16, k] x [k, 8]; x or a parameter's operand alone has no gradient."""
        operands, flops = {"x": 16 * k, "w": k * 8, "y": 16 * 8}, 2 * 16 * 8 * k
        made = operands["w"] + (operands["x"] if gradients == 2 else 0)
        moved = gradients * operands["y"] + operands["x"] + operands["w"] + made
        forward = math.ceil(flops / 1000 + sum(operands.values()) * 4 / 100)
        return forward, math.ceil(gradients * flops / 1000 + moved * 4 / 100)

    (first, first_back), (second, second_back) = product(4, 1), product(8, 2)
    update = {4: math.ceil(4 * 8 * 28 / 100), 8: math.ceil(8 * 8 * 28 / 100)}
    assert times[:3] == [first, second, second]
    assert times[7:] == [second_back + update[8]] * 2 + [first_back + update[4]]


def test_diamond_memory(tmp_path: Path) -> None:
    """16 bytes an element of a parameter; x is kept with the first product, y with the loss, ``a`` by every reader."""
    problem = problem_of(diamond(tmp_path), plain(), precision="fp32", training=True).problem
    kept = 16 * 8 * 4
    assert problem.shared == (Shared(num_bytes=kept, groups=(1, 2)),)
    together, apart = problem.memory_bytes((0, 0, 0, 0, 0)), problem.memory_bytes((0, 0, 1, 0, 0))
    assert together == ((32 + 64 + 64) * 16 + 16 * 4 * 4 + 2 * kept, 0)
    assert apart == ((32 + 64) * 16 + 16 * 4 * 4 + 2 * kept, 64 * 16 + kept)
    assert problem.capacity_bytes.tolist() == [768 << 20] * 2


def test_diamond_step(tmp_path: Path) -> None:
    """The right branch elsewhere: the step is its way there and back, as transfers outlast the left branch."""
    problem = problem_of(diamond(tmp_path), plain(), precision="fp32", training=True).problem
    placement, times = (0, 0, 1, 0, 0), problem.task_ns[:, 0].tolist()
    sent = SEND_NS + 1000 + math.ceil(16 * 8 * 4 / 10)
    way = [times[task] for task in (0, 2, 3, 4, 5, 6, 7, 9)]
    found = play(problem, placement, range(10))
    assert found.makespan_ns == sum(way) + 4 * sent
    assert sorted(found.transfers[:, 1:3].tolist()) == [[0, 1], [0, 1], [1, 0], [1, 0]]


def test_diamond_in_inference(tmp_path: Path) -> None:
    """No backward, the output's end with what makes it, parameters alone, x where it is read and y where it is made."""
    graph = diamond(tmp_path, training=False)
    found = problem_of(graph, plain(), precision="fp32", training=False)
    assert found.operators == ((0,), (1,), (2,), (3, 4)) and not found.problem.is_backward.any()
    assert found.problem.fixed_bytes.tolist() == [(32 + 64) * 4, 64 * 4, 64 * 4, 128 * 4]


# -- what is kept together ---------------------------------------------------------------------------------------


def test_readers_of_a_trained_parameter_are_together(tmp_path: Path) -> None:
    """The tied weight's gradient needs no sum in training; in inference every reader's device holds it.

    What Relu makes is kept by its own backward and by that of the product that reads it.
    """
    body = """agraph (float[batch, 8] x) => (float[batch, 8] y) {
        a = MatMul (x, w)
        b = Relu (a)
        y = MatMul (b, w)
    }"""
    trained = problem_of(text_graph(tmp_path, body, {"w": (8, 8)}), plain(), precision="fp32", training=True)
    assert trained.operators[0] == (0, 2)
    assert trained.problem.shared == (Shared(num_bytes=16 * 8 * 4, groups=(0, 1)),)
    graph = text_graph(tmp_path, body, {"w": (8, 8)}, training=False)
    served = problem_of(graph, plain(), precision="fp32", training=False)
    assert served.operators == ((0,), (1,), (2,))
    assert served.problem.shared == (Shared(num_bytes=64 * 4, groups=(0, 2)),)


def test_frozen_parameters_are_shared(tmp_path: Path) -> None:
    """What is frozen has no backward and no states, and its readers may part; x needs no gradient."""
    body = """agraph (float[batch, 8] x) => (float[batch, 8] y) {
        a = MatMul (x, w)
        b = MatMul (a, w)
        y = MatMul (b, u)
    }"""
    graph = text_graph(tmp_path, body, {"w": (8, 8), "u": (8, 8)}, freeze=("w",))
    found = problem_of(graph, plain(), precision="fp32", training=True)
    assert found.operators[:3] == ((0,), (1,), (2,))
    assert found.task_operator == (0, 1, 2, 3, 3, 2)
    assert found.problem.shared == (Shared(num_bytes=64 * 4, groups=(0, 1)),)


def test_views_send_nothing_twice(tmp_path: Path) -> None:
    """A view is with what makes its operand, and who reads it reads that; its gradient passes through it."""
    body = """agraph (float[batch, 8] x, int64[2] s) => (float[batch, 8] y) {
        a = MatMul (x, w)
        f = Flatten <axis = 1> (a)
        g = Identity (a)
        y = Add (f, g)
    }"""
    body = body.replace(", int64[2] s", "").replace("Flatten <axis = 1> (a)", "Reshape (a, shape)").replace(
        "=> (float[batch, 8] y)", "=> (float[batch, 2, 4] y)\n<int64[3] shape = {-1, 2, 4}>"
    ).replace("g = Identity (a)", "r = Relu (a)\n g = Reshape (r, shape)")  # fmt: skip
    graph = text_graph(tmp_path, body, {"w": (8, 8)})
    assert [operator.type for operator in graph.operators][:5] == ["MatMul", "Reshape", "Relu", "Reshape", "Add"]
    found = problem_of(graph, plain(), precision="fp32", training=True)
    assert found.operators[:3] == ((0, 1), (2, 3), (4,))
    forward = {(maker, reader) for maker, reader, _ in edges_of(found) if reader < len(graph.operators)}
    assert forward == {(0, 1), (0, 2), (2, 3), (0, 4), (2, 4), (4, 5)}


def test_views_of_inputs_are_everywhere(tmp_path: Path) -> None:
    """A view of a graph input is free on any device: nothing is sent."""
    body = """agraph (float[batch, 8] x) => (float[batch, 2, 4] y)
    <int64[3] shape = {-1, 2, 4}> {
        v = Reshape (x, shape)
        a = Relu (v)
        b = Sigmoid (v)
        y = Add (a, b)
    }"""
    graph = text_graph(tmp_path, body, {}, training=False, loss=LossOptions())
    found = problem_of(graph, plain(), precision="fp32", training=False)
    assert found.operators == ((0, 1), (2,), (3,))
    assert {(maker, reader) for maker, reader, _ in edges_of(found)} == {(1, 3), (2, 3)}


def test_caches_stay_where_they_are_read() -> None:
    """A decoder's cache is read and left on one device."""
    graph, found = built("llama_decode_tiny", "1x2:l4", training=False)
    group_of = {index: group for group, members in enumerate(found.operators) for index in members}
    assert len(graph.caches) == 4
    for cache, end in graph.caches.items():
        readers = [index for index, operator in enumerate(graph.operators) if cache in operator.inputs]
        assert {group_of[index] for index in readers} == {group_of[end]}


# -- links -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["1x8:v100-sxm2-32gb", "2x2:l4", "2x4:h100-sxm5-80gb", "2x2:cpu-core"])
@pytest.mark.parametrize("num_bytes", [1, 1000, 123_456_789])
def test_transfers_cost_what_pipelines_pay(cluster: str, num_bytes: int) -> None:
    """Latency and bytes of every pair are a send_recv between two stages of one device, up to a millionth."""
    whole = load_cluster(cluster)
    model, links = CollectiveModel(whole, Mesh(axes=(), num_stages=whole.num_devices)), links_of(whole)
    for a in range(whole.num_devices):
        for b in range(a + 1, whole.num_devices):
            expected = model.among("send_recv", (a, b), num_bytes).ns
            for pair in ((a, b), (b, a)):
                ns = links.latency_ns[pair] + math.ceil(num_bytes * 10**9 / links.bytes_per_s[pair])
                assert abs(ns - expected) <= 1 + expected // 10**6


def test_channels_of_two_nodes() -> None:
    """A transfer holds a way out and a way in; between nodes also those of the nodes; each direction has its own."""
    channels = links_of(load_cluster("2x2:l4")).channels
    used = {(a, b): {c for c in channels[a, b].tolist() if c >= 0} for a in range(4) for b in range(4)}
    assert [len(used[0, b]) for b in range(4)] == [0, 2, 4, 4]
    assert len(used[0, 1] & used[0, 2]) == 1  # out of device 0
    assert len(used[0, 2] & used[1, 3]) == 2  # out of node 0, into node 1
    assert not used[0, 2] & used[2, 0] and not used[0, 1] & used[2, 3]


def test_unlike_nodes() -> None:
    """Each device has the times and the memory of its kind, each pair the slower end's links."""
    cluster, graph = parse_cluster(UNLIKE, file="unlike.yaml"), model_graph("resnet_small", training=True)
    found = problem_of(graph, cluster, precision="fp32", training=True)
    problem = found.problem
    for device, kind in ((0, "1x1:a100-sxm4-80gb"), (1, "1x1:a100-sxm4-80gb"), (3, "1x1:cpu-core")):
        alone = problem_of(graph, load_cluster(kind), precision="fp32", training=True).problem
        assert problem.task_ns[:, device].tolist() == alone.task_ns[:, 0].tolist()
    reserved, buffers = cluster.reserved_memory_bytes, cluster.collective_buffers_bytes
    assert problem.capacity_bytes.tolist() == [max(0, (gib << 30) - reserved - buffers) for gib in (80, 80, 4, 4)]
    assert [device.name for device in found.devices] == [
        "fast, node 0, device 0", "fast, node 0, device 1", "slow, node 1, device 0", "slow, node 2, device 0",
    ]  # fmt: skip
    assert [device.place for device in found.devices] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert problem.links.latency_ns[0, 2] == problem.links.latency_ns[2, 3] == SEND_NS + 8000
    assert problem.links.bytes_per_s[0, 3] == problem.links.bytes_per_s[2, 3] == 2 * 10 * 10**9 // 2


def test_names_of_devices() -> None:
    """Devices count in their node, nodes in the cluster; a single level more is a rack."""
    assert [device.name for device in device_places(load_cluster("2x1:l4"))] == ["node 0, device 0", "node 1, device 0"]


# -- whole models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet_small", "dlrm_tiny", "gshard_moe_tiny"])
def test_models_are_placed(name: str) -> None:
    """What is placed fits, and lies between the bound and one device."""
    _, found = built(name, "1x2:v100-sxm2-32gb", training=True)
    placing = place(found.problem, improve=False)
    assert placing.best is not None
    assert lower_bound_ns(found.problem) <= placing.best.makespan_ns <= int(found.problem.task_ns[:, 0].sum())


# -- constraints and errors --------------------------------------------------------------------------------------


def test_allowed_devices(tmp_path: Path) -> None:
    """An operator's devices are those of all that is kept with it; several constraints meet."""
    graph = diamond(tmp_path, training=False)
    found = problem_of(graph, plain(), precision="fp32", training=False, allowed={"a": [1], "y": [0]}, limit_bytes=999)
    expected = np.ones((4, 2), dtype=bool)
    expected[0], expected[3] = [False, True], [True, False]
    assert (found.problem.allowed == expected).all() and found.problem.capacity_bytes.tolist() == [999, 999]


def test_unknown_operator() -> None:
    """The message suggests what is near."""
    graph = bind(load_model(DATA / "resnet_small.onnx"), BindOptions(batch=2))
    with pytest.raises(UsageError, match=r"no operator 'logit' \(did you mean 'logits'\?\)"):
        problem_of(graph, plain(), precision="fp32", training=False, allowed={"logit": [0]})


def test_unknown_device(tmp_path: Path) -> None:
    """The message says which devices there are."""
    with pytest.raises(UsageError, match="operator 'a': device 2, expected 0 to 1"):
        problem_of(diamond(tmp_path), plain(), precision="fp32", training=True, allowed={"a": [0, 2]})


def test_nowhere_to_put(tmp_path: Path) -> None:
    """The message names the operator, and those that are kept with it where they want to be elsewhere."""
    graph = diamond(tmp_path)
    with pytest.raises(UsageError, match="operator 'a' is allowed on no device"):
        problem_of(graph, plain(), precision="fp32", training=True, allowed={"a": []})
    together, allowed = [{"l", "r"}], {"l": [1], "a": [0], "r": [0]}
    with pytest.raises(UsageError, match=r"operator 'r' is kept on one device with others.*: 'l' on 1, 'r' on 0"):
        problem_of(graph, plain(), precision="fp32", training=True, together=together, allowed=allowed)


# -- what shall be together --------------------------------------------------------------------------------------


def test_together(tmp_path: Path) -> None:
    """Sets with an operator in common are one group, whose members allow what all of them allow."""
    graph = diamond(tmp_path)
    given = [("l", "r"), ("r", "y"), ("a",), ()]
    found = problem_of(graph, plain(), precision="fp32", training=True, together=given, allowed={"y": [1]})
    a, left, right, y, loss = range(5)
    assert found.operators == ((a,), (left, right, y), (loss,))
    assert found.problem.allowed.tolist() == [[True, True], [False, True], [True, True]]
    apart = problem_of(graph, plain(), precision="fp32", training=True).problem
    assert found.problem.task_ns.tolist() == apart.task_ns.tolist()
    assert found.problem.memory_bytes((0, 1, 0)) == apart.memory_bytes((0, 1, 1, 1, 0))


def test_together_with_what_is_together(tmp_path: Path) -> None:
    """What is kept with an operator comes along: its views, and in training the readers of its parameter."""
    body = """agraph (float[batch, 8] x) => (float[batch, 8] y)
    <int64[3] shape = {-1, 2, 4}> {
        a = MatMul (x, w)
        v = Reshape (a, shape)
        b = Relu (a)
        c = MatMul (b, w)
        d = Sigmoid (b)
        y = Add (c, d)
    }"""
    graph = text_graph(tmp_path, body, {"w": (8, 8)})
    ids = [operator.id for operator in graph.operators]
    found = problem_of(graph, plain(), precision="fp32", training=True, together=[{"d", "a"}])
    first = {ids[index] for index in found.operators[0]}
    assert {"a", "c", "d"} <= first and "b" not in first and "y" not in first


def test_unknown_operator_together(tmp_path: Path) -> None:
    """The message suggests what is near, as where devices are allowed."""
    with pytest.raises(UsageError, match=r"no operator 'aa' \(did you mean 'a'\?\)") as caught:
        problem_of(diamond(tmp_path), plain(), precision="fp32", training=True, together=[["y", "aa"]])
    assert caught.value.hint == "Operators are called by their first output."


# -- memory by kind ----------------------------------------------------------------------------------------------


def test_diamond_memory_by_kind(tmp_path: Path) -> None:
    """The closed forms of the diamond's memory, kind by kind."""
    found = problem_of(diamond(tmp_path), plain(), precision="fp32", training=True)
    kept = 16 * 8 * 4
    assert found.memory_by_kind((0, 0, 1, 0, 0)) == (
        {"parameters": 96 * 4, "gradients": 96 * 4, "optimizer": 96 * 8, "activations": 16 * 4 * 4 + 2 * kept},
        {"parameters": 64 * 4, "gradients": 64 * 4, "optimizer": 64 * 8, "activations": kept},
    )
    served = problem_of(diamond(tmp_path, training=False), plain(), precision="fp32", training=False)
    assert served.memory_by_kind((0, 0, 1, 1)) == (
        {"parameters": 96 * 4, "caches": 0, "inputs": 16 * 4 * 4, "outputs": 0},
        {"parameters": 64 * 4, "caches": 0, "inputs": 0, "outputs": kept},
    )


@pytest.mark.parametrize(
    ("name", "training"),
    [*((name, training) for name in MODELS for training in (True, False)), ("llama_decode_tiny", False)],
)
def test_memory_by_kind(name: str, training: bool) -> None:
    """Kinds are those of plans; on one device all are what its plan says, and anywhere they make up all memory."""
    _, found = built(name, "1x3:l4", training=training)
    problem = found.problem
    draw = np.random.default_rng(len(name))
    placements = [(2,) * problem.num_groups, *draw.integers(0, 3, (5, problem.num_groups)).tolist()]
    for placement in placements:
        kinds = found.memory_by_kind(placement)
        assert tuple(sum(held.values()) for held in kinds) == problem.memory_bytes(placement)
    predicted = plan_of(name, mode="train" if training else "infer", precision="fp32").predicted
    kinds = {kind: size for kind, size in predicted.memory_bytes.items() if kind != "workspace"}
    assert found.memory_by_kind(placements[0])[2] == kinds


def test_training_needs_a_loss(tmp_path: Path) -> None:
    """A graph that was bound for inference is not trained."""
    with pytest.raises(UsageError, match="was bound without a loss"):
        problem_of(diamond(tmp_path, training=False), plain(), precision="fp32", training=True)
