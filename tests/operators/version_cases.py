"""One node of an operator as each version of the operator sets writes it: operands, attributes, what is a constant.

A builder gets the version and a random generator. What an older version holds as an attribute a newer one may hold as
an operand; the builders say so, and the tests run every version of an operator's schema.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCase:
    """One node."""

    operands: tuple[Array | None, ...]
    attributes: dict[str, Any]
    constants: tuple[int, ...] = ()
    """Positions of operands that are initializers in the file."""
    num_outputs: int = 1


Builder = Callable[[int, np.random.Generator], NodeCase]


def _x(rng: np.random.Generator, *shape: int) -> Array:
    return rng.uniform(-1.0, 1.0, shape).astype(np.float32)


def _number(value: float) -> Array:
    return np.array(value, np.float32)


def _ints(*values: int) -> Array:
    return np.array(values, np.int64)


def _case(*operands: Array | None, constants: tuple[int, ...] = (), outputs: int = 1, **attributes: Any) -> NodeCase:
    return NodeCase(operands=operands, attributes=attributes, constants=constants, num_outputs=outputs)


def _unary(**attributes: Any) -> Builder:
    return lambda opset, rng: _case(_x(rng, 2, 3, 4), **attributes)


def _positive(opset: int, rng: np.random.Generator) -> NodeCase:
    return _case(np.abs(_x(rng, 2, 3, 4)) + _number(1.1))


def _binary(opset: int, rng: np.random.Generator) -> NodeCase:
    if opset < 8:
        return _case(_x(rng, 3, 4), np.abs(_x(rng, 3, 4)) + _number(0.5))
    return _case(_x(rng, 2, 3, 4), np.abs(_x(rng, 3, 1)) + _number(0.5))


def _logical(opset: int, rng: np.random.Generator) -> NodeCase:
    return _case(rng.random((3, 4)) < 0.5, rng.random((1, 4)) < 0.5)


def _bits(opset: int, rng: np.random.Generator) -> NodeCase:
    return _case(rng.integers(-50, 50, (3, 4), np.int32), rng.integers(-50, 50, (4,), np.int32))


def _reduce(since: int, *, start: float = -1.0) -> Builder:
    """Axes became an operand in version ``since``."""

    def build(opset: int, rng: np.random.Generator) -> NodeCase:
        data = rng.uniform(start, 1.0, (2, 3, 4)).astype(np.float32)
        if opset >= since:
            return _case(data, _ints(0, 2), constants=(1,), keepdims=0)
        return _case(data, axes=[0, 2], keepdims=0)

    return build


def _arg(opset: int, rng: np.random.Generator) -> NodeCase:
    data = rng.integers(0, 3, (3, 4, 5)).astype(np.float32)
    attributes: dict[str, Any] = {"select_last_index": 1} if opset >= 12 else {}
    return _case(data, axis=1, keepdims=0, **attributes)


def _axes(since: int, shape: tuple[int, ...], *axes: int) -> Builder:
    def build(opset: int, rng: np.random.Generator) -> NodeCase:
        if opset >= since:
            return _case(_x(rng, *shape), _ints(*axes), constants=(1,))
        return _case(_x(rng, *shape), axes=list(axes))

    return build


def _clip(opset: int, rng: np.random.Generator) -> NodeCase:
    if opset >= 11:
        return _case(_x(rng, 3, 4), _number(-0.4), _number(0.3), constants=(1, 2))
    return _case(_x(rng, 3, 4), min=-0.4, max=0.3)


def _clip_below(opset: int, rng: np.random.Generator) -> NodeCase:
    if opset >= 11:
        return _case(_x(rng, 3, 4), _number(-0.4), constants=())
    return _case(_x(rng, 3, 4), min=-0.4)


def _pad(mode: str) -> Builder:
    def build(opset: int, rng: np.random.Generator) -> NodeCase:
        pads = (0, 1, 2, 0, 2, 1)
        if opset < 11:
            return _case(_x(rng, 2, 4, 5), mode=mode, pads=list(pads), value=0.5)
        fill = (_number(0.5),) if mode == "constant" else ()
        if opset >= 18 and mode == "constant":
            pads = (-1, 1, 2, 1)
            return _case(_x(rng, 2, 4, 5), _ints(*pads), *fill, _ints(-1, 1), constants=(1, 2, 3), mode=mode)
        return _case(_x(rng, 2, 4, 5), _ints(*pads), *fill, constants=tuple(range(1, 2 + len(fill))), mode=mode)

    return build


def _slice(opset: int, rng: np.random.Generator) -> NodeCase:
    if opset < 10:
        return _case(_x(rng, 4, 5, 6), starts=[1, -3], ends=[3, 100], axes=[0, 2])
    operands = (_ints(3, -3), _ints(-100, 100), _ints(0, 2), _ints(-2, 1))
    return _case(_x(rng, 4, 5, 6), *operands, constants=(1, 2, 3, 4))


def _split(opset: int, rng: np.random.Generator) -> NodeCase:
    if opset < 13:
        return _case(_x(rng, 4, 6), axis=1, split=[1, 3, 2], outputs=3)
    return _case(_x(rng, 4, 6), _ints(1, 3, 2), constants=(1,), axis=-1, outputs=3)


def _split_evenly(opset: int, rng: np.random.Generator) -> NodeCase:
    if opset >= 18:
        return _case(_x(rng, 4, 7), axis=1, num_outputs=3, outputs=3)
    return _case(_x(rng, 4, 6), axis=1, outputs=3)


def _dropout(opset: int, rng: np.random.Generator) -> NodeCase:
    if opset >= 12:
        return _case(_x(rng, 3, 4), _number(0.3), constants=(1,), outputs=2)
    return _case(_x(rng, 3, 4), ratio=0.3)


def _softmax(axis: int | None) -> Builder:
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    return lambda opset, rng: _case(_x(rng, 2, 3, 4), **attributes)


def _top_k(opset: int, rng: np.random.Generator) -> NodeCase:
    if opset < 10:
        return _case(_x(rng, 3, 6), axis=1, k=2, outputs=2)
    attributes: dict[str, Any] = {"largest": 0, "sorted": 1} if opset >= 11 else {}
    return _case(_x(rng, 3, 6), _ints(2), constants=(1,), axis=-1, outputs=2, **attributes)


def _upsample(opset: int, rng: np.random.Generator) -> NodeCase:
    scales = [1.0, 1.0, 2.0, 1.5]
    if opset < 9:
        return _case(_x(rng, 1, 2, 3, 4), mode="nearest", scales=scales)
    return _case(_x(rng, 1, 2, 3, 4), np.array(scales, np.float32), constants=(1,), mode="linear")


def _resize(mode: str, **attributes: Any) -> Builder:
    def build(opset: int, rng: np.random.Generator) -> NodeCase:
        data, scales = _x(rng, 1, 2, 5, 6), np.array([1.0, 1.0, 1.4, 0.5], np.float32)
        if opset < 11:
            return _case(data, scales, constants=(1,), mode=mode)
        if opset < 13:
            return _case(data, np.zeros(0, np.float32), scales, constants=(1, 2), mode=mode, **attributes)
        if opset < 18:
            return _case(data, None, None, _ints(1, 2, 9, 4), constants=(3,), mode=mode, **attributes)
        return _case(data, None, None, _ints(9, 4), constants=(3,), mode=mode, axes=[2, 3], **attributes)

    return build


def _batch_norm(opset: int, rng: np.random.Generator) -> NodeCase:
    vectors = [_x(rng, 3) for _ in range(3)]
    return _case(_x(rng, 2, 3, 4, 5), *vectors, np.abs(_x(rng, 3)) + _number(0.5), epsilon=1e-3)


def _batch_norm_training(opset: int, rng: np.random.Generator) -> NodeCase:
    vectors = [_x(rng, 3) for _ in range(3)]
    operands = (_x(rng, 2, 3, 4, 5), *vectors, np.abs(_x(rng, 3)) + _number(0.5))
    if opset < 14:
        return _case(*operands, momentum=0.7)
    return _case(*operands, training_mode=1, outputs=3, momentum=0.7)


def _conv(opset: int, rng: np.random.Generator) -> NodeCase:
    return _case(_x(rng, 1, 4, 7, 8), _x(rng, 6, 2, 3, 2), _x(rng, 6), group=2, strides=[2, 1], auto_pad="SAME_LOWER")


def _conv_transpose(**attributes: Any) -> Builder:
    return lambda opset, rng: _case(_x(rng, 1, 4, 3, 4), _x(rng, 4, 3, 3, 2), _x(rng, 6), group=2, **attributes)


def _pool(**attributes: Any) -> Builder:
    return lambda opset, rng: _case(_x(rng, 2, 3, 9, 8), kernel_shape=[3, 2], strides=[2, 3], **attributes)


def _since(opset: int, **attributes: tuple[int, Any]) -> dict[str, Any]:
    """Attributes that are there from a version on."""
    return {name: value for name, (since, value) in attributes.items() if opset >= since}


def _max_pool(opset: int, rng: np.random.Generator) -> NodeCase:
    newer = _since(opset, ceil_mode=(10, 1), dilations=(10, [2, 1]))
    outputs = 2 if opset >= 8 else 1
    return _case(_x(rng, 2, 3, 9, 8), kernel_shape=[3, 2], strides=[2, 3], pads=[1, 0, 1, 1], outputs=outputs, **newer)


def _average_pool(opset: int, rng: np.random.Generator) -> NodeCase:
    newer = _since(opset, ceil_mode=(10, 1), dilations=(19, [2, 1]))
    common: dict[str, Any] = {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1], "count_include_pad": 1}
    return _case(_x(rng, 2, 3, 9, 8), **common, **newer)


def _lp_pool(opset: int, rng: np.random.Generator) -> NodeCase:
    newer = _since(opset, dilations=(18, [2, 1]))
    return _case(_x(rng, 2, 3, 9, 8), kernel_shape=[3, 2], strides=[2, 3], pads=[1, 0, 1, 1], p=3, **newer)


def _recurrent(kind: str) -> Builder:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]

    def build(opset: int, rng: np.random.Generator) -> NodeCase:
        shapes = ((5, 3, 4), (2, gates * 6, 4), (2, gates * 6, 6), (2, 2 * gates * 6))
        lengths = np.array([5, 2, 4], np.int32)
        states = [_x(rng, 2, 3, 6) for _ in range(2 if kind == "LSTM" else 1)]
        peepholes = [_x(rng, 2, 18)] if kind == "LSTM" else []
        attributes = {"direction": "bidirectional", "hidden_size": 6}
        operands = (*(_x(rng, *shape) for shape in shapes), lengths, *states, *peepholes)
        return _case(*operands, outputs=3 if kind == "LSTM" else 2, **attributes)

    return build


def _gru_after_reset(opset: int, rng: np.random.Generator) -> NodeCase:
    operands = (_x(rng, 5, 3, 4), _x(rng, 1, 18, 4), _x(rng, 1, 18, 6), _x(rng, 1, 36))
    return _case(*operands, hidden_size=6, linear_before_reset=1, direction="reverse", outputs=2)


def _scatter(opset: int, rng: np.random.Generator) -> NodeCase:
    indices = np.array([[3, 0], [1, -1], [2, 0]], np.int64) if opset >= 11 else np.array([[3, 0], [1, 2], [2, 0]])
    return _case(_x(rng, 3, 4), indices, _x(rng, 3, 2), axis=1)


def _scatter_product(opset: int, rng: np.random.Generator) -> NodeCase:
    newer = _since(opset, reduction=(16, "mul"))
    indices = np.array([[3, 3], [1, -1], [2, 0]] if newer else [[3, 2], [1, -1], [2, 0]], np.int64)
    return _case(_x(rng, 3, 4), indices, _x(rng, 3, 2), axis=1, **newer)


def _scatter_nd(opset: int, rng: np.random.Generator) -> NodeCase:
    newer = _since(opset, reduction=(18, "max"))
    indices = np.array([[0, 1], [2, -1], [0, 1]] if newer else [[0, 1], [2, -1], [1, 1]], np.int64)
    return _case(_x(rng, 3, 4, 5), indices, _x(rng, 3, 5), **newer)


def _one_hot(opset: int, rng: np.random.Generator) -> NodeCase:
    values = np.array([-1.0, 2.0], np.float32)
    return _case(rng.integers(-5, 5, (3, 4)), np.array(5), values, constants=(1, 2), axis=1)


def _mean_variance(opset: int, rng: np.random.Generator) -> NodeCase:
    return _case(_x(rng, 2, 3, 4, 5), **_since(opset, axes=(9, [0, 2])))


def _group_norm(opset: int, rng: np.random.Generator) -> NodeCase:
    count = 6 if opset >= 21 else 2
    return _case(_x(rng, 2, 6, 4), _x(rng, count), _x(rng, count), num_groups=2)


def _images(opset: int, rng: np.random.Generator) -> NodeCase:
    boxes = np.array([[0, 0, 4, 5], [1, 2, 6, 7], [2, 1, 3, 3]], np.float32)
    return _case(_x(rng, 2, 3, 8, 8), boxes, _ints(1, 0, 1), output_height=2, output_width=3, spatial_scale=0.8)


def _grid_sample(opset: int, rng: np.random.Generator) -> NodeCase:
    mode = "bicubic" if opset < 20 else "cubic"
    return _case(_x(rng, 2, 3, 5, 6), 1.2 * _x(rng, 2, 4, 3, 2), mode=mode, padding_mode="reflection")


def _dft(opset: int, rng: np.random.Generator) -> NodeCase:
    if opset < 20:
        return _case(_x(rng, 2, 6, 5, 1), axis=1, onesided=1)
    return _case(_x(rng, 2, 6, 5, 1), None, np.array(1), constants=(2,), onesided=1)


def _norm(opset: int, rng: np.random.Generator) -> NodeCase:
    return _case(_x(rng, 2, 3, 4), _x(rng, 3, 4), _x(rng, 3, 4), axis=1, epsilon=1e-3)


def _loss(reduction: str) -> Builder:
    def build(opset: int, rng: np.random.Generator) -> NodeCase:
        labels, weights = rng.integers(0, 5, (4, 3)), np.abs(_x(rng, 5))
        return _case(_x(rng, 4, 5, 3), labels, weights, reduction=reduction, ignore_index=2)

    return build


def _mod(fmod: int) -> Builder:
    def build(opset: int, rng: np.random.Generator) -> NodeCase:
        if fmod:
            return _case(4 * _x(rng, 3, 4), np.abs(_x(rng, 4)) + _number(0.3), fmod=1)
        return _case(rng.integers(-9, 9, (3, 4)), rng.integers(1, 5, (4,)))

    return build


def _shift(opset: int, rng: np.random.Generator) -> NodeCase:
    return _case(rng.integers(0, 60, (3, 4), np.uint32), rng.integers(0, 3, (4,), np.uint32), direction="LEFT")


def _gather(opset: int, rng: np.random.Generator) -> NodeCase:
    low = -4 if opset >= 11 else 0
    return _case(_x(rng, 3, 4, 5), rng.integers(low, 4, (2, 3)), axis=1)


def _gather_nd(opset: int, rng: np.random.Generator) -> NodeCase:
    newer = _since(opset, batch_dims=(12, 1))
    return _case(_x(rng, 3, 4, 5), rng.integers(-3, 3, (3, 2, 1)), **newer)


def _shape(opset: int, rng: np.random.Generator) -> NodeCase:
    return _case(_x(rng, 3, 4, 5), **_since(opset, start=(15, 1), end=(15, -1)))


def _prelu(opset: int, rng: np.random.Generator) -> NodeCase:
    return _case(_x(rng, 2, 3, 4), _x(rng, 3, 1))


def _range(opset: int, rng: np.random.Generator) -> NodeCase:
    return _case(np.array(7), np.array(-2), np.array(-2), constants=(0, 1, 2))


CASES: tuple[tuple[str, Builder], ...] = (
    *((name, _unary()) for name in ("Abs", "Ceil", "Cos", "Elu", "Erf", "Exp", "Floor", "HardSigmoid", "HardSwish")),
    *((name, _unary()) for name in ("Identity", "LeakyRelu", "Mish", "Neg", "Relu", "Round", "Selu", "Sigmoid")),
    *((name, _unary()) for name in ("Sign", "Sin", "Sinh", "Softplus", "Softsign", "Tan", "Tanh", "ThresholdedRelu")),
    *((name, _unary()) for name in ("Asin", "Acos", "Atan", "Atanh", "Asinh", "Cosh", "IsNaN", "IsInf", "Celu")),
    ("Gelu", _unary(approximate="tanh")),
    ("Shrink", _unary(lambd=0.4, bias=0.1)),
    ("Swish", _unary(alpha=0.7)),
    *((name, _positive) for name in ("Acosh", "Log", "Reciprocal", "Sqrt")),
    *((name, _binary) for name in ("Add", "Div", "Mul", "Sub", "Max", "Min", "Mean", "Sum", "Greater", "Less")),
    *((name, _binary) for name in ("GreaterOrEqual", "LessOrEqual")),
    ("Pow", lambda opset, rng: _case(np.abs(_x(rng, 2, 3)) + _number(0.1), _x(rng, 3))),
    ("Equal", lambda opset, rng: _case(rng.integers(0, 3, (3, 4)), rng.integers(0, 3, (3, 4)))),
    ("PRelu", _prelu),
    *((name, _logical) for name in ("And", "Or", "Xor")),
    ("Not", lambda opset, rng: _case(rng.random((3, 4)) < 0.5)),
    *((name, _bits) for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")),
    ("BitwiseNot", lambda opset, rng: _case(rng.integers(-50, 50, (3, 4), np.int32))),
    ("BitShift", _shift),
    ("Mod", _mod(0)),
    ("Mod", _mod(1)),
    ("Where", lambda opset, rng: _case(rng.random((3, 1)) < 0.5, _x(rng, 3, 4), _x(rng, 4))),
    ("Clip", _clip),
    ("Clip", _clip_below),
    ("Cast", lambda opset, rng: _case(9 * _x(rng, 3, 4), to=7)),
    ("CastLike", lambda opset, rng: _case(9 * _x(rng, 3, 4), _ints(1))),
    ("Dropout", _dropout),
    ("MatMul", lambda opset, rng: _case(_x(rng, 2, 3, 4), _x(rng, 4, 5))),
    (
        "Gemm",
        lambda opset, rng: _case(_x(rng, 4, 3), _x(rng, 5, 4), _x(rng, 5), alpha=0.5, beta=2.0, transA=1, transB=1),
    ),
    ("Einsum", lambda opset, rng: _case(_x(rng, 2, 3, 4), _x(rng, 2, 4, 5), equation="...ij,...jk->...ik")),
    ("Einsum", lambda opset, rng: _case(_x(rng, 4, 3), _x(rng, 3, 5), equation="ij,jk")),
    *((f"Reduce{name}", _reduce(18)) for name in ("L1", "L2", "Max", "Mean", "Min", "Prod", "SumSquare", "LogSumExp")),
    ("ReduceLogSum", _reduce(18, start=0.1)),
    ("ReduceSum", _reduce(13)),
    ("ArgMax", _arg),
    ("ArgMin", _arg),
    *((name, _softmax(axis)) for name in ("Softmax", "LogSoftmax", "Hardmax") for axis in (None, 1)),
    ("CumSum", lambda opset, rng: _case(_x(rng, 3, 4), np.array(-1), constants=(1,), exclusive=1, reverse=1)),
    ("LpNormalization", lambda opset, rng: _case(_x(rng, 3, 4), axis=0, p=1)),
    ("TopK", _top_k),
    ("Reshape", lambda opset, rng: _case(_x(rng, 2, 3, 4), _ints(0, -1), constants=(1,))),
    ("Flatten", lambda opset, rng: _case(_x(rng, 2, 3, 4), axis=2)),
    ("Transpose", lambda opset, rng: _case(_x(rng, 2, 3, 4), perm=[2, 0, 1])),
    ("Squeeze", _axes(13, (1, 3, 1, 4), 0, 2)),
    ("Unsqueeze", _axes(13, (3, 4), 0, 3)),
    ("Expand", lambda opset, rng: _case(_x(rng, 3, 1), _ints(2, 1, 4), constants=(1,))),
    ("Tile", lambda opset, rng: _case(_x(rng, 2, 3), _ints(2, 3), constants=(1,))),
    ("DepthToSpace", lambda opset, rng: _case(_x(rng, 1, 8, 2, 3), blocksize=2, **_since(opset, mode=(11, "CRD")))),
    ("SpaceToDepth", lambda opset, rng: _case(_x(rng, 1, 2, 4, 6), blocksize=2)),
    ("Trilu", lambda opset, rng: _case(_x(rng, 2, 4, 5), np.array(-1), constants=(1,), upper=0)),
    ("Concat", lambda opset, rng: _case(_x(rng, 2, 3), _x(rng, 2, 1), axis=1)),
    ("Slice", _slice),
    ("Split", _split),
    ("Split", _split_evenly),
    *(("Pad", _pad(mode)) for mode in ("constant", "reflect", "edge")),
    ("Shape", _shape),
    ("Size", lambda opset, rng: _case(_x(rng, 3, 4))),
    ("ConstantOfShape", lambda opset, rng: _case(_ints(2, 3), constants=(0,))),
    ("Range", _range),
    ("EyeLike", lambda opset, rng: _case(_x(rng, 3, 4), k=1, dtype=7)),
    ("Gather", _gather),
    ("GatherElements", lambda opset, rng: _case(_x(rng, 3, 4), rng.integers(-4, 4, (3, 2)), axis=1)),
    ("GatherND", _gather_nd),
    ("Scatter", _scatter),
    ("ScatterElements", _scatter),
    ("ScatterElements", _scatter_product),
    ("ScatterND", _scatter_nd),
    ("OneHot", _one_hot),
    ("Compress", lambda opset, rng: _case(_x(rng, 3, 4), np.array([True, False, True]), constants=(1,), axis=1)),
    ("ReverseSequence", lambda opset, rng: _case(_x(rng, 4, 3, 2), _ints(2, 4, 1))),
    ("Conv", _conv),
    ("ConvTranspose", _conv_transpose(strides=[2, 3], pads=[1, 0, 0, 1], output_padding=[1, 2])),
    ("ConvTranspose", _conv_transpose(strides=[2, 2], auto_pad="SAME_UPPER")),
    ("ConvTranspose", _conv_transpose(strides=[2, 3], output_shape=[8, 13])),
    ("MaxPool", _max_pool),
    ("MaxPool", _pool(auto_pad="SAME_UPPER")),
    ("AveragePool", _average_pool),
    ("AveragePool", _pool(auto_pad="SAME_LOWER")),
    ("LpPool", _lp_pool),
    *((f"Global{name}Pool", lambda opset, rng: _case(_x(rng, 2, 3, 4, 5))) for name in ("Average", "Max", "Lp")),
    ("Upsample", _upsample),
    ("Resize", _resize("nearest")),
    ("Resize", _resize("linear", coordinate_transformation_mode="pytorch_half_pixel")),
    ("Resize", _resize("cubic", coordinate_transformation_mode="align_corners", cubic_coeff_a=-0.5)),
    ("BatchNormalization", _batch_norm),
    ("BatchNormalization", _batch_norm_training),
    ("InstanceNormalization", lambda opset, rng: _case(_x(rng, 2, 3, 4), _x(rng, 3), _x(rng, 3))),
    ("GroupNormalization", _group_norm),
    ("LayerNormalization", _norm),
    ("LRN", lambda opset, rng: _case(_x(rng, 2, 5, 3, 3), size=3, alpha=0.1, beta=0.6, bias=1.5)),
    ("MeanVarianceNormalization", _mean_variance),
    ("LSTM", _recurrent("LSTM")),
    ("GRU", _recurrent("GRU")),
    ("GRU", _gru_after_reset),
    ("RNN", _recurrent("RNN")),
    ("RoiAlign", _images),
    ("GridSample", _grid_sample),
    ("DFT", _dft),
    ("Det", lambda opset, rng: _case(_x(rng, 2, 3, 3))),
    *(
        (name, _loss(kind))
        for name in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
        for kind in ("mean", "none")
    ),
)
"""Operator types with a builder each."""
