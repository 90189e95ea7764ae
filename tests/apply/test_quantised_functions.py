"""Quantised operators agree with onnxruntime: whole graphs are bound, run here in one process, and run there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tap_planner.apply.reference import run_reference
from tap_planner.apply.weights import StoredWeights
from tap_planner.graph import BindOptions, WeightReader, bind
from tests.graph.models import saved

_MS = "com.microsoft"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One node: its operands are the graph's input ``x`` (the first array) and initializers."""

    type: str
    operands: tuple[Any, ...]
    data: int = 0
    """Which operand is the graph's input."""
    domain: str = ""
    opset: int = 21
    attributes: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    """How many steps of the result's quantisation runtime and definition may differ by (it uses tables and int8)."""
    tolerance: float = 1e-5


def _draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).uniform(-1.5, 1.5, shape).astype(np.float32)


def _ints(dtype: str, low: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape) + high).integers(low, high, shape).astype(dtype)


_S, _S2 = np.float32(0.031), np.float32(0.047)
_P, _N = np.uint8(128), np.int8(-3)
_A = _ints("uint8", 90, 160, 4, 6)
_B = _ints("int8", -30, 30, 6, 8)
_IMAGE = _ints("uint8", 90, 160, 2, 6, 5, 5)
_COLUMNS = (np.abs(_draw(8)) * 0.01 + 0.01, _ints("int8", -3, 3, 8))
_SAME = {"pads": [1, 1, 1, 1]}
_PACKED = {"K": 64, "N": 6, "bits": 4, "block_size": 16}
_BYTES = _ints("uint8", 0, 256, 6, 4, 8)
_BLOCKS = np.abs(_draw(24)) * 0.1 + 0.01


def _ms(type: str, *operands: Any, steps: int = 0, tolerance: float = 1e-5, data: int = 0, **attributes: Any) -> _Case:
    return _Case(
        type=type,
        operands=operands,
        domain=_MS,
        attributes=attributes,
        steps=steps,
        tolerance=tolerance,
        data=data,
    )


_X = _draw(3, 8)
_CASES = (
    _Case(type="QuantizeLinear", operands=(_X, _S, _P), opset=10),
    _Case(type="QuantizeLinear", operands=(_X, _S), opset=13),
    _Case(type="QuantizeLinear", operands=(_X, _COLUMNS[0], _COLUMNS[1]), opset=13, attributes={"axis": -1}),
    _Case(type="QuantizeLinear", operands=(_X, np.float32(0.2), np.array(1, ml_dtypes.int4))),
    _Case(type="QuantizeLinear", operands=(_X, np.float32(0.2)), attributes={"output_dtype": TensorProto.INT16}),
    _Case(
        type="QuantizeLinear", operands=(_X, np.abs(_draw(3, 2)) + 0.1, None), attributes={"axis": 1, "block_size": 4}
    ),
    _Case(type="DequantizeLinear", operands=(_A, _S, _P), opset=10),
    _Case(type="DequantizeLinear", operands=(_B, *_COLUMNS), opset=13, attributes={"axis": 1}),
    _Case(type="DequantizeLinear", operands=(_ints("int32", -900, 900, 4, 6), _S), opset=13),
    _Case(
        type="DequantizeLinear",
        operands=(_ints("int8", -8, 8, 8, 5).astype(ml_dtypes.int4), np.abs(_draw(2, 5))),
        attributes={"axis": 0, "block_size": 4},
    ),
    _Case(type="DynamicQuantizeLinear", operands=(_X,)),
    _Case(type="MatMulInteger", operands=(_A, _B, _P, _COLUMNS[1])),
    _Case(type="MatMulInteger", operands=(_A, _B)),
    _Case(type="ConvInteger", operands=(_IMAGE, _ints("uint8", 90, 160, 4, 6, 3, 3), _P, _P), attributes=_SAME),
    _Case(type="QLinearMatMul", operands=(_A, _S, _P, _B, *_COLUMNS, _S2, _P), steps=1),
    _Case(
        type="QLinearConv",
        operands=(
            *(_IMAGE, _S, _P, _ints("int8", -30, 30, 4, 6, 3, 3), np.abs(_draw(4)) * 0.01 + 0.01),
            *(np.zeros(4, np.int8), _S2, _P, _ints("int32", -500, 500, 4)),
        ),
        attributes={**_SAME, "strides": [2, 1]},
        steps=1,
    ),
    _ms("QuantizeLinear", _X, _S, np.uint16(30000)),
    _ms("DequantizeLinear", _ints("int16", -900, 900, 4, 6), _S, np.int16(5)),
    _ms("QLinearAdd", _A, _S, _P, _ints("uint8", 90, 160, 6), _S2, _P, _S, _P, steps=1),
    _ms("QLinearMul", _A, _S, _P, _ints("uint8", 90, 160, 4, 1), _S2, _P, _S, _P, steps=1),
    _ms("QLinearSigmoid", _A, _S, _P, np.float32(1 / 256), np.uint8(0), steps=1),
    _ms("QLinearLeakyRelu", _A, _S, _P, _S2, _P, alpha=0.1, steps=1),
    _ms("QLinearSoftmax", _A, _S, _P, np.float32(1 / 256), np.uint8(0), axis=-1, opset=13, steps=1),
    _ms("QLinearAveragePool", _IMAGE, _S, _P, _S2, _P, kernel_shape=[2, 2], strides=[1, 2], steps=1),
    _ms("QLinearGlobalAveragePool", _IMAGE, _S, _P, _S2, _P, channels_last=0, steps=1),
    _ms("QLinearConcat", _S2, _P, _A, _S, _P, _ints("uint8", 90, 160, 4, 3), _S2, _P, data=2, axis=1, steps=1),
    _ms("QGemm", _A, _S, _P, _B, *_COLUMNS, None, None, None, alpha=0.5),
    _ms("QGemm", _A, _S, _P, _B, *_COLUMNS, _ints("int32", -500, 500, 8), _S2, _P, steps=1),
    _ms("MatMulIntegerToFloat", _A, _B, _S, _COLUMNS[0], _P, _COLUMNS[1], _draw(8)),
    _ms("DynamicQuantizeMatMul", _draw(4, 6), _B, *_COLUMNS, _draw(8), tolerance=2e-3),
    _ms("MatMulNBits", _draw(3, 64), _BYTES, _BLOCKS, **_PACKED),
    _ms("MatMulNBits", _draw(3, 64), _BYTES, _BLOCKS, _ints("uint8", 0, 256, 12), None, _draw(6), **_PACKED),
    _ms("MatMulNBits", _draw(3, 40), _BYTES[:, :3], _BLOCKS[:18], _ints("uint8", 0, 256, 12), **{**_PACKED, "K": 40}),
    _ms("MatMulNBits", _draw(3, 64), _ints("uint8", 0, 256, 6, 4, 16), _BLOCKS, **{**_PACKED, "bits": 8}),
    _ms(
        "GatherBlockQuantized",
        _ints("uint8", 0, 256, 10, 16),
        _ints("int64", 0, 10, 4, 3),
        np.abs(_draw(10, 2)),
        data=1,
        gather_axis=0,
        quantize_axis=1,
        block_size=16,
        bits=4,
    ),
    _ms(
        "GatherBlockQuantized",
        _ints("int8", -8, 8, 10, 32).astype(ml_dtypes.int4),
        _ints("int64", 0, 10, 4),
        np.abs(_draw(10, 2)),
        _ints("int8", -8, 8, 10, 2).astype(ml_dtypes.int4),
        data=1,
        gather_axis=0,
        quantize_axis=1,
        block_size=16,
    ),
)


