"""Cases of the family `contrib` and of the standard's attention, and their independent references."""

from __future__ import annotations

from typing import Any

import numpy as np

from tap_planner.operators import OperatorSignature, TensorType
from tests.operators import attention_reference as attention
from tests.operators import contrib_reference as fused
from tests.operators.onnx_nodes import Array
from tests.operators.operator_reference import LOCALISERS, REFERENCES, VALUES, index_type, signature, tensor

_MICROSOFT = "com.microsoft::"
_PLAIN: dict[str, Any] = {"transA": 0, "transB": 0, "transBatchA": 0, "transBatchB": 0, "alpha": 1.0}
_SCALED: dict[str, Any] = {"alpha": 0.5, "beta": 2.0}
_WINDOW: dict[str, Any] = {"kernel_shape": (3, 3), "strides": (2, 1), "pads": (1, 0, 1, 2), "dilations": (1, 1)}


def _int32(*shape: int) -> TensorType:
    return tensor(*shape, dtype="int32")


def _contrib(name: str, *inputs: TensorType | None, num_outputs: int = 1, **attributes: Any) -> OperatorSignature:
    return signature(_MICROSOFT + name, *inputs, num_outputs=num_outputs, **attributes)


def _pointwise() -> list[OperatorSignature]:
    x, vector = tensor(4, 3, 8), tensor(8)
    image, channels = tensor(4, 2, 3, 12), tensor(12)
    return [
        _contrib("BiasGelu", x, vector),
        _contrib("FastGelu", x, vector),
        _contrib("BiasSplitGelu", x, vector),
        _contrib("BiasSoftmax", tensor(4, 3, 5, 6), tensor(4, 1, 1, 6), axis=3, is_inner_broadcast=1),
        _contrib("BiasSoftmax", tensor(4, 3, 2, 6), tensor(2, 6), axis=2, is_inner_broadcast=0),
        signature("Swish", x, alpha=1.702),
        signature("SwiGLU", x, x, alpha=1.5),
        _contrib("SkipLayerNormalization", x, x, vector, vector, vector, num_outputs=4, epsilon=1e-5),
        _contrib("SkipLayerNormalization", x, tensor(3, 8), vector, None, None, epsilon=1e-5),
        _contrib("SkipLayerNormalization", x, tensor(1, 3, 8), vector, vector, epsilon=1e-12),
        _contrib("SkipSimplifiedLayerNormalization", x, x, vector, vector, num_outputs=4, epsilon=1e-5),
        _contrib("SkipSimplifiedLayerNormalization", tensor(6, 8), tensor(6, 8), vector, epsilon=1e-6),
        _contrib("GroupNorm", image, channels, channels, groups=3, activation=1, channels_last=1, epsilon=1e-5),
        _contrib(
            "GroupNorm", tensor(4, 12, 2, 3), channels, channels, groups=6, activation=1, channels_last=0, epsilon=1e-3
        ),
        *(
            _contrib(
                "SkipGroupNorm",
                *(image, channels, channels, skip, channels),
                num_outputs=2,
                groups=6,
                activation=activation,
                channels_last=1,
                epsilon=1e-5,
            )
            for skip, activation in ((image, 0), (tensor(4, 1, 1, 12), 1), (tensor(4, 12), 1))
        ),
        signature("GroupNormalization", tensor(4, 6, 2, 3), tensor(3), tensor(3), num_groups=3, epsilon=1e-5),
    ]


def _embeddings() -> list[OperatorSignature]:
    ids, tables = _int32(4, 3), (tensor(9, 8), tensor(6, 8), tensor(2, 8), tensor(8), tensor(8))
    name = "EmbedLayerNormalization"
    return [
        _contrib(name, ids, ids, *tables, epsilon=1e-12),
        _contrib(name, ids, ids, *tables, ids, num_outputs=3, epsilon=1e-12),
        _contrib(name, ids, None, *tables[:2], None, *tables[3:], None, _int32(1, 3), num_outputs=2, epsilon=1e-5),
    ]


