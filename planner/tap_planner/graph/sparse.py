"""Stored tensors, dense and sparse, under one face.

A sparse tensor is held dense: operators read it so, and memory counts its dense shape. What the file claims is checked
before the dense array is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import SparseTensorProto, TensorProto

from tap_planner.errors import ModelError
from tap_planner.graph.dtypes import dtype_name
from tap_planner.graph.nodes import Node
from tap_planner.graph.tensors import stored_dims

MAX_DENSE = 1 << 32
"""Elements that a sparse tensor may have when it is made dense."""
_ReadTensor = Callable[[TensorProto], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor that the file holds or points to."""

    name: str
    proto: TensorProto | SparseTensorProto

    @property
    def values(self) -> TensorProto:
        """The tensor that holds the elements."""
        return self.proto if isinstance(self.proto, TensorProto) else self.proto.values

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return dtype_name(self.values.data_type)

    @property
    def dims(self) -> tuple[int, ...]:
        """Dense shape.

        Raises:
            ModelError: a dim is negative.
        """
        if isinstance(self.proto, TensorProto):
            return stored_dims(self.proto)
        dims = tuple(self.proto.dims)
        if min(dims, default=0) < 0:
            raise ModelError(f"tensor {self.name!r}: its shape {list(dims)} has a negative dim")
        return dims

    @property
    def outside(self) -> tuple[TensorProto, ...]:
        """What of it lies outside the file."""
        parts = (self.proto,) if isinstance(self.proto, TensorProto) else (self.proto.values, self.proto.indices)
        return tuple(part for part in parts if part.data_location == TensorProto.EXTERNAL)

    def read(self, read: _ReadTensor) -> np.ndarray:
        """The dense value.

        Args:
            read: reads a dense tensor.

        Raises:
            ModelError: the value is absent or damaged.
        """
        if isinstance(self.proto, TensorProto):
            return read(self.proto)
        return _dense(self, read(self.proto.values), read(self.proto.indices))


def stored_tensors(graph: onnx.GraphProto) -> Iterator[StoredTensor]:
    """All initializers; a sparse one is named after its values."""
    for tensor in graph.initializer:
        yield StoredTensor(name=tensor.name, proto=tensor)
    for sparse in graph.sparse_initializer:
        yield StoredTensor(name=sparse.values.name, proto=sparse)


def constant_tensor(node: Node) -> StoredTensor | None:
    """The tensor, dense or sparse, that a Constant node holds; None where it holds a number, a list or a text."""
    for key in ("value", "sparse_value"):
        found = node.attributes.get(key)
        if isinstance(found, TensorProto | SparseTensorProto):
            return StoredTensor(name=node.outputs[0], proto=found)
    return None


def _dense(tensor: StoredTensor, values: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Elements at their places, zeros elsewhere; indices are positions in the flat tensor, or one row per element."""
    dims, count = tensor.dims, math.prod(tensor.dims)
    if count > MAX_DENSE:
        raise ModelError(f"tensor {tensor.name!r}: sparse, and its dense shape {list(dims)} is too large")
    if indices.dtype != np.int64 or indices.ndim not in (1, 2) or indices.shape[0] != values.size:
        raise ModelError(f"tensor {tensor.name!r}: {values.size} sparse elements, but indices {list(indices.shape)}")
    limits = np.array(dims if indices.ndim == 2 else (count,), np.int64)
    if indices.ndim == 2 and indices.shape[1] != len(dims):
        raise ModelError(f"tensor {tensor.name!r}: sparse indices of {indices.shape[1]} dims for a shape {list(dims)}")
    if np.any(indices < 0) or np.any(indices >= limits):
        raise ModelError(f"tensor {tensor.name!r}: a sparse index lies outside the shape {list(dims)}")
    dense = np.zeros(dims, values.dtype)
    if indices.ndim == 2:
        dense[tuple(indices.T)] = values.reshape(-1)
    else:
        dense.reshape(-1)[indices] = values.reshape(-1)
    return dense
