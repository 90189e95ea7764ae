"""Every failure is one line that says what, where and what to try; nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from tap_planner.capture import export_graph
from tap_planner.capture.naming import StoredTensor
from tap_planner.capture.writing import write_model
from tap_planner.errors import CaptureError
from tests.capture.modules import Mlp

X = torch.zeros(2, 8)


class Forward(nn.Module):
    """A module of one line."""

    def __init__(self, forward: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inner = forward

    def forward(self, x: Tensor) -> object:
        """What it was given."""
        return self.inner(x)


def failure(path: Path, module: Any, inputs: Any, **options: Any) -> CaptureError:
    """The error of an export that leaves nothing in the folder."""
    with pytest.raises(CaptureError) as caught:
        export_graph(module, inputs, path / "model.onnx", **options)
    assert not list(path.iterdir())
    assert "\n" not in caught.value.message and caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("dims", "message", "hint"),
    [
        ({"y": {0: "batch"}}, "names input 'y', the inputs are x", ""),
        ({"xx": {0: "batch"}}, "names input 'xx'", "did you mean 'x'?"),
        ({"x": {2: "batch"}}, "names dim 2 of 'x', which has 2 dims", ""),
        ({"x": {"0": "batch"}}, "names dim '0' of 'x'", ""),
        ({"x": {0: "batch size"}}, "is called 'batch size', expected a plain name", ""),
        ({"x": ["batch"]}, "expected a mapping such as {0: 'batch'}", ""),
    ],
)
def test_dims_that_do_not_exist(dims: dict[str, Any], message: str, hint: str, tmp_path: Path) -> None:
    """dynamic_dims that name no input, no dim, or no name."""
    error = failure(tmp_path, Mlp(), X, dynamic_dims=dims)
    assert message in error.message
    assert hint in error.hint


def test_a_dim_that_the_module_fixes(tmp_path: Path) -> None:
    """The features of a linear layer cannot stay open."""
    error = failure(tmp_path, Mlp(), X, dynamic_dims={"x": {1: "features"}})
    assert "dim 1 of 'x'" in error.message and "fixes it to 8" in error.message
    assert "leave that dim out of dynamic_dims" in error.hint


@pytest.mark.full
def test_two_names_for_one_dim(tmp_path: Path) -> None:
    """Dims that the module adds up elementwise are one dim."""

    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    error = failure(tmp_path, Sum(), (X, X), dynamic_dims={"x": {0: "batch"}, "y": {0: "rows"}})
    assert "dim 0 of 'y' is called 'rows', but the module needs it to equal dim 'batch'" in error.message
    assert "one name" in error.hint


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "do not fit forward(x: torch.Tensor)"),
        ({"z": X}, "do not fit forward"),
        (3, "example_inputs is int"),
        ((3,), "hold no tensor"),
        ((Path(),), "argument 'x' holds a PosixPath, whose tensors torch's exporter does not see"),
    ],
)
def test_inputs_that_do_not_fit(inputs: object, message: str, tmp_path: Path) -> None:
    """Example inputs that forward does not take."""
    assert message in failure(tmp_path, Mlp(), inputs).message.replace("'Tensor'", "torch.Tensor")


def test_no_module(tmp_path: Path) -> None:
    """A function is no module."""
    assert "takes a torch.nn.Module, got function" in failure(tmp_path, lambda x: x, X).message


def test_values_from_the_meta_device(tmp_path: Path) -> None:
    """Weights that do not exist cannot be written."""
    error = failure(tmp_path, Mlp().to("meta"), X)
    assert "'up.weight' is on the meta device" in error.message
    assert "weights=False" in error.hint


def test_a_decision_by_value(tmp_path: Path) -> None:
    """The message names the line of the module's own code."""
    error = failure(tmp_path, Forward(lambda x: x + 1 if x.sum() > 0 else x - 1), X)
    assert "decides by a tensor's value at test_errors.py:" in error.message
    assert "torch.cond" in error.hint


