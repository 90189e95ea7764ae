"""Canonical forms of signal operators, and of those whose result is a table made from a few numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tap_planner.graph.compute import default_form
from tap_planner.graph.dtypes import dtype_name, numpy_dtype
from tap_planner.graph.nodes import Node
from tap_planner.graph.values import Call, Form, Value
from tap_planner.operators import AttributeValue


def eye_like(node: Node, value: Value) -> tuple[str, Callable[[], np.ndarray]]:
    """Element type and matrix of an EyeLike node: it depends on the shape of its operand alone.

    Raises:
        ValueError: the operand is no matrix.
    """
    rows, columns = value.shape
    number, offset = node.attributes.get("dtype"), node.attributes.get("k", 0)
    if not isinstance(offset, int):
        raise ValueError(f"k is {offset!r}, expected an integer")
    dtype = dtype_name(number) if isinstance(number, int) else value.type.dtype
    return dtype, lambda: np.eye(rows, columns, offset, dtype=numpy_dtype(dtype))


def _table(call: Call) -> Form:
    """A table whose numbers must be constants (windows, filter banks); the binder computes it."""
    for index in range(len(call.inputs)):
        call.array(index)
    return default_form(call)


def _fourier(call: Call) -> Form:
    """The axis was an attribute (1 if absent) in opset 17 and is an operand (-2 if absent) since opset 20."""
    value = call.operand(0)
    if call.opset >= 20:
        axis = int(call.scalar(2)) if call.has(2) else -2
    else:
        axis = call.integer("axis", 1)
    axis = call.axis(axis, value.rank)
    inverse, onesided = call.integer("inverse", 0), call.integer("onesided", 0)
    default = 2 * (value.shape[axis] - 1) if inverse and onesided else value.shape[axis]
    attributes: dict[str, AttributeValue] = {
        "axis": axis,
        "inverse": inverse,
        "length": int(call.scalar(1)) if call.has(1) else default,
        "onesided": onesided,
    }
    return Form(type="DFT", attributes=attributes, inputs=[value])


def _short_fourier(call: Call) -> Form:
    value = call.operand(0)
    window = call.operand(2) if call.has(2) else None
    length = value.shape[1] if window is None else window.shape[0]
    attributes: dict[str, AttributeValue] = {
        "length": int(call.scalar(3)) if call.has(3) else length,
        "onesided": call.integer("onesided", 1),
        "step": int(call.scalar(1)),
    }
    if window is not None and window.shape[0] != attributes["length"]:
        raise call.error(f"a window of {window.shape[0]} for frames of {attributes['length']}")
    return Form(type="STFT", attributes=attributes, inputs=[value] if window is None else [value, window])


def _cumprod(call: Call) -> Form:
    value = call.operand(0)
    attributes: dict[str, AttributeValue] = {
        "axis": call.axis(int(call.scalar(1)), value.rank),
        "exclusive": call.integer("exclusive", 0),
        "reverse": call.integer("reverse", 0),
    }
    return Form(type="CumProd", attributes=attributes, inputs=[value])


def _bit_cast(call: Call) -> Form:
    return Form(type="BitCast", attributes={"to": dtype_name(call.integer("to"))}, inputs=[call.operand(0)])


CANONICAL: dict[str, Callable[[Call], Form]] = {
    "BitCast": _bit_cast,
    "CumProd": _cumprod,
    "DFT": _fourier,
    "STFT": _short_fourier,
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"), _table),
}
