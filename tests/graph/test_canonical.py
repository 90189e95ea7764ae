"""The canonical form of real models and of single nodes."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import pytest

from tap_planner.graph import BindOptions, Graph, TensorKind, bind
from tap_planner.operators import lookup
from tests.graph.models import BIG, LIGHT_NAMES, TINY, bound, data_model, infer_shapes, light_model, text_model

PUBLISHED_ELEMENTS = {"hm_llama3_8b": 8.03e9, "hm_llama3_70b": 70.6e9, "hm_gpt3_175b": 175e9, "hm_mixtral_8x7b": 46.7e9}
"""Parameters as the models' papers and cards give them."""


def counts(graph: Graph) -> collections.Counter[str]:
    return collections.Counter(operator.type for operator in graph.operators)


def check_well_formed(graph: Graph) -> None:
    """Every operand is made before it is read, and every tensor has one maker."""
    made = {name for name, tensor in graph.tensors.items() if tensor.kind is not TensorKind.ACTIVATION}
    for operator in graph.operators:
        assert made.issuperset(name for name in operator.inputs if name is not None)
        assert made.isdisjoint(operator.outputs)
        made.update(operator.outputs)
        types = tuple(None if name is None else graph.tensor(name).type for name in operator.inputs)
        assert operator.signature.inputs == types
        assert operator.id == operator.outputs[0]
    assert made.issuperset(graph.outputs)


@pytest.mark.parametrize("name", [*TINY, *BIG])
def test_models_are_well_formed_and_known(name: str) -> None:
    """Each model binds, in training, to known operators in topological order."""
    graph = bound(data_model(name), training=True)
    check_well_formed(graph)
    assert all(lookup(operator.type).known for operator in graph.operators)
    assert graph.loss == graph.operators[-1].outputs[0]


@pytest.mark.parametrize("name", LIGHT_NAMES)
def test_light_models_are_well_formed_and_known(name: str) -> None:
    """The CNNs of the onnx package bind with a new batch; no weight was folded away."""
    graph = bound(light_model(name), training=True)
    check_well_formed(graph)
    assert all(lookup(operator.type).known for operator in graph.operators)
    assert graph.batch == 8
    assert all(graph.tensor(name).type.shape[0] == 8 for name in graph.outputs)
    assert not any(tensor.kind is TensorKind.CONSTANT for tensor in graph.tensors.values())


@pytest.mark.parametrize("name", [*TINY, "hm_gpt_tiny", "hm_llama_tiny", "hm_mixtral_tiny"])
def test_shapes_equal_those_of_onnx(name: str) -> None:
    """Values that keep their name have the shape that ONNX infers."""
    model = data_model(name)
    graph = bound(model)
    expected = infer_shapes(model, graph)
    shared = [tensor for tensor in graph.tensors.values() if tensor.name in expected and tensor.kind.value != "input"]
    assert len(shared) > 10
    assert {tensor.name: tensor.type.shape for tensor in shared} == {
        tensor.name: expected[tensor.name] for tensor in shared
    }


@pytest.mark.parametrize("name", LIGHT_NAMES)
def test_light_shapes_equal_those_of_onnx(name: str) -> None:
    """At the batch of the file, all shapes are those that ONNX infers."""
    model = light_model(name)
    graph = bind(model, BindOptions())
    expected = infer_shapes(model, graph)
    shared = [operator.outputs[0] for operator in graph.operators if operator.outputs[0] in expected]
    assert len(shared) > 5
    assert [graph.tensor(item).type.shape for item in shared] == [expected[item] for item in shared]


def test_gpt2_has_no_shape_or_mask_subgraph() -> None:
    """GPT-2's 164 nodes fall to 91 operators (92 with a loss), all of them the network itself."""
    graph = bound(data_model("gpt2_tiny"))
    assert 90 <= len(graph.operators) <= 94
    assert not counts(graph).keys() & {"Shape", "Cast", "Range", "Unsqueeze", "Squeeze", "Identity", "Constant", "And"}
    assert len(graph.parameters) == 28


