"""Strategies, block hints and the batch, on the operators of real models and on graphs written for the purpose."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tap_planner.graph import BindOptions, Graph, LossOptions, bind
from tap_planner.operators import FactorKind, OperatorSignature, rule_of
from tap_planner.sharding import (
    Placement,
    Strategy,
    block_hints,
    enumerate_strategies,
    fits,
    local_shape,
    map_batch,
    shard,
)
from tests.graph.models import TINY, data_model, symbols, text_model

MESHES = ((2,), (3,), (2, 2), (2, 4))
Hints = tuple[tuple[int, ...], ...]


@functools.cache
def tiny(name: str, batch: int = 6) -> Graph:
    """A model bound for training; its batch is like no other size."""
    model = data_model(name)
    dims = {dim: 16 for dim in ("seq", "dec_seq", "enc_seq") if dim in symbols(model)}
    return bind(model, BindOptions(batch=batch, dims=dims, training=True, loss=LossOptions(kind="mean")))


@functools.cache
def distinct_operators(name: str) -> tuple[tuple[OperatorSignature, Hints], ...]:
    """The different (signature, hints) of a model."""
    graph = tiny(name)
    hints = block_hints(graph)
    return tuple(dict.fromkeys((operator.signature, hints[operator.id]) for operator in graph.operators))


def strategies_of(signature: OperatorSignature, hints: Hints, mesh: tuple[int, ...]) -> tuple[Strategy, ...]:
    """All strategies, with every operand allowed to be partial."""
    return enumerate_strategies(signature, rule_of(signature), mesh, hints, [True] * len(signature.inputs))


@pytest.mark.parametrize("name", TINY)
def test_every_placement_of_every_strategy_fits(name: str) -> None:
    """No strategy asks for a placement that its operand or output cannot have."""
    for signature, hints in distinct_operators(name):
        for mesh in MESHES:
            for strategy in strategies_of(signature, hints, mesh):
                operands = zip(
                    (*signature.inputs, *signature.outputs), (*strategy.inputs, *strategy.outputs), strict=True
                )
                for operand, placements in operands:
                    assert (operand is None) == (placements is None)
                    if operand is not None and placements is not None:
                        assert len(placements) == len(mesh)
                        assert fits(operand.shape, placements, mesh)


@pytest.mark.parametrize("name", TINY)
def test_the_first_strategy_replicates(name: str) -> None:
    """The first strategy is ``none`` on every axis, all replicated; no strategy occurs twice."""
    for signature, hints in distinct_operators(name):
        for mesh in MESHES:
            strategies = strategies_of(signature, hints, mesh)
            first = strategies[0]
            assert first.names(rule_of(signature)) == ("none",) * len(mesh)
            placements = [*filter(None, first.inputs), *first.outputs]
            assert all(p.is_replicate for axes in placements for p in axes)
            assert len({strategy.names(rule_of(signature)) for strategy in strategies}) == len(strategies)


def expected_gradient(placement: Placement, outputs: list[Placement]) -> str:
    """Definition of duality on one axis."""
    if placement.is_shard:
        return str(placement)
    if placement.is_partial:
        return "R"
    return "P(sum)" if any(not output.is_replicate for output in outputs) else "R"


@pytest.mark.parametrize("name", TINY)
def test_gradients_are_dual(name: str) -> None:
    """S has an S gradient, P(sum) an R one, R a P one if some output is not R on the axis, else R."""
    for signature, hints in distinct_operators(name):
        for strategy in strategies_of(signature, hints, (2, 2)):
            for placements, gradients in zip(strategy.inputs, strategy.input_gradients, strict=True):
                assert (placements is None) == (gradients is None)
                for axis, placement in enumerate(placements or ()):
                    assert gradients is not None
                    outputs = [output[axis] for output in strategy.outputs]
                    assert str(gradients[axis]) == expected_gradient(placement, outputs)


@pytest.mark.parametrize("name", TINY)
def test_a_split_factor_splits_the_operands_that_hold_it(name: str) -> None:
    """On one axis of two a split factor shards exactly what holds it; a summed one makes the other outputs partial."""
    for signature, hints in distinct_operators(name):
        rule = rule_of(signature)
        for strategy in strategies_of(signature, hints, (2,)):
            (choice,) = strategy.choices
            if choice.kind != "factor":
                continue
            summed = rule.factors[choice.index].kind is FactorKind.SUM
            for operand, placements in zip(rule.inputs, strategy.inputs, strict=True):
                if operand is not None and placements is not None:
                    assert placements[0].is_shard == any(choice.index in dim for dim in operand)
            for output, placements in zip(rule.outputs, strategy.outputs, strict=True):
                holds = any(choice.index in dim for dim in output)
                assert placements[0].is_shard == holds
                assert placements[0].is_partial == (summed and not holds)


@pytest.mark.parametrize("name", TINY)
def test_factor_sizes_are_those_of_the_local_shapes(name: str) -> None:
    """The local dims of every sharded operand are the products of the strategy's factor sizes."""
    for signature, hints in distinct_operators(name):
        rule = rule_of(signature)
        for strategy in strategies_of(signature, hints, (2, 2)):
            operands = (*zip(signature.inputs, rule.inputs, strategy.inputs, strict=True),)
            outputs = (*zip(signature.outputs, rule.outputs, strategy.outputs, strict=True),)
            for operand, dims, placements in (*operands, *outputs):
                if operand is None or dims is None or placements is None:
                    continue
                local = local_shape(operand.shape, placements, (2, 2))
                for dim, factors in enumerate(dims):
                    if any(p.is_shard and p.dim == dim for p in placements):
                        size = 1
                        for factor in factors:
                            size *= strategy.factor_sizes[factor]
                        assert local[dim] == size


