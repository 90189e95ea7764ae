"""Names of element types, as ONNX numbers and as numpy types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from onnx import TensorProto

_SPECIAL = {"FLOAT": "float32", "DOUBLE": "float64"}
_NAMES: dict[int, str] = {
    number: _SPECIAL.get(label, label.lower()) for label, number in TensorProto.DataType.items() if number
}
_NUMPY: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "bool": np.dtype(np.bool_),
    "string": np.dtype(object),
    "float4e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
    "float8e8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "int4": np.dtype(ml_dtypes.int4),
    "uint4": np.dtype(ml_dtypes.uint4),
    "int2": np.dtype(ml_dtypes.int2),
    "uint2": np.dtype(ml_dtypes.uint2),
}
_BITS = {"float4e2m1": 4, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2}
"""Bits of an element where it is less than a byte: such elements are stored packed."""
for _name in ("float64", "float32", "float16", "complex64", "complex128"):
    _NUMPY[_name] = np.dtype(_name)
for _bits in (8, 16, 32, 64):
    _NUMPY[f"int{_bits}"] = np.dtype(f"int{_bits}")
    _NUMPY[f"uint{_bits}"] = np.dtype(f"uint{_bits}")
for _name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"):
    _NUMPY[_name.replace("_", "")] = np.dtype(getattr(ml_dtypes, _name))
_FROM_NUMPY = {dtype: name for name, dtype in _NUMPY.items()}


def dtype_name(number: int) -> str:
    """Lower-case name of an ONNX element type number (``undefined`` for an unknown one)."""
    return _NAMES.get(number, "undefined")


def numpy_dtype(name: str) -> np.dtype:
    """The numpy type of an element type name.

    Raises:
        KeyError: numpy has no such type.
    """
    return _NUMPY[name]


def stored_bytes(name: str, num_elements: int) -> int:
    """Bytes that elements take in a file; those under a byte are packed and the last byte is filled up.

    Raises:
        KeyError: numpy has no such type.
    """
    bits = _BITS.get(name) or 8 * _NUMPY[name].itemsize
    return -(-num_elements * bits // 8)


def name_of_numpy(dtype: np.dtype) -> str:
    """Element type name of a numpy type (``string`` for objects and text)."""
    return _FROM_NUMPY.get(dtype, "string")
