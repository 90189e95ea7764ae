"""Values of constants: canonical operators on numpy arrays, ONNX's reference implementation for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx

from tap_planner.errors import UnsupportedGraphError
from tap_planner.graph.dequantise import dequantise_linear, matmul_nbits
from tap_planner.graph.dtypes import numpy_dtype
from tap_planner.operators import AttributeValue

Attributes = Mapping[str, AttributeValue]
Arrays = Sequence["np.ndarray | None"]


def _given(arrays: Arrays) -> list[np.ndarray]:
    return [array for array in arrays if array is not None]


def _ints(attributes: Attributes, name: str) -> tuple[int, ...]:
    value = attributes[name]
    assert isinstance(value, tuple)
    return tuple(int(item) for item in value)


def _int(attributes: Attributes, name: str) -> int:
    value = attributes[name]
    assert isinstance(value, int)
    return value


def _elementwise(function: Callable[..., np.ndarray]) -> Callable[[Attributes, Arrays], list[np.ndarray]]:
    """A function whose result has the dtype of its first operand."""

    def evaluate(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
        operands = _given(arrays)
        return [np.asarray(function(*operands)).astype(operands[0].dtype, copy=False)]

    return evaluate


def _predicate(function: Callable[..., np.ndarray]) -> Callable[[Attributes, Arrays], list[np.ndarray]]:
    def evaluate(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
        return [np.asarray(function(*_given(arrays)), dtype=np.bool_)]

    return evaluate


def _divide(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """ONNX division truncates integers towards zero."""
    if not np.issubdtype(left.dtype, np.integer):
        return np.divide(left, right)
    if not np.all(right):
        raise ZeroDivisionError("integer division by zero")
    quotient = np.floor_divide(left, right)
    return quotient + ((quotient < 0) & (quotient * right != left)).astype(left.dtype)


def _mod(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    left, right = _given(arrays)
    return [np.fmod(left, right) if attributes.get("fmod") else np.mod(left, right)]


def _fold(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Attributes, Arrays], list[np.ndarray]]:
    def evaluate(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
        first, *rest = _given(arrays)
        for array in rest:
            first = function(first, array)
        return [np.asarray(first)]

    return evaluate


def _cast(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        return [_given(arrays)[0].astype(numpy_dtype(str(attributes["to"])))]


def _where(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    condition, yes, no = _given(arrays)
    return [np.where(condition, yes, no).astype(yes.dtype, copy=False)]


def _slice(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    array = _given(arrays)[0]
    index: list[slice] = [slice(None)] * array.ndim
    names = ("axes", "starts", "ends", "steps")
    for axis, start, end, step in zip(*(_ints(attributes, name) for name in names), strict=True):
        index[axis] = slice(start, None if end < 0 else end, step)
    return [array[tuple(index)]]


def _split(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    cuts = np.cumsum(_ints(attributes, "split"))[:-1]
    return list(np.split(_given(arrays)[0], cuts, _int(attributes, "axis")))


def _gather(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    table, indices = _given(arrays)
    return [np.take(table, indices, axis=_int(attributes, "axis"))]


def _gather_elements(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    data, indices = _given(arrays)
    axis = _int(attributes, "axis")
    rows = tuple(slice(0, size) if dim != axis else slice(None) for dim, size in enumerate(indices.shape))
    return [np.take_along_axis(data[rows], indices, axis)]


def _gather_nd(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    data, indices = _given(arrays)
    batch = _int(attributes, "batch_dims")
    depth = indices.shape[-1]
    lead = data.shape[:batch]
    flat_data = data.reshape(math.prod(lead), *data.shape[batch:])
    flat_indices = indices.reshape(math.prod(lead), -1, depth)
    rows = np.arange(flat_data.shape[0])[:, None]
    taken = flat_data[(rows, *(flat_indices[..., index] for index in range(depth)))]
    return [taken.reshape(*indices.shape[:-1], *data.shape[batch + depth :])]


def _reduction(function: Callable[..., np.ndarray]) -> Callable[[Attributes, Arrays], list[np.ndarray]]:
    def evaluate(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
        array = _given(arrays)[0]
        result = function(array, axis=_ints(attributes, "axes"), keepdims=bool(attributes["keepdims"]))
        return [np.asarray(result).astype(array.dtype, copy=False)]

    return evaluate


def _mean(array: np.ndarray, axis: tuple[int, ...], keepdims: bool) -> np.ndarray:
    """Mean over dims; not a number (and no warning, as numpy gives) where there is nothing to take it of."""
    if math.prod(array.shape[dim] for dim in axis):
        return np.mean(array, axis=axis, keepdims=keepdims)
    return np.divide(np.sum(array, axis=axis, keepdims=keepdims), 0.0)


def _cumsum(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    array, axis = _given(arrays)[0], _int(attributes, "axis")
    if attributes["reverse"]:
        array = np.flip(array, axis)
    result = np.cumsum(array, axis, dtype=array.dtype)
    if attributes["exclusive"]:
        result = result - array
    return [np.flip(result, axis) if attributes["reverse"] else result]


def _trilu(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    function = np.triu if attributes["upper"] else np.tril
    return [function(_given(arrays)[0], _int(attributes, "k"))]


def _clip(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    array = _given(arrays)[0]
    return [np.clip(array, attributes.get("min"), attributes.get("max")).astype(array.dtype)]  # type: ignore[arg-type]


def _concat(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    return [np.concatenate(_given(arrays), _int(attributes, "axis"))]


def _reshape(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    return [_given(arrays)[0].reshape(_ints(attributes, "shape"))]


def _expand(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    return [np.broadcast_to(_given(arrays)[0], _ints(attributes, "shape"))]


def _tile(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    return [np.tile(_given(arrays)[0], _ints(attributes, "repeats"))]


def _transpose(attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    return [np.transpose(_given(arrays)[0], _ints(attributes, "perm"))]


def _sigmoid(array: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-array))


EVALUATORS: dict[str, Callable[[Attributes, Arrays], list[np.ndarray]]] = {
    "Abs": _elementwise(np.abs),
    "Add": _elementwise(np.add),
    "And": _predicate(np.logical_and),
    "Cast": _cast,
    "Ceil": _elementwise(np.ceil),
    "Clip": _clip,
    "Concat": _concat,
    "Cos": _elementwise(np.cos),
    "CumSum": _cumsum,
    "DequantizeLinear": dequantise_linear,
    "Div": _elementwise(_divide),
    "Equal": _predicate(np.equal),
    "Exp": _elementwise(np.exp),
    "Expand": _expand,
    "Floor": _elementwise(np.floor),
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Greater": _predicate(np.greater),
    "GreaterOrEqual": _predicate(np.greater_equal),
    "IsNaN": _predicate(np.isnan),
    "Less": _predicate(np.less),
    "LessOrEqual": _predicate(np.less_equal),
    "Log": _elementwise(np.log),
    "MatMul": _elementwise(np.matmul),
    "Max": _fold(np.maximum),
    "Min": _fold(np.minimum),
    "Mod": _mod,
    "Mul": _elementwise(np.multiply),
    "Neg": _elementwise(np.negative),
    "Not": _predicate(np.logical_not),
    "Or": _predicate(np.logical_or),
    "Pow": _elementwise(np.power),
    "Reciprocal": _elementwise(np.reciprocal),
    "ReduceMax": _reduction(np.max),
    "ReduceMean": _reduction(_mean),
    "ReduceMin": _reduction(np.min),
    "ReduceProd": _reduction(np.prod),
    "ReduceSum": _reduction(np.sum),
    "Reshape": _reshape,
    "Round": _elementwise(np.round),
    "Sigmoid": _elementwise(_sigmoid),
    "Sign": _elementwise(np.sign),
    "Sin": _elementwise(np.sin),
    "Slice": _slice,
    "Split": _split,
    "Sqrt": _elementwise(np.sqrt),
    "Sub": _elementwise(np.subtract),
    "Tanh": _elementwise(np.tanh),
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Where": _where,
    "Xor": _predicate(np.logical_xor),
    "com.microsoft::MatMulNBits": matmul_nbits,
}


def evaluate(kind: str, attributes: Attributes, arrays: Arrays) -> list[np.ndarray]:
    """Results of a canonical operator on arrays.

    Raises:
        KeyError: the operator type has no numpy function here.
    """
    with np.errstate(all="ignore"):
        return EVALUATORS[kind](attributes, arrays)


def evaluate_node(proto: onnx.NodeProto, opset: int, arrays: Arrays) -> list[np.ndarray]:
    """Results of a node as ONNX's reference implementation computes them.

    Args:
        proto: a node of the default domain.
        opset: its operator set version.
        arrays: its operands in order.

    Raises:
        UnsupportedGraphError: the reference implementation cannot compute it.
    """
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    names = [name for name in dict.fromkeys(proto.input) if name]
    outputs = [name for name in proto.output if name]
    try:
        function = helper.make_function("tap", "f", names, outputs, [proto], [helper.make_opsetid("", opset)])
        feeds = {name: array for name, array in zip(proto.input, arrays, strict=True) if name}
        results = ReferenceEvaluator(function).run(None, feeds, attributes={})  # type: ignore[arg-type]
    except Exception as error:
        raise UnsupportedGraphError(
            f"node {proto.name or outputs[0]!r} ({proto.op_type}): its constant value cannot be computed ({error})"
        ) from error
    assert isinstance(results, list)
    return [np.asarray(result) for result in results]
