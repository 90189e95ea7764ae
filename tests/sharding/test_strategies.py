"""Strategies, block hints and the batch, on the operators of real models and on graphs written for the purpose."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest

from tap_planner.graph import BindOptions, Graph, LossOptions, bind
from tap_planner.operators import FactorKind, OperatorSignature, TensorType, rule_of
from tap_planner.sharding import (
    PARTIAL,
    REPLICATE,
    Choice,
    Placement,
    Strategy,
    axis_choices,
    block_hints,
    enumerate_strategies,
    fits,
    local_shape,
    map_batch,
    parse_choice,
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


def attention(heads: int, queries: int, keys: int) -> OperatorSignature:
    """Fused attention with two query heads per key head and a mask by query and key."""
    query, key, mask, shape = (3, 2 * heads, queries, 8), (3, heads, keys, 8), (1, 1, queries, keys), "float32"
    operands = tuple(TensorType(dtype=shape, shape=found) for found in (query, key, key, mask))
    outputs = (operands[0], *operands[1:3])
    return OperatorSignature(type="Attention", attributes=(), inputs=operands, outputs=outputs)


def rings_of(signature: OperatorSignature, mesh: tuple[int, ...]) -> dict[tuple[str, ...], Strategy]:
    """Strategies with a ring on some axis, by name."""
    rule = rule_of(signature)
    found = strategies_of(signature, tuple(() for _ in rule.factors), mesh)
    return {strategy.names(rule): strategy for strategy in found if "ring" in strategy.names(rule)}


def test_rings_are_even() -> None:
    """Queries and keys are both split evenly, or there is no ring; an axis of one device is no obstacle."""
    for queries, keys, mesh, possible in (
        (12, 12, (4,), True),
        (12, 24, (6,), True),
        (12, 18, (4,), False),
        (18, 12, (4,), False),
        (13, 13, (2,), False),
        (12, 12, (1,), True),
        (3, 3, (4,), False),
    ):
        assert bool(rings_of(attention(2, queries, keys), mesh)) == possible, (queries, keys, mesh)


def test_a_ring_holds_parts_of_queries_and_keys() -> None:
    """Operands, gradients and results are parts along the sequence, the mask along its queries; a rank computes its
    queries against all keys, and sees those of all ranks."""
    signature = attention(2, 12, 24)
    rule = rule_of(signature)
    (found,) = rings_of(signature, (4,)).values()
    placements = ((shard(2),),) * 4
    assert found.inputs == found.input_gradients == placements
    assert found.outputs == placements[:3]
    sizes = {factor.name: size for factor, size in zip(rule.factors, found.factor_sizes, strict=True)}
    assert (sizes["s"], sizes["t"]) == (3, 24)
    assert found.input_passes == (1, 4, 4, 1)
    (exchange,) = rule.collectives
    assert found.axes_over(rule, exchange.factor) == (0,)
    ranks = [4 if factor == exchange.factor else 1 for factor in range(len(rule.factors))]
    assert exchange.num_elements(found.factor_sizes, ranks) == 3 * 2 * (24 // 4) * (8 + 8)
    assert exchange.times(ranks) == 3
    assert exchange.times(ranks, (True, True, True, True)) == 6
    assert exchange.times(ranks, (True, False, False, False)) == 3


def test_rings_beside_other_splits() -> None:
    """Two axes are one ring of all their ranks; beside a ring batch, heads and queries may be split."""
    found = rings_of(attention(2, 12, 12), (3, 2))
    other = {"none", "b", "h", "s", "ring"}
    assert set(found) == {(a, b) for a in other for b in other if "ring" in (a, b)} - {("h", "ring")}
    assert found["ring", "ring"].inputs[1] == (shard(2), shard(2))
    assert found["ring", "s"].inputs[:2] == ((shard(2), shard(2)), (shard(2), REPLICATE))
    assert found["ring", "s"].input_gradients[1] == (shard(2), PARTIAL)
    assert found["ring", "h"].inputs[1] == (shard(2), shard(1))
    assert found["ring", "ring"].input_passes == (1, 6, 6, 1)


def test_choices_have_names_that_can_be_read_again() -> None:
    """Every choice of every operator is found by its name."""
    for name in TINY:
        for signature, hints in distinct_operators(name):
            rule = rule_of(signature)
            for choice in axis_choices(rule, hints, [True] * len(signature.inputs)):
                assert parse_choice(rule, choice.name(rule)) == choice
    rule = rule_of(attention(2, 12, 12))
    assert parse_choice(rule, "ring") == Choice("ring", 0)
    for unknown in ("ring[1]", "rings", "partial", ""):
        with pytest.raises(ValueError, match="no choice"):
            parse_choice(rule, unknown)


def test_space_with_a_halo_is_split_evenly_and_not_too_far() -> None:
    """Rows 0 to 11 under a 5x5 kernel: parts of at least two rows, all equal and contiguous, over one axis or two."""
    signature = OperatorSignature(
        type="Conv",
        attributes=(("group", 1), ("kernel_shape", (5, 5)), ("pads", (2, 2, 2, 2))),
        inputs=(TensorType(dtype="float32", shape=(1, 1, 12, 1)), TensorType(dtype="float32", shape=(1, 1, 5, 5))),
        outputs=(TensorType(dtype="float32", shape=(1, 1, 12, 1)),),
    )
    rule = rule_of(signature)
    (space,) = [index for index, factor in enumerate(rule.factors) if factor.kind is FactorKind.PARALLEL]
    hints: Hints = tuple((2, 3) if index == space else () for index in range(len(rule.factors)))
    for mesh in ((2,), (3,), (4,), (5,), (6,), (7,), (8,), (12,), (2, 2), (2, 3), (3, 2), (2, 4), (3, 4), (1, 6)):
        split = [
            found
            for found in strategies_of(signature, hints, mesh)
            if all(choice.kind == "factor" for choice in found.choices)
        ]
        allowed = math.prod(mesh) in (2, 3, 4, 6)
        assert [found.names(rule) for found in split] == ([("s0",) * len(mesh)] if allowed else []), mesh
        for found in split:
            assert found.factor_sizes[space] == 12 // math.prod(mesh)
            assert found.axes_over(rule, space) == tuple(range(len(mesh)))
            assert found.inputs[0] == found.outputs[0] == (shard(2),) * len(mesh)
            assert found.inputs[1] == (REPLICATE,) * len(mesh)
            assert found.input_gradients[1] == (PARTIAL,) * len(mesh)
