"""The numpy references of fused operators agree with onnxruntime (and ONNX's evaluator) where those have a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from tap_planner.operators import OperatorSignature, TensorType
from tests.operators.contrib_cases import CASES
from tests.operators.onnx_nodes import Array, evaluated
from tests.operators.operator_cases import name_of
from tests.operators.operator_reference import random_values, run

_NO_KERNEL = frozenset(
    ("BiasSoftmax", "BiasSplitGelu", "GemmFastGelu", "GroupNorm", "SkipGroupNorm"),
)
"""Operators for which onnxruntime has no CPU kernel."""
_NO_VARIANT: dict[str, Callable[[OperatorSignature], bool]] = {
    "MultiHeadAttention": lambda sig: any(found is not None and len(found.shape) == 5 for found in sig.inputs),
    "DecoderMaskedMultiHeadAttention": lambda sig: (
        len(sig.inputs) > 5 and not sig.attribute("past_present_share_buffer")
    ),
    "GroupQueryAttention": lambda sig: len(sig.inputs) > 14 or (len(sig.inputs) > 8 and _width(sig.inputs[8]) != 8),
}
"""Variants that the CPU kernels refuse: packed operands, caches that grow, normalised heads, heads not of width 16."""


def _width(found: TensorType | None) -> int:
    return 8 if found is None else found.shape[-1]


def _contrib(sig: OperatorSignature) -> str:
    return sig.type.removeprefix("com.microsoft::")


def _has_kernel(sig: OperatorSignature) -> bool:
    name = _contrib(sig)
    refuses = _NO_VARIANT.get(name)
    return sig.type.startswith("com.microsoft::") and name not in _NO_KERNEL and not (refuses and refuses(sig))


def _by_onnxruntime(sig: OperatorSignature, values: Sequence[Array | None]) -> list[Array]:
    """Outputs of the CPU kernel, in float32; the structure that ``graph`` makes an attribute is an operand again."""
    attributes: dict[str, Any] = dict(sig.attributes)
    operands = [v if v is None or v.dtype != np.float64 else v.astype(np.float32) for v in values]
    total = attributes.pop("total_sequence_length", None)
    if total is not None:
        operands[6:7] = [np.array(total, np.int32)]
    feeds = {f"x{index}": value for index, value in enumerate(operands) if value is not None}
    names = [f"x{index}" if value is not None else "" for index, value in enumerate(operands)]
    count = max(2, len(sig.outputs)) if _contrib(sig) == "EmbedLayerNormalization" else len(sig.outputs)
    outputs = [f"y{index}" for index in range(count)]
    if not attributes.get("activation", "none"):
        del attributes["activation"]
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    results = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        if name == "y3"
        else helper.make_empty_tensor_value_info(name)
        for name in outputs
    ]
    node = helper.make_node(_contrib(sig), names, outputs, domain="com.microsoft", **attributes)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "one", infos, results), opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = [np.asarray(found) for found in session.run(None, feeds)][: len(sig.outputs)]
    lowest = np.finfo(np.float32).min
    return [np.where(v == lowest, -np.inf, v) if v.dtype == np.float32 else v for v in found]


def _defined(sig: OperatorSignature, values: Sequence[Array | None], outputs: list[Array]) -> list[Array]:
    """Outputs without what the operator leaves open: statistics, and a cache beyond each text's end."""
    if _contrib(sig).startswith("Skip") and len(outputs) == 4:
        return [outputs[0], outputs[3]]
    if _contrib(sig) in ("GroupQueryAttention", "DecoderMaskedMultiHeadAttention"):
        ends = values[5] if _contrib(sig) == "GroupQueryAttention" else values[7] if len(values) > 7 else None
        if ends is not None:
            rows = [int(end) + 1 for end in np.broadcast_to(ends, outputs[0].shape[:1])]
            return [outputs[0], *(cache[row, :, :end] for cache in outputs[1:] for row, end in enumerate(rows))]
    return outputs


@pytest.mark.parametrize("sig", [sig for sig in CASES if _has_kernel(sig)], ids=name_of)
def test_references_agree_with_onnxruntime(sig: OperatorSignature) -> None:
    """On random operands the reference gives what onnxruntime's kernel gives, to the precision of float32."""
    values = random_values(sig)
    expected = _defined(sig, values, run(sig, values))
    found = _defined(sig, values, _by_onnxruntime(sig, values))
    for ours, theirs in zip(expected, found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


_STANDARD = {"Attention": 25, "Swish": 24, "SwiGLU": 28, "GroupNormalization": 18}


@pytest.mark.parametrize("sig", [sig for sig in CASES if sig.type in _STANDARD], ids=name_of)
def test_references_agree_with_the_onnx_evaluator(sig: OperatorSignature) -> None:
    """The reference gives what ONNX's own evaluator gives at the newest operator set."""
    values = random_values(sig)
    made = evaluated(sig.type, values, dict(sig.attributes), len(sig.outputs), _STANDARD[sig.type])
    for ours, theirs in zip(run(sig, values), made, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_most_cases_are_compared() -> None:
    """What no outside source confirms is the listed rest."""
    alone = {_contrib(sig) for sig in CASES if not _has_kernel(sig) and sig.type not in _STANDARD}
    assert alone == {*_NO_KERNEL, *_NO_VARIANT}
