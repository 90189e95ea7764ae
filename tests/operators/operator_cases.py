"""Signatures on which the records are tested: at least one of every operator type with a rule of its own."""

from __future__ import annotations

from typing import Any

from tap_planner.operators import OperatorSignature
from tests.operators import contrib_cases, detection_cases, quantised_cases, recurrent_cases, sampling_cases
from tests.operators.operator_reference import index_type, signature, tensor

_UNARY = (
    *("Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Reciprocal", "Elu", "Selu", "Abs", "Log", "Erf", "Gelu", "Mish"),
    *("Celu", "LeakyRelu", "ThresholdedRelu", "Shrink", "HardSigmoid", "HardSwish", "Softplus", "Softsign"),
    *("Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Atanh"),
    *("Floor", "Ceil", "Round", "Sign", "Neg", "Identity", "IsNaN", "IsInf", "Dropout"),
)
_BINARY = (
    *("Add", "Sub", "Mul", "Div", "Pow", "Sum", "Mean", "Max", "Min", "PRelu"),
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
)

_FLAG = tensor(2, 3, 4, dtype="bool")
_X = tensor(4, 6, 8)
_IMAGE = tensor(4, 6, 8, 9)
_WINDOW: dict[str, Any] = {"kernel_shape": (3, 3), "strides": (2, 1), "pads": (1, 0, 1, 2), "dilations": (1, 1)}


