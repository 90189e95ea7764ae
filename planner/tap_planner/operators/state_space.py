"""Linear attention and causal convolution with a carried state (opset 27): batch, heads and channels are split."""

from __future__ import annotations

from tap_planner.operators.attributes import int_of, operand
from tap_planner.operators.building import Dims, RuleBuilder, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


def _heads(signature: OperatorSignature) -> tuple[int, int, int, int]:
    """Key heads, query heads for each, width of keys, width of values."""
    query, key, value = (operand(signature, index).shape for index in range(3))
    queries, keys = int_of(signature, "q_num_heads"), int_of(signature, "kv_num_heads")
    if not len(query) == len(key) == len(value) == 3 or keys < 1 or queries % keys:
        raise shape_error(signature, "[batch, time, heads x width] each, query heads in equal groups over key heads")
    width, value_width = query[2] // queries, value[2] // keys
    if (query[2], key[2], value[2]) != (queries * width, keys * width, keys * value_width):
        raise shape_error(signature, f"widths of {queries} and {keys} heads")
    return keys, queries // keys, width, value_width


def _linear_rule(signature: OperatorSignature) -> FactorRule:
    """``(b, t, (h g) d) (b, t, h d) (b, t, h e) -> (b, t, (h g) e) (b, h, d, e)``: a state per key head.

    The state is written once and read once for each step: two products.
    """
    keys, group, width, value_width = _heads(signature)
    batch, length = operand(signature, 0).shape[:2]
    builder = RuleBuilder(signature)
    b, h, t = builder.factor("b", batch), builder.factor("h", keys), builder.fixed("t", length)
    g = builder.factor("g", group, FactorKind.PARALLEL if keys == 1 else FactorKind.FIXED)
    d, e = builder.fixed("d", width), builder.fixed("e", value_width)
    builder.fixed("products", 2)
    state = (b, h, d, e)
    inputs: list[Dims | None] = [(b, t, h + g + d), (b, t, h + d), (b, t, h + e)]
    for index, found in enumerate(signature.inputs[3:], start=3):
        if found is None:
            inputs.append(None)
        elif index == 3:
            inputs.append(state)
        else:
            last = found.shape[-1]
            inputs.append((b, t, () if last == 1 else h if last == keys else h + d))
    return builder.build(inputs, [(b, t, h + g + e), state][: len(signature.outputs)])


def _linear_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    keys, group, width, value_width = _heads(signature)
    query = operand(signature, 0)
    past = signature.inputs[3] if len(signature.inputs) > 3 else None
    batch, length = query.shape[:2]
    result = TensorType(dtype=query.dtype, shape=(batch, length, keys * group * value_width))
    state = TensorType(dtype=(past or query).dtype, shape=(batch, keys, width, value_width))
    return (result, state)[:num_outputs]


def _causal_rule(signature: OperatorSignature) -> FactorRule:
    """``(n, c, l) (c, 1, k) [c] [n, c, k - 1] -> (n, c, l) (n, c, k - 1)``."""
    data, weight = operand(signature, 0).shape, operand(signature, 1).shape
    builder = RuleBuilder(signature)
    n, c = builder.factor("n", data[0]), builder.factor("c", data[1])
    length, taps = builder.fixed("l", data[2]), builder.fixed("k", weight[2])
    state = (n, c, ())
    known: list[Dims] = [(n, c, length), (c, (), taps), (c,), state]
    inputs = [None if found is None else dims for found, dims in zip(signature.inputs, known, strict=False)]
    return builder.build(inputs, [(n, c, length), state][: len(signature.outputs)])


def _causal_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, weight = operand(signature, 0), operand(signature, 1).shape
    if len(data.shape) != 3 or len(weight) != 3 or weight[:2] != (data.shape[1], 1):
        raise shape_error(signature, "data [n, channels, length] and a kernel [channels, 1, k]")
    state = TensorType(dtype=data.dtype, shape=(*data.shape[:2], weight[2] - 1))
    return (data, state)[:num_outputs]


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="LinearAttention",
        rule=_linear_rule,
        infer=_linear_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1, 2, 3, 4, 5),
        caches=((3, 1),),
    ),
    OperatorRecord(
        type="CausalConvWithState",
        rule=_causal_rule,
        infer=_causal_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1, 3),
        trainable_operands=(1, 2),
        caches=((3, 1),),
    ),
)
"""Records of linear attention and causal convolution."""
