"""Attention operators that can be split in a ring: twelve queries, twelve or twenty-four keys, in every variant."""

from __future__ import annotations

from typing import Any

from tap_planner.operators import OperatorSignature, TensorType
from tests.operators.operator_reference import index_type, signature, tensor

_MICROSOFT = "com.microsoft::"


def _int32(*shape: int) -> TensorType:
    return tensor(*shape, dtype="int32")


def _standard() -> list[OperatorSignature]:
    """Attention: two texts, four query heads over two key heads, of width 4."""
    q, kv, more = tensor(2, 4, 12, 4), tensor(2, 2, 12, 4), tensor(2, 2, 24, 4)
    flat: dict[str, Any] = {"q_num_heads": 4, "kv_num_heads": 1}
    return [
        signature("Attention", q, kv, kv, is_causal=1),
        signature("Attention", q, more, tensor(2, 2, 24, 6), is_causal=1, scale=0.7),
        signature("Attention", q, kv, kv, tensor(2, 1, 12, 12), softcap=0.5, num_outputs=3),
        signature("Attention", q, more, more, tensor(12, 17, dtype="bool")),
        signature("Attention", q, kv, kv, tensor(1, 1, 12, 7), left_window_size=2, right_window_size=1),
        signature("Attention", q, more, more, None, None, None, index_type(2), is_causal=1),
        signature("Attention", tensor(2, 12, 16), tensor(2, 12, 4), tensor(2, 12, 3), num_outputs=2, **flat),
    ]


def _contrib() -> list[OperatorSignature]:
    """Operators of com.microsoft: two texts, four heads of width 4 or 16."""
    x, one, wide = tensor(2, 12, 5), tensor(2, 12, 16), tensor(2, 12, 64)
    heads: dict[str, Any] = {"num_heads": 4}
    groups: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2, "total_sequence_length": 12, "num_outputs": 3}
    less, ends, tables = tensor(2, 12, 32), _int32(2), (tensor(16, 8), tensor(16, 8))
    projected, multi = _MICROSOFT + "Attention", _MICROSOFT + "MultiHeadAttention"
    grouped = _MICROSOFT + "GroupQueryAttention"
    weights = (tensor(5, 48), tensor(48))
    return [
        signature(projected, x, *weights, unidirectional=1, **heads),
        signature(projected, x, *weights, _int32(2, 12), mask_filter_value=-3.0, num_outputs=2, **heads),
        signature(projected, x, tensor(5, 28), None, None, None, tensor(1, 2, 12, 12), num_heads=2, **_UNLIKE),
        signature(multi, one, one, tensor(2, 12, 24), tensor(56), unidirectional=1, **heads),
        signature(multi, one, *(tensor(2, 24, 16),) * 2, None, _int32(2, 24), tensor(1, 4, 12, 24), **heads),
        signature(multi, one, *(tensor(2, 4, 12, 4),) * 2, tensor(48), num_outputs=3, **heads),
        signature(multi, tensor(2, 12, 4, 3, 4), None, None, tensor(48), unidirectional=1, **heads),
        signature(multi, one, tensor(2, 12, 4, 2, 4), scale=0.3, **heads),
        signature(grouped, wide, less, less, None, None, ends, None, *tables, do_rotary=1, **groups),
        signature(grouped, wide, less, less, None, None, ends, *[None] * 5, tensor(4), softcap=0.9, **groups),
        signature(grouped, wide, less, less, None, None, ends, *[None] * 4, tensor(1, 4, 12, 12), **groups),
        signature(grouped, tensor(2, 12, 128), None, None, None, None, ends, None, *tables, do_rotary=1, **groups),
    ]


_UNLIKE: dict[str, Any] = {"qkv_hidden_sizes": (8, 8, 12)}

RING_CASES: tuple[OperatorSignature, ...] = (*_standard(), *_contrib())
"""All of them; operands of GroupQueryAttention by position: 5 ends, 7 and 8 tables, 10 bias, 11 sinks."""
