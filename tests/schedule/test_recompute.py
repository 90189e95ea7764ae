"""What runs again under selective recompute: against enumeration, and on real blocks."""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest
from onnx import TensorProto, helper

from tap_planner.folding import FoldedGraph, Run, fold
from tap_planner.graph import BindOptions, Graph, LossOptions, TensorKind, bind
from tap_planner.operators import kept_for_backward, record_of
from tap_planner.schedule import CHEAP_FLOPS, is_cheap, made_gradients, rerun_by_region, rerun_operators
from tests.graph.models import data_model, symbols
from tests.search.models import Nodes, bound, model_file

_ELEMENT_BYTES = {"float32": 2, "float16": 2, "bfloat16": 2, "int64": 8, "bool": 1, "int32": 4}
"""Floats are computed in two bytes."""


@functools.cache
def folded_model(name: str, seq: int) -> FoldedGraph:
    """A model bound for training, folded."""
    model = data_model(name)
    dims = {dim: seq for dim in ("seq", "dec_seq", "enc_seq") if dim in symbols(model)}
    return fold(bind(model, BindOptions(batch=8, dims=dims, training=True, loss=LossOptions(kind="mean"))))


def occurrence(run: Run, number: int) -> range:
    """Operators of an occurrence."""
    return range(run.start + number * run.period, run.start + (number + 1) * run.period)


def readable_outside(graph: Graph, indices: range) -> set[str]:
    """Tensors that operators outside read, and graph outputs."""
    found = set(graph.outputs)
    for index, operator in enumerate(graph.operators):
        if index not in indices:
            found.update(name for name in operator.inputs if name is not None)
    return found


def cost(graph: Graph, indices: range, again: frozenset[int]) -> tuple[int, int]:
    """(Bytes that are held, operators that run again), from the definition."""
    made = {name for index in again for name in graph.operators[index].outputs}
    held: set[str] = set()
    for index in indices:
        operator = graph.operators[index]
        inputs, outputs = kept_for_backward(record_of(operator.signature), made_gradients(graph, operator))
        held.update(name for position in inputs if (name := operator.inputs[position]) is not None)
        held.update(operator.outputs[position] for position in outputs)
        if index in again:
            held.update(name for name in operator.inputs if name is not None)
    types = {name: graph.tensors[name] for name in held - made}
    stored = [tensor.type for tensor in types.values() if tensor.kind in (TensorKind.ACTIVATION, TensorKind.INPUT)]
    return sum(math.prod(type.shape) * _ELEMENT_BYTES[type.dtype] for type in stored), len(again)


