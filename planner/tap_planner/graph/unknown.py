"""Types that the file itself declares, completed by ONNX's shape inference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper

from tap_planner.graph.dtypes import dtype_name
from tap_planner.graph.expressions import evaluate_dim
from tap_planner.graph.native import NativeCrashError, NativeError, isolated
from tap_planner.operators import TensorType

_SMALL_ELEMENTS = 64
"""Initializers up to this size go along by value: they may decide shapes."""
_NUMBERS = {dtype_name(number): number for number in TensorProto.DataType.values()}


def value_info(name: str, type_: TensorType) -> onnx.ValueInfoProto:
    """A static declaration."""
    return helper.make_tensor_value_info(name, _NUMBERS.get(type_.dtype, 0), type_.shape)


@dataclass(slots=True, eq=False)
class Inference:
    """Whether ONNX's shape inference can be asked about a file."""

    works: bool = True
    """False once it has crashed or taken too long."""


class DeclaredTypes:
    """Static types from the file's value_info, completed by ONNX's shape inference when first needed.

    Args:
        proto: the model.
        dims: values of symbolic dims.
        inputs: static types of the graph inputs.
        inference: whether inference is still to be asked; shared by all who read the same file.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        dims: Mapping[str, int],
        inputs: Mapping[str, TensorType],
        inference: Inference | None = None,
    ) -> None:
        self.inference = inference or Inference()
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
        """The graph without weights, inputs as they are bound, and what follows from that."""
        graph = self._proto.graph
        bare = onnx.ModelProto(ir_version=max(self._proto.ir_version, 4), opset_import=self._proto.opset_import)
        bare.graph.name = "graph"
        bare.graph.node.extend(graph.node)
        bare.graph.output.extend(graph.output)
        bare.graph.value_info.extend(graph.value_info)
        stored = {tensor.name for tensor in graph.initializer}
        for value in graph.input:
            if value.name not in stored:
                known = self._inputs.get(value.name)
                bare.graph.input.append(value if known is None else value_info(value.name, known))
        for tensor in graph.initializer:
            if math.prod(tensor.dims) <= _SMALL_ELEMENTS and tensor.data_location != TensorProto.EXTERNAL:
                bare.graph.initializer.append(tensor)
            else:
                bare.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        for value in (*bare.graph.value_info, *bare.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                size = evaluate_dim(dim.dim_param, self._dims) if dim.dim_param else None
                if size is not None:
                    dim.dim_value = size
        if not self.inference.works:
            return bare.graph
        try:
            made = isolated(
                lambda: onnx.shape_inference.infer_shapes(bare, data_prop=True).SerializeToString(), bare.ByteSize()
            )
            return onnx.ModelProto.FromString(made).graph
        except (NativeError, DecodeError) as error:
            self.inference.works = not isinstance(error, NativeCrashError)
            return bare.graph

    def _collect(self, graph: onnx.GraphProto) -> dict[str, TensorType]:
        found: dict[str, TensorType] = {}
        for value in (*graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            sizes = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
            if tensor.HasField("shape") and min(sizes, default=0) >= 0:
                found[value.name] = TensorType(dtype=dtype_name(tensor.elem_type), shape=tuple(sizes))
        return found
