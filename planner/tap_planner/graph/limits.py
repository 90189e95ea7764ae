"""How much may be computed while a model is bound: a small file can describe constants of any size.

Sizes are known before anything is computed, from the operators' records or from ONNX's shape inference of one node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tap_planner.graph.dtypes import name_of_numpy
from tap_planner.graph.native import NativeError, isolated
from tap_planner.graph.nodes import Node
from tap_planner.operators import TensorType

MAX_RANK = 64
"""Dims of a tensor (numpy's limit)."""
MAX_STRUCTURE = 1 << 16
"""Numbers in an operand that decides structure, and items of a sequence."""
MAX_FETCH = 1 << 24
"""Elements that the value of one constant may take, with all that it is computed from."""
MAX_TOTAL = 1 << 26
"""Elements that all of them may take together."""
_MAX_REFERENCE = 1 << 18
"""Elements that ONNX's reference implementation, much of which is loops in Python, is given or makes."""
_MAX_ATTRIBUTE = 1 << 12
"""Largest integer attribute (a kernel, a pad, a group) of a node that the reference implementation computes."""
_SELECTING = frozenset(("Compress", "NonMaxSuppression", "NonZero", "Unique"))
"""Results are never larger than rank times the operands, though their size depends on values."""
_NEVER = frozenset(("ImageDecoder", "RegexFullMatch", "RegexReplace"))
"""Work that no size bounds."""


def is_cheap(node: Node, opset: int, arrays: Sequence[np.ndarray | None], types: Sequence[TensorType] | None) -> bool:
    """Whether ONNX's reference implementation computes a node in little time and memory.

    Args:
        node: of the default domain.
        opset: its operator set version.
        arrays: its operands.
        types: of its results where a record knows them.
    """
    given = sum(array.size for array in arrays if array is not None)
    if node.type in _NEVER or given > _MAX_REFERENCE or not _has_small_attributes(node):
        return False
    if node.type in _SELECTING:
        return True
    made = _inferred_elements(node, opset, arrays) if types is None else sum(item.num_elements for item in types)
    return made is not None and made <= _MAX_REFERENCE


def _has_small_attributes(node: Node) -> bool:
    for value in node.attributes.values():
        items = value if isinstance(value, tuple) else (value,)
        numbers = [abs(item) for item in items if isinstance(item, int)]
        if math.prod(max(number, 1) for number in numbers) > _MAX_REFERENCE or max(numbers, default=0) > _MAX_ATTRIBUTE:
            return False
    return True


def _inferred_elements(node: Node, opset: int, arrays: Sequence[np.ndarray | None]) -> int | None:
    """Elements of a node's results by ONNX's shape inference with the operands' values, None if it does not say."""
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, TensorProto] = {}
    try:
        for name, array in zip(node.proto.input, arrays, strict=True):
            if array is not None:
                number = helper.np_dtype_to_tensor_dtype(array.dtype) if array.dtype != object else TensorProto.STRING
                types[name] = helper.make_tensor_type_proto(number, array.shape)
                if array.size <= _MAX_ATTRIBUTE and name_of_numpy(array.dtype) != "string":
                    data[name] = numpy_helper.from_array(array, name)
        return int(isolated(lambda: _count(node, opset, types, data)))
    except (NativeError, KeyError, TypeError, ValueError):
        return None


def _count(node: Node, opset: int, types: dict[str, onnx.TypeProto], data: dict[str, TensorProto]) -> bytes:
    schema = onnx.defs.get_schema(node.type, opset, "")
    found = onnx.shape_inference.infer_node_outputs(
        schema, node.proto, types, data, opset_imports=[helper.make_opsetid("", opset)]
    )
    total = 0
    for name in node.proto.output:
        if name:
            dims = found[name].tensor_type.shape.dim
            if not found[name].tensor_type.HasField("shape") or not all(dim.HasField("dim_value") for dim in dims):
                raise ValueError(f"{name!r} has no static shape")
            total += math.prod(dim.dim_value for dim in dims)
    return str(total).encode()
