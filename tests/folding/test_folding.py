"""Runs are true repeats, in real models and in random chains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tap_planner.folding import FoldedGraph, Run, fold
from tap_planner.graph import BindOptions, Graph, TensorKind, bind
from tests.graph.models import TINY, bound, data_model, light_model, saved, text_model

SHARES = {"hm_gpt3_175b": (31, 96), "hm_llama3_8b": (58, 32), "hm_llama3_70b": (58, 80), "hm_mixtral_8x7b": (70, 32)}
"""Operators of one layer after canonicalisation, as the generator writes them, and the number of layers."""


def check_run(graph: Graph, run: Run) -> None:
    """The definition, operator by operator, without arrays."""
    position = {name: index for index, operator in enumerate(graph.operators) for name in operator.outputs}
    uses: dict[str, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        for name in operator.inputs:
            if name is not None:
                read = graph.tensor(name).read
                uses.setdefault(name if read is None else f"parameter {read.parameter}", []).append(index)
    for offset in range(run.period):
        copies = [graph.operators[run.start + offset + run.period * i] for i in range(run.count)]
        assert len({copy.signature for copy in copies}) == 1
        assert "Loss" not in {copy.type for copy in copies}
        assert len({tuple(graph.tensor(name).requires_gradient for name in copy.outputs) for copy in copies}) == 1
        for slot in range(len(copies[0].inputs)):
            check_column(graph, run, offset, [copy.inputs[slot] for copy in copies], position, uses)
    for index in range(run.start, run.stop):
        occurrence = (index - run.start) // run.period
        for name in graph.operators[index].outputs:
            readers = uses.get(name, [])
            allowed = run.start + run.period * (occurrence + 2)
            if occurrence < run.count - 1:
                assert all(reader < allowed for reader in readers)


def check_column(
    graph: Graph, run: Run, offset: int, names: list[str | None], position: dict[str, int], uses: dict[str, list[int]]
) -> None:
    """One operand of one operator, over all occurrences."""
    if len(set(names)) == 1:
        assert names[0] is None or position.get(names[0], -1) < run.start
        return
    tensors = [graph.tensor(name or "") for name in names]
    assert len({(tensor.kind, tensor.type, tensor.requires_gradient) for tensor in tensors}) == 1
    if tensors[0].kind is TensorKind.ACTIVATION:
        distances = {run.start + offset + run.period * i - position[names[i] or ""] for i in range(run.count)}
        assert len(distances) == 1
        return
    keys = [tensor.name if tensor.read is None else f"parameter {tensor.read.parameter}" for tensor in tensors]
    if len(set(keys)) == 1:
        return
    trainable = {parameter.name for parameter in graph.parameters if parameter.trainable}
    assert len({tensor.read is not None and tensor.read.parameter in trainable for tensor in tensors}) == 1
    assert len({graph.batch_dims.get(tensor.name) for tensor in tensors}) == 1
    for i, key in enumerate(keys):
        first = run.start + run.period * i
        assert all(first <= index < first + run.period for index in uses[key])


def check_shared(folded: FoldedGraph) -> None:
    """The stretches of every shared block are equal up to a bijection of values, operator by operator; each operator
    is stood for once."""
    graph = folded.graph
    stood_for: list[int] = []
    for run in folded.runs:
        stood_for.extend(range(run.start + run.period, run.stop))
    for block in folded.shared:
        first, *others = block.starts
        for other in others:
            stood_for.extend(range(other, other + block.size))
            forward: dict[str, str] = {}
            for offset in range(block.size):
                ours, theirs = graph.operators[first + offset], graph.operators[other + offset]
                assert ours.signature == theirs.signature
                for mine, yours in zip((*ours.inputs, *ours.outputs), (*theirs.inputs, *theirs.outputs), strict=True):
                    assert (mine is None) == (yours is None)
                    if mine is not None and yours is not None:
                        check_pair(graph, mine, yours)
                        assert forward.setdefault(mine, yours) == yours
            assert len(set(forward.values())) == len(forward)
    assert len(stood_for) == len(set(stood_for))
    assert set(folded.representatives()) == set(range(len(graph.operators))) - set(stood_for)
    count = sum(operator.type != "Loss" for operator in graph.operators)
    assert folded.folded_share == pytest.approx(len(stood_for) / max(count, 1))


def check_pair(graph: Graph, mine: str, yours: str) -> None:
    """Two values in the same place of a shared block: alike, and the same if they are structure."""
    ours, theirs = graph.tensor(mine), graph.tensor(yours)
    assert (ours.kind, ours.type, ours.requires_gradient) == (theirs.kind, theirs.type, theirs.requires_gradient)
    if ours.kind is TensorKind.CONSTANT and (not ours.type.is_float or ours.type.num_elements == 1):
        assert graph.constants.key(mine) == graph.constants.key(yours)


def rebuilt(folded: FoldedGraph) -> list[tuple[object, ...]]:
    """All operators, those of runs made from the first occurrence and the expanded names alone."""
    graph = folded.graph
    operators = [(item.signature, item.inputs, item.outputs) for item in graph.operators]
    for run in folded.runs:
        names = folded.occurrence_names(run)
        for index in range(run.period):
            item = graph.operators[run.start + index]
            for i in range(run.count):
                inputs = tuple(None if name is None else names.tensors[name][i] for name in item.inputs)
                outputs = tuple(names.tensors[name][i] for name in item.outputs)
                operators[run.start + index + run.period * i] = (item.signature, inputs, outputs)
                assert names.operators[item.id][i] == outputs[0]
    return list(operators)


@pytest.mark.parametrize("name", [*TINY, *SHARES])
def test_runs_are_true_repeats(name: str) -> None:
    """Each run meets the definition, and the graph can be rebuilt from first occurrences and names."""
    graph = bound(data_model(name), training=True)
    folded = fold(graph)
    for run in (*folded.runs, *folded.short_runs):
        check_run(graph, run)
    assert rebuilt(folded) == [(item.signature, item.inputs, item.outputs) for item in graph.operators]
    check_shared(folded)


@pytest.mark.parametrize(("name", "layers"), SHARES.items())
def test_big_models_fold_to_one_layer(name: str, layers: tuple[int, int]) -> None:
    """All layers of a decoder are one run."""
    (run,) = fold(bound(data_model(name), training=True)).runs
    assert (run.period, run.count) == layers


@pytest.mark.parametrize("name", ["gpt2_tiny", "bert_tiny", "llama_tiny", "vit_tiny", "gshard_moe_tiny"])
def test_two_layers_are_found(name: str) -> None:
    """Both layers of the exports are one run of two, with shared masks and rotary tables."""
    folded = fold(bound(data_model(name), training=True))
    assert [run.count for run in folded.runs] == [2]
    assert folded.chained_share > 0.4


def test_runs_of_resnet50() -> None:
    """The identity blocks of the four stages repeat 2, 3, 5 and 2 times."""
    folded = fold(bound(light_model("light_resnet50"), training=True))
    assert [run.count for run in folded.runs] == [2, 3, 5, 2]


def test_parameters_of_occurrences() -> None:
    """The names of a run hold the parameters of every layer in order."""
    folded = fold(bound(data_model("hm_llama_tiny"), training=True))
    names = folded.occurrence_names(folded.runs[0])
    assert names.parameters["model.layers.0.mlp.up_proj.weight"] == (
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    )


def chain(folder: Path, layers: list[int], *, shared: bool, tied: bool, tap: int | None) -> Graph:
    """Layers of three kinds in a row, each a MatMul, an activation and a residual Add."""
    nodes, weights, outputs = [], [], ["y"]
    nodes.append(helper.make_node("Relu", ["m"], ["mask"]))
    nodes.append(helper.make_node("MatMul", ["x", "w_in"], ["h"]))
    weights.append(numpy_helper.from_array(np.zeros((4, 4), np.float32), "w_in"))
    value = "h"
    for index, kind in enumerate(layers):
        weight = "w_0" if tied else f"w_{index}"
        if index == 0 or not tied:
            weights.append(numpy_helper.from_array(np.zeros((4, 4), np.float32), weight))
        nodes.append(helper.make_node("MatMul", [value, weight], [f"a{index}"]))
        nodes.append(helper.make_node(("Relu", "Tanh", "Sigmoid")[kind], [f"a{index}"], [f"b{index}"]))
        other = "mask" if shared else value
        nodes.append(helper.make_node("Mul", [f"b{index}", other], [f"c{index}"]))
        nodes.append(helper.make_node("Add", [value, f"c{index}"], [f"d{index}"]))
        if tap == index:
            outputs.append(f"b{index}")
        value = f"d{index}"
    nodes.append(helper.make_node("Neg", [value], ["y"]))
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in ("x", "m")],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)
    return bind(saved(folder, model), BindOptions(training=True))


@given(
    layers=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    shared=st.booleans(),
    tied=st.booleans(),
    tap=st.one_of(st.none(), st.integers(0, 11)),
)
def test_random_chains(
    tmp_path_factory: pytest.TempPathFactory, layers: list[int], shared: bool, tied: bool, tap: int | None
) -> None:
    """Whatever is found in random chains is a true repeat and can be expanded again."""
    graph = chain(tmp_path_factory.mktemp("chain"), layers, shared=shared, tied=tied, tap=tap)
    folded = fold(graph)
    for run in (*folded.runs, *folded.short_runs):
        check_run(graph, run)
    assert rebuilt(folded) == [(item.signature, item.inputs, item.outputs) for item in graph.operators]
    check_shared(folded)
    covered = [index for run in folded.runs for index in range(run.start, run.stop)]
    assert len(covered) == len(set(covered))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_equal_layers_fold(tmp_path: Path, shared: bool, tied: bool) -> None:
    """Equal layers are one run, whether their mask is shared and their weights tied or not."""
    folded = fold(chain(tmp_path, [0] * 8, shared=shared, tied=tied, tap=None))
    assert [(run.period, run.count) for run in folded.runs] == [(4, 8)]


def test_an_output_inside_is_no_obstacle(tmp_path: Path) -> None:
    """Inner values of a layer may be graph outputs (the caches of a decoder): they cost nothing."""
    folded = fold(chain(tmp_path, [0] * 8, shared=False, tied=False, tap=3))
    assert [(run.period, run.count) for run in folded.runs] == [(4, 8)]


def test_layers_with_inputs_and_outputs_of_their_own_fold() -> None:
    """The layers of a decoder with caches are one run, each with its own cache as graph inputs and outputs."""
    graph = bind(data_model("llama_decode_tiny"), BindOptions(batch=4, dims={"past": 16}))
    (run,) = fold(graph).runs
    check_run(graph, run)
    assert run.count == 2


@pytest.mark.parametrize("frozen", ["model.layers.0.*", "*layers.1.mlp.up_proj*"])
def test_frozen_layers_do_not_fold_with_trained_ones(frozen: str) -> None:
    """Layers whose gradients differ are not equal: the first layer's backward is shorter, a frozen weight has none."""
    graph = bind(data_model("hm_llama_tiny"), BindOptions(batch=4, dims={"seq": 16}, training=True, freeze=(frozen,)))
    folded = fold(graph)
    assert folded.runs == ()
    check_shared(folded)


