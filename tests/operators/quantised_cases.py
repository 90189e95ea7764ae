"""Cases of the family `quantised`, and their references: the definitions of ONNX and ONNX Runtime in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tap_planner.operators import Factor, OperatorSignature, TensorType, lookup
from tests.operators.operator_reference import (
    LOCALISERS,
    REFERENCES,
    VALUES,
    Array,
    Range,
    index_type,
    run,
    signature,
    tensor,
)

Values = Sequence[Array | None]
_MS = "com.microsoft::"
_F = tensor()
_U8, _I8, _I32 = (tensor(dtype=name) for name in ("uint8", "int8", "int32"))
_LIMITS = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767)}


def _u8(*shape: int) -> TensorType:
    return tensor(*shape, dtype="uint8")


def _i8(*shape: int) -> TensorType:
    return tensor(*shape, dtype="int8")


def _i32(*shape: int) -> TensorType:
    return tensor(*shape, dtype="int32")


_X = tensor(4, 6, 8)
_IMAGE = _u8(4, 6, 5, 5)
_WINDOW: dict[str, Any] = {"kernel_shape": (3, 3), "strides": (2, 1), "pads": (1, 0, 1, 2), "dilations": (1, 1)}


def _scaling() -> list[OperatorSignature]:
    packed = tensor(4, 6, 8, dtype="int4")
    return [
        signature("QuantizeLinear", _X, _F),
        signature("QuantizeLinear", _X, _F, _I8),
        signature("QuantizeLinear", _X, tensor(6), _u8(6), axis=1),
        signature("QuantizeLinear", _X, tensor(4, 6, 2), _i8(4, 6, 2), axis=2, block_size=4),
        signature("QuantizeLinear", _X, tensor(4, 3, 8), None, axis=1, block_size=2),
        signature("QuantizeLinear", tensor(6), tensor(1), tensor(dtype="uint16")),
        signature("DequantizeLinear", _u8(4, 6, 8), _F, _U8),
        signature("DequantizeLinear", _i32(4, 6), _F),
        signature("DequantizeLinear", _i8(4, 6, 8), tensor(4), _i8(4), axis=0),
        signature("DequantizeLinear", packed, tensor(4, 6, 4), tensor(4, 6, 4, dtype="int4"), axis=2, block_size=2),
        signature("DequantizeLinear", packed, tensor(4, 2, 8), axis=1, block_size=4),
        signature("DynamicQuantizeLinear", tensor(4, 6), num_outputs=3),
    ]


def _linear() -> list[OperatorSignature]:
    scale = (_F, _U8)
    row, column = (tensor(4, 1), _u8(4, 1)), (tensor(8), _i8(8))
    conv: dict[str, Any] = {**_WINDOW, "group": 1}
    same: dict[str, Any] = {**_WINDOW, "strides": (1, 1), "pads": (1, 1, 1, 1)}
    pool: dict[str, Any] = {"kernel_shape": (2, 2), "strides": (1, 2), "pads": (1, 0, 0, 1), "dilations": (1, 1)}
    return [
        signature("MatMulInteger", _u8(4, 6), _i8(6, 8)),
        signature("MatMulInteger", _u8(2, 4, 6), _i8(6, 8), _U8, _i8(8)),
        signature("MatMulInteger", _u8(4, 6), _i8(6, 8), _u8(4), _I8),
        signature("QLinearMatMul", _u8(2, 4, 6), *scale, _i8(6, 8), _F, _I8, *scale),
        signature("QLinearMatMul", _u8(4, 6), *row, _i8(6, 8), *column, tensor(4), _u8(4)),
        signature("ConvInteger", _IMAGE, _u8(4, 6, 3, 3), _U8, _u8(4), **conv),
        signature("QLinearConv", _IMAGE, *scale, _i8(4, 6, 3, 3), tensor(4), _i8(4), *scale, _i32(4), **conv),
        signature("QLinearConv", _IMAGE, *scale, _u8(9, 2, 3, 3), *scale, *scale, **same, group=3),
        signature(f"{_MS}MatMulIntegerToFloat", _u8(2, 4, 6), _i8(6, 8), _F, _F),
        signature(f"{_MS}MatMulIntegerToFloat", _u8(4, 6), _i8(6, 8), _F, tensor(8), _U8, _i8(8), tensor(8)),
        signature(f"{_MS}DynamicQuantizeMatMul", tensor(2, 4, 6), _i8(6, 8), tensor(8), _i8(8), tensor(8)),
        signature(f"{_MS}DynamicQuantizeMatMul", tensor(4, 6), _u8(6, 8), _F),
        signature(
            f"{_MS}QGemm", _u8(4, 6), *scale, _i8(6, 8), _F, _I8, None, None, None, alpha=0.5, transA=0, transB=0
        ),
        signature(f"{_MS}QGemm", _u8(4, 6), *scale, _i8(8, 6), *column, _i32(8), *scale, alpha=1.0, transA=0, transB=1),
        signature(f"{_MS}QLinearAdd", _u8(4, 3, 6), *scale, _u8(3, 1), *scale, *scale),
        signature(f"{_MS}QLinearMul", _u8(4, 1, 6), *scale, _u8(3, 6), *scale, *scale),
        signature(f"{_MS}QLinearWhere", tensor(3, 1, dtype="bool"), _u8(4, 1, 6), *scale, _u8(3, 6), *scale, *scale),
        signature(f"{_MS}QLinearConcat", *scale, _u8(4, 3, 2), *scale, _u8(4, 5, 2), *scale, axis=1),
        signature(f"{_MS}QLinearSigmoid", _u8(4, 6), *scale, *scale),
        signature(f"{_MS}QLinearLeakyRelu", _i8(4, 6), _F, _I8, _F, _I8, alpha=0.1),
        signature(f"{_MS}QLinearSoftmax", _u8(4, 6, 3), *scale, *scale, axes=(1,)),
        signature(f"{_MS}QLinearAveragePool", _IMAGE, *scale, *scale, **pool, ceil_mode=0, count_include_pad=0),
        signature(f"{_MS}QLinearGlobalAveragePool", _IMAGE, *scale, *scale),
        signature(f"{_MS}QLinearReduceMean", _u8(4, 6, 8), *scale, *scale, axes=(1,), keepdims=0),
    ]


def _packed() -> list[OperatorSignature]:
    product = f"{_MS}MatMulNBits"
    four: dict[str, Any] = {"K": 64, "N": 6, "bits": 4, "block_size": 16}
    short: dict[str, Any] = {**four, "K": 40}
    lookup_ = f"{_MS}GatherBlockQuantized"
    rows: dict[str, Any] = {"gather_axis": 0, "quantize_axis": 1, "block_size": 16, "bits": 4}
    return [
        signature(product, tensor(2, 3, 64), _u8(6, 4, 8), tensor(24), **four),
        signature(product, tensor(3, 64), _u8(6, 4, 8), tensor(6, 4), _u8(6, 2), None, tensor(6), **four),
        signature(product, tensor(3, 64), _u8(6, 4, 8), tensor(24), tensor(24), None, tensor(6), **four),
        signature(product, tensor(3, 64), _u8(6, 4, 8), tensor(24), _u8(12), _i32(64), **four),
        signature(product, tensor(3, 40), _u8(6, 3, 8), tensor(18), _u8(12), **short),
        signature(product, tensor(4, 64), _u8(6, 4, 16), tensor(24), _u8(24), **{**four, "bits": 8}),
        signature(lookup_, _u8(10, 32), index_type(4, 3), tensor(10, 4), **{**rows, "bits": 8, "block_size": 8}),
        signature(lookup_, _u8(10, 32), index_type(4, 3), tensor(10, 4), **rows),
        signature(lookup_, _u8(10, 32), index_type(4), tensor(10, 4), _u8(10, 2), **rows),
        signature(
            lookup_, tensor(5, 32, dtype="int4"), index_type(4), tensor(5, 2), tensor(5, 2, dtype="int4"), **rows
        ),
    ]


CASES: tuple[OperatorSignature, ...] = (*_scaling(), *_linear(), *_packed())


def _values(sig: OperatorSignature, rng: np.random.Generator) -> list[Array | None]:
    """Scales for which results lie inside the range of 8 bits, zero points near the middle."""
    marked = lookup(sig.type).quantised_operands
    is_packed = sig.type.endswith(("MatMulNBits", "GatherBlockQuantized"))
    values: list[Array | None] = []
    for index, found in enumerate(sig.inputs):
        if found is None:
            values.append(None)
        elif found.is_float:
            low, high = (0.01, 0.05) if index in marked else (-0.9, 0.9)
            values.append(rng.uniform(low, high, found.shape))
        elif found.dtype == "bool":
            values.append(rng.random(found.shape) < 0.5)
        elif found.dtype == "int64":
            first = sig.inputs[0]
            assert first is not None
            values.append(rng.integers(-first.shape[0], first.shape[0], found.shape))
        elif is_packed and found.dtype == "int32":
            values.append(np.sort(rng.integers(0, 4, found.shape)).astype(np.int32))
        else:
            low, high = {"uint8": (0, 256) if is_packed else (90, 160), "int4": (-8, 8)}.get(found.dtype, (-30, 30))
            values.append(rng.integers(max(low, 0 if found.dtype[0] == "u" else low), high, found.shape))
            values[-1] = np.asarray(values[-1]).astype("int8" if found.dtype == "int4" else found.dtype)
    return values


def _spread(value: Array | None, shape: tuple[int, ...], axis: int, block: int = 0) -> Array:
    """A scale or zero point (None: zero) in float64, against data of ``shape``."""
    if value is None:
        return np.zeros(())
    value = value.astype(np.float64)
    if value.size == 1:
        return value.reshape(())
    if block:
        return np.repeat(value, block, axis)[tuple(slice(size) for size in shape)]
    return (
        value if value.ndim > 1 else value.reshape([-1 if dim == axis % len(shape) else 1 for dim in range(len(shape))])
    )


def _quantise(value: Array, scale: Array, point: Array, dtype: str) -> Array:
    low, high = _LIMITS[dtype]
    return np.clip(np.rint(value / scale) + point, low, high).astype(dtype)


def _made(sig: OperatorSignature, values: Values, result: Array, position: int, axis: int) -> Array:
    """A result quantised by the scale at ``position`` and the zero point behind it."""
    scale, point = (_spread(values[index], result.shape, axis) for index in (position, position + 1))
    return _quantise(result, scale, point, sig.outputs[0].dtype)


def _given(values: Values, *positions: int) -> list[Any]:
    return [values[position] if position < len(values) else None for position in positions]


def _linear_scaling(sig: OperatorSignature, values: Values) -> list[Array]:
    data, scale, point = _given(values, 0, 1, 2)
    axis, block = sig.attribute("axis", 0), sig.attribute("block_size", 0)
    assert isinstance(axis, int) and isinstance(block, int)
    scale, point = (_spread(item, data.shape, axis, block) for item in (scale, point))
    if sig.type == "DequantizeLinear":
        return [(data.astype(np.float64) - point) * scale]
    return [_quantise(data, scale, point, sig.outputs[0].dtype)]


def _dynamic(data: Array) -> tuple[Array, Array, Array]:
    low, high = min(0.0, float(data.min())), max(0.0, float(data.max()))
    scale = (high - low) / 255
    point = np.clip(np.rint(-low / scale), 0, 255)
    return _quantise(data, np.asarray(scale), point, "uint8"), np.asarray(scale), np.asarray(point, np.uint8)


def _dynamic_linear(sig: OperatorSignature, values: Values) -> list[Array]:
    (data,) = _given(values, 0)
    return list(_dynamic(data))


def _shifted(values: Values, data: int, point: int, axis: int) -> Array:
    number = np.asarray(values[data]).astype(np.float64)
    return number - _spread(_given(values, point)[0], number.shape, axis)


def _matmul_integer(sig: OperatorSignature, values: Values) -> list[Array]:
    return [(_shifted(values, 0, 2, -2) @ _shifted(values, 1, 3, -1)).astype(np.int32)]


def _qlinear_matmul(sig: OperatorSignature, values: Values) -> list[Array]:
    total = _shifted(values, 0, 2, -2) @ _shifted(values, 3, 5, -1)
    left, right = np.asarray(values[0]).shape, np.asarray(values[3]).shape
    total = total * _spread(values[1], left, -2) * _spread(values[4], right, -1)
    return [_made(sig, values, total, 6, -2)]


def _attributes(sig: OperatorSignature) -> dict[str, Any]:
    return dict(sig.attributes)


def _convolved(sig: OperatorSignature, data: Array, weight: Array) -> Array:
    """By ONNX's reference evaluator."""
    inner = signature("Conv", tensor(*data.shape), tensor(*weight.shape), **_attributes(sig))
    return run(inner, [data, weight])[0]


