"""Dims, batch, inputs, trainable set and digest."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tap_planner.errors import ModelError, UnboundDimError, UnsupportedGraphError, UsageError
from tap_planner.graph import BindOptions, LossOptions, TensorKind, WeightReader, bind
from tap_planner.operators import record_of
from tests.graph.models import add_weight, bound, data_model, light_model, saved, text_model


def test_unbound_dims_are_all_named() -> None:
    """The error lists every dim that has no value and says how to give it."""
    with pytest.raises(UnboundDimError, match="dec_seq") as caught:
        bind(data_model("t5_tiny"), BindOptions(batch=8))
    assert "seq" in caught.value.message
    assert "--dim dec_seq=N" in caught.value.hint


def test_unknown_dim_suggests_near_ones() -> None:
    """A misspelt dim is an error with the likely intention."""
    with pytest.raises(UsageError, match="sequ") as caught:
        bind(data_model("gpt2_tiny"), BindOptions(batch=8, dims={"sequ": 4}))
    assert "did you mean seq" in caught.value.hint


def test_batch_is_a_dim_like_any_other() -> None:
    """--batch and --dim batch say the same; differing values are an error."""
    model = data_model("gpt2_tiny")
    by_batch = bind(model, BindOptions(batch=8, dims={"seq": 16}))
    by_dim = bind(model, BindOptions(dims={"seq": 16, "batch": 8}))
    assert by_batch.digest == by_dim.digest
    assert by_dim.batch == 8
    assert by_batch.batch_dims == {"input_ids": 0}
    with pytest.raises(UsageError, match="differ"):
        bind(model, BindOptions(batch=8, dims={"seq": 16, "batch": 4}))


def test_unnamed_dims_and_ranks(tmp_path: Path) -> None:
    """A dim without a name is bound as input.index, an input without rank by its shape."""
    model = text_model(tmp_path, "g (float[?,8] x) => (float y) { y = Relu (x) }")
    assert bind(model, BindOptions(dims={"x.0": 3})).tensor("x").type.shape == (3, 8)
    del model.proto.graph.input[0].type.tensor_type.shape.dim[:]
    model.proto.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(UnboundDimError, match="no rank"):
        bind(model, BindOptions())
    assert bind(model, BindOptions(shapes={"x": (2, 8)})).tensor("x").type.shape == (2, 8)


def test_batch_dim_may_be_named(tmp_path: Path) -> None:
    """A batch that does not lead is named."""
    model = text_model(tmp_path, "g (float[seq,n,8] x) => (float y) { y = Relu (x) }")
    graph = bind(model, BindOptions(batch=6, batch_dim="n", dims={"seq": 5}))
    assert graph.batch_dims == {"x": 1}
    assert graph.tensor("x").type.shape == (5, 6, 8)


def test_input_values_become_constants(tmp_path: Path) -> None:
    """--value turns an input into a constant, which is part of the digest."""
    model = text_model(tmp_path, "g (float[4,6] x, int64[2] s) => (float y) { y = Reshape (x, s) }")
    with pytest.raises(UnsupportedGraphError, match="'s'"):
        bind(model, BindOptions())
    scalar = text_model(
        tmp_path,
        "g (float[4,6] x, int64 n) => (float y) <int64 f = {1}, int64 e = {4}> "
        "{ r = Range (n, e, f)\n y = Gather <axis=1> (x, r) }",
    )
    graphs = [bind(scalar, BindOptions(values={"n": value})) for value in (0, 2)]
    assert [graph.tensor("y").type.shape for graph in graphs] == [(4, 4), (4, 2)]
    assert graphs[0].inputs == ("x",)
    with pytest.raises(UsageError, match="no such input"):
        bind(scalar, BindOptions(values={"m": 1}))


def test_ir3_initializers_are_weights(tmp_path: Path) -> None:
    """In old files every initializer is an input as well; only the others are fed."""
    model = onnx.parser.parse_model(
        '<ir_version: 3, opset_import: ["" : 9]> g (float[N,8] x, float[8,4] w) => (float[N,4] y) { y = MatMul (x, w) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((8, 4), np.float32), "w"))
    graph = bind(saved(tmp_path, model), BindOptions(batch=2))
    assert graph.inputs == ("x",)
    assert [parameter.name for parameter in graph.parameters] == ["w"]


@pytest.mark.parametrize("name", ["light_resnet50", "light_bvlc_alexnet", "light_shufflenet", "light_densenet121"])
def test_rebatching_equals_the_file_at_batch_one(name: str) -> None:
    """With another batch all operators stay; each activation's first dim grows by the batch."""
    model = light_model(name)
    one, many = bind(model, BindOptions()), bound(model, batch=6)
    assert one.batch == 1
    assert [operator.type for operator in one.operators] == [operator.type for operator in many.operators]
    for operator in many.operators:
        before, after = one.tensor(operator.id).type.shape, many.tensor(operator.id).type.shape
        assert after == (6 * before[0], *before[1:])


