"""Canonical forms of quantised operators: QDQ and QOperator forms, packed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tap_planner.graph import compute
from tap_planner.graph.dtypes import dtype_name
from tap_planner.graph.values import Call, Form
from tap_planner.operators import AttributeValue

_MICROSOFT = "com.microsoft::"


def _linear(call: Call) -> Form:
    """QuantizeLinear and DequantizeLinear of ONNX and of com.microsoft; a scale of one number has no axis."""
    data, scale = call.operand(0), call.operand(1)
    attributes: dict[str, AttributeValue] = {}
    if scale.rank and scale.shape != (1,):
        attributes["axis"] = call.axis(call.integer("axis", 1 if data.rank > 1 else 0), data.rank)
        block = call.integer("block_size", 0)
        if block < 0:
            raise call.error(f"block_size is {block}, expected at least 0")
        if block:
            attributes["block_size"] = block
    given = call.integer("output_dtype", 0)
    if given:
        attributes["output_dtype"] = dtype_name(given)
    if call.integer("saturate", 1) == 0:
        attributes["saturate"] = 0
    return Form(type=call.node.type.removeprefix(_MICROSOFT), attributes=attributes, inputs=call.data())


def _as(call: Call, base: str, positions: Sequence[int], opset: int | None = None) -> Form:
    """Attributes of the float operator ``base`` on the operands at ``positions``, with all operands kept."""
    if call.integer("channels_last", 0):
        raise call.error("works on channels in the last dim", hint="export the model before it is optimised for a CPU")
    inner = Call(
        node=replace(call.node, type=base),
        inputs=[call.inputs[position] for position in positions if position < len(call.inputs)],
        opset=call.opset if opset is None else opset,
        fetch=call.fetch,
        rebatch=call.rebatch,
    )
    attributes = compute.CANONICAL.get(base, compute.default_form)(inner).attributes
    for name in ("channels_last", "opset"):
        attributes.pop(name, None)
    return Form(type=call.node.type, attributes=attributes, inputs=call.data())


def _like(base: str, *positions: int) -> Callable[[Call], Form]:
    return lambda call: _as(call, base, positions)


def _softmax(call: Call) -> Form:
    return _as(call, "Softmax", (0,), call.integer("opset", call.opset))


def _gemm(call: Call) -> Form:
    form = _as(call, "Gemm", (0, 3, 6))
    del form.attributes["beta"]
    return form


def _concat(call: Call) -> Form:
    axis = call.axis(call.integer("axis"), call.operand(2).rank)
    return Form(type=call.node.type, attributes={"axis": axis}, inputs=call.data())


def _plain(call: Call) -> Form:
    """No attributes."""
    return Form(type=call.node.type, inputs=call.data())


def _bits(call: Call) -> int:
    bits = call.integer("bits", 4)
    if bits not in (2, 4, 8):
        raise call.error(f"{bits} bits an element, expected 2, 4 or 8")
    return bits


def _positive(call: Call, name: str, default: int | None = None) -> int:
    value = call.integer(name, default)
    if value < 1:
        raise call.error(f"attribute {name!r} is {value}, expected at least 1")
    return value


def _packed_product(call: Call) -> Form:
    """MatMulNBits; ``accuracy_level`` says only how a kernel may compute it."""
    if call.integer("weight_prepacked", 0):
        raise call.error("its weight is packed for one kernel", hint="export the model without weight_prepacked")
    attributes: dict[str, AttributeValue] = {
        "K": _positive(call, "K"),
        "N": _positive(call, "N"),
        "bits": _bits(call),
        "block_size": _positive(call, "block_size"),
    }
    return Form(type=call.node.type, attributes=attributes, inputs=call.data())


def _packed_lookup(call: Call) -> Form:
    rank = call.operand(0).rank
    attributes: dict[str, AttributeValue] = {
        "bits": _bits(call),
        "block_size": _positive(call, "block_size", 128),
        "gather_axis": call.axis(call.integer("gather_axis", 0), rank),
        "quantize_axis": call.axis(call.integer("quantize_axis", 1), rank),
    }
    return Form(type=call.node.type, attributes=attributes, inputs=call.data())


CANONICAL: dict[str, Callable[[Call], Form]] = {
    "ConvInteger": _like("Conv", 0, 1),
    "DequantizeLinear": _linear,
    "DynamicQuantizeLinear": _plain,
    "MatMulInteger": _plain,
    "QLinearConv": _like("Conv", 0, 3),
    "QLinearMatMul": _plain,
    "QuantizeLinear": _linear,
    f"{_MICROSOFT}DequantizeLinear": _linear,
    f"{_MICROSOFT}DynamicQuantizeMatMul": _plain,
    f"{_MICROSOFT}GatherBlockQuantized": _packed_lookup,
    f"{_MICROSOFT}MatMulIntegerToFloat": _plain,
    f"{_MICROSOFT}MatMulNBits": _packed_product,
    f"{_MICROSOFT}QGemm": _gemm,
    f"{_MICROSOFT}QLinearAdd": _plain,
    f"{_MICROSOFT}QLinearAveragePool": _like("AveragePool", 0),
    f"{_MICROSOFT}QLinearConcat": _concat,
    f"{_MICROSOFT}QLinearGlobalAveragePool": _like("GlobalAveragePool", 0),
    f"{_MICROSOFT}QLinearLeakyRelu": _like("LeakyRelu", 0),
    f"{_MICROSOFT}QLinearMul": _plain,
    f"{_MICROSOFT}QLinearReduceMean": _like("ReduceMean", 0),
    f"{_MICROSOFT}QLinearSigmoid": _plain,
    f"{_MICROSOFT}QLinearSoftmax": _softmax,
    f"{_MICROSOFT}QLinearWhere": _plain,
    f"{_MICROSOFT}QuantizeLinear": _linear,
}
