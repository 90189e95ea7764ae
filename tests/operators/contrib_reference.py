"""Fused elementwise operators, normalisations and products in plain numpy: the independent source of their tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tap_planner.operators import Factor, OperatorSignature
from tests.operators.attention_reference import Arrays, at, there
from tests.operators.onnx_nodes import Array
from tests.operators.operator_reference import Range

_ERF = np.vectorize(math.erf)


def gelu(value: Array) -> Array:
    """Gelu by its definition."""
    return 0.5 * value * (1 + _ERF(value / math.sqrt(2)))


def fast_gelu(value: Array) -> Array:
    """Gelu by the approximation of the com.microsoft schema."""
    return 0.5 * value * (1 + np.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)))


def sigmoid(value: Array) -> Array:
    """Logistic function."""
    return 1 / (1 + np.exp(-value))


ACTIVATIONS: dict[str, Callable[[Array, float, float], Array]] = {
    "": lambda x, *_: x,
    "Clip": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "Elu": lambda x, alpha, _: np.where(x < 0, alpha * (np.exp(x) - 1), x),
    "HardSigmoid": lambda x, alpha, beta: np.maximum(0, np.minimum(1, alpha * x + beta)),
    "LeakyRelu": lambda x, alpha, _: np.where(x < 0, alpha * x, x),
    "Relu": lambda x, *_: np.maximum(x, 0),
    "Sigmoid": lambda x, *_: sigmoid(x),
    "Softplus": lambda x, *_: np.log(1 + np.exp(x)),
    "Softsign": lambda x, *_: x / (1 + np.abs(x)),
    "Tanh": lambda x, *_: np.tanh(x),
    "ThresholdedRelu": lambda x, alpha, _: np.where(x > alpha, x, 0),
}


def _sum(values: Arrays, *positions: int) -> Array:
    total = there(values, positions[0])
    for position in positions[1:]:
        found = at(values, position)
        total = total if found is None else total + found
    return total


def bias_gelu(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::BiasGelu."""
    return [gelu(_sum(values, 0, 1))]


