"""Values that come from the file or from shapes alone: stored tensors, fills, ranges, fixed inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from onnx import TensorProto

from tap_planner.errors import ModelError, UnsupportedGraphError, UsageError
from tap_planner.graph import signals
from tap_planner.graph.drafts import SMALL_ELEMENTS, Constants, Reads, Types
from tap_planner.graph.dtypes import dtype_name, name_of_numpy, numpy_dtype
from tap_planner.graph.nodes import Node
from tap_planner.graph.roles import Roles
from tap_planner.graph.sparse import StoredTensor, constant_tensor
from tap_planner.graph.tensors import to_array
from tap_planner.graph.values import Value
from tap_planner.graph.weights import constant_value, read_tensor
from tap_planner.operators import TensorType

SOURCES = frozenset(("Constant", "ConstantOfShape", "EyeLike", "Range", "Shape", "Size"))
"""Operators that need no data."""
_STRUCTURE = frozenset(("bool", "int16", "int32", "int64", "uint16", "uint32", "uint64", "string"))


class Sources:
    """Makes the values that depend on no data.

    Args:
        types: interned types.
        constants: where constants are kept.
        reads: where reads of parameters are kept.
        roles: which stored tensors are parameters.
        folder: where external weights lie.
    """

    def __init__(self, types: Types, constants: Constants, reads: Reads, roles: Roles, folder: Path) -> None:
        self._types = types
        self._constants = constants
        self._reads = reads
        self._roles = roles
        self._folder = folder

    def stored(self, tensor: StoredTensor) -> Value:
        """The parameter or constant that a stored tensor is."""
        type_ = self._types.get(tensor.dtype, tensor.dims)
        if is_parameter(tensor.name, type_, self._roles, external=bool(tensor.outside)):
            return self._reads.plain(tensor.name, type_)
        folder = self._folder
        if tensor.outside:
            identity, outside = f"external {tensor.name}", type_
        elif is_table(type_):
            identity, outside = f"stored {tensor.name}", None
        else:
            return self._constants.array(tensor.name, tensor.read(to_array))

        def read(_: object) -> list[np.ndarray]:
            return [tensor.read(lambda part: read_tensor(folder, part))]

        found = self._constants.recipe([tensor.name], [type_], read, [], identity, outside=outside, deferred=True)
        return found[0]

    def make(self, node: Node, operands: Sequence[Value | None]) -> Value | None:
        """The constant or parameter that a node makes from nothing but shapes; None if it is none after all."""
        name = node.outputs[0]
        if node.type == "Constant":
            return self._constant_node(node, name)
        if node.type in ("Shape", "Size"):
            return self._constants.array(name, _shape(node, _only(node, operands).shape))
        if node.type == "EyeLike":
            return self._identity_matrix(node, name, _only(node, operands))
        if not all(value is not None and value.is_constant for value in operands):
            return None
        arrays = [self._constants.fetch(value.name) for value in operands if value is not None]
        if node.type == "ConstantOfShape":
            if arrays[0].dtype != np.int64:
                raise UnsupportedGraphError(f"{node.where}: a shape of {arrays[0].dtype}, expected int64")
            return self._filled(node, name, tuple(int(size) for size in arrays[0].reshape(-1)))
        return self._range(node, name, arrays)

    def _identity_matrix(self, node: Node, name: str, like: Value) -> Value:
        dtype, make = signals.eye_like(node, like)
        type_ = self._types.get(dtype, like.shape)
        if type_.num_elements <= SMALL_ELEMENTS:
            return self._constants.array(name, make())
        identity = f"EyeLike {dtype} {like.shape} {node.attributes.get('k', 0)}"
        return self._constants.recipe([name], [type_], lambda _: [make()], [], identity)[0]

    def _constant_node(self, node: Node, name: str) -> Value:
        try:
            held = constant_tensor(node)
            if held is not None:
                return self.stored(held)
            array = constant_value(node)
        except ModelError as error:
            raise UnsupportedGraphError(error.message) from error
        if name in self._roles.quantised:
            return self._reads.plain(name, self._types.get(name_of_numpy(array.dtype), array.shape))
        return self._constants.array(name, array)

    def _filled(self, node: Node, name: str, shape: tuple[int, ...]) -> Value:
        tensor = node.attributes.get("value")
        fill = to_array(tensor) if isinstance(tensor, TensorProto) else np.zeros(1, np.float32)
        if fill.size != 1:
            raise UnsupportedGraphError(f"{node.where}: is filled with {fill.size} elements, expected 1")
        fill = fill.reshape(())
        dtype = dtype_name(tensor.data_type) if isinstance(tensor, TensorProto) else "float32"
        type_ = self._types.get(dtype, shape)
        if is_parameter(name, type_, self._roles):
            return self._reads.plain(name, type_)
        if type_.num_elements <= SMALL_ELEMENTS:
            return self._constants.array(name, np.full(shape, fill))
        identity = f"ConstantOfShape {dtype} {shape} {fill!r}"
        return self._constants.recipe([name], [type_], lambda _: [np.full(shape, fill)], [], identity)[0]

    def _range(self, node: Node, name: str, arrays: list[np.ndarray]) -> Value:
        if any(array.size != 1 or array.dtype.kind in "bcOSU" for array in arrays):
            raise UnsupportedGraphError(f"{node.where}: its bounds are not one number each")
        start, limit, delta = (array.reshape(-1)[0] for array in arrays)
        if delta == 0 or not all(map(math.isfinite, map(float, (start, limit, delta)))):
            raise UnsupportedGraphError(f"{node.where}: from {start} to {limit} by {delta} is no range")
        dtype = arrays[0].dtype
        count = max(0, math.ceil((float(limit) - float(start)) / float(delta)))
        type_ = self._types.get(
            {np.dtype(np.int32): "int32", np.dtype(np.int64): "int64"}.get(dtype, str(dtype)), [count]
        )

        def values() -> np.ndarray:
            return (start + np.arange(count).astype(dtype) * delta).astype(dtype)

        if count <= SMALL_ELEMENTS:
            return self._constants.array(name, values())
        identity = f"Range {start!r} {limit!r} {delta!r}"
        return self._constants.recipe([name], [type_], lambda _: [values()], [], identity)[0]


def input_value(name: str, type_: TensorType, given: int | tuple[int, ...]) -> np.ndarray:
    """An input that the user fixed."""
    numbers = given if isinstance(given, tuple) else (given,)
    if len(numbers) not in (1, type_.num_elements):
        raise UsageError(
            f"--value {name}: {len(numbers)} numbers for an input of shape {list(type_.shape)}, "
            f"expected 1 or {type_.num_elements}"
        )
    try:
        array = np.array(numbers, np.int64).astype(numpy_dtype(type_.dtype))
    except OverflowError as error:
        raise UsageError(f"--value {name}: a number that is too large for {type_.dtype}") from error
    if not np.array_equal(array.astype(np.int64), np.array(numbers, np.int64)):
        raise UsageError(f"--value {name}={','.join(map(str, numbers))}: not all are {type_.dtype}")
    return np.full(type_.shape, array[0]) if len(numbers) == 1 else array.reshape(type_.shape)


def is_parameter(name: str, type_: TensorType, roles: Roles, *, external: bool = False) -> bool:
    """Whether a stored tensor is a parameter rather than a constant."""
    if name in roles.trainable or name in roles.statistics or name in roles.quantised:
        return True
    if name not in roles.used:
        return False
    plain = type_.is_float or type_.dtype in ("int64", "int32", "bool")
    return external or not plain or type_.num_elements > SMALL_ELEMENTS


def is_table(type_: TensorType) -> bool:
    """Whether a stored constant is a table of numbers: only integers and single numbers are structure."""
    structure = type_.dtype in _STRUCTURE or type_.num_elements == 1
    return not structure


def _shape(node: Node, shape: tuple[int, ...]) -> np.ndarray:
    if node.type == "Size":
        return np.array(math.prod(shape), np.int64)
    start, end = node.attributes.get("start", 0), node.attributes.get("end")
    if not isinstance(start, int) or not isinstance(end, int | None):
        raise UnsupportedGraphError(f"{node.where}: start {start!r} and end {end!r}, expected integers")
    return np.array(shape[start:end], np.int64)


def _only(node: Node, operands: Sequence[Value | None]) -> Value:
    if len(operands) != 1 or operands[0] is None:
        raise UnsupportedGraphError(f"{node.where}: expected one operand")
    return operands[0]