def _products() -> list[OperatorSignature]:
    name, image = "FusedMatMul", tensor(4, 6, 5, 4)
    return [
        _contrib(name, tensor(4, 3, 6), tensor(4, 6, 8), **{**_PLAIN, "alpha": 0.25}),
        _contrib(name, tensor(4, 6, 3), tensor(8, 6), **{**_PLAIN, "transA": 1, "transB": 1}),
        _contrib(name, tensor(6, 2, 3, 4), tensor(2, 3, 4, 5), **{**_PLAIN, "transBatchA": 1}),
        _contrib(
            name,
            *(tensor(4, 2, 3, 6), tensor(5, 2, 3, 4)),
            **{**_PLAIN, "transBatchA": 1, "transA": 1, "transBatchB": 1, "transB": 1, "alpha": 2.0},
        ),
        _contrib(name, tensor(6), tensor(5, 6), **{**_PLAIN, "transA": 1, "transB": 1}),
        *(
            _contrib(
                "FusedGemm", tensor(4, 6), tensor(6, 8), tensor(8), **{**_SCALED, "activation": activation, **more}
            )
            for activation, more in (
                ("Relu", {}),
                ("Tanh", {}),
                ("LeakyRelu", {"activation_alpha": 0.3}),
                ("HardSigmoid", {"activation_alpha": 0.1, "activation_beta": 0.4}),
                ("Elu", {"activation_alpha": 0.7}),
                ("ThresholdedRelu", {"activation_alpha": 0.9}),
                ("Softplus", {}),
                ("Softsign", {}),
                ("Sigmoid", {}),
            )
        ),
        _contrib("FusedGemm", tensor(6, 4), tensor(8, 6), transA=1, transB=1, activation="Relu"),
        _contrib("FusedConv", image, tensor(8, 6, 3, 3), tensor(8), group=1, activation="Relu", **_WINDOW),
        _contrib(
            "FusedConv",
            *(image, tensor(6, 2, 3, 3), tensor(6), tensor(4, 6, 3, 4)),
            group=3,
            activation="Clip",
            activation_params=(0.1, 2.5),
            **_WINDOW,
        ),
        _contrib("FusedConv", image, tensor(8, 6, 3, 3), None, tensor(4, 8, 3, 4), group=1, activation="", **_WINDOW),
        _contrib("GemmFastGelu", tensor(4, 3, 6), tensor(6, 8), tensor(8)),
    ]


def _standard_attention() -> list[OperatorSignature]:
    """Attention of opset 23 to 25."""
    q, kv = tensor(2, 4, 4, 8), tensor(2, 2, 5, 8)
    past, new = tensor(2, 2, 3, 8), tensor(2, 2, 4, 8)
    flat: dict[str, Any] = {"q_num_heads": 4, "kv_num_heads": 1}
    return [
        signature("Attention", q, kv, kv, tensor(4, 5), softcap=0.5, qk_matmul_output_mode=1, num_outputs=4),
        signature("Attention", q, kv, kv, tensor(4, 3, dtype="bool"), num_outputs=4, qk_matmul_output_mode=2),
        signature("Attention", q, new, new, None, past, past, num_outputs=4, is_causal=1, qk_matmul_output_mode=3),
        signature("Attention", q, kv, kv, None, None, None, index_type(2), is_causal=1),
        signature("Attention", q, kv, kv, tensor(2, 1, 4, 5), None, None, index_type(2), scale=0.7),
        signature("Attention", q, new, new, None, past, past, left_window_size=1, right_window_size=2),
        signature("Attention", tensor(2, 4, 32), tensor(2, 5, 8), tensor(2, 5, 4), num_outputs=3, **flat),
    ]


def _projected() -> list[OperatorSignature]:
    """com.microsoft::Attention: x [2, 3, 5], two or four heads of width 4."""
    x, name = tensor(2, 3, 5), "Attention"
    plain = (x, tensor(5, 48), tensor(48))
    past = tensor(2, 2, 4, 2, 4)
    return [
        _contrib(name, *plain, num_heads=4),
        _contrib(name, x, tensor(5, 48), None, num_heads=4, unidirectional=1, scale=0.4),
        _contrib(name, *plain, _int32(2, 3), num_heads=4, mask_filter_value=-3.0),
        _contrib(name, *plain, _int32(2, 3, 3), num_heads=4, mask_filter_value=-3.0, unidirectional=1),
        _contrib(name, *plain, _int32(2), num_heads=4),
        _contrib(name, *plain, _int32(4), num_heads=4, mask_filter_value=-3.0),
        _contrib(name, *plain, None, past, num_heads=4, unidirectional=1, num_outputs=2),
        _contrib(name, *plain, _int32(2, 5), past, num_heads=4, num_outputs=2),
        _contrib(name, *plain, None, None, tensor(1, 4, 3, 3), num_heads=4),
        _contrib(name, x, tensor(5, 28), tensor(28), num_heads=2, qkv_hidden_sizes=(8, 8, 12)),
    ]


