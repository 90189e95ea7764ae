"""Runs a signature in the ONNX reference evaluator, whole or on a shard: the independent source of these tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tap_planner.operators import Factor, FactorRule, OperatorSignature, TensorType, lookup

OPSET = 23
Array = np.ndarray
Range = tuple[int, int]

REFERENCES: dict[str, Callable[[OperatorSignature, Sequence[Array | None]], list[Array]]] = {}
"""Reference evaluations of operators that ONNX's evaluator lacks; families of cases register theirs."""
VALUES: dict[str, Callable[[OperatorSignature, np.random.Generator], list[Array | None]]] = {}
"""Operands of operators whose operands are not merely random floats."""
STRUCTURE: dict[str, Callable[[dict[str, Any]], list[Array | None]]] = {}
"""Takes from an operator's attributes what the file holds as operands behind the data."""
LOCALISERS: dict[str, Callable[[dict[str, Any], Factor, Range, OperatorSignature], None]] = {}
"""Changes that the attributes of an operator need on a part of a factor (a local number of heads)."""

_AS_OPERANDS = {
    "Reshape": ("shape",),
    "Expand": ("shape",),
    "Tile": ("repeats",),
    "Slice": ("starts", "ends", "axes", "steps"),
    "Split": ("split",),
    "TopK": ("k",),
    "CumSum": ("axis",),
    "Trilu": ("k",),
    "ConstantOfShape": ("shape",),
    "Range": ("start", "limit", "delta"),
}


def tensor(*shape: int, dtype: str = "float64") -> TensorType:
    """A tensor type."""
    return TensorType(dtype=dtype, shape=shape)


def index_type(*shape: int) -> TensorType:
    """The type of a tensor of indices."""
    return tensor(*shape, dtype="int64")


def signature(type: str, *inputs: TensorType | None, num_outputs: int = 1, **attributes: Any) -> OperatorSignature:
    """A signature whose outputs are those that the record infers."""
    bare = OperatorSignature(
        type=type,
        attributes=tuple(sorted(attributes.items())),
        inputs=inputs,
        outputs=(),
    )
    return replace(bare, outputs=lookup(type).infer(bare, num_outputs))


def _onnx_type(dtype: str) -> int:
    return onnx.TensorProto.DataType.Value({"float64": "DOUBLE", "float32": "FLOAT"}.get(dtype, dtype.upper()))


def _operand_attributes(sig: OperatorSignature) -> tuple[str, ...]:
    return ("axes",) if sig.type.startswith("Reduce") else _AS_OPERANDS.get(sig.type, ())


def _constants(sig: OperatorSignature, attributes: dict[str, Any]) -> list[Array | None]:
    """Takes the structural attributes away from ``attributes`` and returns them as operands."""
    values: list[Array | None] = []
    if sig.type in STRUCTURE:
        return STRUCTURE[sig.type](attributes)
    for name in _operand_attributes(sig):
        if name in attributes:
            value = attributes.pop(name)
            values.append(np.array([value] if sig.type == "TopK" else value, dtype=np.int64))
    float_type = np.dtype(sig.inputs[0].dtype) if sig.inputs and sig.inputs[0] else np.dtype("float64")
    if sig.type == "OneHot":
        values.append(np.array(attributes.pop("depth")))
        pair = [attributes.pop("off_value"), attributes.pop("on_value")]
        values.append(np.array(pair, dtype=np.float32))
    elif sig.type == "Pad":
        values.append(np.array(attributes.pop("pads"), dtype=np.int64))
        values.append(np.array(attributes.pop("value", 0.0), dtype=float_type))
    elif sig.type == "Clip":
        bounds = (attributes.pop("min", None), attributes.pop("max", None))
        values.extend(None if bound is None else np.array(bound, dtype=float_type) for bound in bounds)
    elif sig.type == "Resize":
        values.extend((None, None, np.array(attributes.pop("sizes"), dtype=np.int64)))
    elif sig.type in ("Softmax", "LogSoftmax", "Hardmax"):
        (attributes["axis"],) = attributes.pop("axes")
    elif sig.type == "Cast":
        attributes["to"] = _onnx_type(str(attributes["to"]))
    return values