def test_rebatching_that_mixes_the_batch_is_refused(tmp_path: Path) -> None:
    """A constant shape that would move elements between samples is no re-batching; the node is named."""
    model = text_model(
        tmp_path,
        "g (float[1,4,6] x) => (float y) <int64[2] s = {4, -1}> { a = Relu (x)\n y = Reshape (a, s) }",
    )
    assert bind(model, BindOptions()).tensor("y").type.shape == (4, 6)
    with pytest.raises(UnsupportedGraphError, match=re.escape("Reshape")):
        bind(model, BindOptions(batch=3))


@pytest.mark.parametrize(
    "node",
    [
        "y = Softmax <axis=0> (a)",
        "y = Concat <axis=0> (a, a)",
        "y = Tile (a, r)",
        "y = LayerNormalization <axis=0> (a, x)",
        "y = ReduceMean (a, z)",
    ],
)
def test_rebatching_of_operators_along_the_batch_is_refused(node: str, tmp_path: Path) -> None:
    """Operators that couple samples would mean something else with another batch."""
    body = f"g (float[1,4] x) => (float y) <int64[2] r = {{2, 1}}, int64[1] z = {{0}}> {{ a = Relu (x)\n {node} }}"
    model = text_model(tmp_path, body)
    assert bind(model, BindOptions()).batch == 1
    with pytest.raises(UnsupportedGraphError, match=node.split()[2]):
        bind(model, BindOptions(batch=3))


def test_rebatching_widens_a_class_token(tmp_path: Path) -> None:
    """A learned row that is concatenated to each sample is repeated for the new batch."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 20]> g (float[1,4,6] x) => (float y) { y = Concat <axis=1> (t, x) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 1, 6), np.float32), "t"))
    graph = bind(saved(tmp_path, model), BindOptions(batch=3))
    assert [operator.type for operator in graph.operators] == ["Expand", "Concat"]
    assert graph.tensor("y").type.shape == (3, 5, 6)


def test_fixed_batch_is_not_changed(tmp_path: Path) -> None:
    """A fixed batch other than 1 cannot be changed; the hint says how to export."""
    model = text_model(tmp_path, "g (float[2,8] x) => (float y) { y = Relu (x) }")
    assert bind(model, BindOptions(batch=2)).batch == 2
    with pytest.raises(UsageError, match="fixed batch of 2") as caught:
        bind(model, BindOptions(batch=4))
    assert "export" in caught.value.hint


def weighted(scale: float, *, bias: str = "b") -> onnx.ModelProto:
    """x W + b with weights of value ``scale``."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["m", bias], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.full((8, 4), scale, np.float32), "w"),
        numpy_helper.from_array(np.full((4,), scale, np.float32), bias),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)


def test_digest_depends_on_structure_alone(tmp_path: Path) -> None:
    """Weights and file name do not count; names, shapes and batch do."""
    options = BindOptions(batch=2, training=True)
    first = bind(saved(tmp_path, weighted(1.0)), options)
    second = bind(saved(tmp_path, weighted(2.0), "other.onnx"), options)
    assert first.digest == second.digest
    assert first.file_sha256 != second.file_sha256
    assert bind(saved(tmp_path, weighted(1.0, bias="c")), options).digest != first.digest
    assert bind(saved(tmp_path, weighted(1.0)), BindOptions(batch=4, training=True)).digest != first.digest


def test_equal_weights_stay_apart(tmp_path: Path) -> None:
    """Two parameters that are equal today are two parameters."""
    model = weighted(0.0)
    model.graph.node.append(helper.make_node("Add", ["y", "b2"], ["z"]))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((4,), np.float32), "b2"))
    model.graph.output[0].name = "z"
    graph = bind(saved(tmp_path, model), BindOptions(batch=2))
    assert [parameter.name for parameter in graph.parameters] == ["w", "b", "b2"]


def test_default_loss_warns_and_counts_terms(tmp_path: Path) -> None:
    """Without --loss the mean of the first float output is minimised, and the user is told."""
    graph = bind(saved(tmp_path, weighted(1.0)), BindOptions(batch=2, training=True))
    loss = graph.operators[-1]
    assert (loss.type, loss.signature.attribute("kind"), loss.signature.attribute("count")) == ("Loss", "mean", 8)
    assert graph.tensor("loss").type.shape == ()
    assert any("mean" in warning for warning in graph.warnings)


