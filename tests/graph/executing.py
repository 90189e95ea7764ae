"""A bound graph run whole, and what onnxruntime makes of the same file."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime

from tap_planner.apply.reference import run_reference
from tap_planner.apply.weights import StoredWeights
from tap_planner.graph import Graph, ModelFile, WeightReader


def outputs_of(model: ModelFile, graph: Graph, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs of the bound graph in float64, by ONNX name."""
    inputs = {name: feeds[name] for name in graph.inputs}
    result = run_reference(graph, StoredWeights(WeightReader(model)), inputs)
    return result.outputs


def expected_outputs(model: ModelFile, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs of the file by onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return {name: np.asarray(value) for name, value in zip(names, session.run(names, dict(feeds)), strict=True)}


def assert_equal_outputs(model: ModelFile, graph: Graph, feeds: Mapping[str, np.ndarray]) -> None:
    """The bound graph computes what onnxruntime computes, to float32 accuracy."""
    found, expected = outputs_of(model, graph, feeds), expected_outputs(model, feeds)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
