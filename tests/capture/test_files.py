"""What lies in an exported file: names, values, sizes, dims; and that it computes what the module computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tap_planner.capture import CapturedGraph, export_graph
from tap_planner.graph import BindOptions, Graph, WeightReader, bind, load_model
from tests.capture.conftest import Exported
from tests.capture.modules import EXAMPLES, Mlp, build

NAMES = tuple(EXAMPLES)


def bound(name: str, captured: CapturedGraph, *, training: bool = True) -> Graph:
    """The file bound with a batch of 4."""
    return bind(load_model(captured.path), BindOptions(batch=4, dims=EXAMPLES[name].sizes, training=training))


def proto(captured: CapturedGraph) -> onnx.ModelProto:
    """The file, without weights that lie beside it."""
    return onnx.load(captured.path, load_external_data=False)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_of_pytorch(name: str, exported: Exported) -> None:
    """Initializers are the named parameters that forward reads, each once, and buffers."""
    module, captured = build(name), exported(name)
    parameters = {key for key, _ in module.named_parameters()} - set(EXAMPLES[name].not_read)
    buffers = {key for key, _ in module.named_buffers()}
    stored = [tensor.name for tensor in proto(captured).graph.initializer]
    assert len(stored) == len(set(stored))
    assert set(captured.parameters) == parameters
    assert parameters <= set(stored) <= parameters | buffers
    assert {item.name for item in bound(name, captured).parameters if item.trainable} == parameters


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_module(name: str, exported: Exported) -> None:
    """Every stored tensor can be read and holds the module's value, bit by bit."""
    module, model = build(name), load_model(exported(name).path)
    reader = WeightReader(model)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    assert reader.missing() == ()
    for tensor in model.proto.graph.initializer:
        np.testing.assert_array_equal(reader.read(tensor.name), tensors[tensor.name].detach().numpy())


@pytest.mark.parametrize("name", NAMES)
def test_valid_and_free_of_metadata(name: str, exported: Exported) -> None:
    """The file passes onnx's checker and holds no stack traces, doc strings or paths."""
    captured = exported(name)
    model = proto(captured)
    onnx.checker.check_model(model)
    assert not model.metadata_props and not model.graph.metadata_props
    assert not any(node.metadata_props or node.doc_string for node in model.graph.node)
    assert not any(info.metadata_props for info in model.graph.value_info)
    text = captured.path.read_bytes()
    assert b".py" not in text and b"stack_trace" not in text


@pytest.mark.parametrize("name", NAMES)
def test_computes_what_the_module_computes(name: str, exported: Exported) -> None:
    """onnxruntime gives the module's outputs, in its order; also with other sizes of the open dims."""
    example, captured = EXAMPLES[name], exported(name)
    session = onnxruntime.InferenceSession(captured.path, providers=["CPUExecutionProvider"])
    double = pytree.tree_map(lambda tensor: torch.cat((tensor, tensor.flip(0))), dict(example.inputs))
    for inputs in (dict(example.inputs), double):
        feeds = {key: leaf.numpy() for key, leaf in zip(captured.inputs, pytree.tree_leaves(inputs), strict=True)}
        expected = pytree.tree_leaves(build(name)(**inputs))
        for got, want in zip(session.run(list(captured.outputs), feeds), expected, strict=True):
            np.testing.assert_allclose(got, want.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_open_dims_have_the_names_given(exported: Exported) -> None:
    """Inputs and outputs show the names of dynamic_dims, also inside sums of dims; other dims are numbers."""
    graph = proto(exported("decoder")).graph
    dims = {
        info.name: [dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim]
        for info in (*graph.input, *graph.output)
    }
    assert dims["input_ids"] == ["batch", "seq"]
    assert all(dims[f"past_{layer}_{half}"] == ["batch", 2, "past", 8] for layer in (0, 1) for half in (0, 1))
    assert dims["output_0"] == ["batch", "seq", 24]
    assert dims["output_1_1_0"][0] == "batch" and set(str(dims["output_1_1_0"][2]).split(" + ")) == {"past", "seq"}
    for info in graph.value_info:
        for dim in info.type.tensor_type.shape.dim:
            assert set(dim.dim_param.replace("+", " ").split()) <= {"batch", "seq", "past"}


def test_outputs_have_the_keys_that_forward_returns(exported: Exported) -> None:
    """A mapping's keys, positions in a sequence, ``output`` for a single tensor."""
    assert exported("tied").outputs == ("logits",)
    assert exported("mlp").outputs == ("output",)
    assert exported("decoder").outputs[:2] == ("output_0", "output_1_0_0")


def same_graph(one: CapturedGraph, other: CapturedGraph, name: str) -> bool:
    """Whether both files are bound to the same graph, for inference and for training."""
    return all(
        bound(name, one, training=training).digest == bound(name, other, training=training).digest
        for training in (False, True)
    )


@pytest.mark.parametrize("name", ["mlp", pytest.param("tied", marks=pytest.mark.full)])
def test_without_weights_the_graph_is_the_same(name: str, exported: Exported) -> None:
    """A file without weights has the digest of one with them, so a plan of either fits the other."""
    real, absent = exported(name), exported(name, "absent")
    assert same_graph(real, absent, name)
    reader = WeightReader(load_model(absent.path))
    assert set(absent.parameters) == set(reader.missing())
    assert not list(absent.path.parent.glob(f"{absent.path.name}.*"))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("mlp", "meta"),
        ("tied", "parameters on meta"),
        pytest.param("conv_train", "meta", marks=pytest.mark.full),
        pytest.param("decoder", "meta", marks=pytest.mark.full),
    ],
)
def test_meta_device_gives_the_same_graph(name: str, place: str, exported: Exported) -> None:
    """A module without values is traced as one with them."""
    assert same_graph(exported(name), exported(name, place), name)


