"""Weights into the model or beside it, and files that are either the old ones or the whole new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import onnx
from onnx import TensorProto

from tap_planner.capture.naming import StoredTensor
from tap_planner.errors import CaptureError
from tap_planner.files import write_whole
from tap_planner.graph import TRAINABLE_KEY

_ALIGNMENT = 4096
"""Offsets of tensors beside the model are multiples of it, so that a reader may map them into memory."""


def check_target(path: Path) -> None:
    """Refuse a path that cannot be written before the module is traced.

    Raises:
        CaptureError: it is a folder, or its folder does not exist.
    """
    if path.is_dir():
        raise CaptureError(f"{path}: is a folder", hint="name a file in it, such as model.onnx")
    if not path.parent.is_dir():
        raise CaptureError(f"{path}: its folder does not exist", hint="create the folder first")


def write_model(
    path: Path,
    proto: onnx.ModelProto,
    stored: Sequence[StoredTensor],
    *,
    weights: bool,
    inline_limit_bytes: int,
) -> Path | None:
    """Write the model and, if need be, the file of weights beside it.

    Args:
        path: the ONNX file.
        proto: the model without stored tensors.
        stored: the tensors.
        weights: whether their values are written.
        inline_limit_bytes: together larger tensors are written beside the model.

    Returns:
        The file of weights, if one was written.

    Raises:
        CaptureError: a file cannot be written.
    """
    if not weights:
        inside = [item for item in stored if item.is_structure]
        outside = [item for item in stored if not item.is_structure]
        location = f"{path.name}.absent"
        if outside and (path.parent / location).exists():
            raise CaptureError(
                f"{path.parent / location}: would be taken for the weights that are not written",
                hint="remove or rename it",
            )
    elif sum(item.value.nbytes for item in stored) <= inline_limit_bytes:
        inside, outside, location = list(stored), [], ""
    else:
        inside = [item for item in stored if item.value.nbytes < _ALIGNMENT]
        outside = [item for item in stored if item.value.nbytes >= _ALIGNMENT]
        location = f"{path.name}.data"
    proto.graph.initializer.extend(_inline(item) for item in inside)
    offsets = _offsets(outside)
    proto.graph.initializer.extend(
        _external(item, location, offset) for item, offset in zip(outside, offsets, strict=True)
    )
    beside = path.parent / location if weights and outside else None
    if beside is not None:
        _replace(beside, lambda file: _write_tensors(file, outside, offsets))
    data = proto.SerializeToString(deterministic=True)
    _replace(path, lambda file: file.write(data))
    return beside


def _header(item: StoredTensor) -> TensorProto:
    tensor = TensorProto(name=item.name, data_type=int(item.value.dtype))
    tensor.dims.extend(int(size) for size in item.value.shape)
    if not (item.is_trainable or item.is_index):
        tensor.metadata_props.add(key=TRAINABLE_KEY, value="false")
    return tensor


def _inline(item: StoredTensor) -> TensorProto:
    tensor = _header(item)
    tensor.raw_data = item.value.tobytes()
    return tensor


def _external(item: StoredTensor, location: str, offset: int) -> TensorProto:
    tensor = _header(item)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(item.value.nbytes))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def _offsets(items: Sequence[StoredTensor]) -> list[int]:
    offsets: list[int] = []
    end = 0
    for item in items:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(start)
        end = start + item.value.nbytes
    return offsets


def _write_tensors(file: BinaryIO, items: Sequence[StoredTensor], offsets: Sequence[int]) -> None:
    for item, offset in zip(items, offsets, strict=True):
        file.write(bytes(offset - file.tell()))
        item.value.tofile(file)


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    write_whole(path, write, CaptureError, "check the folder and its free space")
