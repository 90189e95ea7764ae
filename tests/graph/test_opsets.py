"""Operator sets and domains, local functions, and the other dialects of files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from tap_planner.errors import ModelError, UnsupportedGraphError
from tap_planner.graph import BindOptions, ModelFile, WeightReader, bind, load_model
from tests.graph.executing import assert_equal_outputs, outputs_of
from tests.graph.models import DATA, saved, text_model

CASES = DATA / "cases"
RANDOM = np.random.default_rng(0)


def _stored(name: str, *shape: int) -> TensorProto:
    return numpy_helper.from_array(RANDOM.normal(size=shape).astype(np.float32), name)


def _model(folder: Path, nodes: Sequence[onnx.NodeProto], weights: Sequence[TensorProto], opset: int) -> ModelFile:
    """A model x[2, 4] -> y in an old operator set; its weights are inputs as well, as files of that time have them."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])]
    inputs.extend(helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.dims) for tensor in weights)
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return saved(folder, helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=3))


def test_old_broadcasting_is_upgraded(tmp_path: Path) -> None:
    """Before operator set 7 operands were aligned by an attribute: the result is that of numpy, and a note says so."""
    w, b = _stored("w", 4, 3), _stored("b", 2)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["c"], axis=0, broadcast=1),
        helper.make_node("Dropout", ["c"], ["y"], is_test=1, ratio=0.5),
    ]
    model = _model(tmp_path, nodes, [w, b], 6)
    graph = bind(model, BindOptions())
    assert [parameter.name for parameter in graph.parameters] == ["w", "b"]
    assert graph.warnings == ("the model is written in operator set 6; it was upgraded to 7",)
    x = RANDOM.normal(size=(2, 4))
    expected = x @ numpy_helper.to_array(w) + numpy_helper.to_array(b)[:, None]
    np.testing.assert_allclose(outputs_of(model, graph, {"x": x})["y"], expected, rtol=1e-12)


def test_shapes_in_attributes_are_upgraded(tmp_path: Path) -> None:
    """Before operator set 5 the target of a Reshape was an attribute."""
    model = _model(tmp_path, [helper.make_node("Reshape", ["x"], ["y"], shape=[4, 2], consumed_inputs=[0])], [], 4)
    graph = bind(model, BindOptions())
    assert graph.tensor("y").type.shape == (4, 2)


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("Upsample", ["r"], ["y"], "last", scales=[1.0, 2.0]),
        helper.make_node("Cast", ["r"], ["y"], "last", to="DOUBLE"),
        helper.make_node("Magic", ["r"], ["y"], "last"),
    ],
    ids=lambda node: node.op_type,
)
def test_what_cannot_be_upgraded_is_named(node: onnx.NodeProto, tmp_path: Path) -> None:
    """The node, its operator, the operator set and the lowest one that needs no upgrade."""
    words = rf"node 'last' \({node.op_type}\): operator set 5 cannot be upgraded to 7"
    with pytest.raises(ModelError, match=words) as caught:
        _model(tmp_path, [helper.make_node("Relu", ["x"], ["r"]), node], [], 5)
    assert "the lowest operator set that needs no upgrade is 7" in caught.value.hint
    assert "\n" not in caught.value.message


def test_the_default_domain_has_two_names() -> None:
    """ai.onnx is the empty text, in imports and in nodes."""
    digests = set()
    for name in ("import_ai_onnx", "node_domain_ai_onnx"):
        graph = bind(load_model(CASES / "domain_and_opset_imports" / f"{name}.onnx"), BindOptions(batch=4))
        assert graph.warnings == ()
        digests.add(tuple(operator.type for operator in graph.operators))
    assert digests == {("MatMul", "Relu", "MatMul")}


def test_a_domain_without_version_is_version_one() -> None:
    """It is assumed, and said with the node."""
    graph = bind(load_model(CASES / "domain_and_opset_imports" / "missing_import.onnx"), BindOptions())
    assert [operator.type for operator in graph.operators] == ["com.microsoft::BiasGelu"]
    assert "'com.microsoft'" in graph.warnings[0] and "version 1 is assumed" in graph.warnings[0]


