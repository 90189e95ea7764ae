"""Communication behind products: closed forms of single products and their collectives, and rules that hold for random
plans."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from onnx import TensorProto, helper

from tap_planner.cluster import Cluster, Mesh, MeshAxis, load_cluster
from tap_planner.cost import CollectiveModel
from tap_planner.graph import Graph, Operator, ParameterRead
from tap_planner.operators import rule_of
from tap_planner.plan import OperandDecision, Overlap, Region
from tap_planner.program import Program, lower
from tap_planner.schedule import make_schedule
from tap_planner.sharding import Placements, Strategy, make_strategy, parse_choice
from tap_planner.simulate import GRADIENT, PRODUCT, UPDATED, Prediction, lower_bounds, predict, simulate
from tests.apply.random_plans import RandomPlan
from tests.search.models import Nodes, bound, model_file
from tests.simulate.pipelines import layer_starts, mlp, on_levels, plain_cluster, replicated
from tests.simulate.test_bounds import SETTINGS, drawn, everywhere, graph_of
from tests.simulate.test_prediction import LAYERS, LEVELS, backward_ns, mlp_program, two_nodes

ROWS, WIDTH, RANKS = 1024, 2048, 4
WHOLE_NS = 2 * ROWS * WIDTH * WIDTH // RANKS // 1024
"""A product whose columns, or terms, are split over the ranks, on ``plain_cluster``."""
BYTES = 4 * ROWS * WIDTH
"""What is gathered and summed."""
SLACK_NS = 50
"""Of what takes next to no time, and of rounding."""


class Laid(RandomPlan):
    """Every operator is split as the test says, by axis; parameters lie as they are read, operators are regions."""

    def __init__(self, graph: Graph, mesh_shape: tuple[int, ...], chosen: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__(graph, mesh_shape, 0, optimizer="sgd")
        self._chosen = chosen

    def _choose(self, operator: Operator) -> Strategy:
        rule = rule_of(operator.signature)
        last = self._chosen.get(operator.inputs[0] or "", ("none",) * len(self.mesh_shape))  # what ends the graph
        names = self._chosen.get(operator.id, last)
        choices = tuple(parse_choice(rule, name) for name in names)
        strategy = make_strategy(operator.signature, rule, choices, self.mesh_shape)
        assert strategy is not None
        return strategy

    def _regions(self) -> tuple[Region, ...]:
        names = [operator.id for operator in self.graph.operators]
        return tuple(Region(operators=(name,), run=None, occurrence=0, recompute="none") for name in names)

    def _storage(
        self,
        name: str,
        shape: tuple[int, ...],
        uses: Mapping[str, list[tuple[OperandDecision, ParameterRead, int]]],
        trainable: bool,
    ) -> tuple[Placements, Placements | None]:
        ((operand, _, _),) = uses[name]
        return operand.placement, operand.gradient


@functools.cache
def chain(products: int, *, training: bool = False, beside: int = 1) -> Graph:
    """Sums with a vector, before, between and after products with square matrices.

    Args:
        products: how many, one after the other.
        training: whether there is a loss.
        beside: how many products read what the first sum makes; their results are added.
    """
    nodes = Nodes()
    value = nodes.add("Add", ["x", nodes.weight("shift", WIDTH)], "y")
    for number in range(products):
        made = [
            nodes.add("MatMul", [value, nodes.weight(f"w{number}.{k}", WIDTH, WIDTH)], f"p{number}.{k}")
            for k in range(beside)
        ]
        value = nodes.add("Sum", made, f"s{number}") if beside > 1 else made[0]
        value = nodes.add("Add", [value, nodes.weight(f"shift{number}", WIDTH)], f"y{number}")
    graph = helper.make_graph(
        nodes.nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, ["batch", WIDTH])],
        nodes.initializers,
    )
    return bound(model_file(graph), batch=ROWS, training=training)


def laid(graph: Graph, mesh_shape: tuple[int, ...], chosen: Mapping[str, tuple[str, ...]]) -> Program:
    """A plan in float32 on the devices of one node."""
    decisions = on_levels(Laid(graph, mesh_shape, chosen).build(), (("node",),) * len(mesh_shape))
    return lower(graph, replace(decisions, precision="fp32"))


def cluster_with(bytes_per_s: int, ranks: int = RANKS, **device: int) -> Cluster:
    """One node, where next to nothing but products and collectives takes time."""
    cluster = plain_cluster(ranks, bytes_per_s=bytes_per_s)
    return replace(cluster, device=replace(cluster.device, **device))  # type: ignore[arg-type]


def collective_ns(cluster: Cluster, kind: str, num_bytes: int = BYTES, ranks: tuple[int, ...] = (RANKS,)) -> int:
    """What a collective over the first axis takes by itself."""
    axes = tuple(MeshAxis(name=f"axis{number}", size=size) for number, size in enumerate(ranks))
    return CollectiveModel(cluster, Mesh(axes=axes)).cost(kind, (0,), num_bytes).ns


def each(program: Program, cluster: Cluster) -> dict[Overlap, Prediction]:
    """The prediction with each overlap; the simulated step is the same."""
    found = {overlap: predict(program, cluster, overlap=overlap) for overlap in Overlap}
    for overlap, prediction in found.items():
        assert simulate(program, cluster, overlap=overlap).step_ns == prediction.step_ns
    return found


FAST, EVEN, SLOW = 10**11, 2 * 10**9, 10**9
"""Bytes in a second: a collective takes a few percent of a product, about as long, and longer."""


# -- one product -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_per_s", [FAST, EVEN, SLOW])
def test_a_gather_and_the_product_that_reads_it(bytes_per_s: int) -> None:
    """Wang et al., ASPLOS'23: the first part is computed on what is there, the others on what has come meanwhile:
    max(g c, c + n)."""
    cluster = cluster_with(bytes_per_s)
    program = laid(chain(1), (RANKS,), {"y": ("d0",), "p0.0": ("n",), "y0": ("d1",)})
    gather_ns, found = collective_ns(cluster, "all_gather"), each(program, cluster)
    assert found[Overlap.DATA].step_ns == pytest.approx(WHOLE_NS + gather_ns, abs=SLACK_NS)
    expected = max(WHOLE_NS, WHOLE_NS // RANKS + gather_ns)
    assert found[Overlap.ALL].step_ns == pytest.approx(expected, abs=SLACK_NS)
    assert (expected == WHOLE_NS) == (bytes_per_s == FAST)
    assert found[Overlap.ALL].communication_ns == found[Overlap.NONE].communication_ns == gather_ns


@pytest.mark.parametrize("bytes_per_s", [FAST, EVEN, SLOW])
def test_a_product_and_the_sum_of_its_result(bytes_per_s: int) -> None:
    """A reduce-scatter is the mirror image: what is left of it after the last part, no rank needs any more."""
    cluster = cluster_with(bytes_per_s)
    program = laid(chain(1), (RANKS,), {"y": ("d1",), "p0.0": ("k",), "y0": ("d0",)})
    sum_ns, found = collective_ns(cluster, "reduce_scatter"), each(program, cluster)
    assert found[Overlap.DATA].step_ns == pytest.approx(WHOLE_NS + sum_ns, abs=SLACK_NS)
    expected = max(WHOLE_NS, WHOLE_NS // RANKS + sum_ns)
    assert found[Overlap.ALL].step_ns == pytest.approx(expected, abs=SLACK_NS)


@pytest.mark.parametrize("bytes_per_s", [FAST, EVEN, SLOW])
def test_an_all_reduce_leaves_its_last_part(bytes_per_s: int) -> None:
    """In g parts of time m behind g parts of a product of time c: c + m and (g - 1) times the longer of both."""
    cluster = cluster_with(bytes_per_s)
    program = laid(chain(1), (RANKS,), {"y": ("d1",), "p0.0": ("k",), "y0": ("none",)})
    part_ns, product_ns = collective_ns(cluster, "all_reduce", BYTES // RANKS), WHOLE_NS // RANKS
    found = each(program, cluster)
    expected = part_ns + product_ns + (RANKS - 1) * max(part_ns, product_ns)
    assert found[Overlap.ALL].step_ns == pytest.approx(expected, abs=SLACK_NS)
    assert found[Overlap.ALL].hidden[PRODUCT] == pytest.approx((RANKS - 1) * min(part_ns, product_ns), abs=SLACK_NS)


def test_parts_may_cost_more_than_they_hide() -> None:
    """Each part is a launch of its own: where four parts, or two of two each, gain nothing, the product stays whole."""
    program = laid(chain(1), (RANKS,), {"y": ("d0",), "p0.0": ("n",), "y0": ("d1",)})
    gather_ns = collective_ns(cluster_with(FAST), "all_gather")
    for launch_ns in (WHOLE_NS // RANKS, WHOLE_NS // 2, WHOLE_NS // 2 + gather_ns // 2, WHOLE_NS):
        found = each(program, cluster_with(FAST, launch_ns=launch_ns))
        whole_ns, most_ns = found[Overlap.DATA].step_ns, gather_ns * 2 // 3
        gains = {
            parts: (gather_ns if parts == 4 else most_ns) - max(0, parts * max(launch_ns, WHOLE_NS // parts) - WHOLE_NS)
            for parts in (2, 4)
        }
        if launch_ns == WHOLE_NS:
            gains = {2: most_ns - WHOLE_NS}
        expected = whole_ns - max(0, *gains.values())
        assert found[Overlap.ALL].step_ns == pytest.approx(expected, abs=SLACK_NS)
    assert found[Overlap.ALL] == replace(
        found[Overlap.DATA], hidden={**found[Overlap.DATA].hidden, PRODUCT: 0, UPDATED: 0}
    )


def test_a_weight_that_is_read_again_by_each_part() -> None:
    """Parts read the whole matrix each: few rows and slow memory make two parts, or one, better than four."""
    cluster = cluster_with(EVEN, memory_bandwidth_bytes_per_s=10**11)
    program = laid(chain(1), (RANKS,), {"y": ("d0",), "p0.0": ("n",), "y0": ("d1",)})
    again_ns = 10**9 * 4 * WIDTH * WIDTH // RANKS / (10**8 * cluster.device.memory_efficiency_permille)
    gather_ns, found = collective_ns(cluster, "all_gather"), each(program, cluster)
    whole_ns = found[Overlap.DATA].step_ns
    product_ns = WHOLE_NS + 1000 * (4 * WIDTH * WIDTH // RANKS + BYTES + BYTES // RANKS) / (
        100 * cluster.device.memory_efficiency_permille
    )
    parts_ns = {parts: product_ns + (parts - 1) * again_ns for parts in (2, 4)}
    both_ns = [
        max(parts_ns[2] + gather_ns / 3, parts_ns[2] / 2 + gather_ns),
        max(parts_ns[4], parts_ns[4] / 4 + gather_ns),
    ]
    expected = whole_ns - (product_ns + gather_ns) + min(product_ns + gather_ns, *both_ns)
    assert found[Overlap.ALL].step_ns == pytest.approx(expected, rel=1e-4)


# -- several ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_per_s", [FAST, EVEN, SLOW])
def test_a_product_hides_no_more_than_itself(bytes_per_s: int) -> None:
    """The gather before a product and the sum after it, over two ranks each, share one half of it."""
    cluster = cluster_with(bytes_per_s)
    chosen = {"y": ("d0", "d1"), "p0.0": ("n", "k"), "y0": ("d1", "d0")}
    program = laid(chain(1), (2, 2), chosen)
    gather_ns = collective_ns(cluster, "all_gather", BYTES // 2, (2, 2))
    sum_ns = collective_ns(cluster, "reduce_scatter", BYTES // 2, (2, 2))
    found = each(program, cluster)
    assert found[Overlap.DATA].step_ns == pytest.approx(WHOLE_NS + gather_ns + sum_ns, abs=SLACK_NS)
    hidden = min(gather_ns + sum_ns, WHOLE_NS // 2)
    assert found[Overlap.ALL].hidden[PRODUCT] == pytest.approx(hidden, abs=SLACK_NS)


def test_a_gather_hides_behind_all_that_read_it() -> None:
    """Queries, keys and values apart: longer than one product, shorter than three, it is hidden all the same."""
    cluster = cluster_with(EVEN)
    names = [f"p0.{k}" for k in range(3)]
    chosen = {"y": ("d0",), **dict.fromkeys(names, ("n",)), "s0": ("d1",), "y0": ("d1",)}
    found = each(laid(chain(1, beside=3), (RANKS,), chosen), cluster)
    gather_ns = collective_ns(cluster, "all_gather")
    assert WHOLE_NS < gather_ns < 2 * WHOLE_NS
    assert found[Overlap.ALL].step_ns == pytest.approx(3 * WHOLE_NS, abs=SLACK_NS)
    assert found[Overlap.ALL].hidden[PRODUCT] == gather_ns


@pytest.mark.parametrize("bytes_per_s", [FAST, 4 * 10**9, EVEN, SLOW])
def test_backward_sums_hide_behind_the_parameters_gradient(bytes_per_s: int) -> None:
    """A column and a row product, sequence-parallel: forward one gather and one sum, backward the same again; the sum
    of the operand's gradient hides behind the whole product of the parameter's, others behind g - 1 parts of one."""
    cluster = cluster_with(bytes_per_s)
    chosen = {"y": ("d0",), "p0.0": ("n",), "y0": ("d1",), "p1.0": ("k",), "y1": ("d0",), "loss": ("d0",)}
    program = laid(chain(2, training=True), (RANKS,), chosen)
    ns = collective_ns(cluster, "all_gather")
    found = each(program, cluster)
    expected = 3 * min(ns, WHOLE_NS * (RANKS - 1) // RANKS) + min(ns, WHOLE_NS)
    assert found[Overlap.ALL].hidden[PRODUCT] == pytest.approx(expected, abs=SLACK_NS)
    gained = found[Overlap.DATA].step_ns - found[Overlap.ALL].step_ns
    assert gained == pytest.approx(expected, abs=2 * SLACK_NS)


def test_nothing_else_hides_it() -> None:
    """A gather before a sum of two tensors is waited for."""
    program = laid(chain(1), (RANKS,), {"y": ("d0",), "p0.0": ("none",), "y0": ("none",)})
    cluster = cluster_with(EVEN)
    gathered = each(program, cluster)
    assert gathered[Overlap.ALL].hidden[PRODUCT] > 0
    program = laid(chain(1), (RANKS,), {"y": ("d0",), "p0.0": ("m",), "y0": ("none",)})
    found = each(program, cluster)
    assert found[Overlap.ALL].step_ns == found[Overlap.DATA].step_ns
    assert found[Overlap.ALL].hidden[PRODUCT] == 0


# -- the next step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("fast", [True, False], ids=["fast links", "slow links"])
def test_gathers_of_updated_parameters_hide_behind_the_next_step(microbatches: int, fast: bool) -> None:
    """ZeRO 1 of L equal layers: the first layer waits for its gather, behind each layer runs that of the next: once a
    step (L - 1) min(c, n)."""
    cluster = two_nodes(10**12 if fast else 10**9)
    program = mlp_program(1, microbatches)
    data, everything = (predict(program, cluster, overlap=overlap) for overlap in (Overlap.DATA, Overlap.ALL))
    one, *_ = backward_ns(program, cluster)
    gather_ns = (data.communication_ns - sum_of_reductions(program, cluster)) // LAYERS
    layer_ns = one - (cluster.device.backward_floor_ns - cluster.device.launch_ns)
    expected = (LAYERS - 1) * min(gather_ns, layer_ns)
    assert (gather_ns < layer_ns) == fast
    assert everything.hidden[UPDATED] == pytest.approx(expected, abs=SLACK_NS)
    assert everything.hidden[GRADIENT] == data.hidden[GRADIENT]
    assert data.step_ns - everything.step_ns == everything.hidden[UPDATED]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_stage_that_waits_for_its_gathers_holds_up_the_others(name: str) -> None:
    """Two stages of two layers: the first waits for the gather of its first layer, the second has time for both of its
    own until the first microbatch comes; of two gathers that either waited for, one is left to the step."""
    layers, width = 4, 8192
    graph = mlp(layers, width=width, rows=8)
    program = replicated(graph, layer_starts(layers, 2), make_schedule(name, 2, 4), ranks=2, zero=1)
    cluster = plain_cluster(1, nodes=4, bytes_per_s=2 * 10**12)
    mesh = Mesh(axes=(MeshAxis(name="a", size=2),), num_stages=2)
    gather_ns = CollectiveModel(cluster, mesh).cost("all_gather", (0,), 4 * width * width).ns
    data, timeline = (simulate(program, cluster, overlap=overlap) for overlap in (Overlap.DATA, Overlap.ALL))
    assert [stage.exposed_ns.get(UPDATED, 0) for stage in data.stages] == pytest.approx([2 * gather_ns] * 2, rel=1e-2)
    assert timeline.stages[0].exposed_ns[UPDATED] == pytest.approx(gather_ns, rel=1e-2)
    assert timeline.stages[1].exposed_ns.get(UPDATED, 0) == pytest.approx(0, abs=SLACK_NS)
    assert data.step_ns - timeline.step_ns == pytest.approx(gather_ns, rel=1e-2)


def sum_of_reductions(program: Program, cluster: Cluster) -> int:
    """Time of all reductions of gradients."""
    model = CollectiveModel(cluster, Mesh(axes=(MeshAxis(name="dp", size=2),)))
    return sum(model.cost("reduce_scatter", (0,), 2 * bucket.elements).ns for bucket in program.decisions.buckets)


# -- rules ------------------------------------------------------------------------------------------------------------


def without_launches(cluster: Cluster) -> Cluster:
    """So that parts of tiny products are worth their while."""
    return replace(cluster, device=replace(cluster.device, launch_ns=0, backward_launch_ns=0))


@pytest.mark.parametrize(
    ("name", "seed"), list(itertools.product(("gpt2_tiny", "gshard_moe_tiny", "t5_tiny"), range(12)))
)
def test_more_overlap_is_never_slower(name: str, seed: int) -> None:
    """Without a pipeline; the prediction and the simulated step agree, and communication is hidden at most once."""
    zero, recompute = random.Random(seed).choice(SETTINGS)
    graph = graph_of(name)
    plan = RandomPlan(graph, (2, 2), seed, zero=zero, recompute=recompute, microbatches=1 + seed % 3).build()
    program = lower(graph, on_levels(replace(plan, precision="bf16"), LEVELS[2, 2]))
    found = each(program, without_launches(load_cluster("2x2:a100-sxm4-80gb")))
    assert found[Overlap.NONE].step_ns >= found[Overlap.DATA].step_ns >= found[Overlap.ALL].step_ns
    assert found[Overlap.NONE].hidden_ns == 0 == sum(found[Overlap.DATA].hidden.get(k, 0) for k in (PRODUCT, UPDATED))
    for prediction in found.values():
        assert min(prediction.hidden.values()) >= 0 and prediction.hidden_ns <= prediction.communication_ns


def test_random_plans_hide_something() -> None:
    """The rules above are about something: of these plans, some hide behind products, and some behind the next step."""
    hidden: dict[str, int] = {PRODUCT: 0, UPDATED: 0}
    for seed in range(12):
        plan = RandomPlan(graph_of("gpt2_tiny"), (2, 2), seed, zero=1).build()
        program = lower(graph_of("gpt2_tiny"), on_levels(replace(plan, precision="bf16"), LEVELS[2, 2]))
        cluster = without_launches(load_cluster("2x2:a100-sxm4-80gb"))
        prediction = predict(program, cluster, overlap=Overlap.ALL)
        for kind in hidden:
            hidden[kind] += prediction.hidden[kind] > 0
    assert min(hidden.values()) > 3


@everywhere
def test_pipelines_account_for_what_products_hide(name: str, seed: int) -> None:
    """On each stage compute, exposed communication and bubble make up the step, which is no shorter than its bounds and
    no longer than without; what stages hold is the same."""
    program, cluster = drawn(name, seed, "nccl")
    cluster = without_launches(cluster)
    plain, timeline = (simulate(program, cluster, overlap=overlap) for overlap in (Overlap.DATA, Overlap.ALL))
    bounds = lower_bounds(program, cluster, overlap=Overlap.ALL)
    assert 0 < bounds.step_ns <= timeline.step_ns <= plain.step_ns
    assert predict(program, cluster, overlap=Overlap.ALL).step_ns == timeline.step_ns
    for before, stage in zip(plain.stages, timeline.stages, strict=True):
        assert stage.compute_ns + sum(stage.exposed_ns.values()) + stage.bubble_ns == timeline.step_ns
        assert stage.bubble_ns >= 0
        assert all(0 <= ns <= stage.communication_ns[kind] for kind, ns in stage.hidden_ns.items())
        assert PRODUCT not in stage.exposed_ns
        assert stage.memory.peak_bytes == before.memory.peak_bytes