def _conv_integer(sig: OperatorSignature, values: Values) -> list[Array]:
    return [np.rint(_convolved(sig, _shifted(values, 0, 2, 0), _shifted(values, 1, 3, 0))).astype(np.int32)]


def _qlinear_conv(sig: OperatorSignature, values: Values) -> list[Array]:
    total = _convolved(sig, _shifted(values, 0, 2, 0), _shifted(values, 3, 5, 0))
    total = total + _spread(_given(values, 8)[0], total.shape, 1)
    scale = _spread(values[1], total.shape, 1) * _spread(values[4], total.shape, 1)
    return [_made(sig, values, total * scale, 6, 1)]


def _integer_to_float(sig: OperatorSignature, values: Values) -> list[Array]:
    total = _shifted(values, 0, 4, -2) @ _shifted(values, 1, 5, -1)
    total = total * np.asarray(values[2]) * _spread(values[3], total.shape, -1)
    return [total + _spread(_given(values, 6)[0], total.shape, -1)]


def _dynamic_matmul(sig: OperatorSignature, values: Values) -> list[Array]:
    number, scale, point = _dynamic(np.asarray(values[0]))
    total = (number.astype(np.float64) - point.astype(np.float64)) @ _shifted(values, 1, 3, -1)
    total = total * scale * _spread(values[2], total.shape, -1)
    return [total + _spread(_given(values, 4)[0], total.shape, -1)]


