"""Files that are no models, and weights beside the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import external_data_helper, numpy_helper

from tap_planner.errors import ModelError
from tap_planner.graph import WeightReader, load_model
from tap_planner.graph.upgrade import MAX_OPSET
from tests.graph.models import DATA, add_weight, data_model, light_model, saved, text_model

BAD = {
    "empty": (b"", "empty"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs"),
    "json": (b'{"a": 1}', "not a readable ONNX model"),
    "zip": (b"PK\x03\x04" + bytes(40), "not a readable ONNX model"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_no_models(name: str, tmp_path: Path) -> None:
    """Each ends in one line that says what the file is."""
    content, words = BAD[name]
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words) as caught:
        load_model(path)
    assert "\n" not in caught.value.message


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    """A missing file and half a file are told apart."""
    with pytest.raises(ModelError, match="no such file"):
        load_model(tmp_path / "absent.onnx")
    half = (DATA / "gpt2_tiny.onnx").read_bytes()[:9000]
    (tmp_path / "half.onnx").write_bytes(half)
    with pytest.raises(ModelError, match="truncated"):
        load_model(tmp_path / "half.onnx")


@pytest.mark.parametrize("opset", [0, 999])
def test_unsupported_opsets_are_named(opset: int, tmp_path: Path) -> None:
    """Operator sets outside the supported range are refused with both numbers."""
    with pytest.raises(ModelError, match=f"operator set {opset} .*1 to {MAX_OPSET}"):
        text_model(tmp_path, "g (float[2] x) => (float[2] y) { y = Relu (x) }", opset=opset)


def test_weights_are_not_read_to_load() -> None:
    """A model whose weights are absent loads, and the reader says what is missing."""
    reader = WeightReader(data_model("gpt2_tiny"))
    missing = reader.missing()
    assert len(missing) == 28
    assert not reader.available(missing[0])
    with pytest.raises(ModelError, match="cannot be read"):
        reader.read(missing[0])


def test_external_weights_are_read(tmp_path: Path) -> None:
    """Inline, external with offset, and ConstantOfShape weights read as onnx reads them."""
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 20]> g () => (float y) { y = Identity (w) }')
    values = {name: np.arange(size, dtype=np.float32) + size for name, size in (("v", 3), ("w", 5))}
    for name, value in values.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    external_data_helper.convert_model_to_external_data(model, location="weights.bin", size_threshold=0)
    onnx.save(model, tmp_path / "model.onnx")
    reader = WeightReader(load_model(tmp_path / "model.onnx"))
    assert reader.missing() == ()
    for name, value in values.items():
        np.testing.assert_array_equal(reader.read(name), value)


def test_weights_in_nodes_are_read() -> None:
    """The fill value of a ConstantOfShape weight is read with its shape."""
    model = light_model("light_squeezenet")
    node = next(node for node in model.proto.graph.node if node.op_type == "ConstantOfShape")
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.proto.graph.initializer}
    value = WeightReader(model).read(node.output[0])
    assert value.shape == tuple(shapes[node.input[0]])


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "sub/../../secret", "..\\secret", "", "link"])
def test_external_data_stays_beside_the_model(location: str, tmp_path: Path) -> None:
    """No path leads out of the model's folder, not through a link either."""
    (tmp_path / "secret").write_bytes(bytes(64))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 20]> g () => (float y) { y = Identity (w) }')
    add_weight(model, "w", (4,), location=location)
    reader = WeightReader(saved(folder, model))
    assert not reader.available("w")
    with pytest.raises(ModelError, match="'w'"):
        reader.read("w")


def test_external_sizes_are_checked_first(tmp_path: Path) -> None:
    """A tensor that claims 2^66 bytes is refused before anything is allocated."""
    (tmp_path / "weights.bin").write_bytes(bytes(64))
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 20]> g () => (float y) { y = Identity (w) }')
    add_weight(model, "w", (2**32, 2**32))
    with pytest.raises(ModelError, match="ends at 64"):
        WeightReader(saved(tmp_path, model)).read("w")