def _elementwise() -> list[OperatorSignature]:
    return [
        *(signature(name, tensor(2, 1, 4)) for name in _UNARY),
        *(signature(name, tensor(4, 3, 6), tensor(3, 1)) for name in _BINARY),
        signature("Add", tensor(6), tensor(4, 3, 6)),
        signature("Add", tensor(4, 1, 6), tensor(1, 3, 6)),
        signature("Mul", tensor(), tensor(4, 6)),
        signature("Sum", tensor(4, 6), tensor(6), tensor(4, 1)),
        signature("Max", tensor(4, 6), tensor(6), tensor(4, 1)),
        signature("Mod", index_type(4, 6), index_type(6), fmod=0),
        signature("Add", index_type(4, 6), index_type(6)),
        *(signature(name, _FLAG, tensor(3, 1, dtype="bool")) for name in ("And", "Or", "Xor")),
        signature("Not", _FLAG),
        *(signature(name, index_type(4, 6), index_type(6)) for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")),
        signature("Where", tensor(3, 1, dtype="bool"), tensor(4, 1, 6), tensor()),
        signature("Clip", _X, min=0.3, max=0.6),
        signature("Clip", _X, max=0.6),
        signature("Cast", _X, to="int64"),
        signature("Cast", index_type(4, 2), to="float64"),
        signature("Gelu", _X, approximate="tanh"),
    ]


def _contractions() -> list[OperatorSignature]:
    return [
        signature("MatMul", tensor(4, 6), tensor(6, 8)),
        signature("MatMul", tensor(2, 4, 6), tensor(6, 8)),
        signature("MatMul", tensor(2, 1, 4, 6), tensor(3, 6, 8)),
        signature("MatMul", tensor(6), tensor(6, 8)),
        signature("MatMul", tensor(2, 4, 6), tensor(6)),
        signature("MatMul", tensor(6), tensor(6)),
        signature("Gemm", tensor(4, 6), tensor(6, 8), tensor(8), alpha=0.5, beta=2.0),
        signature("Gemm", tensor(6, 4), tensor(8, 6), tensor(4, 1), transA=1, transB=1),
        signature("Gemm", tensor(4, 6), tensor(8, 6), transB=1),
        signature("Gemm", tensor(4, 6), tensor(6, 8), tensor()),
        signature("Einsum", tensor(4, 6), tensor(6, 8), equation="ij,jk->ik"),
        signature("Einsum", tensor(4, 3, 6), tensor(4, 5, 6), equation="gse,gte->sgt"),
        signature("Einsum", tensor(4, 6), equation="ij->j"),
        signature("Einsum", tensor(4, 4, 6), equation="iij->j"),
        signature("Einsum", tensor(4), tensor(6), tensor(6, 4), equation="i,j,ji->i"),
        signature("Attention", tensor(2, 6, 4, 8), tensor(2, 6, 5, 8), tensor(2, 6, 5, 8)),
        signature("Attention", tensor(2, 6, 4, 8), tensor(2, 3, 5, 8), tensor(2, 3, 5, 8), tensor(4, 5)),
        signature("Attention", tensor(2, 6, 4, 8), tensor(2, 3, 4, 8), tensor(2, 3, 4, 8), is_causal=1),
        signature("Attention", tensor(2, 6, 4, 8), tensor(2, 2, 5, 8), tensor(2, 2, 5, 4), tensor(2, 1, 4, 5)),
        signature("Attention", tensor(2, 4, 24), tensor(2, 5, 12), tensor(2, 5, 12), q_num_heads=4, kv_num_heads=2),
    ]


_SAME: dict[str, Any] = {"strides": (1, 1), "pads": (1, 1, 1, 1), "dilations": (1, 1), "kernel_shape": (3, 3)}
_DILATED: dict[str, Any] = {**_SAME, "dilations": (2, 2)}
_STRIDED: dict[str, Any] = {**_SAME, "strides": (2, 2)}
_POINT: dict[str, Any] = {**_SAME, "kernel_shape": (1, 1), "pads": (0,) * 4}


def _convolutions() -> list[OperatorSignature]:
    return [
        signature("Conv", _IMAGE, tensor(4, 6, 3, 3), tensor(4), group=1, **_WINDOW),
        signature("Conv", _IMAGE, tensor(4, 6, 1, 1), group=1, **_POINT),
        signature("Conv", _IMAGE, tensor(9, 2, 3, 3), tensor(9), group=3, **_SAME),
        signature("Conv", _IMAGE, tensor(6, 1, 3, 3), tensor(6), group=6, **_DILATED),
        signature("Conv", tensor(2, 4, 9), tensor(6, 4, 3), kernel_shape=(3,), strides=(2,), pads=(1, 1), group=1),
        signature("ConvTranspose", _IMAGE, tensor(6, 4, 3, 3), tensor(4), group=1, **_SAME),
        signature("ConvTranspose", _IMAGE, tensor(6, 2, 3, 3), group=3, **_STRIDED),
        signature("MaxPool", _IMAGE, ceil_mode=0, **_WINDOW),
        signature("MaxPool", _IMAGE, ceil_mode=1, kernel_shape=(3, 3), strides=(2, 2), pads=(0, 0, 0, 0)),
        signature("MaxPool", _IMAGE, num_outputs=2, ceil_mode=0, **_WINDOW),
        signature("AveragePool", _IMAGE, ceil_mode=0, count_include_pad=0, **_WINDOW),
        signature("AveragePool", _IMAGE, count_include_pad=1, kernel_shape=(2, 2), strides=(2, 2), pads=(0,) * 4),
        signature("LpPool", _IMAGE, kernel_shape=(2, 2), strides=(2, 2), pads=(0,) * 4, p=2),
        signature("GlobalAveragePool", _IMAGE),
        signature("GlobalMaxPool", _IMAGE),
        signature("Resize", _IMAGE, sizes=(4, 6, 16, 18), mode="nearest"),
        signature("Resize", tensor(2, 3, 4, 6), sizes=(2, 3, 12, 6), mode="nearest", nearest_mode="round_prefer_ceil"),
        signature(
            "Resize",
            tensor(2, 3, 4, 6),
            sizes=(2, 3, 8, 15),
            mode="nearest",
            nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        ),
    ]


def _layout() -> list[OperatorSignature]:
    shapes = [
        ((2, 4, 24), (2, 4, 6, 4)),
        ((2, 4, 24), (8, 24)),
        ((2, 4, 24), (2, 4, 3, 2, 4)),
        ((2, 6, 4, 8), (12, 4, 8)),
        ((12, 4, 8), (2, 6, 4, 8)),
        ((4, 6, 2, 4), (4, 6, 8)),
        ((4, 6, 1, 1), (4, 6)),
        ((4, 6), (1, 4, 1, 6)),
        ((6, 4), (8, 3)),
        ((2, 6, 4), (2, 8, 3)),
        ((1,), ()),
        ((24,), (2, 3, 4)),
    ]
    return [
        *(signature("Reshape", tensor(*before), shape=after) for before, after in shapes),
        signature("Transpose", _X, perm=(2, 0, 1)),
        signature("Expand", tensor(4, 1, 6), shape=(2, 4, 3, 6)),
        signature("Tile", tensor(4, 1, 6), repeats=(2, 3, 1)),
        signature("Tile", tensor(2, 4), repeats=(1, 6)),
        signature("DepthToSpace", tensor(2, 8, 3, 3), blocksize=2),
        signature("SpaceToDepth", tensor(2, 2, 4, 6), blocksize=2),
        signature("Trilu", tensor(2, 4, 5), k=1, upper=0),
        signature("Slice", _X, starts=(1, 0), ends=(5, 8), axes=(1, 2), steps=(2, 1)),
        signature("Slice", _X, starts=(7,), ends=(-100,), axes=(2,), steps=(-1,)),
        signature("Slice", _X, starts=(2,), ends=(2,), axes=(2,), steps=(1,)),
        signature("Pad", _X, pads=(0, 1, 0, 0, 2, 0), mode="constant", value=0.0),
        signature("Pad", _X, pads=(0, 1, 0, 0, 2, 0), mode="constant", value=3.0),
        signature("Pad", _X, pads=(0, 0, 1, 0, 0, 1), mode="reflect"),
        signature("Split", tensor(4, 12), num_outputs=3, axis=1, split=(4, 4, 4)),
        signature("Split", tensor(4, 12), num_outputs=2, axis=1, split=(4, 8)),
        signature("Split", tensor(4, 3), num_outputs=3, axis=1, split=(1, 1, 1)),
        signature("Concat", tensor(4, 3, 2), tensor(4, 5, 2), tensor(4, 1, 2), axis=1),
    ]


def _indexed() -> list[OperatorSignature]:
    return [
        signature("Gather", tensor(10, 6), index_type(4, 3), axis=0),
        signature("Gather", tensor(4, 10, 6), index_type(3), axis=1),
        signature("Gather", tensor(4, 10, 6), index_type(), axis=1),
        signature("Gather", index_type(10, 6), index_type(4), axis=0),
        signature("GatherElements", tensor(4, 6, 5), index_type(4, 3, 5), axis=1),
        signature("GatherND", tensor(4, 6, 5), index_type(4, 3, 1), batch_dims=1),
        signature("GatherND", tensor(4, 6, 5), index_type(3, 2), batch_dims=0),
        signature("ScatterElements", tensor(4, 6, 5), index_type(4, 3, 5), tensor(4, 3, 5), axis=1, reduction="add"),
        signature("ScatterND", tensor(4, 6, 5), index_type(3, 1), tensor(3, 6, 5)),
        signature("OneHot", index_type(4, 6), depth=5, axis=1, off_value=0.0, on_value=1.0),
    ]


def _reductions() -> list[OperatorSignature]:
    names = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
    return [
        *(signature(f"Reduce{name}", _X, axes=(1,), keepdims=1) for name in names),
        *(signature(f"Reduce{name}", _X, axes=(0, 2), keepdims=0) for name in names),
        signature("ReduceSum", index_type(4, 6), axes=(1,), keepdims=0),
        signature("ArgMax", _X, axis=1, keepdims=1),
        signature("ArgMin", _X, axis=2, keepdims=0),
        signature("Softmax", _X, axes=(2,)),
        signature("LogSoftmax", _X, axes=(1,)),
        signature("Hardmax", _X, axes=(2,)),
        signature("LpNormalization", _X, axis=2, p=2),
        signature("CumSum", _X, axis=1, exclusive=1, reverse=0),
        signature("TopK", _X, num_outputs=2, k=3, axis=1, largest=1, sorted=1),
    ]


def _normalisations() -> list[OperatorSignature]:
    channel = tensor(6)
    return [
        signature("LayerNormalization", _X, tensor(8), tensor(8), axis=2, epsilon=1e-5),
        signature("LayerNormalization", _X, tensor(6, 8), None, axis=1, epsilon=1e-5),
        signature("RMSNormalization", _X, tensor(8), axis=2, epsilon=1e-5),
        signature("BatchNormalization", _IMAGE, *[channel] * 4, epsilon=1e-5, training_mode=0),
        signature("BatchNormalization", _IMAGE, *[channel] * 4, num_outputs=3, epsilon=1e-5, training_mode=1),
        signature("InstanceNormalization", _IMAGE, channel, channel, epsilon=1e-5),
        signature("GroupNormalization", _IMAGE, channel, channel, num_groups=3, epsilon=1e-5),
        signature("LRN", _IMAGE, size=3, alpha=0.1, beta=0.75, bias=1.0),
        signature("MeanVarianceNormalization", _IMAGE, axes=(0, 2, 3)),
        signature("RotaryEmbedding", tensor(2, 4, 3, 8), tensor(5, 4), tensor(5, 4), index_type(2, 3)),
        signature("RotaryEmbedding", tensor(2, 3, 32), tensor(2, 3, 4), tensor(2, 3, 4), num_heads=4),
    ]


LOSSES = (
    signature("Loss", tensor(4, 6), kind="mean", count=24),
    signature("Loss", tensor(4, 6), kind="sum", count=24),
    signature("Loss", tensor(4, 6, 10), index_type(4, 6), kind="cross-entropy", count=24),
)

OUTPUTS = (
    signature("Transfer", tensor(4, 6, 8)),
    signature("Output", tensor(4, 6, 8)),
    signature("Output", tensor(4, 2, 7, 6), tensor(4, 2, 6, 6)),
    signature("Output", tensor(4, 2, 6, 6), tensor(4, 2, 6, 6)),
)

CASES: tuple[OperatorSignature, ...] = (
    *_elementwise(),
    *_contractions(),
    *_convolutions(),
    *_layout(),
    *_indexed(),
    *_reductions(),
    *_normalisations(),
    *LOSSES,
    *OUTPUTS,
    *contrib_cases.CASES,
    *quantised_cases.CASES,
    *recurrent_cases.CASES,
    *detection_cases.CASES,
    *sampling_cases.CASES,
)


def name_of(sig: OperatorSignature) -> str:
    """A readable test id."""
    shapes = ",".join("x".join(map(str, found.shape)) if found else "-" for found in sig.inputs)
    return f"{sig.type}[{shapes}]"
