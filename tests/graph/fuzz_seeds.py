"""Valid models that fuzzing starts from: exported ones, CNNs of the onnx package, its operator tests, written ones."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper, numpy_helper

from tests.graph.models import DATA, LIGHT

MAX_EXPORTED_BYTES = 60_000
"""Larger files of tests/data are left out: their mutations would take most of the time and show nothing new."""
MAX_OPSET = 23
"""Operator tests are of the onnx package's newest operator set; this one is supported."""
MAX_OPERATOR_BYTES = 20_000
"""Limit for the operator tests, likewise."""

WRITTEN = {
    "perceptron": """
        agraph (float[batch, 8] x) => (float[batch, 4] y)
        <float[8, 16] w1, float[16] b1, float[16, 4] w2>
        { h = MatMul(x, w1) hb = Add(h, b1) r = Relu(hb) o = Gemm(r, w2) y = Softmax<axis = -1>(o) }""",
    "shapes": """
        agraph (float[batch, seq, 8] x, int64[batch, seq] ids) => (float[batch, seq, 8] y, float[u, v, w] z)
        <float[32, 8] table, int64[1] minus = {-1}, int64[1] eight = {8}, int64[1] zero = {0}, int64[1] one = {1},
         int64[1] two = {2}, int64 start = {0}, int64 step = {1}, int64[6] pads = {0, 1, 0, 0, 1, 0},
         int64[3] repeats = {1, 2, 1}>
        {
            s = Shape(x) n = Gather<axis = 0>(s, one) b = Slice(s, zero, one) t = Concat<axis = 0>(b, n, eight)
            e = Gather(table, ids) f = Reshape(e, t) g = Add(f, x) count = Squeeze(n, zero)
            p = Range(start, count, step) pe = Unsqueeze(p, zero) q = Gather(table, pe) r = Expand(q, t) y = Add(g, r)
            filled = ConstantOfShape<value = float[1] {2.0}>(t) m = Mul(filled, y) pd = Pad(m, pads)
            tl = Tile(pd, repeats) z = Slice(tl, zero, two, one)
        }""",
    "einsum": """
        agraph (float[batch, seq, 8] x) => (float[batch, seq, seq] y)
        <float[8, 2, 4] wq, float[8, 2, 4] wk>
        {
            q = Einsum<equation = "bsh,hnd->bnsd">(x, wq) k = Einsum<equation = "bsh,hnd->bnsd">(x, wk)
            a = Einsum<equation = "bnsd,bntd->bnst">(q, k) y = ReduceMean<keepdims = 0>(a, axes)
        }""",
    "branches": """
        agraph (float[batch, 4] x, int64 rate) => (float[batch, 4] y)
        <bool yes = {1}, float[4, 4] w>
        {
            y = If(yes) <
                then_branch = inner () => (float[batch, 4] a) {
                    a = If(yes) <
                        then_branch = deep () => (float[batch, 4] c) { c = MatMul(x, w) },
                        else_branch = deep2 () => (float[batch, 4] d) { d = Neg(x) }
                    >
                },
                else_branch = other () => (float[batch, 4] b) { b = Identity(x) }
            >
        }""",
    "strings": """
        agraph (float[batch, 4] x) => (float[batch, 4] y, string[2] t)
        <string[2] words = {"a", "b"}>
        { t = Identity(words) y = Relu(x) }""",
    "cnn": """
        agraph (float[batch, 3, 16, 16] x) => (float[batch, 10] y)
        <float[8, 3, 3, 3] w, float[8] s, float[8] o, float[8] mu, float[8] var, float[8, 10] v>
        {
            c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, w) n = BatchNormalization(c, s, o, mu, var)
            r = Relu(n) p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r) g = GlobalAveragePool(p)
            f = Flatten(g) y = MatMul(f, v)
        }""",
    "quantised": """
        agraph (float[batch, 8] x) => (float[batch, 4] y)
        <float sx = {0.1}, uint8 zx = {3}, int8[8, 4] wq, float[4] sw, int8[4] zw>
        {
            q = QuantizeLinear(x, sx, zx) d = DequantizeLinear(q, sx, zx) w = DequantizeLinear<axis = 1>(wq, sw, zw)
            y = MatMul(d, w)
        }""",
    "lookups": """
        agraph (float[batch, 6, 4] x, int64[batch, 2] at) => (float[batch, 2, 4] y, int64[batch, 1, 4] o)
        <int64[1] k = {2}, int64 depth = {5}, float[2] onoff = {0.0, 1.0}, int64[1] splits = {3}>
        {
            best, index = TopK<axis = 1>(x, k) h = OneHot(at, depth, onoff) r = ReduceMax<axes = [2], keepdims = 1>(h)
            u = Mul(best, r) a, b = Split<axis = 1>(x) c = Concat<axis = 1>(a, b) o = ArgMax<axis = 1>(c)
            y = Clip(u)
        }""",
    "sequence": """
        agraph (float[batch, 6] x) => (float[batch, 3] y)
        <int64 three = {3}, int64 zero = {0}>
        { s = SplitToSequence<axis = 1>(x, three) y = SequenceAt(s, zero) }""",
}
"""Graphs as ONNX text (opset 17)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """A valid model to start from."""

    name: str
    group: str
    """``exported``, ``operator`` or ``written``."""
    proto: onnx.ModelProto


def _exported() -> list[Seed]:
    paths = [path for path in sorted(DATA.glob("*.onnx")) if path.stat().st_size <= MAX_EXPORTED_BYTES]
    paths.extend(sorted(LIGHT.glob("*.onnx")))
    cases = sorted((DATA / "cases").rglob("*.onnx"))
    seeds = [_read(path, "exported") for path in paths]
    seeds.extend(_read(path, "written") for path in cases if path.stat().st_size <= MAX_EXPORTED_BYTES)
    return [seed for seed in seeds if seed is not None]


def _read(path: Path, group: str) -> Seed | None:
    """The model in a file, None where the file is one of the cases that hold no model."""
    try:
        return Seed(name=path.stem, group=group, proto=onnx.load(path, load_external_data=False))
    except Exception:
        return None


def _written() -> list[Seed]:
    seeds = []
    for name, body in WRITTEN.items():
        text = f'<ir_version: 8, opset_import: ["" : 17]>\n{body}'
        model = onnx.parser.parse_model(text)
        _store_declared(model)
        if name == "einsum":
            model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axes"))
            model.opset_import[0].version = 18
        seeds.append(Seed(name=name, group="written", proto=model))
    seeds.extend(Seed(name=name, group="written", proto=model) for name, model in _built().items())
    return seeds


def _store_declared(model: onnx.ModelProto) -> None:
    """Give the values that the text declares without a value zeros (text holds no large tensors)."""
    for value in model.graph.value_info:
        kind = value.type.tensor_type
        zeros = np.zeros([dim.dim_value for dim in kind.shape.dim], helper.tensor_dtype_to_np_dtype(kind.elem_type))
        model.graph.initializer.append(numpy_helper.from_array(zeros, value.name))
    del model.graph.value_info[:]


def _built() -> dict[str, onnx.ModelProto]:
    """What ONNX text cannot say: functions, loops, sparse and external tensors, gated recurrences."""
    return {"functions": _functions(), "loop": _loop(), "scan": _scan(), "stored": _stored(), "recurrent": _recurrent()}


def _tensor(name: str, shape: list[int | str], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _model(graph: onnx.GraphProto, opset: int = 17, **extra: Any) -> onnx.ModelProto:
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", opset)], **extra)


def _functions() -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    inner = helper.make_function(
        "local", "Twice", ["x"], ["y"], [helper.make_node("Add", ["x", "x"], ["y"])], opsets[:1]
    )
    outer = helper.make_function(
        "local",
        "Block",
        ["x", "w"],
        ["y"],
        [
            helper.make_node("MatMul", ["x", "w"], ["m"]),
            helper.make_node("Twice", ["m"], ["y"], domain="local"),
        ],
        opsets,
    )
    nodes = [
        helper.make_node("Block", ["x", "w"], ["h"], domain="local", name="first"),
        helper.make_node("Block", ["h", "w"], ["y"], domain="local", name="second"),
    ]
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    graph = helper.make_graph(nodes, "f", [_tensor("x", ["batch", 4])], [_tensor("y", ["batch", 4])], [weight])
    return helper.make_model(graph, ir_version=8, opset_imports=opsets, functions=[outer, inner])


def _loop() -> onnx.ModelProto:
    body = helper.make_graph(
        [helper.make_node("MatMul", ["state", "w"], ["next"]), helper.make_node("Identity", ["go"], ["again"])],
        "body",
        [_tensor("i", [], TensorProto.INT64), _tensor("go", [], TensorProto.BOOL), _tensor("state", ["batch", 4])],
        [_tensor("again", [], TensorProto.BOOL), _tensor("next", ["batch", 4])],
    )
    nodes = [helper.make_node("Loop", ["trips", "yes", "x"], ["y"], body=body)]
    stored = [
        numpy_helper.from_array(np.array(3), "trips"),
        numpy_helper.from_array(np.array(True), "yes"),
        numpy_helper.from_array(np.ones((4, 4), np.float32), "w"),
    ]
    return _model(helper.make_graph(nodes, "l", [_tensor("x", ["batch", 4])], [_tensor("y", ["batch", 4])], stored))


def _scan() -> onnx.ModelProto:
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "item"], ["t"]), helper.make_node("Identity", ["t"], ["out"])],
        "body",
        [_tensor("s", [4]), _tensor("item", [4])],
        [_tensor("t", [4]), _tensor("out", [4])],
    )
    nodes = [helper.make_node("Scan", ["initial", "x"], ["last", "y"], body=body, num_scan_inputs=1)]
    stored = [numpy_helper.from_array(np.zeros(4, np.float32), "initial")]
    return _model(helper.make_graph(nodes, "s", [_tensor("x", ["batch", 4])], [_tensor("y", ["batch", 4])], stored))


def external(tensor: TensorProto, **fields: object) -> TensorProto:
    """Mark a tensor as stored beside the model, with these entries."""
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in fields.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _stored() -> onnx.ModelProto:
    weight = external(TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 4]), location="w.bin", length=64)
    target = external(TensorProto(name="t", data_type=TensorProto.INT64, dims=[2]), location="t.bin", offset=0)
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("sp", TensorProto.FLOAT, [2], [1.0, 2.0]),
        helper.make_tensor("at", TensorProto.INT64, [2], [1, 5]),
        [4, 4],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Constant", [], ["c"], sparse_value=sparse),
        helper.make_node("MatMul", ["h", "sp"], ["g"]),
        helper.make_node("MatMul", ["g", "c"], ["k"]),
        helper.make_node("Reshape", ["k", "t"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "e",
        [_tensor("x", ["batch", 4])],
        [_tensor("y", ["batch", 4])],
        [weight, target],
        sparse_initializer=[sparse],
    )
    return _model(graph)


def _recurrent() -> onnx.ModelProto:
    stored = [
        numpy_helper.from_array(np.ones((1, 32, 4), np.float32), "w"),
        numpy_helper.from_array(np.ones((1, 32, 8), np.float32), "r"),
        numpy_helper.from_array(np.zeros((1, 64), np.float32), "b"),
    ]
    nodes = [helper.make_node("LSTM", ["x", "w", "r", "b"], ["y", "h", "c"], hidden_size=8)]
    shape: list[int | str] = ["seq", 1, "batch", 8]
    return _model(helper.make_graph(nodes, "r", [_tensor("x", ["seq", "batch", 4])], [_tensor("y", shape)], stored))


def _operator_tests() -> list[Seed]:
    """ONNX's own test of every operator; integer inputs become constants, later float inputs weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        cases = collect_testcases(None)
    seeds = []
    for case in sorted(cases, key=lambda case: case.name):
        if case.model is None or case.model.ByteSize() > MAX_OPERATOR_BYTES or not case.data_sets:
            continue
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        for entry in model.opset_import:
            if entry.domain == "":
                entry.version = min(entry.version, MAX_OPSET)
        _store_inputs(model, case.data_sets[0][0])
        seeds.append(Seed(name=case.name, group="operator", proto=model))
    return seeds


def _store_inputs(model: onnx.ModelProto, arrays: list) -> None:
    for index, (value, array) in enumerate(zip(list(model.graph.input), arrays, strict=False)):
        small = isinstance(array, np.ndarray) and array.nbytes <= 2048 and array.dtype != object
        if not small or (index == 0 and array.dtype.kind == "f"):
            continue
        try:
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
        except (TypeError, ValueError, KeyError):
            continue
        model.graph.input.remove(value)


def load_seeds(*, operator_tests: bool = True) -> dict[str, list[Seed]]:
    """Seeds by group.

    Args:
        operator_tests: also ONNX's operator tests (making them takes some seconds).
    """
    seeds = [*_exported(), *_written(), *(_operator_tests() if operator_tests else ())]
    groups: dict[str, list[Seed]] = {}
    for seed in seeds:
        groups.setdefault(seed.group, []).append(seed)
    return groups
