"""Canonical forms. Fused operators of the com.microsoft domain.

What is exactly a standard operator becomes it. Of the others the attributes that do not matter are dropped and the
defaults of onnxruntime's schemas are written out, so that equal operators have equal attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tap_planner.graph import compute, layout
from tap_planner.graph.values import Call, Form
from tap_planner.operators import AttributeValue

_Canonicaliser = Callable[[Call], Form]


def _renamed(type: str, **attributes: AttributeValue) -> _Canonicaliser:
    """The same operands under another operator; ``attributes`` are fixed."""

    def form(call: Call) -> Form:
        return Form(type=type, attributes=dict(attributes), inputs=call.data())

    return form


def _with_defaults(**defaults: AttributeValue) -> _Canonicaliser:
    """The same operator with the attributes that it has, and with those defaults."""

    def form(call: Call) -> Form:
        made = compute.default_form(call)
        made.attributes = {**defaults, **made.attributes}
        return made

    return form


def _quick_gelu(call: Call) -> Form:
    return Form(type="Swish", attributes={"alpha": call.number("alpha", 1.702)}, inputs=call.data())


def _fast_gelu(call: Call) -> Form:
    if call.has(1):
        return Form(type="com.microsoft::FastGelu", inputs=call.data())
    return Form(type="Gelu", attributes={"approximate": "tanh"}, inputs=[call.operand(0)])


def _simplified_norm(call: Call) -> Form:
    value = call.operand(0)
    attributes: dict[str, AttributeValue] = {
        "axis": call.axis(call.integer("axis", -1), value.rank),
        "epsilon": call.number("epsilon", 1e-5),
    }
    return Form(type="RMSNormalization", attributes=attributes, inputs=call.data())


def _matmul(call: Call) -> Form:
    flags = {name: call.integer(name, 0) for name in ("transA", "transB", "transBatchA", "transBatchB")}
    alpha = call.number("alpha", 1.0)
    inputs = call.data()
    if not any(flags.values()) and alpha == 1.0:
        return Form(type="MatMul", inputs=inputs)
    return Form(type="com.microsoft::FusedMatMul", attributes={**flags, "alpha": alpha}, inputs=inputs)


def _gemm(call: Call) -> Form:
    form = compute.CANONICAL["Gemm"](call)
    activation = call.text("activation", "")
    if not activation:
        return form
    form.type = "com.microsoft::FusedGemm"
    form.attributes["activation"] = activation
    names = {"activation_alpha": "activation_alpha", "activation_beta": "activation_beta"}
    for name, given in {**names, "leaky_relu_alpha": "activation_alpha"}.items():
        if name in call.attributes:
            form.attributes[given] = call.number(name, 0.0)
    return form


def _conv(call: Call) -> Form:
    form = compute.CANONICAL["Conv"](call)
    activation = call.text("activation", "")
    if not activation and not call.has(3):
        return form
    form.type = "com.microsoft::FusedConv"
    form.attributes["activation"] = activation
    parameters = call.attributes.get("activation_params")
    if activation and isinstance(parameters, tuple):
        form.attributes["activation_params"] = tuple(float(item) for item in parameters)
    return form


def _group_norm(call: Call) -> Form:
    attributes: dict[str, AttributeValue] = {
        "activation": call.integer("activation", 0),
        "channels_last": call.integer("channels_last", 1),
        "epsilon": call.number("epsilon", 1e-5),
        "groups": call.integer("groups"),
    }
    plain = call.node.type == "com.microsoft::GroupNorm"
    if plain and not attributes["activation"] and not attributes["channels_last"]:
        known: dict[str, AttributeValue] = {"epsilon": attributes["epsilon"], "num_groups": attributes["groups"]}
        return Form(type="GroupNormalization", attributes=known, inputs=call.data())
    return Form(type=call.node.type, attributes=attributes, inputs=call.data())


def _bias_dropout(call: Call) -> Form:
    """Without training mode nothing is dropped: a sum."""
    if call.has(4) and bool(call.array(4).reshape(-1)[0]):
        raise call.error("drops values by chance", hint="export it with training_mode false, or as Add and Dropout")
    if call.wants(1):
        raise call.error("its mask is read", hint="export it without the mask, or as Add and Dropout")
    values = [value for value in call.inputs[:3] if value is not None]
    return Form(type="Add" if len(values) == 2 else "Sum", inputs=list(values))


def _rotary(call: Call) -> Form:
    """RotaryEmbedding of the standard where positions are given one by one; its operands have another order."""
    value, positions, table = call.operand(0), call.operand(1), call.operand(2)
    rotary, heads = call.integer("rotary_embedding_dim", 0), call.integer("num_heads", 0)
    width = 2 * table.shape[-1]
    if value.rank == 4:
        heads, width = value.shape[1], value.shape[3]
    elif heads:
        width = value.shape[2] // heads
    elif width:
        heads = value.shape[2] // width
    attributes: dict[str, AttributeValue] = {"interleaved": call.integer("interleaved", 0), "num_heads": heads}
    scale = call.number("scale", 1.0)
    if 2 * table.shape[-1] != (rotary or width) or (value.rank == 3 and heads * width != value.shape[2]):
        raise call.error(f"tables of {table.shape[-1]} angles do not fit heads of width {width}")
    if positions.rank == 2 and scale == 1.0:
        attributes["rotary_embedding_dim"] = rotary
        inputs = [value, table, call.operand(3), positions]
        return Form(type="RotaryEmbedding", attributes=attributes, inputs=list(inputs))
    if scale != 1.0:
        attributes["scale"] = scale
    return Form(type=call.node.type, attributes=attributes, inputs=call.data())


def _used(call: Call, *, drop: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    """Attributes as they are, without those whose value says nothing (None: whatever the value)."""
    found = compute.default_form(call).attributes
    return {name: value for name, value in found.items() if name not in drop or drop[name] not in (None, value)}


_PLAIN_ATTENTION: dict[str, AttributeValue] = {
    "do_rotary": 0,
    "output_qk": 0,
    "past_present_share_buffer": 0,
    "scale": 0.0,
    "unidirectional": 0,
}


def _attention(call: Call) -> Form:
    attributes = _used(call, drop=_PLAIN_ATTENTION)
    if not any(call.has(index) for index in (3, 4)):
        attributes.pop("mask_filter_value", None)
    return Form(type=call.node.type, attributes=attributes, inputs=call.data())


_PLAIN_GROUPS: dict[str, AttributeValue] = {
    "causal": 1,
    "do_rotary": 0,
    "k_quant_type": "NONE",
    "kv_cache_bit_width": 0,
    "local_window_size": -1,
    "qk_output": 0,
    "rotary_interleaved": 0,
    "scale": 0.0,
    "sliding_window_cache": 0,
    "smooth_softmax": 0,
    "softcap": 0.0,
    "v_quant_type": "NONE",
}


def _group_query(call: Call) -> Form:
    """The longest total length decides the size of the cache: it becomes an attribute."""
    attributes = _used(call, drop=_PLAIN_GROUPS)
    attributes["total_sequence_length"] = int(call.scalar(6))
    inputs = call.data()
    inputs[6] = None
    return Form(type=call.node.type, attributes=attributes, inputs=inputs)


def _trilu(call: Call) -> Form:
    return layout.CANONICAL["Trilu"](call)


_EXTENSIONS: dict[str, AttributeValue] = {
    "channels_last": 0,
    "dilation": 1,
    "input_channel_offset": 0,
    "input_channels": 0,
    "ndim": 1,
    "state_channels_last": -1,
    "state_length": 0,
    "state_update_capacity": 0,
    "state_window": 0,
}
"""What LinearAttention and CausalConvWithState can do beyond the standard's, each with the value that does not."""