def test_the_module_is_left_as_it_was(tmp_path: Path) -> None:
    """Stand-ins are gone after the export: parameters are the same objects on the same device."""
    module = build("mlp", "meta")
    before = dict(module.named_parameters())
    export_graph(module, EXAMPLES["mlp"].inputs, tmp_path / "mlp.onnx", weights=False)
    assert all(parameter is before[name] and parameter.is_meta for name, parameter in module.named_parameters())


@pytest.mark.full
def test_indices_without_a_value_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An integer buffer on the meta device is part of the graph that cannot be known: a warning names it."""
    export_graph(build("tied", "meta"), EXAMPLES["tied"].inputs, tmp_path / "tied.onnx", weights=False)
    assert any("'order'" in record.getMessage() for record in caplog.records if record.name == "tap_planner")


def test_a_parameter_called_like_an_operator_keeps_its_name(exported: Exported) -> None:
    """The exporter calls sums add, add_1, ...: they make way for the parameter ``add``."""
    graph = proto(exported("tied")).graph
    made = [output for node in graph.node for output in node.output]
    assert len(made) == len(set(made))
    assert "add" not in made
    assert any("add" in node.input for node in graph.node)


class Awkward(torch.nn.Module):
    """Returns an input, a parameter, one value twice and a constant; an input is called like a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
        self.register_buffer("one", torch.tensor([5.0, 7.0]))
        self.register_buffer("same", self.one)

    def forward(self, x: Tensor, weight: Tensor, *more: Tensor, scale: float = 1.0) -> dict[str, object]:
        """Everything."""
        y = x * self.weight * scale + weight + self.one + self.same + torch.tensor([0.5, 0.25])
        return {"x": x, "y": y, "again": [y, self.weight], "none": None, "more": more[0] + y}


def test_awkward_inputs_and_outputs(tmp_path: Path) -> None:
    """All names are different, and onnxruntime gives every output."""
    x, weight, more = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]), torch.tensor([100.0, 200.0])
    captured = export_graph(Awkward(), (x, weight, more), tmp_path / "awkward.onnx")
    onnx.checker.check_model(captured.path)
    assert captured.inputs == ("x", "weight_1", "more_0")
    assert captured.parameters == ("weight",)
    assert captured.outputs == ("x_out", "y", "again_0", "again_1", "more")
    session = onnxruntime.InferenceSession(captured.path, providers=["CPUExecutionProvider"])
    got = session.run(None, dict(zip(captured.inputs, (x.numpy(), weight.numpy(), more.numpy()), strict=True)))
    for value, want in zip(got, ([1, 2], [22.5, 40.25], [22.5, 40.25], [2, 3], [122.5, 240.25]), strict=True):
        np.testing.assert_array_equal(value, want)


def test_large_weights_lie_beside_the_model(tmp_path: Path) -> None:
    """Above the limit weights go to a file of their own; bfloat16 keeps its bits."""
    module = Mlp()
    module.up, module.down = torch.nn.Linear(8, 512), torch.nn.Linear(512, 8)
    path = tmp_path / "mlp.onnx"
    inputs = torch.zeros(2, 8, dtype=torch.bfloat16)
    captured = export_graph(module.to(torch.bfloat16), inputs, path, inline_limit_bytes=1000)
    assert captured.weights_path == tmp_path / "mlp.onnx.data"
    outside = {tensor.name for tensor in proto(captured).graph.initializer if tensor.external_data}
    assert outside == {"up.weight", "down.weight"}  # biases are smaller than a page: they stay
    reader = WeightReader(load_model(path))
    for name in captured.parameters:
        bits = reader.read(name).view(np.uint16)
        np.testing.assert_array_equal(bits, module.get_parameter(name).detach().view(torch.uint16).numpy())
    assert sorted(item.name for item in tmp_path.iterdir()) == ["mlp.onnx", "mlp.onnx.data"]


def test_same_bytes_again(exported: Exported, tmp_path: Path) -> None:
    """Exporting twice gives the same file."""
    example = EXAMPLES["mlp"]
    again = export_graph(build("mlp"), example.inputs, tmp_path / "again.onnx", dynamic_dims=example.dims)
    assert again.path.read_bytes() == exported("mlp").path.read_bytes()


def test_nothing_of_capture_imports_torch_before_it_is_used() -> None:
    """Planning works where torch is not installed."""
    code = "import sys, tap_planner.capture, tap_planner_cli.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