def to_model(sig: OperatorSignature) -> onnx.ModelProto:
    """An ONNX model of one node, with the structural attributes as initializers."""
    attributes: dict[str, Any] = dict(sig.attributes)
    names = [f"x{index}" if found is not None else "" for index, found in enumerate(sig.inputs)]
    infos = [
        helper.make_tensor_value_info(f"x{index}", _onnx_type(found.dtype), found.shape)
        for index, found in enumerate(sig.inputs)
        if found is not None
    ]
    constants = []
    for index, value in enumerate(_constants(sig, attributes)):
        names.append("" if value is None else f"c{index}")
        if value is not None:
            constants.append(numpy_helper.from_array(value, f"c{index}"))
    outputs = [f"y{index}" for index in range(len(sig.outputs))]
    node = helper.make_node(sig.type, names, outputs, **attributes)
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph([node], "one", infos, results, constants)
    opset = 9 if sig.type == "Upsample" else OPSET
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def _cross_entropy_terms(logits: Array, labels: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(-1))
    return log_sum - np.take_along_axis(shifted, labels[..., None], -1)[..., 0]


def _local_response(values: Array, size: int, alpha: float, beta: float, bias: float) -> Array:
    """LRN's definition (the reference evaluator's is wrong for a batch of more than one)."""
    before, channels = (size - 1) // 2, values.shape[1]
    squares = [(values[:, max(0, c - before) : c + size - before] ** 2).sum(1, keepdims=True) for c in range(channels)]
    return values / (bias + alpha / size * np.concatenate(squares, 1)) ** beta


def _conv_transpose(sig: OperatorSignature, values: Sequence[Array | None]) -> Array:
    """Torch's, since the reference evaluator has no groups."""
    import torch

    attributes: dict[str, Any] = dict(sig.attributes)
    operands = [torch.from_numpy(value) for value in values if value is not None]
    pads = attributes["pads"]
    rank = len(pads) // 2
    assert pads[:rank] == pads[rank:]
    return torch.nn.functional.conv_transpose2d(
        operands[0],
        operands[1],
        operands[2] if len(operands) > 2 else None,
        stride=attributes["strides"],
        padding=pads[:rank],
        groups=attributes["group"],
        dilation=attributes["dilations"],
    ).numpy()


def _run_here(sig: OperatorSignature, values: Sequence[Array | None]) -> list[Array] | None:
    """Outputs of operators that the reference evaluator lacks or gets wrong; None for the others."""
    if sig.type in REFERENCES:
        return REFERENCES[sig.type](sig, values)
    if sig.type == "Loss":
        return [_loss(sig, values)]
    if sig.type in ("Output", "Transfer") and values[0] is not None:
        return [values[0]]
    if sig.type == "ConvTranspose":
        return [_conv_transpose(sig, values)]
    data, attributes = values[0] if values else None, dict[str, Any](sig.attributes)
    if sig.type == "LRN" and data is not None:
        return [_local_response(data, **attributes)]
    if sig.type == "MeanVarianceNormalization" and data is not None:
        axes = attributes["axes"]
        return [(data - data.mean(axes, keepdims=True)) / (data.std(axes, keepdims=True) + 1e-9)]
    return None


def _loss(sig: OperatorSignature, values: Sequence[Array | None]) -> Array:
    kind, count, data = sig.attribute("kind"), sig.attribute("count"), values[0]
    assert isinstance(count, int) and data is not None
    if kind == "cross-entropy":
        assert values[1] is not None
        return _cross_entropy_terms(data, values[1]).sum() / count
    return data.sum() / (count if kind == "mean" else 1)


def run(sig: OperatorSignature, values: Sequence[Array | None]) -> list[Array]:
    """Outputs of the operator ``sig`` for the operands ``values``."""
    results = _run_here(sig, values)
    if results is not None:
        return results
    feeds = {f"x{index}": value for index, value in enumerate(values) if value is not None}
    return [np.asarray(found) for found in ReferenceEvaluator(to_model(sig)).run(None, feeds)]


def random_values(sig: OperatorSignature, seed: int = 0) -> list[Array | None]:
    """Random operands in the domain of the operator; indices are within their range."""
    rng = np.random.default_rng(seed)
    if sig.type in VALUES:
        return VALUES[sig.type](sig, rng)
    values: list[Array | None] = []
    for found in sig.inputs:
        if found is None:
            values.append(None)
        elif found.is_float:
            values.append(rng.uniform(0.2, 0.9, found.shape))
        elif found.dtype == "bool":
            values.append(rng.random(found.shape) < 0.5)
        else:
            values.append(rng.integers(int(sig.type == "Mod"), _index_limit(sig), found.shape))
    if sig.type == "ScatterND" and values[1] is not None:
        values[1] = np.arange(values[1].size).reshape(values[1].shape) % _index_limit(sig)
    if sig.type == "ScatterElements" and values[1] is not None:
        axis = sig.attribute("axis")
        assert isinstance(axis, int)
        values[1] = np.broadcast_to(
            np.expand_dims(np.arange(values[1].shape[axis]), tuple(d for d in range(values[1].ndim) if d != axis)),
            values[1].shape,
        ).copy()
    return values