@pytest.mark.parametrize(
    ("name", "words"), [("no_import", "no operator set version"), ("future_opset", "operator set 999")]
)
def test_versions_that_are_no_use(name: str, words: str) -> None:
    """None at all, or one of the future: one line with what is supported."""
    with pytest.raises(ModelError, match=words) as caught:
        load_model(CASES / "domain_and_opset_imports" / f"{name}.onnx")
    assert "expected 1 to " in caught.value.message


def test_nodes_out_of_order_are_sorted_with_a_note() -> None:
    """The first node that had to move is named."""
    model = load_model(CASES / "unsorted_nodes" / "model.onnx")
    graph = bind(model, BindOptions())
    assert [operator.type for operator in graph.operators] == ["MatMul", "Exp", "Relu"]
    (note,) = graph.warnings
    assert "not in topological order" in note and "'last' (Relu)" in note


FUNCTIONS = """<ir_version: 10, opset_import: ["" : 17, "local" : 1]>
g (float[2,4] x) => (float[2,4] y) <float[4] b = {1, 2, 3, 4}> {
    a = local.outer <slope = 0.5> (x, b)
    y = local.inner:two (a)
}
<domain: "local", opset_import: ["" : 17, "local" : 1]> outer <slope> (u, v) => (w) {
    s = Add (u, v)
    w = local.inner <alpha: float = @slope> (s)
}
<domain: "local", opset_import: ["" : 17]> inner <alpha> (p) => (q) { q = LeakyRelu <alpha: float = @alpha> (p) }
<domain: "local", overload: "two", opset_import: ["" : 17]> inner (p) => (q) { q = Exp (p) }"""


def test_functions_are_inlined_with_attributes_and_overloads(tmp_path: Path) -> None:
    """Nested calls, attributes that are handed through, and two functions of one name."""
    model = saved(tmp_path, onnx.parser.parse_model(FUNCTIONS))
    graph = bind(model, BindOptions())
    assert [operator.type for operator in graph.operators] == ["Add", "LeakyRelu", "Exp"]
    assert_equal_outputs(model, graph, {"x": RANDOM.normal(size=(2, 4)).astype(np.float32)})


def test_functions_of_another_operator_set_are_converted(tmp_path: Path) -> None:
    """A function may be written in an older version than the model."""
    text = FUNCTIONS.replace('opset_import: ["" : 17]> inner', 'opset_import: ["" : 13]> inner')
    graph = bind(saved(tmp_path, onnx.parser.parse_model(text)), BindOptions())
    assert [operator.type for operator in graph.operators] == ["Add", "LeakyRelu", "Exp"]


