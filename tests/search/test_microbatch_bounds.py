"""What is said of a microbatch count from the graph of fewer microbatches holds of its own graph."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tap_planner import api
from tap_planner.operators import FactorRule, rule_of
from tap_planner.plan import PlanOptions, PlanRequest
from tap_planner.search import Weights, search
from tap_planner.search.enumeration import SearchSpace
from tap_planner.search.terms import UNREACHABLE
from tap_planner.sharding import Strategy

pytestmark = pytest.mark.usefixtures("without_buffers")

DATA = Path(__file__).parents[1] / "data"
NO_SEQUENCE = ("dlrm_tiny", "gshard_moe_tiny", "resnet_small", "unet_tiny", "vit_tiny")
MODELS = (
    "bert_tiny",
    "dlrm_tiny",
    "gpt2_tiny",
    "gshard_moe_tiny",
    "hm_gpt_tiny",
    "hm_llama_tiny",
    "hm_mixtral_tiny",
    "llama_tiny",
    "mixtral_tiny_batched_mm",
    "resnet_small",
    "t5_tiny",
    "unet_tiny",
    "vit_tiny",
)
BATCH = 16
MESHES = ("dp=8", "dp=2,tp=4")
PAIRS = ((1, 4), (1, 16), (2, 8))
"""Counts of the graph that is asked, and of the microbatches that it is asked about."""


@cache
def space_of(model: str, mesh: str) -> SearchSpace:
    """The space of a tiny model on a mesh of eight devices."""
    dims = {"t5_tiny": {"seq": 8, "dec_seq": 8}}.get(model, {} if model in NO_SEQUENCE else {"seq": 16})
    options = PlanOptions(batch=BATCH, dims=dims, mesh=mesh)
    request = PlanRequest(model=DATA / f"{model}.onnx", cluster="2x4:a100-sxm4-80gb", options=options)
    return SearchSpace(api.prepare_search(request).request)


def _names(strategy: Strategy, rule: FactorRule) -> tuple[str, ...]:
    """Its choices; in how many blocks a factor is split may depend on the batch."""
    return tuple(name.partition("[")[0] + "[]" * (name[-1] == "]") for name in strategy.names(rule))


def pairs_of(space: SearchSpace) -> list[tuple[int, int]]:
    """The pairs of counts that the space has, and of which one graph tells of the other."""
    return [pair for pair in PAIRS if set(pair) <= set(space.counts) and space.is_like_first(pair[1])]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_operators_are_bounded_and_lose_only_strategies_that_are_lost(model: str, mesh: str) -> None:
    """Every strategy of an operator in the graph of more microbatches is one in that of fewer, is not among the lost
    ones, and takes no less time; and all that are called lost are not there."""
    space = space_of(model, mesh)
    (settings,) = space.settings(0)
    pairs = [pair for pair in pairs_of(space) if pair[1] < BATCH]  # one sample has no batch, and factors of other names
    lost = 0
    for graph_of, count in pairs:
        own, other = space.costed(0, settings, None, count), space.costed(0, settings, None, count, graph_of=graph_of)
        for index in own.model.space.index.skeleton:
            rule = rule_of(own.model.graph.operators[index].signature)
            ns, bounds = own.operator_ns(index), other.operator_ns(index)
            least: dict[tuple[str, ...], np.ndarray] = {}
            for place, strategy in enumerate(other.model.space.operator(index).strategies):
                name = _names(strategy, rule)
                least[name] = np.minimum(bounds[:, place], least.get(name, bounds[:, place]))
            for place, strategy in enumerate(own.model.space.operator(index).strategies):
                assert bool((least[_names(strategy, rule)] <= ns[:, place]).all())
            mine = {_names(strategy, rule) for strategy in own.model.space.operator(index).strategies}
            gone = {name for name, found in least.items() if bool((found >= UNREACHABLE).all())}
            assert not gone & mine
            lost += len(gone)
    assert lost or not pairs


@pytest.mark.parametrize("model", ["bert_tiny", "dlrm_tiny", "gshard_moe_tiny", "hm_mixtral_tiny", "vit_tiny"])
def test_weighted_bounds_are_below_the_plans_of_the_own_graph(model: str) -> None:
    """At every multiplier the relaxed bound from the graph of fewer microbatches is no more than what the solution from
    their own graph costs; nor is the one bound for all larger counts, with what the least of them pays for each
    microbatch, the activations of the largest, and the strategies of any."""
    space = space_of(model, MESHES[-1])
    (settings,) = space.settings(0)
    counts = [count for count in space.counts if space.is_like_first(count)]
    for count in counts[1:]:
        own = space.solver(space.costed(0, settings, None, count))
        one = space.solver(space.costed(0, settings, None, count, graph_of=1))
        more = space.solver(space.costed(0, settings, None, 2, graph_of=1, and_more=True))
        assert space.tells_of_all_from(1, 2) == (counts == list(space.counts))
        for time, memory in ((1, 0), (1, 1), (1, 16)):
            weighted = own.minimise(Weights(time, memory)).weighted(Weights(time, memory))
            assert one.minimise(Weights(time, memory, count)).bound <= weighted
            assert more.minimise(Weights(time, memory, counts[-1])).bound <= weighted


@pytest.mark.parametrize(("model", "is_like"), [("vit_tiny", False), ("gpt2_tiny", True)])
def test_one_sample_may_need_fewer_operators(model: str, is_like: bool) -> None:
    """A class token is not expanded to a batch of one: the graphs of larger microbatches say nothing of that of one
    sample, which is looked at itself."""
    space = space_of(model, "dp=8")
    assert space.is_like_first(BATCH // 2)
    assert space.is_like_first(BATCH) == is_like
    assert is_like == (len(space.graph(BATCH).operators) == len(space.graph(1).operators))


def test_a_fixed_batch_leaves_one_microbatch(tmp_path: Path) -> None:
    """Under a limit that asks for smaller microbatches a model that has no other batch is planned with one of them."""
    nodes: list[onnx.NodeProto] = []
    for layer in range(6):
        nodes.append(helper.make_node("MatMul", [f"r{layer}", f"w{layer}"], [f"h{layer}"]))
        nodes.append(helper.make_node("Relu", [f"h{layer}"], [f"r{layer + 1}"]))
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4096, 1024]) for name in ("r0", "r6")]
    weights = [numpy_helper.from_array(np.ones((1024, 1024), np.float32), f"w{layer}") for layer in range(6)]
    graph = helper.make_graph(nodes, "fixed", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "fixed.onnx")
    options = PlanOptions(max_memory_bytes=46_000_000)
    request = PlanRequest(model=tmp_path / "fixed.onnx", cluster="1x4:a100-sxm4-80gb", options=options)
    result = search(api.prepare_search(request).request)
    assert result.decisions.microbatches == 1 and result.memory_bytes <= 46_000_000
    assert result.notes == ("one microbatch only: the model has a fixed batch of 4096",)
