"""Types of operators that have no record: what the file declares, or what ONNX infers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from tap_planner.graph.dtypes import dtype_name
from tap_planner.operators import TensorType


class DeclaredTypes:
    """Static types from the file's value_info, completed by ONNX's shape inference when first needed.

    Args:
        proto: the model.
        dims: values of symbolic dims.
        inputs: static types of the graph inputs.
    """

    def __init__(self, proto: onnx.ModelProto, dims: Mapping[str, int], inputs: Mapping[str, TensorType]) -> None:
        self._proto = proto
        self._dims = dims
        self._inputs = inputs
        self._found: dict[str, TensorType] | None = None

    def types(self, names: Sequence[str]) -> list[TensorType] | None:
        """Types of the named values, None if one is not static."""
        if self._found is None:
            self._found = self._collect(self._inferred())
        found = [self._found.get(name) for name in names]
        return None if None in found else [item for item in found if item is not None]

    def _inferred(self) -> onnx.GraphProto:
        copy = onnx.ModelProto()
        copy.CopyFrom(self._proto)
        for value in copy.graph.input:
            if value.name in self._inputs:
                dims = value.type.tensor_type.shape.dim
                del dims[:]
                for size in self._inputs[value.name].shape:
                    dims.add().dim_value = size
        for value in (*copy.graph.value_info, *copy.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param in self._dims:
                    dim.dim_value = self._dims[dim.dim_param]
        try:
            return onnx.shape_inference.infer_shapes(copy, data_prop=True).graph
        except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
            return copy.graph

    def _collect(self, graph: onnx.GraphProto) -> dict[str, TensorType]:
        found: dict[str, TensorType] = {}
        for value in (*graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            sizes = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
            if tensor.HasField("shape") and min(sizes, default=0) >= 0:
                found[value.name] = TensorType(dtype=dtype_name(tensor.elem_type), shape=tuple(sizes))
        return found
