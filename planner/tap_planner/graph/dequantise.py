"""Values of quantised constants: what DequantizeLinear and MatMulNBits make of stored numbers, in numpy.

Rotary tables of quantised models lie so in the file; they are computed when they are run, never to plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tap_planner.graph.dtypes import numpy_dtype
from tap_planner.operators import AttributeValue

Attributes = Mapping[str, AttributeValue]
Arrays = Sequence["np.ndarray | None"]


def _int(attributes: Attributes, name: str, default: int) -> int:
    value = attributes.get(name, default)
    assert isinstance(value, int)
    return value


def _spread(scale: np.ndarray, shape: tuple[int, ...], attributes: Attributes) -> np.ndarray:
    """A scale (or zero point) broadcast against data of ``shape``."""
    if scale.size == 1:
        return scale.reshape(())
    axis, block = _int(attributes, "axis", 1), _int(attributes, "block_size", 0)
    if block:
        if not 0 < block <= max(shape[axis], 1):
            raise ValueError(f"blocks of {block} in a dim of {shape[axis]}")
        return np.take(np.repeat(scale, block, axis), range(shape[axis]), axis)
    return scale.reshape([-1 if dim == axis else 1 for dim in range(len(shape))])


def dequantise_linear(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    """``(x - zero point) scale``."""
    data, scale = arrays[0], arrays[1]
    points = arrays[2] if len(arrays) > 2 else None
    assert data is not None and scale is not None
    wide = np.float64 if scale.dtype == np.float64 else np.float32
    values = data.astype(wide)
    if points is not None:
        values = values - _spread(points.astype(wide), data.shape, attributes)
    values = values * _spread(scale.astype(wide), data.shape, attributes)
    return [
        values.astype(numpy_dtype(str(attributes["output_dtype"])) if "output_dtype" in attributes else scale.dtype)
    ]


def unpacked(data: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of ``bits`` bits in the bytes along the last dim, lowest bits first."""
    per_byte = 8 // bits
    shifts = np.arange(per_byte, dtype=np.uint8) * bits
    numbers = (data[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return numbers.reshape(*data.shape[:-1], data.shape[-1] * per_byte)


def matmul_nbits(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    """``A W^T`` with W of ``[N, K]`` in blocks along K, each with a scale and a zero point (the middle by default)."""
    data, weight, scale, points, groups, bias = (*arrays, *(None,) * (6 - len(arrays)))
    assert data is not None and weight is not None and scale is not None
    bits, inner, block = (_int(attributes, name, 4) for name in ("bits", "K", "block_size"))
    columns, blocks = weight.shape[:2]
    numbers = unpacked(weight, bits).reshape(columns, -1)[:, :inner].astype(np.float64)
    of_column = np.arange(inner) // block if groups is None else groups.astype(np.int64)
    if points is None:
        zeros = np.full((columns, blocks), float(1 << (bits - 1)))
    elif points.dtype == np.uint8 and bits < 8:
        zeros = unpacked(points.reshape(columns, -1), bits)[:, :blocks].astype(np.float64)
    else:
        zeros = points.reshape(columns, blocks).astype(np.float64)
    scales = scale.reshape(columns, blocks).astype(np.float64)
    matrix = (numbers - zeros[:, of_column]) * scales[:, of_column]
    result = data.astype(np.float64) @ matrix.T
    return [(result if bias is None else result + bias).astype(data.dtype)]