def test_cross_entropy_adds_labels() -> None:
    """Cross-entropy adds an int64 input of the logits' leading dims and counts tokens."""
    options = BindOptions(batch=4, dims={"seq": 16}, training=True, loss=LossOptions(kind="cross-entropy"))
    graph = bind(data_model("gpt2_tiny"), options)
    assert graph.inputs[-1] == "labels"
    assert (graph.tensor("labels").type.dtype, graph.tensor("labels").type.shape) == ("int64", (4, 16))
    assert graph.operators[-1].signature.attribute("count") == 64
    assert graph.batch_dims["labels"] == 0
    assert graph.warnings == ()


def test_unknown_loss_output() -> None:
    """A loss over an output that does not exist names the outputs."""
    options = BindOptions(batch=4, dims={"seq": 16}, training=True, loss=LossOptions(kind="mean", output="logit"))
    with pytest.raises(UsageError, match="logit"):
        bind(data_model("gpt2_tiny"), options)


def test_gradients_flow_from_parameters_to_the_loss(tmp_path: Path) -> None:
    """What lies before the first weight, and everything in inference, needs no gradient."""
    model = weighted(1.0)
    model.graph.node.insert(0, helper.make_node("Relu", ["x"], ["r"]))
    model.graph.node[1].input[0] = "r"
    file = saved(tmp_path, model)
    graph = bind(file, BindOptions(batch=2, training=True))
    assert {name for name, tensor in graph.tensors.items() if tensor.requires_gradient} == {"w", "m", "b", "y", "loss"}
    quiet = bind(file, BindOptions(batch=2))
    assert not any(tensor.requires_gradient for tensor in quiet.tensors.values())
    assert quiet.loss is None


def test_freeze_and_train_patterns(tmp_path: Path) -> None:
    """Patterns change the trainable set; one that matches nothing is an error."""
    file = saved(tmp_path, weighted(1.0))
    frozen = bind(file, BindOptions(batch=2, training=True, freeze=("*",), train=("b",)))
    assert [parameter.name for parameter in frozen.parameters if parameter.trainable] == ["b"]
    assert not frozen.tensor("m").requires_gradient
    with pytest.raises(UsageError, match="--freeze"):
        bind(file, BindOptions(batch=2, training=True, freeze=("decoder*",)))


def test_weights_in_constant_nodes_are_parameters(tmp_path: Path) -> None:
    """Constant and ConstantOfShape weights, also behind Identity and Transpose, are parameters."""
    model = text_model(
        tmp_path,
        """g (float[2,3] x) => (float y) <int64[2] s = {4, 5}> {
            w = Constant <value = float[4,3] {1,2,3,4,5,6,7,8,9,10,11,12}> ()
            i = Identity (w)
            t = Transpose (i)
            a = MatMul (x, t)
            v = ConstantOfShape <value = float[1] {0.5}> (s)
            y = MatMul (a, v)
        }""",
    )
    graph = bind(model, BindOptions(training=True))
    assert [operator.type for operator in graph.operators] == ["MatMul", "MatMul", "Loss"]
    assert {parameter.name: parameter.trainable for parameter in graph.parameters} == {"w": True, "v": True}
    read = graph.tensor("t").read
    assert read is not None
    assert (read.parameter, read.dims) == ("w", (1, 0))


