"""Small models that meant harm: each is one way in which a file can ask for more than it is worth, or lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

OPSET = 17
_FLOAT, _INT64, _BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def _value(name: str, shape: Sequence[int | str], kind: int = _FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _stored(name: str, content: object, dtype: type = np.int64) -> TensorProto:
    return numpy_helper.from_array(np.array(content, dtype), name)


def _model(
    nodes: Sequence[NodeProto],
    stored: Sequence[TensorProto] = (),
    *,
    inputs: Sequence[ValueInfoProto] = (_value("x", ["batch", 8]),),
    outputs: Sequence[str] = ("y",),
    opset: int = OPSET,
    domains: Sequence[str] = (),
    **extra: Any,
) -> bytes:
    results = [ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(list(nodes), "g", list(inputs), results, list(stored))
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, ir_version=8, opset_imports=imports, **extra).SerializeToString()


def _node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> NodeProto:
    return helper.make_node(kind, list(inputs), list(outputs), **attributes)


def _filled(sizes: object, then: Sequence[NodeProto] = ()) -> bytes:
    """A constant of the given shape, added to the input (or what ``then`` makes of it)."""
    nodes = [
        _node("ConstantOfShape", ["sizes"], ["c"]),
        *then,
        _node("Add", ["x", then[-1].output[0] if then else "c"], ["y"]),
    ]
    return _model(nodes, [_stored("sizes", sizes)])


# -- sizes -------------------------------------------------------------------------------------------------------


def _range_of_a_trillion() -> bytes:
    stored = [_stored("zero", 0), _stored("many", 2**40), _stored("one", 1)]
    return _model([_node("Range", ["zero", "many", "one"], ["r"]), _node("Reshape", ["x", "r"], ["y"])], stored)


def _huge_constant_decides() -> bytes:
    nodes = [
        _node("ConstantOfShape", ["sizes"], ["c"]),
        _node("ReduceSum", ["c"], ["s"], keepdims=0),
        _node("Cast", ["s"], ["t"], to=_INT64),
        _node("Expand", ["x", "t"], ["y"]),
    ]
    return _model(nodes, [_stored("sizes", [2**20, 2**20])])


def _tower(kind: str, levels: int) -> bytes:
    nodes = [_node("Constant", [], ["c0"], value_ints=[1, 2])]
    extra = {"axis": 0} if kind == "Concat" else {}
    nodes.extend(_node(kind, [f"c{level}", f"c{level}"], [f"c{level + 1}"], **extra) for level in range(levels))
    nodes.append(_node("ConstantOfShape", [f"c{levels}"], ["f"]))
    return _model([*nodes, _node("Add", ["x", "f"], ["y"])])


def _repeated_fetches() -> bytes:
    """A long chain of large constants, whose value decides a shape again and again."""
    nodes = [_node("ConstantOfShape", ["sizes"], ["c0"], value=_stored("v", [0]))]
    current = "x"
    for step in range(400):
        nodes.append(_node("Neg", [f"c{step}"], [f"c{step + 1}"]))
        nodes.append(_node("ReduceMax", [f"c{step + 1}"], [f"m{step}"], keepdims=0))
        nodes.append(_node("Add", [f"m{step}", "eight"], [f"t{step}"]))
        nodes.append(_node("Reshape", [current, f"t{step}"], [f"x{step}"]))
        current = f"x{step}"
    nodes.append(_node("Identity", [current], ["y"]))
    stored = [_stored("sizes", [100_000]), _stored("eight", [-1, 8])]
    return _model(nodes, stored)


def _integer_product() -> bytes:
    nodes = [
        _node("ConstantOfShape", ["sizes"], ["c"], value=_stored("v", [1])),
        _node("MatMul", ["c", "c"], ["d"]),
        _node("MatMul", ["d", "c"], ["e"]),
        _node("ReduceMax", ["e"], ["m"], keepdims=0),
        _node("Expand", ["x", "m"], ["y"]),
    ]
    return _model(nodes, [_stored("sizes", [3000, 3000])])


def _reference_pads() -> bytes:
    """One constant element, padded and pooled to one element again."""
    pads = [2**16] * 4
    pool = _node("MaxPool", ["c"], ["p"], kernel_shape=[2**17 + 1] * 2, pads=pads)
    return _filled([1, 1, 1, 1], [pool])


def _many_results() -> bytes:
    return _model([_node("Split", ["x"], ["y"], num_outputs=2**31)], opset=18)


def _many_operands() -> bytes:
    return _model([_node("Concat", ["x"] * 10_000, ["y"], axis=0)])


def _many_items() -> bytes:
    stored = [_stored("sizes", [2**40]), _stored("zero", 0)]
    nodes = [
        _node("Expand", ["x0", "sizes"], ["e"]),
        _node("SplitToSequence", ["e"], ["s"]),
        _node("SequenceAt", ["s", "zero"], ["y"]),
    ]
    return _model(nodes, stored, inputs=[_value("x0", [1])])


def _einsum() -> bytes:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return _model(
        [_node("Einsum", ["x0"] * 26, ["y"], equation=",".join(letters) + "->" + letters)],
        inputs=[_value("x0", [1000])],
    )


def _einsum_of_constants() -> bytes:
    letters = "abcdefgh"
    nodes = [_node("Einsum", ["c"] * 8, ["e"], equation=",".join(letters) + "->a"), _node("Add", ["x", "e"], ["y"])]
    return _model(nodes, [_stored("c", [1.0] * 64, np.float32)])


def _mel_bank() -> bytes:
    names = ["a", "b", "c", "d", "e"]
    stored = [_stored(name, 2**30) for name in names[:3]]
    stored.extend(_stored(name, 2**30, np.float32) for name in names[3:])
    return _model([_node("MelWeightMatrix", names, ["m"]), _node("MatMul", ["x", "m"], ["y"])], stored)


def _window() -> bytes:
    return _model([_node("HannWindow", ["n"], ["w"]), _node("Mul", ["x", "w"], ["y"])], [_stored("n", 2**40)])


def _mean_of_nothing() -> bytes:
    return _filled([0, 8], [_node("ReduceMean", ["c"], ["m"], axes=[0])])


def _constant_for_nobody() -> bytes:
    return _model([_node("Constant", [], [], value_int=1), _node("Relu", ["x"], ["y"])])


def _rank() -> bytes:
    return _filled([1] * 100_000)


def _sparse(dims: Sequence[int], indices: Sequence[int]) -> bytes:
    values = helper.make_tensor("w", _FLOAT, [len(indices)], [1.0] * len(indices))
    sparse = helper.make_sparse_tensor(values, _stored("at", indices), dims)
    nodes = [
        _node("Constant", [], ["c"], sparse_value=sparse),
        _node("ReduceMax", ["c"], ["m"]),
        _node("Add", ["x", "m"], ["y"]),
    ]
    return _model(nodes)


def _activation_tower() -> bytes:
    """Sizes beyond 64 bits."""
    nodes = [_node("Concat", [f"x{step}" if step else "x"] * 2, [f"x{step + 1}"], axis=1) for step in range(90)]
    return _model([*nodes, _node("Relu", ["x90"], ["y"])])


# -- lies --------------------------------------------------------------------------------------------------------


def _weight(**changes: Any) -> bytes:
    tensor = _stored("w", np.ones((8, 8)), np.float32)
    for name, value in changes.items():
        if name == "dims":
            del tensor.dims[:]
            tensor.dims.extend(value)  # type: ignore[arg-type]
        else:
            setattr(tensor, name, value)
    return _model([_node("MatMul", ["x", "w"], ["y"])], [tensor])


def _target(**changes: Any) -> bytes:
    tensor = _stored("t", [-1, 4])
    for name, value in changes.items():
        if name == "dims":
            del tensor.dims[:]
            tensor.dims.extend(value)  # type: ignore[arg-type]
        else:
            setattr(tensor, name, value)
    return _model([_node("Reshape", ["x", "t"], ["y"])], [tensor])


def _external(location: str, offset: str = "0", length: str = "16") -> bytes:
    tensor = TensorProto(name="t", data_type=_INT64, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=value)
    return _model([_node("Reshape", ["x", "t"], ["y"])], [tensor])


def _axes_twice() -> bytes:
    return _model([_node("Unsqueeze", ["x", "axes"], ["y"])], [_stored("axes", [0, 0])])


def _scan_of_nothing(count: int) -> bytes:
    body = helper.make_graph([_node("Identity", ["s"], ["t"])], "b", [_value("s", [8])], [_value("t", [8])])
    return _model([_node("Scan", ["x"], ["y"], body=body, num_scan_inputs=count)])


def _scatter_misfit() -> bytes:
    return _model([_node("ScatterND", ["x", "at", "x"], ["y"])], [_stored("at", [1])])


def _integer_bias() -> bytes:
    stored = [_stored("w", np.ones((8, 8)), np.float32), _stored("b", np.ones(8), np.int8)]
    return _model([_node("Gemm", ["x", "w", "b"], ["y"])], stored)


def _two_operands_of_one() -> bytes:
    return _model([_node("Relu", ["x", "w"], ["y"])], [_stored("w", np.ones((8, 8)), np.float32)])


# -- names -------------------------------------------------------------------------------------------------------


def _name(name: str) -> bytes:
    return _model([_node("Reshape", ["x", "t"], ["y"], name=name)], [_stored("t", [7, -1, 0, -5])])


def _equal_names() -> bytes:
    return _model([_node("Relu", ["x"], ["x"])], outputs=["x"])


def _symbol(text: str) -> bytes:
    return _model([_node("Relu", ["x"], ["y"])], inputs=[_value("x", [text, f"{text}*2"])])


# -- structure ---------------------------------------------------------------------------------------------------


def _cycle() -> bytes:
    return _model([_node("Add", ["x", "b"], ["a"]), _node("Relu", ["a"], ["b"]), _node("Relu", ["b"], ["y"])])


def _long_chain() -> bytes:
    nodes = [_node("Relu", [f"x{step}" if step else "x"], [f"x{step + 1}"]) for step in range(5000)]
    return _model([*nodes, _node("Relu", ["x5000"], ["y"])])


def _reversed_chain() -> bytes:
    nodes = [_node("Relu", [f"x{step}" if step else "x"], [f"x{step + 1}"]) for step in range(5000)]
    return _model([_node("Relu", ["x5000"], ["y"]), *reversed(nodes)])


def _nested_branches(levels: int) -> bytes:
    node = _node("Relu", ["x"], ["r"])
    for level in range(levels):
        result = ValueInfoProto(name=node.output[0])
        graph = helper.make_graph([node], f"g{level}", [], [result])
        node = _node("If", ["yes"], [f"r{level}"], then_branch=graph, else_branch=graph if level < 4 else _empty())
    node.output[0] = "y"
    return _model([node], [helper.make_tensor("yes", _BOOL, [], [True])])


def _empty() -> GraphProto:
    return helper.make_graph([], "e", [], [ValueInfoProto(name="x")])


def _nested_loops(levels: int, *, rounds: int | None) -> bytes:
    """Loops in loops; without rounds the number depends on the data."""
    inner = [_node("Relu", ["s0"], ["t0"])]
    for level in range(levels):
        ends = [
            [_value(f"i{level}", [], _INT64), _value(f"c{level}", [], _BOOL), _value(f"s{level}", ["batch", 8])],
            [_value(f"d{level}", [], _BOOL), _value(f"t{level}", ["batch", 8])],
        ]
        nodes = [*inner, _node("Identity", [f"c{level}"], [f"d{level}"])]
        body = helper.make_graph(nodes, f"b{level}", *ends)
        last = level == levels - 1
        source, result = ("x", "y") if last else (f"s{level + 1}", f"t{level + 1}")
        inner = [_node("Loop", ["rounds", "", source], [result], body=body)]
    if rounds is not None:
        return _model(inner, [_stored("rounds", rounds)])
    return _model(inner, inputs=[_value("x", ["batch", 8]), _value("rounds", [], _INT64)])


def _many_branches() -> bytes:
    nodes: list[NodeProto] = []
    for step in range(600):
        graph = helper.make_graph(
            [_node("Relu", [f"x{step}" if step else "x"], [f"r{step}"])], "g", [], [ValueInfoProto(name=f"r{step}")]
        )
        nodes.append(_node("If", ["yes"], [f"x{step + 1}"], then_branch=graph, else_branch=graph))
    nodes.append(_node("Relu", ["x600"], ["y"]))
    return _model(nodes, [helper.make_tensor("yes", _BOOL, [], [True])])


def _functions(calls: int, count: int, *, ring: bool = False) -> bytes:
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid("f", 1)]
    functions = []
    for level in range(count):
        last = level == count - 1 and not ring
        names = ["a", *(f"m{call}" for call in range(calls - 1)), "b"]
        callee = "Neg" if last else f"F{(level + 1) % count}"
        nodes = [
            helper.make_node(callee, [source], [result], domain="" if last else "f")
            for source, result in itertools.pairwise(names)
        ]
        functions.append(helper.make_function("f", f"F{level}", ["a"], ["b"], nodes, imports))
    node = helper.make_node("F0", ["x"], ["y"], domain="f")
    return _model([node], domains=["f"], functions=functions)


def _deep_bytes() -> bytes:
    """Graphs in attributes in graphs, far deeper than protobuf reads."""
    data = b""
    for _ in range(2000):
        for field in (0x32, 0x2A, 0x0A):  # AttributeProto.g, NodeProto.attribute, GraphProto.node
            length, size = len(data), b""
            while length > 127:
                size += bytes((length & 127 | 128,))
                length >>= 7
            data = bytes((field,)) + size + bytes((length,)) + data
    model = onnx.ModelProto(ir_version=8)
    length, size = len(data), b""
    while length > 127:
        size += bytes((length & 127 | 128,))
        length >>= 7
    return model.SerializeToString() + bytes((0x3A,)) + size + bytes((length,)) + data


def _native_crash() -> bytes:
    """onnx 1.23's shape inference reads ``rho[0]`` without looking whether it is there."""
    node = helper.make_node("SVMRegressor", ["x"], ["s"], domain="ai.onnx.ml", n_supports=2**53 + 1)
    for name in ("kernel_params", "rho"):
        node.attribute.append(AttributeProto(name=name, type=AttributeProto.FLOATS))
    return _model([node, _node("Relu", ["s"], ["y"])], domains=["ai.onnx.ml"])