def _index_limit(sig: OperatorSignature) -> int:
    first = sig.inputs[0]
    assert first is not None
    shape = first.shape
    if sig.type in ("GatherND", "ScatterND"):
        return min(shape[:3])
    if sig.type in ("Gather", "GatherElements", "ScatterElements"):
        axis = sig.attribute("axis")
        assert isinstance(axis, int)
        return shape[axis]
    if sig.type == "Loss":
        return shape[-1]
    if sig.type == "RotaryEmbedding":
        cache = sig.inputs[1]
        assert cache is not None
        return cache.shape[0]
    return 4


def shard(rule: FactorRule, dims: Sequence[tuple[int, ...]], value: Array, factor: int, part: Range) -> Array:
    """The part of ``value`` (its dims made of factors ``dims``) that holds the range ``part`` of ``factor``."""
    sizes: list[int] = []
    position = None
    for dim, content in enumerate(dims):
        for held in content:
            position = len(sizes) if held == factor else position
            sizes.append(rule.factors[held].size)
        if not content:
            sizes.append(value.shape[dim])
    if position is None:
        return value
    cut = value.reshape(sizes)[(slice(None),) * position + (slice(*part),)]
    return cut.reshape(
        [_local_size(rule, content, size, factor, part) for content, size in zip(dims, value.shape, strict=True)]
    )


def _local_size(rule: FactorRule, content: tuple[int, ...], size: int, factor: int, part: Range) -> int:
    return size // rule.factors[factor].size * (part[1] - part[0]) if factor in content else size


def localise(sig: OperatorSignature, rule: FactorRule, factor: int, part: Range) -> OperatorSignature:
    """The signature of the same operator on the range ``part`` of ``factor``: local shapes, local attributes."""

    def local(found: TensorType, dims: Sequence[tuple[int, ...]]) -> TensorType:
        shape = tuple(
            _local_size(rule, content, size, factor, part) for content, size in zip(dims, found.shape, strict=True)
        )
        return TensorType(dtype=found.dtype, shape=shape)

    inputs = tuple(
        None if found is None or dims is None else local(found, dims)
        for found, dims in zip(sig.inputs, rule.inputs, strict=True)
    )
    outputs = tuple(local(found, dims) for found, dims in zip(sig.outputs, rule.outputs, strict=True))
    attributes: dict[str, Any] = dict(sig.attributes)
    _localise_shapes(sig.type, attributes, inputs, outputs)
    if sig.type in LOCALISERS:
        LOCALISERS[sig.type](attributes, rule.factors[factor], part, sig)
    else:
        _localise_counts(attributes, rule.factors[factor], part)
    return OperatorSignature(
        type=sig.type,
        attributes=tuple(sorted(attributes.items())),
        inputs=inputs,
        outputs=outputs,
    )


def _localise_shapes(
    type: str,
    attributes: dict[str, Any],
    inputs: tuple[TensorType | None, ...],
    outputs: tuple[TensorType, ...],
) -> None:
    if not inputs:
        return
    result, data = outputs[0], inputs[0]
    assert data is not None
    if type in ("Reshape", "Expand"):
        attributes["shape"] = result.shape
    elif type == "Resize":
        attributes["sizes"] = result.shape
    elif type == "Tile":
        attributes["repeats"] = tuple(new // old for new, old in zip(result.shape, data.shape, strict=True))
    elif type == "Split":
        axis = attributes["axis"]
        assert isinstance(axis, int)
        attributes["split"] = tuple(found.shape[axis] for found in outputs)


def _localise_counts(attributes: dict[str, Any], factor: Factor, part: Range) -> None:
    counts = {
        "g": ("group", "num_groups", "q_num_heads"),
        "h": ("q_num_heads", "kv_num_heads", "num_heads"),
    }
    for name in counts.get(factor.name, ()):
        value = attributes.get(name)
        if isinstance(value, int):
            attributes[name] = value // factor.size * (part[1] - part[0])


def parts_of(size: int, count: int) -> list[Range]:
    """The ranges of an uneven split of ``size`` over ``count`` ranks, without the empty ones."""
    chunk = math.ceil(size / count)
    ranges = [(rank * chunk, min(size, (rank + 1) * chunk)) for rank in range(count)]
    return [(start, stop) for start, stop in ranges if start < stop]