@pytest.mark.parametrize(("name", "elements"), PUBLISHED_ELEMENTS.items())
def test_parameter_counts_are_the_published_ones(name: str, elements: float) -> None:
    """The big models hold as many parameters as their cards say."""
    total = sum(parameter.type.num_elements for parameter in bound(data_model(name)).parameters)
    assert total == pytest.approx(elements, rel=0.01)


def test_resnet50_parameters() -> None:
    """ResNet-50 has 25.6 million parameters, of which batch-norm statistics are not trained."""
    graph = bound(light_model("light_resnet50"), training=True)
    trained = sum(parameter.type.num_elements for parameter in graph.parameters if parameter.trainable)
    assert trained == 25_557_032
    statistics = {
        graph.tensors[operator.inputs[index] or ""].name
        for operator in graph.operators
        if operator.type == "BatchNormalization"
        for index in (3, 4)
    }
    assert statistics == {parameter.name for parameter in graph.parameters if not parameter.trainable}


def test_rotary_table_is_a_constant() -> None:
    """LLaMA's frequencies meet only positions: cos and sin are constants, computed when asked for."""
    graph = bound(data_model("hm_llama_tiny"), seq=600)
    constants = [tensor for tensor in graph.tensors.values() if tensor.kind is TensorKind.CONSTANT]
    tables = [tensor for tensor in constants if tensor.type.shape == (600, 16)]
    assert len(tables) == 2
    assert all(graph.constants.small(tensor.name) is None for tensor in tables)
    frequencies = 1.0 / 5e5 ** (np.arange(0, 16, 2) / 16)
    angles = np.outer(np.arange(600), np.concatenate([frequencies, frequencies]))
    found = [graph.constants.value(tensor.name) for tensor in tables]
    assert any(np.allclose(value, np.cos(angles), atol=1e-3) for value in found)
    assert any(np.allclose(value, np.sin(angles), atol=1e-3) for value in found)


def test_position_embedding_stays_a_parameter() -> None:
    """A table that is looked up at constant positions is a weight."""
    graph = bound(data_model("hm_gpt_tiny"), training=True)
    assert {parameter.name: parameter.trainable for parameter in graph.parameters}["model.wpe.weight"]


def test_tied_weight_is_one_parameter_read_twice() -> None:
    """The transposed read of the tied embedding is a read, not an operator."""
    graph = bound(data_model("hm_gpt_tiny"))
    reads = [tensor.read for tensor in graph.tensors.values() if tensor.read]
    tied = [read.dims for read in reads if read.parameter == "model.embed_tokens.weight"]
    assert sorted(tied) == [(0, 1), (1, 0)]


NODES = {
    "Reshape": ("y = Reshape <allowzero=0> (x, s)", "s = {0, -1}", {"shape": (4, 48)}),
    "Flatten": ("y = Flatten <axis=2> (x)", None, {"shape": (24, 8)}),
    "Unsqueeze": ("y = Unsqueeze (x, s)", "s = {-1, 0}", {"shape": (1, 4, 6, 8, 1)}),
    "Slice": (
        "y = Slice (x, a, b, s)",
        "a = {-7}, int64[1] b = {-1}, int64[1] s = {-1}",
        {"starts": (1,), "ends": (7,), "axes": (2,), "steps": (1,)},
    ),
    "Transpose": ("y = Transpose (x)", None, {"perm": (2, 1, 0)}),
    "ReduceMean": ("y = ReduceMean <keepdims=0> (x, s)", "s = {-1}", {"axes": (2,), "keepdims": 0}),
    "Softmax": ("y = Softmax <axis=-2> (x)", None, {"axes": (1,)}),
    "Tile": ("y = Tile (x, s)", "s = {1, 2, 3}", {"repeats": (1, 2, 3)}),
    "Expand": ("y = Expand (x, s)", "s = {5, 1, 1, 8}", {"shape": (5, 4, 6, 8)}),
    "Cast": ("y = Cast <to=7> (x)", None, {"to": "int64"}),
    "CumSum": ("y = CumSum (x, s)", "s = {-1}", {"axis": 2, "reverse": 0, "exclusive": 0}),
    "Pad": ("y = Pad (x, s)", "s = {0, 0, 1, 0, 0, 2}", {"pads": (0, 0, 1, 0, 0, 2), "mode": "constant"}),
}
RENAMED = {"Flatten": "Reshape", "Unsqueeze": "Reshape"}


