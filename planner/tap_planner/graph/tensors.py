"""Stored tensors as arrays: what a file claims of dims, element type and length is checked before anything is made."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto, numpy_helper

from tap_planner.errors import ModelError
from tap_planner.graph.dtypes import dtype_name, stored_bytes


def stored_dims(tensor: TensorProto) -> tuple[int, ...]:
    """Dims of a stored tensor.

    Raises:
        ModelError: one is negative.
    """
    dims = tuple(tensor.dims)
    if min(dims, default=0) < 0:
        raise ModelError(f"tensor {tensor.name!r}: its shape {list(dims)} has a negative dim")
    return dims


def to_array(tensor: TensorProto) -> np.ndarray:
    """The value of a tensor that the file holds.

    Raises:
        ModelError: the file holds more or fewer bytes than the shape needs, or the element type is not known.
    """
    dims = stored_dims(tensor)
    dtype = dtype_name(tensor.data_type)
    if tensor.data_location == TensorProto.EXTERNAL:
        raise ModelError(f"tensor {tensor.name!r}: its value lies outside the file")
    if dtype == "undefined":
        raise ModelError(f"tensor {tensor.name!r}: element type {tensor.data_type} is not known")
    if tensor.HasField("raw_data") and dtype != "string":
        try:
            needed = stored_bytes(dtype, math.prod(dims))
        except KeyError as error:
            raise ModelError(f"tensor {tensor.name!r}: element type {dtype} is not supported") from error
        if needed != len(tensor.raw_data):
            raise ModelError(
                f"tensor {tensor.name!r}: the file holds {len(tensor.raw_data)} bytes, its shape {list(dims)} of "
                f"{dtype} needs {needed}"
            )
    try:
        return numpy_helper.to_array(tensor)
    except (ArithmeticError, LookupError, TypeError, ValueError, NotImplementedError) as error:
        raise ModelError(f"tensor {tensor.name!r}: its value does not fit {dtype} {list(dims)} ({error})") from error