def _slow_pattern() -> bytes:
    texts = helper.make_tensor("texts", TensorProto.STRING, [1], [b"a" * 40 + b"!"])
    nodes = [
        _node("RegexFullMatch", ["texts"], ["m"], pattern="(a+)+"),
        _node("Cast", ["m"], ["c"], to=_FLOAT),
        _node("Add", ["x", "c"], ["y"]),
    ]
    return _model(nodes, [texts], opset=20)


MODELS: dict[str, Callable[[], bytes]] = {
    "a range of 2^40 numbers decides a shape": _range_of_a_trillion,
    "a constant of 2^40 elements decides a shape": _huge_constant_decides,
    "a constant of 2^40 elements is added": lambda: _filled([2**20, 2**20]),
    "a constant of a negative size": lambda: _filled([-1, 8]),
    "a constant of 100,000 dims": _rank,
    "the mean of no elements": _mean_of_nothing,
    "a constant without a name": _constant_for_nobody,
    "constants joined to themselves 60 times": lambda: _tower("Concat", 60),
    "integers multiplied until they overflow": lambda: _tower("Mul", 70),
    "a long chain of large constants computed 400 times": _repeated_fetches,
    "products of large integer matrices": _integer_product,
    "a constant padded to 2^34 elements inside a pool": _reference_pads,
    "a split into 2^31 parts": _many_results,
    "10,000 operands": _many_operands,
    "a sequence of 2^40 items": _many_items,
    "an Einsum of 1000^26 elements": _einsum,
    "an Einsum of constants with 64^8 products": _einsum_of_constants,
    "a filter bank of 2^59 numbers": _mel_bank,
    "a window of 2^40 numbers": _window,
    "a sparse constant of 2^40 elements": lambda: _sparse([2**20, 2**20], [1, 2]),
    "a sparse constant of 2^31 elements": lambda: _sparse([2**31], [1, 2]),
    "a sparse index outside the shape": lambda: _sparse([4, 4], [1, 16]),
    "sizes beyond 64 bits": _activation_tower,
    "fewer bytes than the weight's shape needs": lambda: _weight(raw_data=b"abc"),
    "a weight of a negative size": lambda: _weight(dims=[8, -8]),
    "a weight of 2^124 elements": lambda: _weight(dims=[2**62, 2**62], raw_data=b""),
    "an unknown element type": lambda: _weight(data_type=99),
    "fewer bytes than a target's shape needs": lambda: _target(raw_data=b"12345"),
    "more bytes than a target's shape needs": lambda: _target(dims=[1]),
    "a target of texts": lambda: _target(data_type=TensorProto.STRING),
    "external data above the folder": lambda: _external("../../../etc/passwd"),
    "external data at an absolute path": lambda: _external("/etc/passwd"),
    "external data at a path with a zero byte": lambda: _external("w\x00.bin"),
    "external data at a negative offset": lambda: _external("w.bin", offset="-8"),
    "external data at an offset that is no number": lambda: _external("w.bin", offset="one"),
    "external data that is longer than the shape": lambda: _external("w.bin", length=str(2**62)),
    "the folder as external data": lambda: _external("."),
    "the same dim added twice": _axes_twice,
    "a Scan over -2^62 operands": lambda: _scan_of_nothing(-(2**62)),
    "a Scan over more operands than there are": lambda: _scan_of_nothing(9),
    "a ScatterND whose operands do not fit": _scatter_misfit,
    "integers added to a sum of floats": _integer_bias,
    "a Relu of two operands": _two_operands_of_one,
    "a name with a line end": lambda: _name("a\nb"),
    "a name with a terminal escape": lambda: _name("\x1b[2J\x1b[31m"),
    "a name that turns text around": lambda: _name("\u202egnihtyna"),
    "a name of a million letters": lambda: _name("n" * 1_000_000),
    "a value that is its own operand": _equal_names,
    "a symbol of a thousand parentheses": lambda: _symbol("(" * 1000 + "n" + ")" * 1000),
    "a symbol of many products": lambda: _symbol("*".join(["999999999"] * 19)),
    "a cycle": _cycle,
    "a chain of 5000 nodes": _long_chain,
    "a chain of 5000 nodes, last one first": _reversed_chain,
    "20 branches in each other": lambda: _nested_branches(20),
    "20 loops of 100 rounds in each other": lambda: _nested_loops(20, rounds=100),
    "20 loops of unknown length in each other": lambda: _nested_loops(20, rounds=None),
    "600 branches in a row": _many_branches,
    "a function that calls itself": lambda: _functions(1, 1, ring=True),
    "a ring of functions": lambda: _functions(1, 5, ring=True),
    "functions that call the next twice, 40 deep": lambda: _functions(2, 40),
    "functions that call the next ten times, 4 deep": lambda: _functions(10, 4),
    "messages nested 6000 deep": _deep_bytes,
    "an attribute that crashes onnx's own inference": _native_crash,
    "a pattern of exponential time": _slow_pattern,
}
"""How to make each model; the name says what is wrong with it."""
