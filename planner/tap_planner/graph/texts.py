"""Models written as ONNX text, with weights that have shapes and no values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx.parser

from tap_planner.graph.loading import ModelFile


def model_of_text(text: str, weights: Mapping[str, tuple[int, ...]]) -> ModelFile:
    """A model that is in no file.

    Args:
        text: a model in ONNX text (``onnx.parser``), of the newest operator set that is read without changes.
        weights: shapes of the float weights that its nodes read; their values are absent.
    """
    proto = onnx.parser.parse_model(text)
    for name, shape in weights.items():
        tensor = onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", "absent"
        proto.graph.initializer.append(tensor)
    opset = next(entry.version for entry in proto.opset_import if not entry.domain)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return ModelFile(path=Path(f"{proto.graph.name}.onnx"), proto=proto, sha256=sha256, opset=opset)