def test_an_operator_that_onnx_does_not_have(tmp_path: Path) -> None:
    """The message names the operator."""
    error = failure(tmp_path, Forward(lambda x: torch.linalg.eigvals(x[:, :2]).real), X)
    assert "aten.linalg_eig" in error.message
    assert "torch.onnx.ops.symbolic" in error.hint


@pytest.mark.full
def test_a_result_that_is_no_tensor(tmp_path: Path) -> None:
    """Numbers are no outputs of a graph."""
    error = failure(tmp_path, Forward(lambda x: (x + 1, 3)), X)
    assert "neither a tensor nor None" in error.message


@pytest.mark.full
def test_a_forward_that_fails(tmp_path: Path) -> None:
    """An error of the module's own is shown in one line, with its place."""
    error = failure(tmp_path, Forward(lambda x: x @ x), X)
    assert "Forward cannot be traced at test_errors.py:" in error.message
    assert "module(*example_inputs)" in error.hint


@pytest.mark.parametrize(
    "names", [["x"], pytest.param(["a", "b"], marks=pytest.mark.full), pytest.param([], marks=pytest.mark.full)]
)
def test_output_names_that_do_not_fit(names: list[str], tmp_path: Path) -> None:
    """Too few, too many, or one that is taken."""
    assert "output_names" in failure(tmp_path, Forward(lambda x: x + 1), X, output_names=names).message


@pytest.mark.parametrize("absent", ["torch", "onnxscript"])
def test_without_torch(absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said."""
    real = util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == absent else real(name, package)

    monkeypatch.setattr("tap_planner.capture.exporting.find_spec", find)
    error = failure(tmp_path, Mlp(), X)
    assert f"needs {absent}" in error.message
    assert "tap-planner[apply]" in error.hint


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    """A folder, or a folder that does not exist, is refused before tracing."""
    with pytest.raises(CaptureError, match="is a folder"):
        export_graph(Mlp(), X, tmp_path)
    with pytest.raises(CaptureError, match="its folder does not exist"):
        export_graph(Mlp(), X, tmp_path / "no" / "model.onnx")


class FailingValue:
    """A stored tensor whose data cannot be read to its end."""

    dtype, shape, nbytes = onnx.TensorProto.FLOAT, (4096,), 4 * 4096

    def tobytes(self) -> bytes:
        """Fails."""
        raise OSError(28, "No space left on device")

    def tofile(self, file: Any) -> None:
        """Writes half and fails."""
        file.write(bytes(100))
        raise OSError(28, "No space left on device")


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Path]:
    """A model that was there before, with weights beside it; both must survive."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old model")
    (tmp_path / "model.onnx.data").write_bytes(b"old weights")
    yield path
    assert path.read_bytes() == b"old model"
    assert (tmp_path / "model.onnx.data").read_bytes() == b"old weights"
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data"]


def stored(value: Any) -> StoredTensor:
    """A parameter."""
    return StoredTensor(
        name="w",
        value=value,
        is_parameter=True,
        is_trainable=True,
        has_value=True,
        is_index=False,
        is_structure=False,
    )


def test_a_full_disk_leaves_the_old_files(old: Path) -> None:
    """A failure while weights are written changes nothing and is said in one line."""
    with pytest.raises(CaptureError, match=r"model\.onnx\.data: cannot be written: No space left on device"):
        write_model(old, onnx.ModelProto(), [stored(FailingValue())], weights=True, inline_limit_bytes=0)


def test_a_failed_rename_leaves_the_old_files(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where the last step fails."""

    def fail(source: str, target: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tap_planner.files.os.replace", fail)
    with pytest.raises(CaptureError, match="Permission denied"):
        write_model(old, onnx.ModelProto(), [], weights=True, inline_limit_bytes=0)


def test_a_file_that_would_be_taken_for_the_weights(tmp_path: Path) -> None:
    """Weights that are declared absent must be absent."""
    (tmp_path / "model.onnx.absent").write_bytes(b"something")
    with pytest.raises(CaptureError, match="would be taken for the weights"):
        write_model(
            tmp_path / "model.onnx",
            onnx.ModelProto(),
            [stored(FailingValue())],
            weights=False,
            inline_limit_bytes=0,
        )
