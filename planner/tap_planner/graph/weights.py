"""Reading the weights of a model, from the file or from files beside it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from onnx import TensorProto

from tap_planner.errors import ModelError
from tap_planner.graph.dtypes import dtype_name, stored_bytes
from tap_planner.graph.loading import ModelFile
from tap_planner.graph.nodes import Node, decode_nodes
from tap_planner.graph.sparse import StoredTensor, constant_tensor, stored_tensors
from tap_planner.graph.tensors import to_array

_HINT = "put the weights beside the model, or pass --init random"


def external_fields(tensor: TensorProto) -> dict[str, str]:
    """The key-value pairs that say where an external tensor lies."""
    return {_text(entry.key): _text(entry.value) for entry in tensor.external_data}


def _text(value: str | bytes) -> str:
    """Damaged files may hold bytes that are no text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _extent(tensor: TensorProto) -> tuple[int, int, int]:
    """Offset and length of external data as the file says, and the length that the shape needs, in bytes.

    Raises:
        ModelError: they are no numbers, or the element type is unknown.
    """
    fields = external_fields(tensor)
    dtype = dtype_name(tensor.data_type)
    try:
        expected = stored_bytes(dtype, math.prod(tensor.dims))
        return int(fields.get("offset", "0")), int(fields.get("length", expected)), expected
    except (KeyError, ValueError) as error:
        raise ModelError(f"tensor {tensor.name!r}: external data entry is not readable ({error})") from error


def external_path(folder: Path, tensor: TensorProto) -> Path:
    """The file that holds an external tensor, checked to lie inside ``folder``.

    Raises:
        ModelError: the location is empty, absolute, climbs out of the folder, or is a link out of it.
    """
    location = external_fields(tensor).get("location", "")
    parts = location.replace("\\", "/").split("/")
    outside = location.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or "\\" in location
    if not location or outside or "\0" in location:
        raise ModelError(
            f"tensor {tensor.name!r}: external data location {location!r} is not a plain path beside the model",
            hint="export the model again with its weights beside it",
        )
    path = folder / location
    root = folder.resolve()
    if not path.resolve().is_relative_to(root):
        raise ModelError(f"tensor {tensor.name!r}: external data location {location!r} links out of the model's folder")
    return path


def _located(folder: Path, tensor: TensorProto) -> tuple[Path, int, int]:
    """File, offset and length of external data, checked against the shape and the size of the file.

    Raises:
        ModelError: the location is not allowed, the file is absent or too short, or the entry does not fit the shape.
    """
    path = external_path(folder, tensor)
    offset, length, expected = _extent(tensor)
    if offset < 0 or length != expected:
        raise ModelError(
            f"tensor {tensor.name!r}: external data of {length} bytes at {offset}, but its shape needs {expected}",
            hint="the file is damaged; export the model again",
        )
    try:
        available = path.stat().st_size if path.is_file() else -1
    except (OSError, ValueError):
        available = -1
    if available < 0:
        raise ModelError(
            f"tensor {tensor.name!r}: weights file {path.name!r} cannot be read in folder {str(folder)!r}", hint=_HINT
        )
    if offset + length > available:
        raise ModelError(
            f"tensor {tensor.name!r}: {path.name} ends at {available}, needs {offset + length} bytes", hint=_HINT
        )
    return path, offset, length


def read_external(folder: Path, tensor: TensorProto) -> np.ndarray:
    """Read an external tensor; sizes are checked before anything is allocated.

    Raises:
        ModelError: the location is not allowed, the file is absent or too short.
    """
    path, offset, length = _located(folder, tensor)
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(length)
    except OSError as error:
        raise ModelError(f"tensor {tensor.name!r}: weights file {path.name!r} cannot be read") from error
    inline = TensorProto(name=tensor.name, data_type=tensor.data_type, raw_data=data)
    inline.dims.extend(tensor.dims)
    return to_array(inline)


def read_tensor(folder: Path, tensor: TensorProto) -> np.ndarray:
    """Read a tensor, wherever it lies.

    Raises:
        ModelError: as ``read_external`` and ``to_array``.
    """
    return read_external(folder, tensor) if tensor.data_location == TensorProto.EXTERNAL else to_array(tensor)


class WeightReader:
    """Reads parameters of a model by name.

    Args:
        model: the parsed file; external data is looked for in its folder.
    """

    def __init__(self, model: ModelFile) -> None:
        self._folder = model.path.parent
        proto = model.proto
        self._tensors: dict[str, StoredTensor] = {tensor.name: tensor for tensor in stored_tensors(proto.graph)}
        nodes = decode_nodes(node for node in proto.graph.node if node.op_type in ("Constant", "ConstantOfShape"))
        self._nodes: dict[str, Node] = {node.outputs[0]: node for node in nodes}

    def available(self, parameter: str) -> bool:
        """Whether ``read`` would find the value."""
        return self.problem(parameter) is None

    def problem(self, parameter: str) -> ModelError | None:
        """Why ``read`` would not find the value; the data itself is not read."""
        tensor = self._tensors.get(parameter)
        if tensor is None:
            known = parameter in self._nodes
            return None if known else ModelError(f"the model holds no parameter {parameter!r}")
        try:
            for part in tensor.outside:
                _located(self._folder, part)
        except ModelError as error:
            return error
        return None

    def missing(self) -> tuple[str, ...]:
        """Initializers whose external data is absent, in file order."""
        return tuple(name for name in self._tensors if not self.available(name))

    def read(self, parameter: str) -> np.ndarray:
        """The stored value of a parameter.

        Raises:
            ModelError: no such parameter, or its external data is absent or not allowed.
        """
        tensor = self._tensors.get(parameter)
        if tensor is not None:
            return tensor.read(self._read)
        node = self._nodes.get(parameter)
        if node is None:
            raise ModelError(f"the model holds no parameter {parameter!r}")
        if node.type == "Constant":
            return constant_value(node)
        shape = self._shape_of(node)
        fill = node.attributes.get("value")
        value = to_array(fill) if isinstance(fill, TensorProto) else np.zeros(1, np.float32)
        return np.full(shape, value.reshape(()), value.dtype)

    def _read(self, tensor: TensorProto) -> np.ndarray:
        return read_tensor(self._folder, tensor)

    def _shape_of(self, node: Node) -> tuple[int, ...]:
        source = node.inputs[0]
        if source in self._tensors:
            value = self._tensors[source].read(self._read)
        elif source in self._nodes and self._nodes[source].type == "Constant":
            value = constant_value(self._nodes[source])
        else:
            raise ModelError(f"{node.where}: its shape {source!r} is not a stored constant")
        return tuple(int(size) for size in value)


def constant_value(node: Node) -> np.ndarray:
    """Value of a Constant node.

    Raises:
        ModelError: the value is damaged or of an unknown kind.
    """
    tensor = constant_tensor(node)
    if tensor is not None:
        return tensor.read(to_array)
    for key, value in node.attributes.items():
        if key in ("value_int", "value_ints"):
            return np.array(value, np.int64)
        if key in ("value_float", "value_floats"):
            return np.array(value, np.float32)
        if key in ("value_string", "value_strings"):
            return np.array(value, object)
    raise ModelError(f"{node.where}: a constant of an unsupported form ({', '.join(node.attributes) or 'no value'})")
