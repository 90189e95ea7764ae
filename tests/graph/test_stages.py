"""A graph cut in stages: everything that goes from one to another goes through a Transfer."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from tap_planner.apply import RandomWeights, synthetic_inputs
from tap_planner.apply.reference import run_reference
from tap_planner.errors import UsageError
from tap_planner.graph import BindOptions, Graph, LossOptions, TensorKind, bind, cut_in_stages
from tests.graph.models import data_model

MODELS = {"gpt2_tiny": {"seq": 8}, "t5_tiny": {"seq": 8, "dec_seq": 6}, "unet_tiny": {}, "hm_mixtral_tiny": {"seq": 8}}
everywhere = pytest.mark.parametrize("name", MODELS)


def graph_of(name: str) -> Graph:
    """A model bound for training."""
    return bind(data_model(name), BindOptions(batch=2, dims=MODELS[name], training=True, loss=LossOptions(kind="mean")))


def cuts(graph: Graph) -> Iterator[tuple[Graph, tuple[int, ...], list[str]]]:
    """The graph cut at random places: the cut graph, where chunks begin, and what was asked for."""
    for seed in range(6):
        draw = random.Random(seed)
        positions = sorted(draw.sample(range(1, len(graph.operators)), draw.randint(1, 5)))
        starts = [graph.operators[index].id for index in (0, *positions)]
        yield *cut_in_stages(graph, starts), starts


@everywhere
def test_chunks_read_only_what_is_theirs(name: str) -> None:
    """Operators read what their own chunk makes or receives; only Transfers read what an earlier chunk makes."""
    for cut, begins, _ in cuts(graph_of(name)):
        made_in: dict[str, int] = {}
        for index, operator in enumerate(cut.operators):
            chunk = sum(begin <= index for begin in begins)
            for read in operator.inputs:
                if read in made_in:
                    assert made_in[read] < chunk if operator.type == "Transfer" else made_in[read] == chunk
                elif read is not None:
                    assert cut.tensors[read].kind is not TensorKind.ACTIVATION
            made_in.update(dict.fromkeys(operator.outputs, chunk))


@everywhere
def test_copies_are_taken_from_earlier_chunks(name: str) -> None:
    """What an earlier chunk of the same stage has got is read from there; what it has not got comes from its maker, and
    so does everything where nothing is said. The results stay those of the whole graph."""
    graph, taken = graph_of(name), 0
    for cut, begins, starts in cuts(graph):
        stages = [number % 2 for number in range(len(starts))]
        own = [[c for c in range(n) if stages[c] == stages[n]] for n in range(len(starts))]
        again, positions = cut_in_stages(graph, starts, own)
        assert positions == begins and [o.id for o in again.operators] == [o.id for o in cut.operators]
        copied: dict[str, str] = {}
        for plain, operator in zip(cut.operators, again.operators, strict=True):
            if operator.type != "Transfer":
                assert operator == plain
                continue
            (source,), (made,) = operator.inputs, operator.outputs
            assert source is not None and copied.get(source, source) == plain.inputs[0]
            copied[made] = str(plain.inputs[0])
            chunk = sum(begin <= again.operators.index(operator) for begin in begins) - 1
            earlier = [c for c in own[chunk] if f"{plain.inputs[0]}@{c}" in copied]
            assert source == (f"{plain.inputs[0]}@{earlier[0]}" if earlier else plain.inputs[0])
            taken += bool(earlier)
        weights, inputs = RandomWeights(graph, seed=1), synthetic_inputs(graph)
        whole, parts = (run_reference(each, weights, inputs) for each in (graph, again))
        assert whole.loss == parts.loss
        for parameter, gradient in whole.gradients.items():
            scale = float(np.abs(gradient).max())
            np.testing.assert_allclose(parts.gradients[parameter], gradient, rtol=0, atol=1e-13 * scale)
    assert taken or name in ("gpt2_tiny", "hm_mixtral_tiny")  # in them every tensor is read near to its maker


@everywhere
def test_operators_stay_in_order(name: str) -> None:
    """Without the Transfers it is the graph that it was; chunks begin where they were asked to, behind Transfers."""
    graph = graph_of(name)
    for cut, begins, starts in cuts(graph):
        own = [operator for operator in cut.operators if operator.type != "Transfer"]
        assert [(o.id, o.signature, o.outputs) for o in own] == [
            (o.id, o.signature, o.outputs) for o in graph.operators
        ]
        for begin, end, start in zip(begins, (*begins[1:], len(cut.operators)), starts, strict=True):
            types = [operator.type == "Transfer" for operator in cut.operators[begin:end]]
            assert types == sorted(types, reverse=True)
            assert cut.operators[begin + sum(types)].id == start
        assert (cut.outputs, cut.loss, cut.parameters) == (graph.outputs, graph.loss, graph.parameters)


@everywhere
def test_chunks_receive_a_tensor_once(name: str) -> None:
    """One Transfer for each tensor and chunk, in the order in which tensors are made, straight from the maker."""
    for cut, begins, _ in cuts(graph_of(name)):
        outputs = [(name, operator) for operator in cut.operators for name in operator.outputs]
        made = {name: place for place, (name, _) in enumerate(outputs)}
        for begin, end in zip(begins, (*begins[1:], len(cut.operators)), strict=True):
            transfers = [o for o in cut.operators[begin:end] if o.type == "Transfer"]
            sources = [made[str(transfer.inputs[0])] for transfer in transfers]
            assert sources == sorted(set(sources))
            assert all(outputs[source][1].type != "Transfer" for source in sources)
            kinds = [(cut.tensors[str(t.inputs[0])], cut.tensors[t.outputs[0]]) for t in transfers]
            assert all(a.type == b.type and a.requires_gradient == b.requires_gradient for a, b in kinds)


@everywhere
def test_chunks_share_no_read_of_a_parameter(name: str) -> None:
    """A parameter that several chunks read is read by each for itself, in the same way."""
    graph = graph_of(name)
    for cut, begins, _ in cuts(graph):
        read_in: dict[str, set[int]] = {}
        for index, operator in enumerate(cut.operators):
            for read in operator.inputs:
                if read is not None and cut.tensors[read].kind is TensorKind.PARAMETER:
                    read_in.setdefault(read, set()).add(sum(begin <= index for begin in begins))
        assert all(len(chunks) == 1 for chunks in read_in.values())
        before = {graph.tensors[read].read for o in graph.operators for read in o.inputs if read is not None}
        assert {cut.tensors[read].read for read in read_in} | {None} == before | {None}


@pytest.mark.parametrize("name", ["gpt2_tiny", "t5_tiny"])
def test_a_cut_graph_computes_the_same(name: str) -> None:
    """A single process that runs Transfers as what they are, the identity, makes the same but for the order of sums."""
    graph = graph_of(name)
    weights, inputs = RandomWeights(graph), synthetic_inputs(graph)
    expected = run_reference(graph, weights, inputs)
    for cut, _, _ in cuts(graph):
        made = run_reference(cut, weights, inputs)
        assert made.loss == expected.loss
        for parameter, gradient in expected.gradients.items():
            scale = float(np.abs(gradient).max())
            np.testing.assert_allclose(made.gradients[parameter], gradient, rtol=0, atol=1e-13 * scale)


def test_one_chunk_is_the_graph() -> None:
    """Nothing is cut where one stage begins at the first operator."""
    graph = graph_of("gpt2_tiny")
    cut, begins = cut_in_stages(graph, [graph.operators[0].id])
    assert cut is graph and begins == (0,)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ((), "the first stage begins at"),
        ((1,), "the first stage begins at"),
        ((0, 5, 3), "does not come after"),
        ((0, 3, 3), "does not come after"),
        ((0, -1), "no operator is called 'nowhere'"),
    ],
)
def test_wrong_starts_are_refused(places: tuple[int, ...], message: str) -> None:
    """Stages begin at operators that are there, in order, the first at the first."""
    graph = graph_of("gpt2_tiny")
    starts = ["nowhere" if place < 0 else graph.operators[place].id for place in places]
    with pytest.raises(UsageError, match=message):
        cut_in_stages(graph, starts)
