"""One ONNX node run by its reference evaluator or by onnxruntime, given its operands as the file would hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper
from onnx.reference import ReferenceEvaluator

Array = np.ndarray


def node_model(
    type: str, operands: Sequence[Array | None], attributes: dict[str, Any], num_outputs: int, opset: int
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """The model of one node whose operands are all graph inputs, and the feeds of them."""
    feeds = {f"x{index}": np.asarray(value) for index, value in enumerate(operands) if value is not None}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    names = [f"x{index}" if value is not None else "" for index, value in enumerate(operands)]
    outputs = [f"y{index}" for index in range(num_outputs)]
    node = helper.make_node(type, names, outputs, **attributes)
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph([node], "one", inputs, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return model, feeds


def evaluated(
    type: str, operands: Sequence[Array | None], attributes: dict[str, Any], num_outputs: int = 1, opset: int = 23
) -> list[Array]:
    """Outputs by ONNX's reference evaluator."""
    model, feeds = node_model(type, operands, attributes, num_outputs, opset)
    return [np.asarray(found) for found in ReferenceEvaluator(model).run(None, feeds)]


def by_onnxruntime(
    type: str, operands: Sequence[Array | None], attributes: dict[str, Any], num_outputs: int = 1, opset: int = 21
) -> list[Array]:
    """Outputs by onnxruntime."""
    model, feeds = node_model(type, operands, attributes, num_outputs, opset)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(found) for found in session.run(None, feeds)]
