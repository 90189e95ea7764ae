"""Convolutions and pooling whose space may be split, with their definition written as loops over numpy windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tap_planner.operators import OperatorSignature
from tests.operators.operator_reference import Array, signature, tensor


def _window(rank: int, kernel: int, stride: int, begin: int, end: int, dilation: int = 1) -> dict[str, Any]:
    return {
        "kernel_shape": (kernel,) * rank,
        "strides": (stride,) * rank,
        "pads": (begin,) * rank + (end,) * rank,
        "dilations": (dilation,) * rank,
    }


_X = tensor(2, 4, 12, 12)


def _pool(name: str, rank: int = 2, **attributes: Any) -> OperatorSignature:
    data = tensor(2, 3, *(12,) * rank)
    return signature(name, data, **attributes)


SPATIAL_CASES: tuple[OperatorSignature, ...] = (
    signature("Conv", _X, tensor(3, 4, 3, 3), tensor(3), group=1, **_window(2, 3, 1, 1, 1)),
    signature("Conv", _X, tensor(3, 4, 3, 3), group=1, **_window(2, 3, 2, 1, 1)),
    signature("Conv", _X, tensor(3, 4, 4, 4), group=1, **_window(2, 4, 1, 1, 2)),
    signature("Conv", _X, tensor(6, 2, 3, 3), tensor(6), group=2, **_window(2, 3, 1, 2, 2, 2)),
    signature("Conv", _X, tensor(3, 4, 1, 1), tensor(3), group=1, **_window(2, 1, 2, 0, 0)),
    signature("Conv", tensor(2, 4, 12), tensor(3, 4, 7), group=1, **_window(1, 7, 2, 3, 3)),
    signature("Conv", tensor(2, 4, 12), tensor(3, 4, 3), group=1, **_window(1, 3, 1, 2, 0)),
    signature("Conv", tensor(1, 2, 6, 6, 6), tensor(2, 2, 3, 3, 3), group=1, **_window(3, 3, 1, 1, 1)),
    signature("ConvTranspose", _X, tensor(4, 3, 4, 4), tensor(3), group=1, **_window(2, 4, 2, 1, 1)),
    signature("ConvTranspose", _X, tensor(4, 3, 2, 2), group=1, **_window(2, 2, 2, 0, 0)),
    signature("ConvTranspose", _X, tensor(4, 2, 5, 5), group=2, **_window(2, 5, 1, 2, 2)),
    _pool("MaxPool", ceil_mode=0, **_window(2, 3, 2, 1, 1)),
    _pool("MaxPool", ceil_mode=1, **_window(2, 3, 2, 0, 0)),
    _pool("MaxPool", rank=1, ceil_mode=0, **_window(1, 2, 1, 0, 1)),
    _pool("AveragePool", ceil_mode=0, count_include_pad=0, **_window(2, 3, 1, 1, 1)),
    _pool("AveragePool", ceil_mode=0, count_include_pad=1, **_window(2, 5, 1, 2, 2)),
    _pool("AveragePool", ceil_mode=0, count_include_pad=0, **_window(2, 2, 2, 0, 0)),
    _pool("LpPool", ceil_mode=0, p=2, **_window(2, 3, 1, 1, 1)),
)
"""All with every dim of space as a factor."""


def ints(sig: OperatorSignature, name: str) -> tuple[int, ...]:
    """An attribute that is a list of integers."""
    value = sig.attribute(name)
    assert isinstance(value, tuple)
    return tuple(int(item) for item in value)


def padding_of(sig: OperatorSignature) -> float:
    """What lies in the padding; NaN does not count in an average."""
    if sig.type == "MaxPool":
        return -math.inf
    return np.nan if sig.type == "AveragePool" and not sig.attribute("count_include_pad") else 0.0


def evaluate(sig: OperatorSignature, values: Sequence[Array | None], pads: Sequence[tuple[int, int]]) -> Array:
    """The operator on data of any size, window by window; ``pads`` instead of those of the signature.

    A transposed convolution cuts ``pads`` off.
    """
    data = values[0]
    assert data is not None
    if sig.type == "ConvTranspose":
        return _scattered(sig, data, values, pads)
    padded = np.pad(data, [(0, 0), (0, 0), *pads], constant_values=padding_of(sig))
    kernel, strides, dilations = (ints(sig, name) for name in ("kernel_shape", "strides", "dilations"))
    extents = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    counts = [(n - e) // s + 1 for n, e, s in zip(padded.shape[2:], extents, strides, strict=True)]
    channels = sig.outputs[0].shape[1]
    result = np.empty((data.shape[0], channels, *counts))
    for place in itertools.product(*map(range, counts)):
        cut = tuple(slice(o * s, o * s + e, d) for o, s, e, d in zip(place, strides, extents, dilations, strict=True))
        result[(slice(None), slice(None), *place)] = _of_window(sig, padded[(slice(None), slice(None), *cut)], values)
    return result


def _of_window(sig: OperatorSignature, window: Array, values: Sequence[Array | None]) -> Array:
    """[batch, channels] of one window [batch, channels, kernel]."""
    space = tuple(range(2, window.ndim))
    if sig.type == "MaxPool":
        return window.max(space)
    if sig.type == "AveragePool":
        return np.nansum(window, space) / (~np.isnan(window)).sum(space)
    if sig.type == "LpPool":
        return np.sqrt((window**2).sum(space))
    weight, bias = values[1], values[2] if len(values) > 2 else None
    assert weight is not None
    groups = sig.attribute("group")
    assert isinstance(groups, int)
    split = window.reshape(window.shape[0], groups, weight.shape[1], -1)
    kernels = weight.reshape(groups, -1, weight.shape[1], split.shape[-1])
    result = np.einsum("ngik,goik->ngo", split, kernels).reshape(window.shape[0], -1)
    return result if bias is None else result + bias


def _scattered(
    sig: OperatorSignature, data: Array, values: Sequence[Array | None], pads: Sequence[tuple[int, int]]
) -> Array:
    weight, bias = values[1], values[2] if len(values) > 2 else None
    groups = sig.attribute("group")
    assert weight is not None and isinstance(groups, int)
    strides, space = ints(sig, "strides"), data.shape[2:]
    kernel = weight.shape[2:]
    sizes = [(n - 1) * s + k for n, s, k in zip(space, strides, kernel, strict=True)]
    channels = weight.shape[1] * groups
    result = np.zeros((data.shape[0], channels, *sizes))
    kernels = weight.reshape(groups, -1, *weight.shape[1:])
    for place in itertools.product(*map(range, space)):
        pixel = data[(slice(None), slice(None), *place)].reshape(data.shape[0], groups, -1)
        added = np.einsum("ngi,gio...->ngo...", pixel, kernels).reshape(data.shape[0], channels, *kernel)
        cut = tuple(slice(i * s, i * s + k) for i, s, k in zip(place, strides, kernel, strict=True))
        result[(slice(None), slice(None), *cut)] += added
    cuts = tuple(slice(begin, size - end) for (begin, end), size in zip(pads, sizes, strict=True))
    result = result[(slice(None), slice(None), *cuts)]
    return result if bias is None else result + bias.reshape(-1, *(1,) * len(space))


def pads_of(sig: OperatorSignature) -> list[tuple[int, int]]:
    """(begin, end) per dim of space; where the last window is cut short by a rounded-up count, the end is longer."""
    pads, rank = ints(sig, "pads"), len(sig.outputs[0].shape) - 2
    if not sig.attribute("ceil_mode"):
        return list(zip(pads[:rank], pads[rank:], strict=True))
    found = []
    for dim, size in enumerate(sig.inputs[0].shape[2:] if sig.inputs[0] else ()):
        read = (sig.outputs[0].shape[dim + 2] - 1) * ints(sig, "strides")[dim] + ints(sig, "kernel_shape")[dim]
        found.append((pads[dim], read - size - pads[dim]))
    return found