def _state_space(call: Call) -> Form:
    """The standard's operator of that name, unless an extension is in use."""
    attributes = _used(call, drop=_EXTENSIONS)
    grouped = call.integer("q_num_heads", 1) % max(call.integer("kv_num_heads", 1), 1) == 0
    if not grouped or not _EXTENSIONS.keys().isdisjoint(attributes):
        return compute.default_form(call)
    return Form(type=call.node.type.removeprefix("com.microsoft::"), attributes=attributes, inputs=call.data())


CANONICAL: dict[str, _Canonicaliser] = {
    "SimplifiedLayerNormalization": _simplified_norm,
    "com.microsoft::Attention": _attention,
    "com.microsoft::BiasAdd": _renamed("Sum"),
    "com.microsoft::BiasDropout": _bias_dropout,
    "com.microsoft::BiasSoftmax": _with_defaults(axis=1),
    "com.microsoft::CausalConvWithState": _state_space,
    "com.microsoft::DecoderMaskedMultiHeadAttention": _attention,
    "com.microsoft::EmbedLayerNormalization": _with_defaults(epsilon=1e-12),
    "com.microsoft::FastGelu": _fast_gelu,
    "com.microsoft::FusedConv": _conv,
    "com.microsoft::FusedGemm": _gemm,
    "com.microsoft::FusedMatMul": _matmul,
    "com.microsoft::Gelu": _renamed("Gelu", approximate="none"),
    "com.microsoft::GroupNorm": _group_norm,
    "com.microsoft::GroupQueryAttention": _group_query,
    "com.microsoft::LinearAttention": _state_space,
    "com.microsoft::MultiHeadAttention": _attention,
    "com.microsoft::QuickGelu": _quick_gelu,
    "com.microsoft::RotaryEmbedding": _rotary,
    "com.microsoft::SimplifiedLayerNormalization": _simplified_norm,
    "com.microsoft::SkipGroupNorm": _group_norm,
    "com.microsoft::SkipLayerNormalization": _with_defaults(epsilon=1e-12),
    "com.microsoft::SkipSimplifiedLayerNormalization": _with_defaults(epsilon=1e-12),
    "com.microsoft::TransposeMatMul": _matmul,
    "com.microsoft::Trilu": _trilu,
}

TRAINABLE: dict[str, tuple[int, ...]] = {
    "SimplifiedLayerNormalization": (1,),
    "com.microsoft::BiasAdd": (1,),
    "com.microsoft::BiasDropout": (1,),
    "com.microsoft::CausalConvWithState": (1, 2),
    "com.microsoft::SimplifiedLayerNormalization": (1,),
    "com.microsoft::TransposeMatMul": (0, 1),
}
"""Weights among the operands of operators that have no record of their own, because they become standard ones."""