def _multi_head() -> list[OperatorSignature]:
    """com.microsoft::MultiHeadAttention: four heads of width 4, three queries, five keys."""
    name, q, k, v = "MultiHeadAttention", tensor(2, 3, 16), tensor(2, 5, 16), tensor(2, 5, 16)
    new, past = tensor(2, 3, 16), tensor(2, 4, 2, 4)
    return [
        _contrib(name, q, k, v, num_heads=4),
        _contrib(name, q, k, tensor(2, 5, 24), tensor(56), num_heads=4),
        _contrib(name, q, k, v, tensor(48), _int32(2, 5), tensor(1, 4, 3, 5), num_heads=4, mask_filter_value=-3.0),
        _contrib(name, q, k, v, None, _int32(2), num_heads=4),
        _contrib(name, q, k, v, None, _int32(2, 3, 5), tensor(2, 1, 3, 5), num_heads=4, scale=0.3),
        _contrib(name, q, new, new, tensor(48), None, None, past, past, num_heads=4, unidirectional=1, num_outputs=4),
        _contrib(name, q, tensor(2, 4, 5, 4), tensor(2, 4, 5, 4), num_heads=4),
        _contrib(name, q, tensor(2, 4, 5, 4), tensor(2, 4, 5, 4), tensor(48), num_heads=4),
        _contrib(name, tensor(2, 3, 4, 3, 4), num_heads=4, unidirectional=1),
        _contrib(name, q, tensor(2, 5, 4, 2, 4), num_heads=4),
    ]


def _grouped() -> list[OperatorSignature]:
    """com.microsoft::GroupQueryAttention: four query heads over two key heads of width 16."""
    heads: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2}
    tables = (tensor(12, 8), tensor(12, 8))
    name, lengths = "GroupQueryAttention", _int32(2)

    def new(tokens: int) -> tuple[TensorType, TensorType, TensorType]:
        return tensor(2, tokens, 64), tensor(2, tokens, 32), tensor(2, tokens, 32)

    def case(tokens: int, cache: int | None, total: int, *more: TensorType | None, **kinds: Any) -> OperatorSignature:
        past = None if cache is None else tensor(2, 2, cache, 16)
        fixed = {"num_outputs": 3, "total_sequence_length": total, **heads, **kinds}
        return _contrib(name, *new(tokens), past, past, lengths, None, *more, **fixed)

    return [
        case(3, None, 3),
        case(3, None, 3, *tables, do_rotary=1),
        case(3, 6, 3, *tables, index_type(2, 3), do_rotary=1, rotary_interleaved=1),
        case(1, 6, 5, *tables, do_rotary=1, scale=0.2),
        case(1, 4, 5, None, None, None, None, tensor(4), local_window_size=2),
        case(4, None, 4, None, None, None, tensor(1, 4, 4, 4), softcap=0.3),
        case(4, None, 4, smooth_softmax=1, local_window_size=2),
        case(4, None, 4, causal=0, num_outputs=1),
        case(3, None, 3, *[None] * 7, tensor(16), tensor(16), qk_norm_epsilon=1e-4),
        _contrib(
            name,
            *(tensor(2, 3, 128), None, None, None, None, lengths, None, *tables),
            num_outputs=3,
            total_sequence_length=3,
            do_rotary=1,
            **heads,
        ),
        _contrib(
            name,
            *(tensor(2, 3, 96), None, None, None, None, lengths, None, tensor(12, 4), tensor(12, 4)),
            num_outputs=3,
            total_sequence_length=3,
            do_rotary=1,
            num_heads=4,
            kv_num_heads=4,
        ),
        _contrib(
            name,
            *(tensor(2, 3, 64), tensor(2, 3, 16), tensor(2, 3, 16), None, None, lengths),
            num_outputs=3,
            total_sequence_length=3,
            num_heads=4,
            kv_num_heads=1,
        ),
    ]


def _decoders() -> list[OperatorSignature]:
    name, one, cross = "DecoderMaskedMultiHeadAttention", tensor(2, 1, 16), tensor(2, 4, 5, 4)
    past = tensor(2, 4, 6, 4)
    shared: dict[str, Any] = {"num_heads": 4, "past_present_share_buffer": 1, "num_outputs": 3}
    return [
        _contrib(name, one, one, one, None, None, past, past, _int32(1), None, None, tensor(48), **shared),
        _contrib(
            name,
            *(one, one, one, _int32(2, 3), tensor(1, 4, 1, 3), past, past, _int32(1)),
            mask_filter_value=-3.0,
            **shared,
        ),
        _contrib(name, tensor(2, 1, 48), None, None, _int32(2, 7), None, past, past, num_heads=4, num_outputs=3),
        _contrib(name, one, cross, cross, num_heads=4),
    ]


