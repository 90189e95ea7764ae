"""Attention operators written out query by query in numpy: the independent source of their tests.

A part of the queries says by the attribute ``first`` which query of the whole its first one is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tap_planner.operators import Factor, OperatorSignature
from tests.operators.onnx_nodes import Array
from tests.operators.operator_reference import Range

Arrays = Sequence["Array | None"]


def by_heads(value: Array, heads: int) -> Array:
    """[b, s, heads x d] -> [b, heads, s, d]."""
    return value.reshape(*value.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def flat(value: Array) -> Array:
    """[b, heads, s, d] -> [b, s, heads x d]."""
    return value.transpose(0, 2, 1, 3).reshape(value.shape[0], value.shape[2], -1)


def at(values: Arrays, index: int) -> Array | None:
    """An operand, None if it is absent."""
    return values[index] if index < len(values) else None


def there(values: Arrays, index: int) -> Array:
    """An operand that must be there."""
    found = values[index]
    assert found is not None
    return found


def query_row(
    query: Array, keys: Array, values: Array, bias: Array, scale: float, cap: float = 0.0, sinks: Sequence[float] = ()
) -> tuple[Array, Array, Array, Array, Array]:
    """One query over its keys: result, scores, capped, biased, weights."""
    scores = np.array([float(query @ key) * scale for key in keys])
    capped = cap * np.tanh(scores / cap) if cap else scores
    biased = capped + bias
    if np.all(np.isneginf(bias)):
        weights = np.zeros_like(biased)
    else:
        logits = np.concatenate([biased, sinks])
        powers = np.exp(logits - logits.max())
        weights = (powers / powers.sum())[: len(keys)]
    return weights @ values, scores, capped, biased, weights


def attend(query: Array, key: Array, value: Array, bias: Array, scale: float, cap: float = 0.0) -> list[Array]:
    """All rows; ``bias`` is broadcast to [b, heads, s, t]. Result, scores, capped, biased, weights."""
    b, n, s, _ = query.shape
    t, group = key.shape[2], n // key.shape[1]
    whole = np.broadcast_to(bias, (b, n, s, t))
    found = [np.zeros((b, n, s, value.shape[3])), *(np.zeros((b, n, s, t)) for _ in range(4))]
    for i, h, q in np.ndindex(b, n, s):
        row = query_row(query[i, h, q], key[i, h // group], value[i, h // group], whole[i, h, q], scale=scale, cap=cap)
        for made, part in zip(found, row, strict=True):
            made[i, h, q] = part
    return found


def _visible(condition: Array, fill: float = -math.inf) -> Array:
    return np.where(condition, 0.0, fill)


def onnx_attention(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """Attention of opset 23 to 25."""
    attributes: dict[str, Any] = dict(sig.attributes)
    query, key, value = (there(values, index) for index in range(3))
    is_flat = query.ndim == 3
    if is_flat:
        heads = attributes["q_num_heads"], attributes["kv_num_heads"], attributes["kv_num_heads"]
        query, key, value = (by_heads(v, n) for v, n in zip((query, key, value), heads, strict=True))
    past_key, past_value, valid = at(values, 4), at(values, 5), at(values, 6)
    offset = np.zeros(query.shape[0], np.int64)
    if past_key is not None and past_value is not None:
        offset += past_key.shape[2]
        key, value = np.concatenate([past_key, key], 2), np.concatenate([past_value, value], 2)
    length = attributes.get("queries", query.shape[2])
    if valid is not None:
        offset = valid - length
    t = key.shape[2]
    bias = np.zeros((query.shape[0], query.shape[1], query.shape[2], t))
    mask = at(values, 3)
    if mask is not None:
        added = _visible(mask) if mask.dtype == bool else mask
        room = [(0, 0)] * (added.ndim - 1) + [(0, t - added.shape[-1])]
        bias = bias + np.pad(added, room, constant_values=-math.inf)
    behind, ahead = attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)
    for i, q, k in np.ndindex(query.shape[0], query.shape[2], t):
        distance = k - (attributes.get("first", 0) + q + offset[i])
        hides = attributes.get("is_causal", 0) and distance > 0
        hides = hides or (behind >= 0 and distance < -behind) or (ahead >= 0 and distance > ahead)
        if hides or (valid is not None and k >= valid[i]):
            bias[i, :, q, k] = -math.inf
    scale = attributes.get("scale", 1 / math.sqrt(query.shape[3]))
    result, *modes = attend(query, key, value, bias, scale, attributes.get("softcap", 0.0))
    shown = modes[attributes.get("qk_matmul_output_mode", 0)]
    return [flat(result) if is_flat else result, key, value, shown][: len(sig.outputs)]


def _mask(mask: Array, keys: int, fill: float) -> Array:
    """A mask of the com.microsoft domain as a bias."""
    if mask.ndim == 1:
        raise AssertionError("lengths are handled with the batch at hand")
    return _visible(mask > 0, fill)[:, None, None] if mask.ndim == 2 else _visible(mask > 0, fill)[:, None]


def _length_mask(mask: Array, batch: int, keys: int, fill: float) -> Array:
    ends, starts = (mask, np.zeros(batch)) if mask.shape[0] == batch else np.split(mask, 2)
    rows = [[ends[i] > k >= starts[i] for k in range(keys)] for i in range(batch)]
    return _visible(np.array(rows), fill)[:, None, None]


def _masked(
    sig: OperatorSignature, query: Array, keys: int, cached: int, mask: Array | None, added: Array | None
) -> Array:
    attributes: dict[str, Any] = dict(sig.attributes)
    fill, batch = attributes.get("mask_filter_value", -10000.0), query.shape[0]
    bias = np.zeros((1, 1, query.shape[2], keys))
    if mask is not None:
        bias = bias + (_length_mask(mask, batch, keys, fill) if mask.ndim == 1 else _mask(mask, keys, fill))
    if attributes.get("unidirectional"):
        positions = attributes.get("first", 0) + np.arange(query.shape[2]) + cached
        bias = bias + _visible(np.arange(keys) <= positions[:, None])
    return bias if added is None else bias + added


def projected_attention(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::Attention."""
    attributes: dict[str, Any] = dict(sig.attributes)
    packed = there(values, 0) @ there(values, 1)
    bias = at(values, 2)
    packed = packed if bias is None else packed + bias
    sizes = attributes.get("qkv_hidden_sizes", (packed.shape[2] // 3,) * 3)
    parts = np.split(packed, [sizes[0], sizes[0] + sizes[1]], -1)
    query, key, value = (by_heads(part, attributes["num_heads"]) for part in parts)
    past = at(values, 4)
    if past is not None:
        key, value = np.concatenate([past[0], key], 2), np.concatenate([past[1], value], 2)
    cached = 0 if past is None else past.shape[3]
    added = _masked(sig, query, key.shape[2], cached, at(values, 3), at(values, 5))
    scale = attributes.get("scale", 1 / math.sqrt(query.shape[3]))
    result = attend(query, key, value, added, scale)[0]
    return [flat(result), np.stack([key, value]) if len(sig.outputs) > 1 else result][: len(sig.outputs)]


def _with_bias(query: Array, key: Array, value: Array, bias: Array | None, heads: int) -> list[Array]:
    """Operands by heads, with the bias added to those that are not yet."""
    operands = [query, key, value]
    sizes = [v.shape[2] if v.ndim == 3 else v.shape[1] * v.shape[3] for v in operands]
    pieces = [None] * 3 if bias is None else np.split(bias, np.cumsum(sizes)[:2])
    return [
        v if v.ndim == 4 else by_heads(v if piece is None else v + piece, heads)
        for v, piece in zip(operands, pieces, strict=True)
    ]


def multi_head_attention(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::MultiHeadAttention."""
    attributes: dict[str, Any] = dict(sig.attributes)
    first, second, third = there(values, 0), at(values, 1), at(values, 2)
    if first.ndim == 5:
        first, second, third = (first[:, :, :, i].reshape(*first.shape[:2], -1) for i in range(3))
    elif second is not None and second.ndim == 5:
        second, third = (second[:, :, :, i].reshape(*second.shape[:2], -1) for i in range(2))
    assert second is not None and third is not None
    query, key, value = _with_bias(first, second, third, at(values, 3), attributes["num_heads"])
    past_key, past_value = at(values, 6), at(values, 7)
    cached = 0
    if past_key is not None and past_value is not None:
        cached = past_key.shape[2]
        key, value = np.concatenate([past_key, key], 2), np.concatenate([past_value, value], 2)
    added = _masked(sig, query, key.shape[2], cached, at(values, 4), at(values, 5))
    scale = attributes.get("scale", 1 / math.sqrt(query.shape[3]))
    result, _, _, biased, _ = attend(query, key, value, added, scale)
    return [flat(result), key, value, biased][: len(sig.outputs)]


def decoder_attention(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::DecoderMaskedMultiHeadAttention."""
    attributes: dict[str, Any] = dict(sig.attributes)
    first, second, third = there(values, 0), at(values, 1), at(values, 2)
    if second is None or third is None:
        first, second, third = np.split(first, 3, -1)
    query, key, value = _with_bias(first, second, third, at(values, 10), attributes["num_heads"])
    past_key, past_value, mask, added = at(values, 5), at(values, 6), at(values, 3), at(values, 4)
    length = key.shape[2]
    if past_key is not None and past_value is not None:
        shared = attributes.get("past_present_share_buffer", 0)
        start = int(there(values, 7)[0]) if shared else past_key.shape[2]
        room = [(0, 0), (0, 0), (0, 0 if shared else 1), (0, 0)]
        caches = [np.pad(past, room) for past in (past_key, past_value)]
        caches[0][:, :, start], caches[1][:, :, start] = key[:, :, 0], value[:, :, 0]
        (key, value), length = caches, start + 1
    bias = np.zeros((1, 1, 1, length))
    if mask is not None:
        bias = bias + _mask(mask, length, attributes.get("mask_filter_value", -10000.0))
    if added is not None:
        bias = bias + added
    scale = attributes.get("scale", 1 / math.sqrt(query.shape[3]))
    result = attend(query, key[:, :, :length], value[:, :, :length], bias, scale)[0]
    return [flat(result), key, value][: len(sig.outputs)]


def turned(vector: Array, cosines: Array, sines: Array, interleaved: bool) -> Array:
    """One vector with its leading pairs rotated."""
    result, pairs = vector.copy(), len(cosines)
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        result[a] = cosines[i] * vector[a] - sines[i] * vector[b]
        result[b] = sines[i] * vector[a] + cosines[i] * vector[b]
    return result


def rotary_embedding(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::RotaryEmbedding."""
    attributes: dict[str, Any] = dict(sig.attributes)
    data, positions, cosines, sines = (there(values, index) for index in range(4))
    split = by_heads(data, attributes["num_heads"]) if data.ndim == 3 else data
    result = np.zeros_like(split)
    for i, h, s in np.ndindex(*split.shape[:3]):
        place = positions[i, s] if positions.ndim == 2 else positions[0] + attributes.get("first", 0) + s
        result[i, h, s] = turned(split[i, h, s], cosines[place], sines[place], bool(attributes.get("interleaved", 0)))
    return [flat(result) if data.ndim == 3 else result]


def _normal(value: Array, weight: Array | None, epsilon: float) -> Array:
    if weight is None:
        return value
    return value / np.sqrt((value**2).mean(-1, keepdims=True) + epsilon) * weight


def group_query_attention(sig: OperatorSignature, values: Arrays) -> list[Array]:
    """com.microsoft::GroupQueryAttention."""
    attributes: dict[str, Any] = dict(sig.attributes)
    heads, key_heads = attributes["num_heads"], attributes["kv_num_heads"]
    first, second, third = there(values, 0), at(values, 1), at(values, 2)
    if second is None or third is None:
        unit = first.shape[2] // (heads + 2 * key_heads)
        first, second, third = np.split(first, [heads * unit, (heads + key_heads) * unit], -1)
    query, key, value = by_heads(first, heads), by_heads(second, key_heads), by_heads(third, key_heads)
    query = _normal(query, at(values, 14), attributes.get("q_norm_epsilon", attributes.get("qk_norm_epsilon", 1e-6)))
    key = _normal(key, at(values, 15), attributes.get("k_norm_epsilon", attributes.get("qk_norm_epsilon", 1e-6)))
    past_key, past_value, ids = at(values, 3), at(values, 4), at(values, 9)
    lengths, first_query = there(values, 5) + 1, attributes.get("first", 0)
    count, room = key.shape[2], 0 if past_key is None else past_key.shape[2]
    total = max(room, attributes["total_sequence_length"])
    keys, stored = (np.zeros((*key.shape[:2], total, key.shape[3])) for _ in range(2))
    if past_key is not None and past_value is not None:
        keys[:, :, :room], stored[:, :, :room] = past_key, past_value
    result = np.zeros(query.shape)
    for i in range(query.shape[0]):
        start = max(int(lengths[i]) - count, 0)
        places = ids[i] if ids is not None else start + np.arange(count)
        for s in range(count):
            for h in range(key_heads):
                keys[i, h, start + s] = _turned(attributes, values, key[i, h, s], places[s])
                stored[i, h, start + s] = value[i, h, s]
        for h, s in np.ndindex(*query.shape[1:3]):
            token = first_query + s
            vector = _turned(attributes, values, query[i, h, s], places[token])
            result[i, h, s] = _group_row(attributes, values, vector, keys[i], stored[i], (i, h, s, start + token))
    return [flat(result), keys, stored][: len(sig.outputs)]


def _turned(attributes: dict[str, Any], values: Arrays, vector: Array, place: int) -> Array:
    if not attributes.get("do_rotary"):
        return vector
    tables = there(values, 7)[place], there(values, 8)[place]
    return turned(vector, *tables, interleaved=bool(attributes.get("rotary_interleaved", 0)))


def _group_row(
    attributes: dict[str, Any],
    values: Arrays,
    query: Array,
    keys: Array,
    stored: Array,
    where: tuple[int, int, int, int],
) -> Array:
    i, h, s, position = where
    head = h // (attributes["num_heads"] // attributes["kv_num_heads"])
    causal, window = attributes.get("causal", 1), attributes.get("local_window_size", -1)
    end = position + 1 if causal else int(there(values, 5)[i]) + 1
    begin = max(0, end - window) if window > 0 else 0
    bias, sinks = at(values, 10), at(values, 11)
    extra = [0.0] if attributes.get("smooth_softmax") else [] if sinks is None else [float(sinks[h])]
    added = np.zeros(end - begin)
    if bias is not None:
        added = bias[i if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0, s, begin:end]
    scale = attributes.get("scale", 1 / math.sqrt(len(query)))
    cap = attributes.get("softcap", 0.0)
    return query_row(query, keys[head, begin:end], stored[head, begin:end], added, scale, cap, extra)[0]


def localise(attributes: dict[str, Any], factor: Factor, part: Range, sig: OperatorSignature) -> None:
    """Counts of heads and the first query, on a part."""
    share = part[1] - part[0]
    if factor.name == "s":
        attributes["first"], attributes["queries"] = part[0], factor.size
    counts = {"h": ("num_heads", "kv_num_heads", "q_num_heads"), "g": ("num_heads", "q_num_heads")}
    for name in counts.get(factor.name, ()):
        if name in attributes:
            attributes[name] = attributes[name] // factor.size * share
    if factor.name == "h" and "qkv_hidden_sizes" in attributes:
        attributes["qkv_hidden_sizes"] = tuple(size // factor.size * share for size in attributes["qkv_hidden_sizes"])