def test_short_periods_are_reported_apart(tmp_path: Path) -> None:
    """A row of equal operators is no block (the first reads the input: it differs from the other eight)."""
    body = "\n".join(f"a{i + 1} = Relu (a{i})" for i in range(9))
    folded = fold(bind(text_model(tmp_path, f"g (float[4] a0) => (float a9) {{ {body} }}"), BindOptions()))
    assert folded.runs == ()
    assert [(run.period, run.count) for run in folded.short_runs] == [(1, 8)]
    assert (folded.folded_share, folded.short_share) == (0.0, pytest.approx(7 / 9))


def test_graphs_without_operators(tmp_path: Path) -> None:
    """An empty graph folds to nothing, and so does one that is nothing but an end."""
    model = text_model(tmp_path, "g (float[2] x) => (float y) { y = Identity (x) }")
    folded = fold(bind(model, BindOptions()))
    assert (folded.runs, folded.folded_share, folded.representatives()) == ((), 0.0, ())
    ended = fold(bind(model, BindOptions(ends=True)))
    assert (ended.runs, ended.folded_share, ended.representatives()) == ((), 0.0, (0,))


def test_very_wide_operators_stay_outside(tmp_path: Path) -> None:
    """A Concat of all layers' values ends every chain and is in no run."""
    layers = "\n".join(f"b{i} = Exp (a{i})\n c{i} = Relu (b{i})\n a{i + 1} = Neg (c{i})" for i in range(80))
    joined = ", ".join(f"a{i + 1}" for i in range(80))
    model = text_model(tmp_path, f"g (float[4] a0) => (float y) {{ {layers}\n y = Concat <axis=0> ({joined}) }}")
    folded = fold(bind(model, BindOptions()))
    for run in folded.runs:
        check_run(folded.graph, run)
    check_shared(folded)
    assert folded.graph.operators[-1].type == "Concat"
    assert folded.chained_share == 0.0