def test_reads_with_added_dims(tmp_path: Path) -> None:
    """Dims of size 1 that are added to a parameter belong to its reading."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 20]> g (float[2,3,4,4] x) => (float y) <int64[2] s = {1, 2}>'
        "{ b = Unsqueeze (w, s)\n y = Add (x, b) }"
    )
    add_weight(model, "w", (3,))
    graph = bind(saved(tmp_path, model), BindOptions())
    read = graph.tensor("b").read
    assert read is not None
    assert read.dims == (0, None, None)
    assert graph.tensor("b").kind is TensorKind.PARAMETER


def test_unsorted_nodes_and_cycles(tmp_path: Path) -> None:
    """Unsorted files are sorted; a cycle names its loop; a value from nowhere names its reader."""
    graph = bind(text_model(tmp_path, "g (float[2] x) => (float y) { y = Neg (a)\n a = Exp (x) }"), BindOptions())
    assert [operator.type for operator in graph.operators] == ["Exp", "Neg"]
    with pytest.raises(UnsupportedGraphError, match="cycle"):
        bind(text_model(tmp_path, "g (float[2] x) => (float y) { a = Add (x, y)\n y = Neg (a) }"), BindOptions())
    with pytest.raises(UnsupportedGraphError, match="ghost"):
        bind(text_model(tmp_path, "g (float[2] x) => (float y) { y = Add (x, ghost) }"), BindOptions())


def test_outputs_may_be_inputs(tmp_path: Path) -> None:
    """A graph of one Identity returns its input."""
    graph = bind(text_model(tmp_path, "g (float[2] x) => (float y) { y = Identity (x) }"), BindOptions())
    assert (graph.operators, graph.outputs, graph.output_names) == ((), ("x",), ("y",))


def test_unknown_operator_needs_a_declared_shape(tmp_path: Path) -> None:
    """An operator without a record is kept, as one that nobody knows, where the file declares its output's shape."""
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Flash", ["x"], ["a"], domain="acme"), helper.make_node("Relu", ["a"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        ),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("acme", 1)],
    )
    with pytest.raises(UnsupportedGraphError, match="acme::Flash"):
        bind(saved(tmp_path, model), BindOptions(batch=2))
    model.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, ["batch", 4]))
    graph = bind(saved(tmp_path, model), BindOptions(batch=2))
    assert graph.tensor("a").type.shape == (2, 4)
    assert [record_of(operator.signature).known for operator in graph.operators] == [False, True]


@pytest.mark.parametrize(("rate", "kind"), [(8, "Relu"), (16, "Tanh")])
def test_known_branches_are_taken(rate: int, kind: str, tmp_path: Path) -> None:
    """An If on an input's value becomes the branch that is taken; its weights are parameters and can be read."""
    branches = {}
    for name, operator in (("then_branch", "Relu"), ("else_branch", "Tanh")):
        weight = numpy_helper.from_array(np.full((4, 4), len(operator), np.float32), "w")
        nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node(operator, ["a"], ["o"])]
        outputs = [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)]
        branches[name] = helper.make_graph(nodes, name, [], outputs, [weight])
    model = text_model(
        tmp_path, "g (float[2,4] x, int64 sr) => (float y) <int64 e = {8}> { c = Equal (sr, e)\n y = Neg (x) }"
    ).proto
    model.graph.node[1].CopyFrom(helper.make_node("If", ["c"], ["y"], **branches))
    file = saved(tmp_path, model)
    graph = bind(file, BindOptions(values={"sr": rate}))
    assert [operator.type for operator in graph.operators] == ["MatMul", kind]
    (parameter,) = graph.parameters
    assert parameter.trainable is False
    assert (WeightReader(file).read(parameter.name) == len(kind)).all()
    (warning,) = bind(file, BindOptions()).warnings
    assert "every device runs all 2 nodes" not in warning and "--value sr=8" in warning


def test_sequences_between_split_and_read(tmp_path: Path) -> None:
    """A sequence that is split from a tensor and read at constant positions is a Split."""
    model = text_model(
        tmp_path,
        """g (float[2,6] x) => (float y) <int64 s = {4}, int64 i = {1}> {
            q = SplitToSequence <axis=1> (x, s)
            y = SequenceAt (q, i)
        }""",
    )
    graph = bind(model, BindOptions())
    assert [operator.signature.attribute("split") for operator in graph.operators] == [(4, 2)]
    assert graph.tensor(graph.outputs[0]).type.shape == (2, 2)


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    """A model's own functions are replaced by their nodes."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 20, "local" : 1]>
        g (float[2,4] x) => (float y) { y = local.twice (x) }
        <domain: "local", opset_import: ["" : 20]> twice (v) => (w) { w = Add (v, v) }"""
    )
    graph = bind(saved(tmp_path, model), BindOptions())
    assert [operator.type for operator in graph.operators] == ["Add"]


def test_constants_outside_the_file_are_not_read_to_bind() -> None:
    """LLaMA's frequencies lie in an absent file: the graph binds, their value is asked for when it is needed."""
    graph = bound(data_model("llama_tiny"))
    assert graph.constants.outside() == ("m.model.rotary_emb.inv_freq",)
    constants = [tensor for tensor in graph.tensors.values() if tensor.kind is TensorKind.CONSTANT]
    table = next(item.name for item in constants if item.type.is_float and item.type.num_elements > 1000)
    with pytest.raises(ModelError, match="inv_freq"):
        graph.constants.value(table)
    value = graph.constants.value(table, lambda _, kind: np.zeros(kind.shape, np.float32))
    assert value.shape == graph.tensor(table).type.shape
    assert set(np.unique(value)) <= {0.0, 1.0}
