"""Canonical forms of operators that select by value, of sequences and texts, and of losses in the file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tap_planner.graph.compute import default_form
from tap_planner.graph.values import Call, Form
from tap_planner.operators import AttributeValue


def _compress(call: Call) -> Form:
    """A constant condition becomes positions; otherwise the file must declare how many elements remain."""
    value = call.operand(0)
    attributes: dict[str, AttributeValue] = {}
    if "axis" in call.attributes:
        attributes["axis"] = call.axis(call.integer("axis"), value.rank)
    if not call.operand(1).is_constant:
        attributes["count"] = call.declared_size(0, attributes.get("axis", 0))
        return Form(type="Compress", attributes=attributes, inputs=[value, call.operand(1)])
    positions = np.flatnonzero(call.array(1).reshape(-1))
    attributes["count"] = len(positions)
    attributes["indices"] = tuple(int(position) for position in positions)
    return Form(type="Compress", attributes=attributes, inputs=[value])


def _nonzero(call: Call) -> Form:
    return Form(type="NonZero", attributes={"count": call.declared_size(0, 1)}, inputs=[call.operand(0)])


def _unique(call: Call) -> Form:
    value = call.operand(0)
    attributes: dict[str, AttributeValue] = {"sorted": call.integer("sorted", 1)}
    if "axis" in call.attributes:
        attributes["axis"] = call.axis(call.integer("axis"), value.rank)
    attributes["count"] = call.declared_size(0, attributes.get("axis", 0))
    return Form(type="Unique", attributes=attributes, inputs=[value])


def _constant_or(function: Callable[[Call], Form]) -> Callable[[Call], Form]:
    """The form of ``function``, which asks for declared sizes, or, of constants, what the binder evaluates."""

    def canonical(call: Call) -> Form:
        if all(value is None or value.is_constant for value in call.inputs):
            return default_form(call)
        return function(call)

    return canonical


def _reverse_sequence(call: Call) -> Form:
    attributes: dict[str, AttributeValue] = {
        "batch_axis": call.integer("batch_axis", 1),
        "time_axis": call.integer("time_axis", 0),
    }
    if {*attributes.values()} != {0, 1}:
        raise call.error("its batch and time are not the first two dims")
    return Form(type="ReverseSequence", attributes=attributes, inputs=call.data())


def _tensor_scatter(call: Call) -> Form:
    mode, rank = call.text("mode", "linear"), call.operand(0).rank
    axis = call.axis(call.integer("axis", -2), rank)
    if mode not in ("linear", "circular") or axis == 0:
        raise call.error(f"mode {mode!r} along dim {axis}, expected linear or circular along a dim behind the batch")
    return Form(type="TensorScatter", attributes={"axis": axis, "mode": mode}, inputs=call.data())


def _text(call: Call) -> Form:
    """Texts and encoded images are for the host: only constants of them are evaluated."""
    if call.inputs and all(value is None or value.is_constant for value in call.inputs):
        return default_form(call)
    raise call.error(
        f"{call.node.type} works on texts or encoded images, which are not planned",
        hint="cut it off with onnx.utils.extract_model and run it on the host before the model",
    )


def _grams(call: Call) -> Form:
    return _text(call) if call.attributes.get("pool_strings") else default_form(call)


def _criterion(call: Call) -> Form:
    reduction = call.text("reduction", "mean")
    if reduction not in ("none", "mean", "sum"):
        raise call.error(f"reduction {reduction!r}, expected none, mean or sum")
    attributes: dict[str, AttributeValue] = {"reduction": reduction}
    if "ignore_index" in call.attributes:
        attributes["ignore_index"] = call.integer("ignore_index")
    return Form(type=call.node.type, attributes=attributes, inputs=call.data())


CANONICAL: dict[str, Callable[[Call], Form]] = {
    "Compress": _compress,
    "NegativeLogLikelihoodLoss": _criterion,
    "NonZero": _constant_or(_nonzero),
    "ReverseSequence": _reverse_sequence,
    "SoftmaxCrossEntropyLoss": _criterion,
    "TensorScatter": _tensor_scatter,
    "TfIdfVectorizer": _grams,
    "Unique": _constant_or(_unique),
    **dict.fromkeys(("ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit"), _text),
}
