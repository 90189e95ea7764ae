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
        for slot in range(len(copies[0].inputs)):
            check_column(graph, run, offset, [copy.inputs[slot] for copy in copies], position, uses)
    for index in range(run.start, run.stop):
        occurrence = (index - run.start) // run.period
        for name in graph.operators[index].outputs:
            readers = uses.get(name, [])
            allowed = run.start + run.period * (occurrence + 2)
            if occurrence < run.count - 1:
                assert name not in graph.outputs
                assert all(reader < allowed for reader in readers)


def check_column(
    graph: Graph, run: Run, offset: int, names: list[str | None], position: dict[str, int], uses: dict[str, list[int]]
) -> None:
    """One operand of one operator, over all occurrences."""
    if len(set(names)) == 1:
        assert names[0] is None or position.get(names[0], -1) < run.start
        return
    tensors = [graph.tensor(name or "") for name in names]
    assert len({(tensor.kind, tensor.type) for tensor in tensors}) == 1
    if tensors[0].kind is TensorKind.ACTIVATION:
        distances = {run.start + offset + run.period * i - position[names[i] or ""] for i in range(run.count)}
        assert len(distances) == 1
        return
    keys = [tensor.name if tensor.read is None else f"parameter {tensor.read.parameter}" for tensor in tensors]
    if len(set(keys)) == 1:
        return
    assert tensors[0].kind in (TensorKind.PARAMETER, TensorKind.CONSTANT)
    for i, key in enumerate(keys):
        first = run.start + run.period * i
        assert all(first <= index < first + run.period for index in uses[key])


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
    assert len(folded.representatives()) == len(graph.operators) - sum(run.saving for run in folded.runs)


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
    assert folded.folded_share > 0.4


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
    covered = [index for run in folded.runs for index in range(run.start, run.stop)]
    assert len(covered) == len(set(covered))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_equal_layers_fold(tmp_path: Path, shared: bool, tied: bool) -> None:
    """Equal layers are one run, whether their mask is shared and their weights tied or not."""
    folded = fold(chain(tmp_path, [0] * 8, shared=shared, tied=tied, tap=None))
    assert [(run.period, run.count) for run in folded.runs] == [(4, 8)]


def test_an_output_inside_ends_the_chain(tmp_path: Path) -> None:
    """A layer whose inner value is a graph output is the last of its run."""
    folded = fold(chain(tmp_path, [0] * 8, shared=False, tied=False, tap=3))
    assert [(run.period, run.count) for run in folded.runs] == [(4, 4), (4, 4)]


def test_short_periods_are_reported_apart(tmp_path: Path) -> None:
    """A row of equal operators is no block (the first reads the input: it differs from the other eight)."""
    body = "\n".join(f"a{i + 1} = Relu (a{i})" for i in range(9))
    folded = fold(bind(text_model(tmp_path, f"g (float[4] a0) => (float a9) {{ {body} }}"), BindOptions()))
    assert folded.runs == ()
    assert [(run.period, run.count) for run in folded.short_runs] == [(1, 8)]
    assert (folded.folded_share, folded.short_share) == (0.0, pytest.approx(7 / 9))


def test_graphs_without_operators(tmp_path: Path) -> None:
    """An empty graph folds to nothing."""
    model = text_model(tmp_path, "g (float[2] x) => (float y) { y = Identity (x) }")
    folded = fold(bind(model, BindOptions()))
    assert (folded.runs, folded.folded_share, folded.representatives()) == ((), 0.0, ())


def test_very_wide_operators_stay_outside(tmp_path: Path) -> None:
    """A Concat of all layers' values ends every chain and is in no run."""
    layers = "\n".join(f"b{i} = Exp (a{i})\n c{i} = Relu (b{i})\n a{i + 1} = Neg (c{i})" for i in range(80))
    joined = ", ".join(f"a{i + 1}" for i in range(80))
    model = text_model(tmp_path, f"g (float[4] a0) => (float y) {{ {layers}\n y = Concat <axis=0> ({joined}) }}")
    folded = fold(bind(model, BindOptions()))
    for run in folded.runs:
        check_run(folded.graph, run)
    assert folded.graph.operators[-1].type == "Concat"
    assert folded.folded_share == 0.0