def _qgemm(sig: OperatorSignature, values: Values) -> list[Array]:
    alpha, transposed = _attributes(sig)["alpha"], bool(sig.attribute("transB"))
    left, right = _shifted(values, 0, 2, 0), _shifted(values, 3, 5, 0 if transposed else 1)
    total = left @ (right.T if transposed else right)
    total = (total + _spread(values[6], total.shape, -1)) * alpha
    total = total * np.asarray(values[1]) * _spread(values[4], total.shape, -1)
    if values[7] is None:
        return [total]
    return [_made(sig, values, total, 7, -1)]


def _restored(values: Values, data: int) -> Array:
    number, scale, point = (np.asarray(values[data + offset]).astype(np.float64) for offset in range(3))
    return (number - point) * scale


def _between(sig: OperatorSignature, values: Values) -> list[Array]:
    """Restore, compute, quantise."""
    name = sig.type.removeprefix(f"{_MS}QLinear")
    made = 6
    if name == "Add":
        result = _restored(values, 0) + _restored(values, 3)
    elif name == "Mul":
        result = _restored(values, 0) * _restored(values, 3)
    elif name == "Where":
        result, made = np.where(np.asarray(values[0]), _restored(values, 1), _restored(values, 4)), 7
    elif name == "Concat":
        axis = sig.attribute("axis")
        assert isinstance(axis, int)
        result, made = np.concatenate([_restored(values, index) for index in range(2, len(values), 3)], axis), 0
    else:
        data = _restored(values, 0)
        result, made = run(signature(name, tensor(*data.shape), **_attributes(sig)), [data])[0], 3
    return [_made(sig, values, result, made, 0)]


