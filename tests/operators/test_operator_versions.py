"""Every version of an operator from opset 7 on means what onnxruntime, or ONNX's reference, says."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx.reference.op_run import RuntimeImplementationError

from tap_planner.graph.upgrade import MAX_OPSET, MIN_OPSET
from tests.operators.backend_nodes import run_model
from tests.operators.onnx_nodes import Array, by_onnxruntime, evaluated, node_model
from tests.operators.version_cases import CASES, Builder, NodeCase

_NEWEST_REFERENCE = 24
"""The newest operator set that onnxruntime is asked for where a schema has not changed since."""


def _versions(type: str) -> list[int]:
    """One operator set for each version of a schema, and the newest one that the importer reads."""
    since = {
        schema.since_version
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain == "" and schema.name == type and not schema.deprecated
    }
    last = {
        schema.since_version
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain == "" and schema.name == type and schema.deprecated
    }
    found = {max(version, MIN_OPSET) for version in since}
    return sorted(found | (set() if last else {MAX_OPSET}))


_PAIRS = [
    pytest.param(type, build, opset, id=f"{type}-{number}-{opset}")
    for type, group in itertools.groupby(CASES, key=lambda pair: pair[0])
    for number, (_, build) in enumerate(group)
    for opset in _versions(type)
]


def _expected(type: str, case: NodeCase, opset: int) -> list[Array]:
    """Onnxruntime where it has a kernel, else ONNX's reference evaluator, else the kernel of an older version."""
    arguments = (type, case.operands, case.attributes, case.num_outputs)
    for version in sorted({opset, min(opset, _NEWEST_REFERENCE)}, reverse=True):
        if onnx.defs.get_schema(type, version).since_version != onnx.defs.get_schema(type, opset).since_version:
            continue
        try:
            return by_onnxruntime(*arguments, version)
        except Exception as error:
            if "NOT_IMPLEMENTED" not in str(error) and "opset" not in str(error).lower():
                raise
    try:
        return evaluated(*arguments, opset)
    except RuntimeImplementationError:
        return by_onnxruntime(*arguments, _versions(type)[0])


@pytest.mark.parametrize(("type", "build", "opset"), _PAIRS)
def test_version_means_what_the_reference_says(type: str, build: Builder, opset: int) -> None:
    """A node as this operator set writes it is imported and gives the reference's outputs."""
    case = build(opset, np.random.default_rng(5))
    model, feeds = node_model(type, case.operands, case.attributes, case.num_outputs, opset)
    constants = {f"x{index}" for index in case.constants}
    made = run_model(model, feeds, constants)
    for found, wanted in zip(made, _expected(type, case, opset), strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), rtol=2e-5, atol=2e-5)