def _calling(folder: Path, depth: int, calls: int, *, round_: bool = False) -> ModelFile:
    """Functions F0, F1, ... each of which calls the next ``calls`` times; ``round_``: the last one calls the first."""
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    functions = []
    for index in range(depth):
        if index == depth - 1 and not round_:
            nodes = [helper.make_node("Relu", ["x"], ["y"])]
        else:
            callee = f"F{(index + 1) % depth}"
            names = ["x", *(f"t{call}" for call in range(calls - 1)), "y"]
            nodes = [
                helper.make_node(callee, [source], [result], domain="local")
                for source, result in itertools.pairwise(names)
            ]
        functions.append(helper.make_function("local", f"F{index}", ["x"], ["y"], nodes, imports))
    graph = helper.make_graph(
        [helper.make_node("F0", ["x"], ["y"], domain="local")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    return saved(folder, helper.make_model(graph, functions=functions, opset_imports=imports, ir_version=10))


def test_functions_may_call_each_other_often(tmp_path: Path) -> None:
    """Two calls in each of ten functions are 512 nodes."""
    assert len(bind(_calling(tmp_path, 10, 2), BindOptions()).operators) == 512


@pytest.mark.parametrize(
    ("depth", "calls", "round_", "words"),
    [
        (30, 2, False, "grows to 262144 nodes"),
        (3, 1, True, "call themselves: local::F0 -> local::F1 -> local::F2 -> local::F0"),
        (2000, 1, False, "cannot be inlined"),
    ],
    ids=["bomb", "recursion", "depth"],
)
def test_functions_beyond_all_bounds(depth: int, calls: int, round_: bool, words: str, tmp_path: Path) -> None:
    """What would fill the memory, never end, or overflow a stack is one line."""
    with pytest.raises(ModelError, match=words) as caught:
        _calling(tmp_path, depth, calls, round_=round_)
    assert "\n" not in caught.value.message


def test_weights_of_branches_keep_their_names(tmp_path: Path) -> None:
    """A tensor of a branch is a parameter under its own name unless the main graph has that name already."""
    branches = {}
    for name, value in (("then_branch", 1.0), ("else_branch", 2.0)):
        weight = numpy_helper.from_array(np.full((4, 4), value, np.float32), "w")
        constant = helper.make_node("Constant", [], ["v"], value=numpy_helper.from_array(np.full(4, value, np.float32)))
        nodes = [constant, helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "v"], ["o"])]
        outputs = [helper.make_tensor_value_info("o", TensorProto.FLOAT, [2, 4])]
        branches[name] = helper.make_graph(nodes, name, [], outputs, [weight])
    base = text_model(tmp_path, "g (float[2,4] x, bool c) => (float[2,4] y) { y = Neg (x) }").proto
    base.graph.node[0].CopyFrom(
        helper.make_node("If", ["c"], ["y"], then_branch=branches["then_branch"], else_branch=branches["else_branch"])
    )
    model = saved(tmp_path, base)
    reader = WeightReader(model)
    for taken, names, value in ((0, ["w", "v"], 2.0), (1, ["w_1", "v_1"], 1.0)):
        graph = bind(model, BindOptions(values={"c": taken}))
        assert [parameter.name for parameter in graph.parameters] == names
        assert all((reader.read(name) == value).all() for name in names)
        assert [operator.type for operator in graph.operators] == ["MatMul", "Add"]


def test_a_branch_may_return_its_weight(tmp_path: Path) -> None:
    """A tensor that is at once stored in a branch and its result."""
    branches = {
        name: helper.make_graph(
            [], name, [], [helper.make_tensor_value_info("o", TensorProto.FLOAT, [2])], [_stored("o", 2)]
        )
        for name in ("then_branch", "else_branch")
    }
    base = text_model(tmp_path, "g (bool c, float[2] x) => (float[2] z) { y = Neg (x)\n z = Add (x, y) }").proto
    base.graph.node[0].CopyFrom(
        helper.make_node("If", ["c"], ["y"], then_branch=branches["then_branch"], else_branch=branches["else_branch"])
    )
    model = saved(tmp_path, base)
    for options in (BindOptions(), BindOptions(values={"c": 1})):
        feeds = {"c": np.array(True), "x": np.ones(2, np.float32)}
        assert_equal_outputs(model, bind(model, options), feeds)


def test_long_chains_are_no_problem(tmp_path: Path) -> None:
    """Ten thousand nodes behind each other, in reverse order, are bound without recursion."""
    nodes = [
        helper.make_node("Tanh", [f"t{index}" if index else "x"], [f"t{index + 1}" if index < 9999 else "y"])
        for index in range(10_000)
    ]
    graph = helper.make_graph(
        nodes[::-1],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    model = saved(tmp_path, helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert len(bind(model, BindOptions()).operators) == 10_000


def test_a_cycle_names_its_values() -> None:
    """The loop is listed, whatever else is wrong."""
    with pytest.raises(UnsupportedGraphError, match="the graph has a cycle: b -> c -> a -> b"):
        bind(load_model(CASES / "invalid_graphs" / "cycle.onnx"), BindOptions())