def _model(case: _Case) -> onnx.ModelProto:
    names = [
        "" if value is None else ("x" if index == case.data else f"w{index}")
        for index, value in enumerate(case.operands)
    ]
    outputs = [f"y{index}" for index in range(3 if case.type.startswith("Dynamic") and not case.domain else 1)]
    node = helper.make_node(case.type, names, outputs, domain=case.domain, **case.attributes)
    fed = np.asarray(case.operands[case.data])
    dtype = helper.np_dtype_to_tensor_dtype(fed.dtype)
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", dtype, fed.shape)],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [
            numpy_helper.from_array(np.asarray(value), name)
            for value, name in zip(case.operands, names, strict=True)
            if name not in ("", "x")
        ],
    )
    imports = [helper.make_opsetid("", case.opset), helper.make_opsetid(_MS, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _run_there(case: _Case, model: onnx.ModelProto) -> list[np.ndarray]:
    """onnxruntime; what its session cannot return (int4) by ONNX's reference evaluator."""
    fed = np.asarray(case.operands[case.data])
    packed = any(value is not None and np.asarray(value).dtype == ml_dtypes.int4 for value in case.operands)
    if not case.domain and packed:
        return [np.asarray(found) for found in ReferenceEvaluator(model).run(None, {"x": fed})]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(found) for found in session.run(None, {"x": fed})]


def _name(case: _Case) -> str:
    return f"{case.domain[4:]}{case.type}-{'-'.join(str(np.shape(value)) for value in case.operands[:3])}"


@pytest.mark.parametrize("case", _CASES, ids=_name)
def test_agrees_with_onnxruntime(case: _Case, tmp_path: Path) -> None:
    """Bound from a file and run in float64, results are the runtime's: floats to rounding, integers to a step."""
    model = _model(case)
    expected = _run_there(case, model)
    file = saved(tmp_path, model)
    graph = bind(file, BindOptions())
    found = run_reference(graph, StoredWeights(WeightReader(file)), {"x": np.asarray(case.operands[case.data])})
    for name, reference in zip(graph.output_names, expected, strict=True):
        made = found.outputs[name].astype(np.float64)
        assert made.shape == reference.shape
        reference = reference.astype(np.float64)
        assert np.ptp(reference) > 0 or reference.size == 1, "the case tests nothing"
        limit = case.steps if case.steps else case.tolerance * max(1.0, float(np.abs(reference).max()))
        assert np.abs(made - reference).max() <= limit
        if case.steps:
            assert np.mean(made != reference) < 0.1, "a step's difference must be rare"


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("float8e4m3fn", ml_dtypes.float8_e4m3fn), ("float8e5m2", ml_dtypes.float8_e5m2), ("int4", ml_dtypes.int4)],
)
def test_small_types_round_trip(dtype: str, kind: type, tmp_path: Path) -> None:
    """Quantised to a type of 8 or 4 bits and restored: as ONNX's reference evaluator does it, saturation included."""
    data = np.concatenate([_draw(40).reshape(-1), np.array([700.0, -900.0, 0.0, 1e-6], np.float32)])
    zero = numpy_helper.from_array(np.zeros((), kind), "z")
    scale = numpy_helper.from_array(np.array(0.3, np.float32), "s")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "pair",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, data.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, data.shape)],
        [scale, zero],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": data})
    file = saved(tmp_path, model)
    bound = bind(file, BindOptions())
    assert bound.tensors[bound.operators[0].outputs[0]].type.dtype == dtype
    found = run_reference(bound, StoredWeights(WeightReader(file)), {"x": data})
    np.testing.assert_allclose(found.outputs["y"], np.asarray(expected, np.float64), rtol=1e-6, atol=1e-7)