def _rotaries() -> list[OperatorSignature]:
    tables = (tensor(9, 4), tensor(9, 4))
    return [
        _contrib("RotaryEmbedding", tensor(2, 3, 32), index_type(1), *tables, num_heads=4, interleaved=0),
        _contrib("RotaryEmbedding", tensor(2, 2, 3, 8), index_type(1), *tables, num_heads=2, interleaved=1),
    ]


CASES: tuple[OperatorSignature, ...] = (
    *_pointwise(),
    *_embeddings(),
    *_products(),
    *_standard_attention(),
    *_projected(),
    *_multi_head(),
    *_grouped(),
    *_decoders(),
    *_rotaries(),
)

_ATTENTION = {
    "Attention": attention.onnx_attention,
    _MICROSOFT + "Attention": attention.projected_attention,
    _MICROSOFT + "MultiHeadAttention": attention.multi_head_attention,
    _MICROSOFT + "GroupQueryAttention": attention.group_query_attention,
    _MICROSOFT + "DecoderMaskedMultiHeadAttention": attention.decoder_attention,
    _MICROSOFT + "RotaryEmbedding": attention.rotary_embedding,
}
_FUSED = {
    "Swish": fused.swish,
    "SwiGLU": fused.swiglu,
    _MICROSOFT + "BiasGelu": fused.bias_gelu,
    _MICROSOFT + "BiasSoftmax": fused.bias_softmax,
    _MICROSOFT + "BiasSplitGelu": fused.bias_split_gelu,
    _MICROSOFT + "EmbedLayerNormalization": fused.embed_layer_norm,
    _MICROSOFT + "FastGelu": fused.bias_fast_gelu,
    _MICROSOFT + "FusedConv": fused.fused_conv,
    _MICROSOFT + "FusedGemm": fused.fused_gemm,
    _MICROSOFT + "FusedMatMul": fused.fused_matmul,
    _MICROSOFT + "GemmFastGelu": fused.gemm_fast_gelu,
    _MICROSOFT + "GroupNorm": fused.group_norm,
    _MICROSOFT + "SkipGroupNorm": fused.group_norm,
    _MICROSOFT + "SkipLayerNormalization": fused.skip_layer_norm,
    _MICROSOFT + "SkipSimplifiedLayerNormalization": fused.skip_simplified_norm,
}

_LENGTHS = {
    (_MICROSOFT + "Attention", 3): (2, 3, 1, 0),
    (_MICROSOFT + "MultiHeadAttention", 4): (2, 5),
    ("Attention", 6): (2, 5),
    (_MICROSOFT + "DecoderMaskedMultiHeadAttention", 7): (2,),
    (_MICROSOFT + "RotaryEmbedding", 1): (3,),
}
"""Operands of one dim that are lengths, ends and starts, or a position."""
_LIMITS = {0: 9, 1: 2, 7: 2, 8: 6}
"""By operand of EmbedLayerNormalization: rows of what it looks up."""


def _integers(sig: OperatorSignature, index: int, found: TensorType, rng: np.random.Generator) -> Array:
    if sig.type.endswith("EmbedLayerNormalization"):
        return rng.integers(0, _LIMITS[index], found.shape).astype(found.dtype)
    if sig.type.endswith("GroupQueryAttention"):
        total = sig.attribute("total_sequence_length")
        tokens = sig.inputs[0].shape[1] if sig.inputs[0] else 0
        assert isinstance(total, int)
        if index == 5:  # the first text is shorter where its cache has room, so that both states are met
            return np.array([total - 1 - (tokens == 1), total - 1], found.dtype)
        return np.arange(found.shape[1])[None] + np.full(found.shape, 2)
    if len(found.shape) == 1:
        return np.array(_LENGTHS[sig.type, index][: found.shape[0]], found.dtype)
    mask = rng.integers(0, 2, found.shape).astype(found.dtype)
    mask[..., 0] = 1
    return mask


def _values(sig: OperatorSignature, rng: np.random.Generator) -> list[Array | None]:
    """Floats of both signs; masks, lengths and indices that the operator allows."""
    made: list[Array | None] = []
    for index, found in enumerate(sig.inputs):
        if found is None:
            made.append(None)
        elif found.is_float:
            made.append(rng.uniform(-1, 1, found.shape))
        elif found.dtype == "bool":
            made.append(rng.random(found.shape) < 0.6)
        else:
            made.append(_integers(sig, index, found, rng))
    return made


REFERENCES["GroupNormalization"] = fused.standard_group_norm
for _type, _reference in {**_ATTENTION, **_FUSED}.items():
    REFERENCES[_type] = _reference
    VALUES[_type] = _values
    LOCALISERS[_type] = attention.localise if _type in _ATTENTION else fused.localise