def _unpacked(data: Array, bits: int) -> Array:
    """Numbers in bytes along the last dim, lowest bits first, by numpy's own bit order."""
    every = np.unpackbits(data[..., None], axis=-1, bitorder="little")
    groups = every.reshape(*data.shape[:-1], -1, bits)
    return (groups * (1 << np.arange(bits))).sum(-1).astype(np.float64)


def _nbits(sig: OperatorSignature, values: Values) -> list[Array]:
    data, weight, scale, points, groups, bias = _given(values, *range(6))
    bits, inner, block = (_attributes(sig)[name] for name in ("bits", "K", "block_size"))
    columns, blocks = weight.shape[:2]
    scale = scale.reshape(columns, blocks)
    if points is None:
        points = np.full(scale.shape, 2.0 ** (bits - 1))
    elif points.dtype == np.uint8:
        points = _unpacked(points.reshape(columns, -1), bits)
    points = points.reshape(columns, -1)
    result = np.zeros((*data.shape[:-1], columns)) + (0.0 if bias is None else bias)
    numbers = _unpacked(weight, bits).reshape(columns, -1)
    for k in range(inner):
        group = k // block if groups is None else int(groups[k])
        result = result + data[..., k : k + 1] * ((numbers[:, k] - points[:, group]) * scale[:, group])
    return [result]