def bias_fast_gelu(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::FastGelu."""
    return [fast_gelu(_sum(values, 0, 1))]


def bias_split_gelu(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::BiasSplitGelu."""
    total = _sum(values, 0, 1)
    half = total.shape[-1] // 2
    return [total[..., :half] * gelu(total[..., half:])]


def bias_softmax(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::BiasSoftmax."""
    total, axis = _sum(values, 0, 1), sig.attribute("axis")
    assert isinstance(axis, int)
    rows = np.exp(total.reshape(*total.shape[:axis], -1))
    return [(rows / rows.sum(-1, keepdims=True)).reshape(total.shape)]


def swish(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """Swish (opset 24)."""
    alpha = sig.attribute("alpha", 1.0)
    assert isinstance(alpha, float)
    return [there(values, 0) * sigmoid(alpha * there(values, 0))]


def swiglu(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """SwiGLU (opset 28)."""
    return [swish(sig, values)[0] * there(values, 1)]


def _epsilon(sig: OperatorSignature, default: float) -> float:
    value = sig.attribute("epsilon", default)
    assert isinstance(value, float)
    return value


def _standardised(value: Array, epsilon: float) -> tuple[Array, Array, Array]:
    mean, variance = value.mean(-1, keepdims=True), value.var(-1, keepdims=True)
    return (value - mean) / np.sqrt(variance + epsilon), mean, 1 / np.sqrt(variance + epsilon)


def skip_layer_norm(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::SkipLayerNormalization."""
    total, beta = _sum(values, 0, 1, 4), at(values, 3)
    normal, mean, inverse = _standardised(total, _epsilon(sig, 1e-12))
    result = normal * there(values, 2) + (0 if beta is None else beta)
    return [result, mean.astype(np.float32), inverse.astype(np.float32), total][: len(sig.outputs)]


def skip_simplified_norm(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::SkipSimplifiedLayerNormalization."""
    total = _sum(values, 0, 1, 3)
    inverse = 1 / np.sqrt((total**2).mean(-1, keepdims=True) + _epsilon(sig, 1e-12))
    statistics = [np.zeros_like(inverse, np.float32), inverse.astype(np.float32)]
    return [total * inverse * there(values, 2), *statistics, total][: len(sig.outputs)]


def embed_layer_norm(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::EmbedLayerNormalization; the attribute ``first`` is the position of the first word here."""
    words, segments, mask, positions = there(values, 0), at(values, 1), at(values, 7), at(values, 8)
    first = sig.attribute("first", 0)
    assert isinstance(first, int)
    total = np.zeros((*words.shape, there(values, 2).shape[1]))
    for b, s in np.ndindex(*words.shape):
        place = first + s if positions is None else positions[b if positions.shape[0] > 1 else 0, s]
        total[b, s] = there(values, 2)[words[b, s]] + there(values, 3)[place]
        if segments is not None:
            total[b, s] += there(values, 4)[segments[b, s]]
    result = _standardised(total, _epsilon(sig, 1e-12))[0] * there(values, 5) + there(values, 6)
    valid = np.zeros(words.shape[0]) if mask is None else [list(row).count(1) for row in mask]
    return [result, np.array(valid, np.int32), total][: len(sig.outputs)]


def group_norm(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::GroupNorm and SkipGroupNorm, group by group."""
    attributes: dict[str, Any] = dict(sig.attributes)
    value, skip, bias = there(values, 0), at(values, 3), at(values, 4)
    last = attributes.get("channels_last", 1)
    value = value if last else np.moveaxis(value, 1, -1)
    if skip is not None:
        wide = skip if skip.ndim == 2 or last else np.moveaxis(skip, 1, -1)
        value = value + (wide[:, None, None] if wide.ndim == 2 else wide)
    value = value if bias is None else value + bias
    result = np.zeros_like(value)
    for part in np.split(np.arange(value.shape[-1]), attributes["groups"]):
        for n in range(value.shape[0]):
            group = value[n][..., part]
            result[n][..., part] = (group - group.mean()) / np.sqrt(group.var() + _epsilon(sig, 1e-5))
    result = result * there(values, 1) + there(values, 2)
    result = result * sigmoid(result) if attributes.get("activation") else result
    made = [result, value] if last else [np.moveaxis(result, -1, 1), np.moveaxis(value, -1, 1)]
    return made[: len(sig.outputs)]


def standard_group_norm(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """GroupNormalization; scale and bias hold a number for each group (opset 18) or channel (opset 21)."""
    value, count = there(values, 0), sig.attribute("num_groups")
    assert isinstance(count, int)
    rows = value.reshape(value.shape[0], count, -1)
    normal = _standardised(rows, _epsilon(sig, 1e-5))[0].reshape(value.shape)
    scale, bias = (np.repeat(vector, value.shape[1] // len(vector)) for vector in (there(values, 1), there(values, 2)))
    space = (1,) * (value.ndim - 2)
    return [normal * scale.reshape(-1, *space) + bias.reshape(-1, *space)]


def fused_matmul(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::FusedMatMul."""
    operands: list[Array] = []
    for index, letter in enumerate("AB"):
        value = there(values, index)
        if value.ndim > 1 and sig.attribute(f"transBatch{letter}"):
            value = value.transpose(*range(1, value.ndim - 1), 0, -1)
        operands.append(np.swapaxes(value, -1, -2) if value.ndim > 1 and sig.attribute(f"trans{letter}") else value)
    alpha = sig.attribute("alpha", 1.0)
    assert isinstance(alpha, float)
    return [alpha * np.matmul(*operands)]


def fused_gemm(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::FusedGemm."""
    attributes: dict[str, Any] = dict(sig.attributes)
    left, right, added = there(values, 0), there(values, 1), at(values, 2)
    product = (left.T if attributes.get("transA") else left) @ (right.T if attributes.get("transB") else right)
    product = attributes.get("alpha", 1.0) * product + (0 if added is None else attributes.get("beta", 1.0) * added)
    activation = ACTIVATIONS[attributes["activation"]]
    return [activation(product, attributes.get("activation_alpha", 0.0), attributes.get("activation_beta", 0.0))]


def fused_conv(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::FusedConv, output position by output position."""
    attributes: dict[str, Any] = dict(sig.attributes)
    data, weight, bias, added = there(values, 0), there(values, 1), at(values, 2), at(values, 3)
    top, left, bottom, right = attributes["pads"]
    (down, across), groups = attributes["strides"], attributes["group"]
    padded = np.pad(data, [(0, 0), (0, 0), (top, bottom), (left, right)])
    result = np.zeros((data.shape[0], weight.shape[0], *sig.outputs[0].shape[2:]))
    per_group, size = weight.shape[0] // groups, weight.shape[1]
    for n, c, y, x in np.ndindex(*result.shape):
        start = c // per_group * size
        window = padded[n, start : start + size, down * y :, across * x :][:, : weight.shape[2], : weight.shape[3]]
        result[n, c, y, x] = (window * weight[c]).sum() + (0 if bias is None else bias[c])
    result = result if added is None else result + added
    parameters = (*attributes.get("activation_params", ()), 0.0, 0.0)
    return [ACTIVATIONS[attributes.get("activation", "")](result, parameters[0], parameters[1])]


def gemm_fast_gelu(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::GemmFastGelu."""
    product, bias = there(values, 0) @ there(values, 1), at(values, 2)
    return [fast_gelu(product if bias is None else product + bias)]


def localise(attributes: dict[str, Any], factor: Factor, part: Range, sig: OperatorSignature) -> None:
    """Counts of groups and the first position, on a part."""
    if factor.name == "s":
        attributes["first"] = part[0]
    for name in ("group", "groups"):
        if factor.name == "g" and name in attributes:
            attributes[name] = attributes[name] // factor.size * (part[1] - part[0])