def graph_of(folder: Path, body: str) -> Graph:
    """A graph from ONNX text, for training."""
    model = text_model(folder, body)
    return bind(model, BindOptions(batch=4, training=True, loss=LossOptions(kind="mean")))


def hints_of(graph: Graph, type: str, factor: str) -> tuple[int, ...]:
    """Block counts of a factor of the first operator of a type."""
    operator = next(found for found in graph.operators if found.type == type)
    names = [known.name for known in rule_of(operator.signature).factors]
    return block_hints(graph)[operator.id][names.index(factor)]


FUSED = """
g (float[batch, 8] x) => (float[batch, 8] y)
<float[8, 24] w = {%s}, int64[3] sizes = {8, 8, 8}> {
    qkv = MatMul(x, w)
    q, k, v = Split<axis = 1>(qkv, sizes)
    s = Add(q, k)
    y = Add(s, v)
}
""" % ", ".join(["0"] * 192)  # noqa: UP031

HEADS = """
g (float[batch, 6, 5, 8] x) => (float[heads, 5, 8] y)
<int64[3] shape = {-1, 5, 8}> {
    r = Relu(x)
    merged = Reshape(r, shape)
    y = Relu(merged)
}
"""


def test_a_fused_projection_may_be_split_in_three_blocks(tmp_path: Path) -> None:
    """The columns of a fused QKV matrix can be split inside each of its three parts."""
    assert hints_of(graph_of(tmp_path, FUSED), "MatMul", "n") == (3,)


def test_a_fused_projection_has_the_strategy_of_three_blocks(tmp_path: Path) -> None:
    """Split in blocks, the projection's output is S(1, blocks=3) and the Split's parts are S(1)."""
    graph = graph_of(tmp_path, FUSED)
    hints = block_hints(graph)
    product, split = graph.operators[:2]
    made = {
        strategy.names(rule_of(product.signature))[0]: strategy.outputs[0][0]
        for strategy in strategies_of(product.signature, hints[product.id], (2,))
    }
    assert made["n[3]"] == shard(1, 3)
    read = [s for s in strategies_of(split.signature, hints[split.id], (2,)) if s.inputs[0] == (shard(1, 3),)]
    assert [strategy.outputs for strategy in read] == [((shard(1),),) * 3]


def test_merged_batch_and_heads_may_be_split_by_heads(tmp_path: Path) -> None:
    """[B, H, S, D] -> [B*H, S, D] with batch 4: the merged dim can be split inside each of 4 blocks."""
    graph = graph_of(tmp_path, HEADS)
    last = next(operator for operator in reversed(graph.operators) if operator.type == "Relu")
    assert block_hints(graph)[last.id][0] == (4,)


def test_batch_and_heads_on_two_axes_is_a_blocks_shard(tmp_path: Path) -> None:
    """Batch on one axis and heads on the other merge to S(0) and S(0, blocks=4)."""
    graph = graph_of(tmp_path, HEADS)
    reshape = next(operator for operator in graph.operators if operator.type == "Reshape")
    found = [
        strategy.outputs[0]
        for strategy in strategies_of(reshape.signature, block_hints(graph)[reshape.id], (2, 2))
        if strategy.inputs[0] == (shard(0), shard(1))
    ]
    assert found == [(shard(0), shard(0, 4))]


def growing_factors(name: str) -> list[tuple[str, frozenset[int], frozenset[int]]]:
    """Per operator: its id, the factors mapped to the batch, and those whose size changes with the batch."""
    small, large = tiny(name), tiny(name, 14)
    found = map_batch(small).factors
    result: list[tuple[str, frozenset[int], frozenset[int]]] = []
    for one, other in zip(small.operators, large.operators, strict=True):
        sizes = zip(rule_of(one.signature).factors, rule_of(other.signature).factors, strict=True)
        growing = frozenset(index for index, (a, b) in enumerate(sizes) if a.size != b.size)
        result.append((one.id, found.get(one.id, frozenset()), growing))
    return result


@pytest.mark.parametrize("name", TINY)
def test_the_batch_grows_when_another_is_bound(name: str) -> None:
    """No factor is taken for the batch whose size stays when another batch is bound."""
    assert [id for id, mapped, growing in growing_factors(name) if mapped - growing] == []


@pytest.mark.parametrize("name", ["gpt2_tiny", "llama_tiny", "resnet_small", "gshard_moe_tiny"])
def test_what_grows_with_the_batch_is_mapped(name: str) -> None:
    """Where the batch comes from the inputs alone, every factor that grows with it is found."""
    assert [id for id, mapped, growing in growing_factors(name) if mapped != growing] == []


def test_gpt2_has_no_obstacle_to_microbatches() -> None:
    """Every operator of GPT-2 can split the batch."""
    assert map_batch(tiny("gpt2_tiny")).obstacles == ()


def test_what_depends_on_the_whole_batch_is_an_obstacle(tmp_path: Path) -> None:
    """A softmax over the batch forbids microbatches and is named."""
    graph = graph_of(tmp_path, "g (float[batch, 8] x) => (float[batch, 8] y) { r = Relu(x) y = Softmax<axis = 0>(r) }")
    assert map_batch(graph).obstacles == ("y",)