def _block_lookup(sig: OperatorSignature, values: Values) -> list[Array]:
    """Rows restored one by one; rows below ``first_row`` or past the end lie in another part."""
    data, indices, scale, points = _given(values, *range(4))
    attributes = _attributes(sig)
    bits, block = attributes["bits"], attributes["block_size"]
    first, count = attributes.get("first_row", 0), attributes.get("rows", len(data))
    packed = data.dtype == np.uint8
    numbers = _unpacked(data, bits) if packed else data.astype(np.float64)
    if points is not None:
        points = _unpacked(points, bits) if packed else points.astype(np.float64)
    zeros = np.full(scale.shape, 2.0 ** (bits - 1) if packed else 0.0) if points is None else points
    result = np.zeros((*indices.shape, numbers.shape[1]))
    for place in np.ndindex(*indices.shape):
        row = int(indices[place]) + (count if indices[place] < 0 else 0) - first
        if 0 <= row < len(data):
            for k in range(numbers.shape[1]):
                result[(*place, k)] = (numbers[row, k] - zeros[row, k // block]) * scale[row, k // block]
    return [result]


def _localise_product(attributes: dict[str, Any], factor: Factor, part: Range, sig: OperatorSignature) -> None:
    count = part[1] - part[0]
    if factor.name == "n":
        attributes["N"] = count
    elif factor.name == "kb":
        attributes["K"] = count * attributes["block_size"]


def _localise_lookup(attributes: dict[str, Any], factor: Factor, part: Range, sig: OperatorSignature) -> None:
    if factor.name == "v":
        attributes.update(first_row=part[0], rows=factor.size)


_REFERENCES = {
    "QuantizeLinear": _linear_scaling,
    "DequantizeLinear": _linear_scaling,
    "DynamicQuantizeLinear": _dynamic_linear,
    "MatMulInteger": _matmul_integer,
    "QLinearMatMul": _qlinear_matmul,
    "ConvInteger": _conv_integer,
    "QLinearConv": _qlinear_conv,
    f"{_MS}MatMulIntegerToFloat": _integer_to_float,
    f"{_MS}DynamicQuantizeMatMul": _dynamic_matmul,
    f"{_MS}QGemm": _qgemm,
    f"{_MS}MatMulNBits": _nbits,
    f"{_MS}GatherBlockQuantized": _block_lookup,
}
REFERENCES.update(_REFERENCES)
VALUES.update(dict.fromkeys(_REFERENCES, _values))
for _case in CASES:
    if _case.type not in _REFERENCES:
        REFERENCES[_case.type] = _between
        VALUES[_case.type] = _values
LOCALISERS[f"{_MS}MatMulNBits"] = _localise_product
LOCALISERS[f"{_MS}GatherBlockQuantized"] = _localise_lookup
