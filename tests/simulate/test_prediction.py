"""Predicted steps: sums against the price of the Program and its list of collectives, closed forms of a uniform MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from onnx import TensorProto, helper

from tap_planner.cluster import Cluster, Mesh, MeshAxis, load_cluster
from tap_planner.cost import CollectiveModel, ComputeModel, operator_times_ns
from tap_planner.graph import BindOptions, Graph, LossOptions, Operator, bind
from tap_planner.operators import rule_of
from tap_planner.plan import AxisDecision, Region
from tap_planner.program import Phase, Program, collectives, lower
from tap_planner.sharding import PARTIAL, REPLICATE, Placements, Strategy, axis_choices, make_strategy, shard
from tap_planner.simulate import GATHER, GRADIENT, predict, price_program
from tests.apply.random_plans import RandomPlan
from tests.graph.models import data_model, symbols
from tests.search.models import Nodes, bound, model_file

LAYERS, SIZE, BATCH = 6, 512, 64
LEVELS = {(2, 2): (("network",), ("node",)), (4,): (("node", "network"),)}


def model_graph(name: str, microbatches: int, *, training: bool = True) -> Graph:
    """A model bound with the batch of one microbatch."""
    model = data_model(name)
    dims = {dim: 16 for dim in ("seq", "dec_seq", "enc_seq") if dim in symbols(model)}
    loss = LossOptions(kind="mean")
    return bind(model, BindOptions(batch=8 // microbatches, dims=dims, training=training, loss=loss))


def placed(program: Program, levels: tuple[tuple[str, ...], ...]) -> Program:
    """The Program with the levels that its axes span."""
    axes = tuple(replace(axis, levels=names) for axis, names in zip(program.decisions.axes, levels, strict=True))
    return replace(program, decisions=replace(program.decisions, axes=axes))


@pytest.mark.parametrize("name", ["gpt2_tiny", "gshard_moe_tiny", "t5_tiny"])
@pytest.mark.parametrize("mesh", [(2, 2), (4,)], ids=str)
@pytest.mark.parametrize(
    ("zero", "recompute", "microbatches"), [(0, "none", 2), (1, "full", 1), (2, "none", 2), (3, "full", 2)]
)
def test_sums_and_bounds(name: str, mesh: tuple[int, ...], zero: int, recompute: str, microbatches: int) -> None:
    """Compute is that of objective A, communication the list of collectives; hidden time is background communication;
    the step is no shorter than its compute and than the busiest level."""
    graph = model_graph(name, microbatches)
    plan = RandomPlan(graph, mesh, zero, zero=zero, recompute=recompute, microbatches=microbatches).build()
    program = placed(lower(graph, replace(plan, precision="bf16")), LEVELS[mesh])
    cluster = load_cluster("2x2:a100-sxm4-80gb")
    prediction, price = predict(program, cluster), price_program(program, cluster)
    assert prediction.compute_ns == price.compute_ns + price.optimizer_ns
    assert prediction.step_ns == prediction.compute_ns + prediction.communication_ns - prediction.hidden_ns
    times = list(timed(program, cluster))
    assert prediction.communication_ns == sum(ns for *_, ns in times)
    gathers = zero == 3
    assert 0 <= prediction.hidden[GRADIENT] <= sum(ns for phase, _, ns in times if phase is Phase.GRADIENT)
    assert 0 <= prediction.hidden[GATHER] <= (sum(ns for _, _, ns in times) if gathers else 0)
    assert prediction.step_ns >= prediction.compute_ns
    for level in ("node", "network"):
        assert prediction.step_ns >= sum(ns for _, levels, ns in times if level in levels)


@pytest.mark.parametrize("zero", [0, 3])
def test_nothing_is_hidden_over_gloo(zero: int) -> None:
    """What accelerators would hide is exposed where the cores that compute also communicate."""
    plan = RandomPlan(model_graph("gpt2_tiny", 1), (4,), zero, zero=zero).build()
    program = placed(lower(model_graph("gpt2_tiny", 1), replace(plan, precision="bf16")), LEVELS[(4,)])
    cluster = load_cluster("2x2:a100-sxm4-80gb")
    overlapped, waiting = (predict(program, replace(cluster, library=library)) for library in ("nccl", "gloo"))
    assert overlapped.hidden_ns > 0 == waiting.hidden_ns
    assert waiting.step_ns == waiting.compute_ns + waiting.communication_ns


def timed(program: Program, cluster: Cluster) -> Iterator[tuple[Phase, set[str], int]]:
    """(phase, levels, ns of all calls) of the Program's collectives."""
    decisions = program.decisions
    mesh = Mesh(axes=tuple(MeshAxis(name=axis.name, size=axis.size) for axis in decisions.axes))
    model, compute = CollectiveModel(cluster, mesh), ComputeModel(cluster.device, decisions.precision)
    for entry in collectives(program):
        payload = compute.tensor_bytes(entry.dtype, entry.elements)
        levels = {name for axis in entry.axes for name in decisions.axes[axis].levels}
        yield entry.phase, levels, entry.count * model.cost(entry.kind, entry.axes, payload).ns