@pytest.mark.parametrize("kind", NODES)
def test_canonical_attributes(kind: str, tmp_path: Path) -> None:
    """Structural operands are attributes: dims are non-negative and defaults are filled in."""
    node, constants, expected = NODES[kind]
    length = constants.count(",") + 1 if constants and "b =" not in constants else 1
    kinds = f"<int64[{length}] {constants}>" if constants else ""
    model = text_model(tmp_path, f"g (float[4,6,8] x) => (float y) {kinds} {{ {node} }}")
    (operator,) = bind(model, BindOptions()).operators
    assert operator.type == RENAMED.get(kind, kind)
    assert len(operator.inputs) == 1
    assert {key: operator.signature.attribute(key) for key in expected} == expected


def test_no_ops_are_dropped_and_output_names_stay(tmp_path: Path) -> None:
    """Identity, inference dropout, float casts and reshapes to the same shape leave nothing behind."""
    model = text_model(
        tmp_path,
        """g (float[4,6] x) => (float16 y) <int64[2] s = {4, -1}, int64[2] e = {1, 6}> {
            a = Relu (x)
            b = Identity (a)
            c = Dropout (b)
            d = Reshape (c, s)
            f = Expand (d, e)
            h = Transpose <perm=[0, 1]> (f)
            k = Concat <axis=0> (h)
            y = Cast <to=10> (k)
        }""",
    )
    graph = bind(model, BindOptions())
    assert [operator.type for operator in graph.operators] == ["Relu"]
    assert (graph.outputs, graph.output_names) == (("a",), ("y",))


def test_reshapes_merge_unless_the_middle_is_needed(tmp_path: Path) -> None:
    """Two reshapes in a row are one, and none if they undo each other."""
    body = """g (float[4,6] x) => (float y{more}) <int64[1] s = {{-1}}, int64[2] t = {{4, 6}}> {{
        a = Relu (x)
        b = Reshape (a, s)
        c = Reshape (b, t)
        y = Neg (c)
    }}"""
    merged = bind(text_model(tmp_path, body.format(more="")), BindOptions())
    assert [operator.type for operator in merged.operators] == ["Relu", "Neg"]
    kept = bind(text_model(tmp_path, body.format(more=", float b")), BindOptions())
    assert [operator.type for operator in kept.operators] == ["Relu", "Reshape", "Reshape", "Neg"]


def test_dead_operators_and_unused_outputs_are_dropped(tmp_path: Path) -> None:
    """What no output depends on is gone; an unused optional output too."""
    model = text_model(
        tmp_path,
        """g (float[4,3,8,8] x, float[9] unused) => (float y) {
            dead = Exp (x)
            y, indices = MaxPool <kernel_shape=[2,2]> (x)
        }""",
    )
    (operator,) = bind(model, BindOptions()).operators
    assert operator.outputs == ("y",)


def test_huge_constants_are_not_made(tmp_path: Path) -> None:
    """A few bytes that describe 10^12 elements stay a recipe."""
    model = text_model(
        tmp_path,
        "g (float[4] x) => (int64 y) <int64[2] s = {1000000, 1000000}, int64 o = {1}> { y = Expand (o, s) }",
    )
    graph = bind(model, BindOptions())
    assert graph.tensor(graph.outputs[0]).type.shape == (1000000, 1000000)
    assert graph.constants.small(graph.outputs[0]) is None