FOLDED = {
    "deep_gpt2_48": 0.94,
    "deep_bert_12": 0.80,
    "deep_llama_12": 0.88,
    "deep_vit_12": 0.82,
    "deep_t5_6": 0.62,
    "deep_resnet_152": 0.82,
    "deep_moe8x8": 0.75,
    "deep_unet": 0.20,
}
"""Least folded shares."""


@pytest.mark.parametrize(("name", "least"), FOLDED.items())
@pytest.mark.parametrize("training", [False, True])
def test_folded_shares_of_deep_models(name: str, least: float, training: bool) -> None:
    """Deep models fold at least so far, and what is found is proven operator by operator."""
    graph = bind(data_model(name), BindOptions(training=training))
    folded = fold(graph)
    for run in folded.runs:
        check_run(graph, run)
    check_shared(folded)
    assert folded.folded_share >= least


def test_experts_inside_a_layer_are_one_block() -> None:
    """The eight experts of a layer share a block although the layers are already a run."""
    folded = fold(bind(data_model("deep_moe8x8"), BindOptions(batch=8)))
    (run,) = folded.runs
    inside = [
        block
        for block in folded.shared
        if sum(run.start <= start < run.start + run.period for start in block.starts) >= 5
    ]
    assert inside and max(block.size for block in inside) >= 14