# -- a uniform MLP, its batch split over two nodes ---------------------------------------------------------------


class DataParallel(RandomPlan):
    """Every operator splits the batch; every parameter is whole; every operator is a region."""

    def _choose(self, operator: Operator) -> Strategy:
        rule = rule_of(operator.signature)
        for choice in axis_choices(rule, self.hints[operator.id], (True,) * len(operator.inputs)):
            strategy = make_strategy(operator.signature, rule, (choice,), self.mesh_shape)
            if strategy is None or strategy.inputs[0] != (shard(0),):
                continue
            if operator.type != "MatMul" or strategy.outputs[0] == (shard(0),):
                return strategy
        raise AssertionError(operator.id)

    def _regions(self) -> tuple[Region, ...]:
        names = [operator.id for operator in self.graph.operators]
        return tuple(Region(operators=(name,), run=None, occurrence=0, recompute="none") for name in names)

    def _storage(self, *given: object) -> tuple[Placements, Placements]:
        return (REPLICATE,), (PARTIAL,)


def mlp() -> Graph:
    """``LAYERS`` products of ``BATCH`` x ``SIZE`` with square matrices, and the mean of the result."""
    nodes = Nodes()
    value = "x"
    for layer in range(LAYERS):
        value = nodes.add("MatMul", [value, nodes.weight(f"w{layer}", SIZE, SIZE)], f"y{layer}")
    graph = helper.make_graph(
        nodes.nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", SIZE])],
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, ["batch", SIZE])],
        nodes.initializers,
    )
    return bound(model_file(graph), batch=BATCH)


def two_nodes(bytes_per_s: int) -> Cluster:
    """Two nodes of one device each, without latency."""
    cluster = load_cluster("2x1:a100-sxm4-80gb")
    node, network = cluster.levels
    network = replace(network, bandwidth_bytes_per_s=bytes_per_s, latency_ns=0, nics=1)
    return replace(cluster, levels=(node, network))


def mlp_program(zero: int, microbatches: int) -> Program:
    """The MLP in bf16 on two nodes."""
    graph = mlp()
    decisions = DataParallel(graph, (2,), 0, zero=zero, microbatches=microbatches).build()
    axes = (AxisDecision(name="dp", size=2, levels=("network",)),)
    return lower(graph, replace(decisions, axes=axes, precision="bf16"))


def backward_ns(program: Program, cluster: Cluster) -> list[int]:
    """Backward time of each layer by the roofline: two products, but one in the first layer, whose input is given."""
    compute = ComputeModel(cluster.device, "bf16")
    times: list[int] = []
    for layer, operator in enumerate(program.graph.operators[:LAYERS]):
        _, ns = operator_times_ns(
            compute,
            operator.signature,
            factor_sizes=(BATCH // 2, SIZE, SIZE),
            input_elements=(BATCH // 2 * SIZE, SIZE * SIZE),
            output_elements=(BATCH // 2 * SIZE,),
            requires_gradient=(layer > 0, True),
        )
        times.append(ns)
    return times


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("fast", [True, False], ids=["fast links", "slow links"])
def test_reductions_of_a_uniform_mlp(microbatches: int, fast: bool) -> None:
    """All but the last reduction hide behind the layers below, as far as those last; once a step, whatever the number
    of microbatches."""
    cluster = two_nodes(10**12 if fast else 10**9)
    program = mlp_program(0, microbatches)
    first, *others = backward_ns(program, cluster)
    assert len(program.decisions.buckets) == LAYERS and len(set(others)) == 1
    reduction = CollectiveModel(cluster, Mesh(axes=(MeshAxis(name="dp", size=2),))).cost(
        "all_reduce", (0,), 2 * SIZE * SIZE
    )
    assert (reduction.ns < min(first, others[0])) == fast
    behind = (LAYERS - 1) * reduction.ns if fast else (LAYERS - 2) * others[0] + first
    prediction = predict(program, cluster)
    assert prediction.hidden == {GRADIENT: behind, GATHER: 0}
    assert prediction.communication_ns == LAYERS * reduction.ns


@pytest.mark.parametrize("zero", [2, 3])
def test_every_microbatch_hides_as_much(zero: int) -> None:
    """ZeRO 2 reduces in every microbatch, ZeRO 3 gathers as well: three microbatches hide three times as much."""
    cluster = two_nodes(10**11)
    one, three = predict(mlp_program(zero, 1), cluster), predict(mlp_program(zero, 3), cluster)
    assert {kind: 3 * ns for kind, ns in one.hidden.items()} == dict(three.hidden)
    assert one.hidden[GRADIENT] > 0 and (one.hidden[GATHER] > 0) == (zero == 3)


def test_inference_hides_nothing() -> None:
    """Without gradients there is nothing in the background."""
    graph = model_graph("gpt2_tiny", 1, training=False)
    program = placed(lower(graph, replace(RandomPlan(graph, (2, 2), 0).build(), precision="bf16")), LEVELS[(2, 2)])
    assert predict(program, load_cluster("2x2:a100-sxm4-80gb")).hidden_ns == 0
