"""ONNX's own node tests (onnx.backend.test), run through the importer and the single-process reference."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

from tap_planner.apply.reference import run_reference
from tap_planner.errors import UnboundDimError, UnsupportedGraphError, UsageError
from tap_planner.graph import BindOptions, Graph, ModelFile, bind

Array = np.ndarray
_TOLERANCES = {"float16": 2e-3, "bfloat16": 3e-2}
"""Results of types that ours are not rounded to: everything is computed in float64 here."""


@cache
def backend_cases() -> dict[str, Any]:
    """Every node test of the installed onnx package by its name."""
    with warnings.catch_warnings(action="ignore"):
        return {case.name: case for case in load_model_tests(kind="node")}


def holds_tensors(case: Any) -> bool:
    """Whether all inputs and outputs are tensors (no sequences, no optionals)."""
    values = (*case.model.graph.input, *case.model.graph.output)
    return all(value.type.WhichOneof("value") == "tensor_type" for value in values)


def opset_of(model: onnx.ModelProto) -> int:
    """Version of the default domain, the newest where the model only uses another one."""
    versions = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    return versions[0] if versions else onnx.defs.onnx_opset_version()


class _NoWeights:
    """The node tests hold no parameters."""

    def part(self, parameter: Any, indices: Any) -> Array:
        raise AssertionError(f"{parameter.name} is no parameter")

    def constant(self, name: str, type: Any) -> Array | None:
        return None


def bound(model: onnx.ModelProto, feeds: Mapping[str, Array], results: Sequence[Array]) -> Graph:
    """Bind a model for these inputs: what decides shapes becomes an initializer, as files that are planned have it.

    Args:
        model: all of its operands are inputs.
        feeds: their values.
        results: the expected outputs; their shapes are declared where the importer asks for them.
    """
    fixed: set[str] = set()
    dims: dict[str, int] = {}
    declared = False
    while True:
        variant = onnx.ModelProto()
        variant.CopyFrom(model)
        variant.graph.initializer.extend(numpy_helper.from_array(feeds[name], name) for name in sorted(fixed))
        if declared:
            _declare(variant, results)
        file = ModelFile(path=Path("node.onnx"), proto=variant, sha256="0" * 64, opset=opset_of(model))
        try:
            return bind(file, BindOptions(training=False, dims=dims))
        except (UnboundDimError, UsageError) as error:
            sizes = _named_dims(error.message, feeds, fixed)
            if sizes == dims:
                raise
            dims = sizes
        except UnsupportedGraphError as error:
            more = _structural(error.message, feeds) - fixed
            if more:
                fixed |= more
                dims = {name: size for name, size in dims.items() if name.rpartition(".")[0] not in fixed}
            elif "depends on the data" in error.message and not declared:
                declared = True
            else:
                raise


def _declare(model: onnx.ModelProto, results: Sequence[Array]) -> None:
    for value, result in zip(model.graph.output, results, strict=True):
        shape = value.type.tensor_type.shape
        del shape.dim[:]
        for size in result.shape:
            shape.dim.add().dim_value = size


def _named_dims(message: str, feeds: Mapping[str, Array], fixed: set[str]) -> dict[str, int]:
    """Sizes of the dims that a message says have no value (``x.0``)."""
    found: dict[str, int] = {}
    for name, dim in re.findall(r"([\w/]+)\.(\d+)", message.partition(":")[2]):
        if name in feeds and name not in fixed:
            found[f"{name}.{dim}"] = feeds[name].shape[int(dim)]
    return found


def _structural(message: str, feeds: Mapping[str, Array]) -> set[str]:
    """Inputs that must be constants: the one that a message names, or all integers if it names what is made of them."""
    found = re.search(r"operand \d+ \('([^']+)'\) decides shapes", message)
    if found is None:
        named = set(re.findall(r"'([^']+)'", message)) if "depends on" in message else set()
        return named & set(feeds)
    if found.group(1) in feeds:
        return {found.group(1)}
    return {name for name, value in feeds.items() if value.dtype.kind in "iub"}


def _array(value: Any) -> Array:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def run_case(case: Any) -> None:
    """Run one node test.

    Raises:
        AssertionError: an output differs in shape or value.
        TapError: it cannot be imported or executed.
    """
    for operands, results in case.data_sets:
        names = [value.name for value in case.model.graph.input]
        feeds = dict(zip(names, map(_array, operands), strict=False))
        expected = [_array(result) for result in results]
        graph = bound(case.model, feeds, expected)
        made = run_reference(graph, _NoWeights(), feeds)
        for name, wanted in zip(graph.output_names, expected, strict=True):
            _compare(made.outputs[name], wanted, case)


def run_model(model: onnx.ModelProto, feeds: Mapping[str, Array], constants: set[str]) -> list[Array]:
    """Outputs of a model by the importer and the single-process reference.

    Args:
        model: all of its operands are inputs.
        feeds: their values.
        constants: which of them are initializers of the file.
    """
    variant = onnx.ModelProto()
    variant.CopyFrom(model)
    variant.graph.initializer.extend(numpy_helper.from_array(feeds[name], name) for name in sorted(constants))
    file = ModelFile(path=Path("node.onnx"), proto=variant, sha256="0" * 64, opset=opset_of(model))
    graph = bind(file, BindOptions(training=False))
    made = run_reference(graph, _NoWeights(), feeds)
    return [made.outputs[name] for name in graph.output_names]


def _compare(made: Array, wanted: Array, case: Any) -> None:
    assert made.shape == wanted.shape
    kind = str(wanted.dtype)
    if wanted.dtype.kind in "iub" and kind.startswith(("int", "uint", "bool")):
        np.testing.assert_array_equal(made.astype(np.int64), wanted.astype(np.int64))
        return
    loose = _TOLERANCES.get(kind, 0.0)
    exact = wanted.astype(np.float64)
    np.testing.assert_allclose(made, exact, rtol=max(case.rtol, loose), atol=max(case.atol, loose, 1e-6))