def random_graph(seed: int) -> Graph:
    """A small graph of cheap and dear operators with shared operands; sizes differ by broadcasting and products."""
    choose = random.Random(seed)
    nodes = Nodes()
    values = [("x", 8)]
    for number in range(9):
        (a, wide), (b, other) = choose.choice(values), choose.choice(values)
        kind, name = choose.choice(["Relu", "Gelu", "Softmax", "Mul", "Add", "MatMul", "MatMul"]), f"t{number}"
        if kind == "MatMul":
            width = choose.choice([4, 8, 300])
            nodes.add("MatMul", [a, nodes.weight(f"w{number}", wide, width)], name)
            values.append((name, width))
        elif kind in ("Mul", "Add"):
            if wide != other:
                continue
            nodes.add(kind, [a, b], name)
            values.append((name, wide))
        else:
            nodes.add(kind, [a], name)
            values.append((name, wide))
    last, width = values[-1]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])
    out = helper.make_tensor_value_info(last, TensorProto.FLOAT, ["batch", width])
    outs = [out]
    if len(values) > 3 and choose.random() < 0.3:
        inner, inner_width = values[len(values) // 2]
        if inner != last:
            outs.append(helper.make_tensor_value_info(inner, TensorProto.FLOAT, ["batch", inner_width]))
    return bound(model_file(helper.make_graph(nodes.nodes, "random", [x], outs, nodes.initializers)), batch=8)


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_the_best_of_all_choices(seed: int) -> None:
    """No set of operators that may run again leaves fewer bytes, or as few with fewer operators."""
    graph = random_graph(seed)
    choose = random.Random(-seed)
    first = choose.randrange(max(1, len(graph.operators) // 3))
    indices = range(first, len(graph.operators) - 1)
    outside = readable_outside(graph, indices)
    allowed = [
        index
        for index in indices
        if is_cheap(graph, graph.operators[index]) and outside.isdisjoint(graph.operators[index].outputs)
    ]
    found = rerun_operators(graph, indices)
    assert found <= set(allowed)
    choices = itertools.chain.from_iterable(itertools.combinations(allowed, n) for n in range(len(allowed) + 1))
    assert cost(graph, indices, found) == min(cost(graph, indices, frozenset(again)) for again in choices)


def test_some_random_graphs_have_something_to_run_again() -> None:
    """The enumeration above compares something."""
    graphs = [random_graph(seed) for seed in range(60)]
    assert sum(bool(rerun_operators(graph, range(len(graph.operators) - 1))) for graph in graphs) >= 15


def rerun_types(name: str, seq: int) -> list[str]:
    """Types of what runs again in the first block."""
    folded = folded_model(name, seq)
    found = rerun_operators(folded.graph, occurrence(folded.runs[0], 0))
    return [folded.graph.operators[index].type for index in sorted(found)]


def test_gpt() -> None:
    """GPT-3 makes scores, softmax, norms and GELU again, and no projection nor the product with the values."""
    found = rerun_types("hm_gpt3_175b", 2048)
    assert found == ["LayerNormalization", "MatMul", "Mul", "Add", "Softmax", "LayerNormalization", "Gelu"]


@pytest.mark.parametrize(
    ("name", "seq", "products"), [("gpt3_175b_2l", 2048, 4), ("llama3_8b_2l", 4096, 7), ("hm_mixtral_8x7b", 4096, 8)]
)
def test_projections_never_run_again(name: str, seq: int, products: int) -> None:
    """Of all products of a real block only that of queries and keys runs again."""
    folded = folded_model(name, seq)
    graph, block = folded.graph, occurrence(folded.runs[0], 0)
    found = rerun_operators(graph, block)
    again = [graph.operators[index] for index in sorted(found) if graph.operators[index].type in ("MatMul", "Gemm")]
    (scores,) = again
    assert scores.signature.outputs[0].shape[-2:] == (seq, seq)
    assert "Softmax" in [graph.operators[index].type for index in found]
    weighted = [
        graph.operators[index]
        for index in block
        if any(n is not None and graph.tensors[n].kind is TensorKind.PARAMETER for n in graph.operators[index].inputs)
        and graph.operators[index].type in ("MatMul", "Gemm")
    ]
    assert len(weighted) == products


MODELS = [
    ("gpt2_tiny", 16),
    ("hm_gpt3_175b", 2048),
    ("llama3_8b_2l", 4096),
    ("gshard_moe_tiny", 16),
    ("hm_mixtral_8x7b", 4096),
    ("hm_llama_tiny", 16),
    ("hm_mixtral_tiny", 16),
]


@pytest.mark.parametrize(("name", "seq"), MODELS)
def test_occurrences_of_a_run_are_equal(name: str, seq: int) -> None:
    """First, second and last occurrence run the same operators again, and no fewer bytes are held without it."""
    folded = folded_model(name, seq)
    for run in folded.runs:
        places = [
            {
                index - run.start - number * run.period
                for index in rerun_operators(folded.graph, occurrence(run, number))
            }
            for number in sorted({0, 1, run.count - 1})
        ]
        assert all(place == places[0] for place in places)
        indices = occurrence(run, 0)
        again = frozenset(run.start + place for place in places[0])
        assert cost(folded.graph, indices, again) < cost(folded.graph, indices, frozenset())


@pytest.mark.parametrize(("name", "seq"), MODELS)
def test_backward_has_all_it_reads(name: str, seq: int) -> None:
    """All consumers of what is made again lie in the region; what runs again is cheap and draws no random numbers."""
    folded = folded_model(name, seq)
    graph = folded.graph
    for run in folded.runs:
        indices = occurrence(run, run.count - 1)
        outside = readable_outside(graph, indices)
        for index in rerun_operators(graph, indices):
            assert outside.isdisjoint(graph.operators[index].outputs)
            assert is_cheap(graph, graph.operators[index])


def test_by_region_is_each_region_by_itself() -> None:
    """One pass over all regions gives what each gives alone."""
    folded = folded_model("t5_tiny", 16)
    regions = [range(begin, end) for begin, end in itertools.pairwise([0, 5, 60, 140, len(folded.graph.operators)])]
    alone = tuple(rerun_operators(folded.graph, region) for region in regions)
    assert rerun_by_region(folded.graph, regions) == alone


def test_cheap_means_few_flops_per_element() -> None:
    """A product over 256 is the last cheap one (2 x 256 FLOPs an element); a random operator never is."""
    for size, cheap in ((CHEAP_FLOPS // 2, True), (CHEAP_FLOPS // 2 + 1, False)):
        nodes = Nodes()
        nodes.add("MatMul", ["x", nodes.weight("w", size, 4)], "y")
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", size])
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
        graph = bound(model_file(helper.make_graph(nodes.nodes, "m", [x], [y], nodes.initializers)), batch=2)
        assert is_cheap(graph, graph.operators[0]) is cheap
    nodes = Nodes()
    nodes.add("RandomNormalLike", ["x"], "r")
    nodes.add("Mul", ["x", "r"], "y")
    nodes.add("Mul", ["y", nodes.weight("w", 8)], "z")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 8])
    graph = bound(model_file(helper.make_graph(nodes.nodes, "m", [x], [z], nodes.initializers)), batch=2)
    assert not is_cheap(graph, graph.operators[0])
    assert not is_cheap(graph, graph.operators[-1])