def test_levels_of_a_unet_are_shared() -> None:
    """Residual blocks on the way down and on the way up are one block."""
    graph = bind(data_model("deep_unet"), BindOptions(batch=8))
    folded = fold(graph)
    middle = len(graph.operators) // 2
    assert any(block.starts[0] < middle / 2 and block.starts[-1] > middle * 3 / 2 for block in folded.shared)


@given(
    st.lists(st.sampled_from(["one", "two", "three", "Exp", "Neg", "Sin"]), min_size=1, max_size=14), st.integers(0, 3)
)
def test_random_pieces_are_shared(tmp_path_factory: pytest.TempPathFactory, pieces: list[str], skip: int) -> None:
    """Pieces of several operators strewn among others: all that is found is true."""
    lines: list[str] = []
    values = ["x"]

    def emit(text: str) -> None:
        values.append(f"v{len(values)}")
        lines.append(f"{values[-1]} = {text}")

    for number, piece in enumerate(pieces):
        value, older = values[-1], values[max(0, len(values) - 1 - skip)]
        if piece in ("one", "two", "three"):
            kinds = {"one": ("Relu", "Tanh"), "two": ("Tanh", "Sigmoid"), "three": ("Relu", "Relu")}[piece]
            emit(f"{kinds[0]} ({value})")
            emit(f"{kinds[1]} ({values[-1]})")
            emit(f"Mul ({values[-1]}, {value})")
            emit(f"Add ({values[-1]}, {older if number % 2 else value})")
        else:
            emit(f"{piece} ({value})")
    body = "\n".join(lines)
    model = text_model(tmp_path_factory.mktemp("pieces"), f"g (float[4] x) => (float {values[-1]}) {{ {body} }}")
    folded = fold(bind(model, BindOptions()))
    for run in (*folded.runs, *folded.short_runs):
        check_run(folded.graph, run)
    check_shared(folded)


def test_pieces_apart_are_found(tmp_path: Path) -> None:
    """Two equal pieces between unlike operators are one block, whatever outside value they read."""
    piece = "{0}a = Relu ({1})\n{0}b = Tanh ({0}a)\n{0}c = Mul ({0}b, {2})\n{0}d = Add ({0}c, {1})\n"
    body = (
        "p = Exp (x)\n" + piece.format("u", "p", "x") + "q = Sin (ud)\n" + piece.format("w", "q", "p") + "y = Neg (wd)"
    )
    folded = fold(bind(text_model(tmp_path, f"g (float[4] x) => (float y) {{ {body} }}"), BindOptions()))
    assert folded.runs == ()
    # The Mul of the first piece reads the graph's input, that of the second an operator's value: they differ.
    assert folded.shared == ()
    body = body.replace("Mul (ub, x)", "Mul (ub, o)").replace("p = Exp (x)", "o = Cos (x)\np = Exp (x)")
    folded = fold(bind(text_model(tmp_path, f"g (float[4] x) => (float y) {{ {body} }}"), BindOptions()))
    assert [(block.starts, block.size) for block in folded.shared] == [((2, 7), 4)]
    check_shared(folded)


def test_a_value_read_twice_is_no_two_values(tmp_path: Path) -> None:
    """A stretch that reads one outside value twice does not match one that reads two."""
    piece = "{0}a = Relu ({1})\n{0}b = Tanh ({0}a)\n{0}c = Mul ({0}b, {2})\n{0}d = Add ({0}c, {3})\n"
    body = (
        "o = Cos (x)\np = Exp (x)\n" + piece.format("u", "p", "o", "o") + "q = Sin (ud)\n"
        + piece.format("w", "q", "p", "o") + "y = Neg (wd)"
    )  # fmt: skip
    folded = fold(bind(text_model(tmp_path, f"g (float[4] x) => (float y) {{ {body} }}"), BindOptions()))
    check_shared(folded)
    assert [(block.starts, block.size) for block in folded.shared] == [((2, 7), 3)]
