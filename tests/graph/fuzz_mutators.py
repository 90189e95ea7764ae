"""Structure-aware damage to ONNX models: each mutator changes a model in place, or says that it found nothing to change.

A mutation is a pure function of (seed models, seed number, index): the same three give the same bytes.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from tap_planner.operators import known_types
from tests.graph.fuzz_seeds import Seed, external

T = TypeVar("T")
Random = np.random.Generator
Mutator = Callable[[Random, onnx.ModelProto], bool]

BYTE_SHARE = 0.12
"""Share of the inputs that are damaged byte by byte."""
JOINED_SHARE = 0.08
"""Share of the models that get the nodes of another one behind them."""
GROUP_SHARES = {"exported": 0.2, "operator": 0.5, "written": 0.3}
EXTREME_INTS = (
    *(0, -1, 1, 2, 3, 4, 7, 16, -2, -5, 255, 1000, 65537, 2**20, -(2**20), 2**31 - 1, 2**31, -(2**31), 2**32 + 1),
    *(2**40, 2**53 + 1, 2**62, -(2**62), 2**63 - 1, -(2**63)),
)
EXTREME_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, -1e38, float("inf"), float("-inf"), float("nan"), 0.5)
ODD_NAMES = (
    *("", " ", "a b", "x\ny", "\x1b[31mred", "\u202egnp", "\ud7ff", "\U0001f600" * 5, "../../etc/passwd", "%s{0}$(id)"),
    *("n" * 5000, "__proto__", "labels", "loss", "batch", "'", '"', "\x00", "a__0", "a__unused_1", "x__batch"),
)
EQUATIONS = (
    *("ij,jk->ik", "i,j,k,l,m,n,o,p->ijklmnop", "...ij,...jk->...ik", "ii->i", "ij->", "->", "", "ij,jk", "iI,Ij->ij"),
    *("a" * 60 + "->a", ",".join(string.ascii_letters) + "->" + string.ascii_letters, "ij->ijj", "éé->é", "i j->zz", "..."),
)


FUSED_ATTRIBUTES = (
    *("num_heads", "kv_num_heads", "unidirectional", "hidden_size", "K", "N", "bits", "block_size", "do_rotary"),
    *("axis", "is_packed", "interleaved", "top_k", "k", "local_window_size", "transA", "transB", "group"),
)


def pick(rng: Random, items: Sequence[T]) -> T:
    """One of the items."""
    return items[int(rng.integers(len(items)))]


def _chance(rng: Random, share: float) -> bool:
    return bool(rng.random() < share)


# -- places in a model -------------------------------------------------------------------------------------------


def _graphs(model: onnx.ModelProto) -> list[onnx.GraphProto]:
    """The graph and all subgraphs."""
    found: list[onnx.GraphProto] = []
    pending = [model.graph]
    while pending:
        graph = pending.pop()
        found.append(graph)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    pending.append(attribute.g)
    return found


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    nodes = [node for graph in _graphs(model) for node in graph.node]
    nodes.extend(node for function in model.functions for node in function.node)
    return nodes


def _attributes(model: onnx.ModelProto) -> list[AttributeProto]:
    return [attribute for node in _nodes(model) for attribute in node.attribute]


def _tensors(model: onnx.ModelProto) -> list[TensorProto]:
    tensors = [tensor for graph in _graphs(model) for tensor in graph.initializer]
    tensors.extend(attribute.t for attribute in _attributes(model) if attribute.HasField("t"))
    return tensors


def _declared(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    return [value for graph in _graphs(model) for part in (graph.input, graph.output, graph.value_info) for value in part]


def _values(graph: onnx.GraphProto) -> list[str]:
    """Names that a node could read."""
    names = [value.name for value in graph.input]
    names.extend(tensor.name for tensor in graph.initializer)
    names.extend(name for node in graph.node for name in node.output if name)
    return names or ["x"]


@cache
def _schemas() -> tuple[onnx.defs.OpSchema, ...]:
    return tuple(sorted(onnx.defs.get_all_schemas(), key=lambda schema: (schema.domain, schema.name)))


def _text(rng: Random) -> str:
    letters = string.ascii_letters + "_-. é0123"
    return "".join(pick(rng, letters) for _ in range(int(rng.integers(0, 9))))


def _integer(rng: Random) -> int:
    if _chance(rng, 0.3):
        return int(rng.integers(-4, 12))
    return pick(rng, EXTREME_INTS)


# -- nodes -------------------------------------------------------------------------------------------------------


def change_operator(rng: Random, model: onnx.ModelProto) -> bool:
    """Another operator type or domain."""
    nodes = _nodes(model)
    if not nodes:
        return False
    node = pick(rng, nodes)
    schema = pick(rng, _schemas())
    node.op_type = pick(rng, (schema.name, schema.name, schema.name, pick(rng, nodes).op_type, _text(rng), ""))
    if _chance(rng, 0.2):
        node.domain = pick(rng, ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "nobody.knows", "\n"))
    return True


def change_operands(rng: Random, model: onnx.ModelProto) -> bool:
    """Swap, drop, double, rewire or empty what a node reads."""
    graph = pick(rng, _graphs(model))
    nodes = [node for node in graph.node if node.input]
    if not nodes:
        return False
    node = pick(rng, nodes)
    names, at = list(node.input), int(rng.integers(len(node.input)))
    way = int(rng.integers(7))
    if way == 0:
        rng.shuffle(names)
    elif way == 1:
        del names[at]
    elif way == 2:
        names.insert(at, names[at])
    elif way == 3:
        names[at] = pick(rng, _values(graph))
    elif way == 4:
        names[at] = pick(rng, ("", "nobody makes this"))
    elif way == 5:
        names.extend([names[at]] * pick(rng, (1, 3, 300)))
    else:
        names.append(pick(rng, _values(graph)))
    del node.input[:]
    node.input.extend(names)
    return True


def change_results(rng: Random, model: onnx.ModelProto) -> bool:
    """Drop, double, rename or add what a node makes."""
    graph = pick(rng, _graphs(model))
    nodes = [node for node in graph.node if node.output]
    if not nodes:
        return False
    node = pick(rng, nodes)
    names, at = list(node.output), int(rng.integers(len(node.output)))
    way = int(rng.integers(5))
    if way == 0:
        del names[at]
    elif way == 1:
        names.append(names[at])
    elif way == 2:
        names[at] = pick(rng, (*ODD_NAMES, pick(rng, _values(graph))))
    elif way == 3:
        names.extend(f"more_{index}" for index in range(pick(rng, (1, 2, 7, 2000))))
    else:
        names.insert(0, "")
    del node.output[:]
    node.output.extend(names)
    return True


def move_nodes(rng: Random, model: onnx.ModelProto) -> bool:
    """Delete, double, reorder nodes, or close a cycle."""
    graph = pick(rng, _graphs(model))
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node]
    if not nodes:
        return False
    at, way = int(rng.integers(len(nodes))), int(rng.integers(5))
    if way == 0:
        del nodes[at]
    elif way == 1:
        nodes.insert(int(rng.integers(len(nodes) + 1)), nodes[at])
    elif way == 2:
        rng.shuffle(nodes)  # type: ignore[arg-type]
    elif way == 3:
        nodes.insert(int(rng.integers(len(nodes))), nodes.pop(at))
    else:
        last = nodes[-1]
        if nodes[at].input and last.output:
            nodes[at].input[0] = last.output[0]
    del graph.node[:]
    graph.node.extend(nodes)
    return True


def insert_operator(rng: Random, model: onnx.ModelProto) -> bool:
    """Put an operator of ONNX's list between a value and its reader, with operands and attributes of a likely kind."""
    graph = pick(rng, _graphs(model))
    places = [index for index, node in enumerate(graph.node) if node.input]
    if not places:
        return False
    at, schema = pick(rng, places), pick(rng, _schemas())
    names = _values(graph)
    count = min(schema.min_input + int(rng.integers(0, 3)), schema.max_input, 8)
    source = graph.node[at].input[0]
    operands = [source, *(pick(rng, names) for _ in range(count - 1))][:count]
    results = ["fuzzed_value", *(f"fuzzed_{index}" for index in range(max(schema.min_output, 1) - 1))]
    node = helper.make_node(schema.name, operands, results, domain=schema.domain)
    for key, attribute in sorted(schema.attributes.items()):
        if attribute.required or _chance(rng, 0.3):
            _set_attribute(rng, node.attribute.add(name=key), int(attribute.type.value))
    _insert(graph, at, [node], source, "fuzzed_value")
    return True


def insert_fused(rng: Random, model: onnx.ModelProto) -> bool:
    """Put an operator of another domain between a value and its reader."""
    graph = pick(rng, _graphs(model))
    places = [index for index, node in enumerate(graph.node) if node.input]
    if not places:
        return False
    at = pick(rng, places)
    names, source = _values(graph), graph.node[at].input[0]
    domain, kind = pick(rng, [name for name in known_types() if "::" in name]).split("::")
    operands = [source, *(pick(rng, (source, "", pick(rng, names))) for _ in range(int(rng.integers(0, 7))))]
    node = helper.make_node(kind, operands, ["fuzzed_c"], domain=domain)
    for key in FUSED_ATTRIBUTES:
        if _chance(rng, 0.3):
            node.attribute.add(name=key, type=AttributeProto.INT).i = _integer(rng)
    if all(entry.domain != domain for entry in model.opset_import):
        model.opset_import.add(domain=domain, version=1)
    _insert(graph, at, [node], source, "fuzzed_c")
    return True


def join_models(others: Sequence[Seed]) -> Mutator:
    """A mutator that puts the nodes of another model behind values of this one."""

    def join(rng: Random, model: onnx.ModelProto) -> bool:
        other = pick(rng, others).proto
        graph, names = model.graph, _values(model.graph)
        renamed = {value.name: pick(rng, names) for value in other.graph.input}
        for node in other.graph.node[:40]:
            copy = graph.node.add()
            copy.CopyFrom(node)
            for part in (copy.input, copy.output):
                for index, name in enumerate(part):
                    if name:
                        part[index] = renamed.get(name, f"joined_{name}")
        for tensor in other.graph.initializer:
            graph.initializer.add().CopyFrom(tensor)
            graph.initializer[-1].name = f"joined_{tensor.name}"
        if graph.node and graph.node[-1].output:
            graph.output.add().name = graph.node[-1].output[0]
        return True

    return join


def _insert(graph: onnx.GraphProto, at: int, made: Sequence[onnx.NodeProto], old: str, new: str) -> None:
    nodes = list(graph.node)
    for index, name in enumerate(nodes[at].input):
        if name == old:
            nodes[at].input[index] = new
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (*nodes[:at], *made, *nodes[at:])]
    del graph.node[:]
    graph.node.extend(copies)


_STRUCTURAL: tuple[tuple[str, tuple[int, ...]], ...] = (
    *(("Reshape", (-1,)), ("Reshape", (0, -1)), ("Reshape", (2**32, 2**32)), ("Reshape", (-1, -1, 0))),
    *(("Expand", (2**40, 1)), ("Expand", (1, 1, 1)), ("Expand", (3, -1, 0)), ("Tile", (2**31,) * 2), ("Tile", (1, 0))),
    *(("Tile", (-3, 1)), ("Pad", (0, 2**40, 0, 0)), ("Pad", (-9, -9, -9, -9)), ("Unsqueeze", (0, 0)), ("Unsqueeze", (99,))),
    *(("Squeeze", (0,)), ("ReduceSum", (7,)), ("TopK", (2**33,)), ("TopK", (-1,)), ("Gather", (2**40, -(2**40)))),
    *(("Split", (-1, 2)), ("Split", (2**62, 2**62)), ("CumSum", (9,)), ("Trilu", (2**62,)), ("SplitToSequence", (0,))),
    *(("OneHot", (2**50,)), ("ConstantOfShape", (2**40, 2**10)), ("ConstantOfShape", (-1,)), ("Resize", (2**40,) * 2)),
    *(("SequenceAt", (5,)), ("Range", (2**62,)), ("Slice", (2**63 - 1,)), ("ScatterND", (1,)), ("GatherND", (5,))),
)


def insert_structure(rng: Random, model: onnx.ModelProto) -> bool:
    """Put an operator whose constant operand decides shapes between a value and its reader."""
    graph = model.graph
    places = [index for index, node in enumerate(graph.node) if node.input]
    if not places:
        return False
    at = pick(rng, places)
    kind, sizes = pick(rng, _STRUCTURAL)
    source = graph.node[at].input[0]
    graph.initializer.append(numpy_helper.from_array(np.array(sizes, np.int64), "fuzzed_sizes"))
    operands = {
        "ConstantOfShape": ["fuzzed_sizes"],
        "Range": ["fuzzed_zero", "fuzzed_many", "fuzzed_step"],
        "Slice": [source, "fuzzed_sizes", "fuzzed_sizes"],
        "Resize": [source, "", "", "fuzzed_sizes"],
        "OneHot": [source, "fuzzed_sizes", "fuzzed_sizes"],
        "ScatterND": [source, "fuzzed_sizes", source],
    }.get(kind, [source, "fuzzed_sizes"])
    if kind == "Range":
        bounds = (0, sizes[0], pick(rng, (1, -1, 0, 3)))
        for name, bound in zip(operands, bounds, strict=True):
            graph.initializer.append(numpy_helper.from_array(np.array(bound, np.int64), name))
    node = helper.make_node(kind, operands, ["fuzzed_value"])
    _insert(graph, at, [node], source, "fuzzed_value")
    return True


def insert_tower(rng: Random, model: onnx.ModelProto) -> bool:
    """A chain in which each node doubles the elements of a constant or of a value."""
    graph = model.graph
    places = [index for index, node in enumerate(graph.node) if node.input]
    if not places:
        return False
    at = pick(rng, places)
    source = graph.node[at].input[0]
    current = source
    nodes: list[onnx.NodeProto] = []
    if _chance(rng, 0.5):
        nodes.append(helper.make_node("Constant", [], ["tower"], value_ints=[1, 2, 3]))
        current = "tower"
    kind = pick(rng, ("Concat", "Concat", "Add", "Mul", "Pow", "BitShift"))
    for step in range(pick(rng, (3, 20, 40, 70))):
        extra = {"axis": 0} if kind == "Concat" else {"direction": "LEFT"} if kind == "BitShift" else {}
        nodes.append(helper.make_node(kind, [current, current], [f"tower_{step}"], **extra))
        current = f"tower_{step}"
    if _chance(rng, 0.4):
        nodes.append(helper.make_node("ConstantOfShape", [current], ["tower_filled"]))
        current = "tower_filled"
    _insert(graph, at, nodes, source, current)
    return True


def insert_einsum(rng: Random, model: onnx.ModelProto) -> bool:
    """An Einsum of odd equation over some values."""
    graph = pick(rng, _graphs(model))
    places = [index for index, node in enumerate(graph.node) if node.input]
    if not places:
        return False
    at, equation = pick(rng, places), pick(rng, EQUATIONS)
    source = graph.node[at].input[0]
    names = [source, *(pick(rng, (source, pick(rng, _values(graph)))) for _ in range(equation.count(",")))]
    _insert(graph, at, [helper.make_node("Einsum", names, ["fuzzed_e"], equation=equation)], source, "fuzzed_e")
    return True


def insert_sequence(rng: Random, model: onnx.ModelProto) -> bool:
    """Sequence, optional or string operators between a value and its reader."""
    graph = model.graph
    places = [index for index, node in enumerate(graph.node) if node.input]
    if not places:
        return False
    at = pick(rng, places)
    source = graph.node[at].input[0]
    index = helper.make_node("Constant", [], ["seq_at"], value_int=pick(rng, (0, 1, -1, 2**40)))
    make = pick(rng, ("SplitToSequence", "SequenceConstruct", "Optional", "SequenceEmpty", "StringNormalizer"))
    made = helper.make_node(make, [] if make == "SequenceEmpty" else [source], ["seq"])
    read = pick(
        rng,
        (
            helper.make_node("SequenceAt", ["seq", "seq_at"], ["seq_out"]),
            helper.make_node("ConcatFromSequence", ["seq"], ["seq_out"], axis=pick(rng, (0, 1, -9))),
            helper.make_node("SequenceLength", ["seq"], ["seq_out"]),
            helper.make_node("OptionalGetElement", ["seq"], ["seq_out"]),
            helper.make_node("Identity", ["seq"], ["seq_out"]),
        ),
    )
    _insert(graph, at, [index, made, read], source, "seq_out")
    return True


# -- attributes and declarations -----------------------------------------------------------------------------------


def _set_attribute(rng: Random, attribute: AttributeProto, kind: int) -> None:
    """Give an attribute a value of this kind."""
    name = attribute.name
    attribute.Clear()
    attribute.name, attribute.type = name, kind  # type: ignore[assignment]
    if kind == AttributeProto.INT:
        attribute.i = _integer(rng)
    elif kind == AttributeProto.INTS:
        attribute.ints.extend(_integer(rng) for _ in range(pick(rng, (0, 1, 2, 3, 4, 9, 3000))))
    elif kind == AttributeProto.FLOAT:
        attribute.f = pick(rng, EXTREME_FLOATS)
    elif kind == AttributeProto.FLOATS:
        attribute.floats.extend(pick(rng, EXTREME_FLOATS) for _ in range(int(rng.integers(0, 5))))
    elif kind == AttributeProto.STRING:
        attribute.s = pick(rng, (b"", b"SAME_UPPER", b"\xff\xfe", b"forward", b"linear", _text(rng).encode()))
    elif kind == AttributeProto.STRINGS:
        attribute.strings.extend([b"Tanh", b"\xff", _text(rng).encode()][: int(rng.integers(0, 4))])
    elif kind == AttributeProto.TENSOR:
        attribute.t.CopyFrom(numpy_helper.from_array(np.array([_integer(rng)], np.int64), "t"))
        damage_tensor(rng, attribute.t)


def change_attribute(rng: Random, model: onnx.ModelProto) -> bool:
    """Another value, another kind, a lying kind, a second copy, or none."""
    nodes = [node for node in _nodes(model) if node.attribute]
    if not nodes:
        return False
    node = pick(rng, nodes)
    at = int(rng.integers(len(node.attribute)))
    attribute, way = node.attribute[at], int(rng.integers(8))
    if way <= 3 and attribute.type == AttributeProto.INTS and attribute.ints:
        attribute.ints[int(rng.integers(len(attribute.ints)))] = _integer(rng)
    elif way <= 3 and attribute.type not in (AttributeProto.GRAPH, AttributeProto.TENSOR):
        _set_attribute(rng, attribute, attribute.type)
    elif way == 4:
        _set_attribute(rng, attribute, int(rng.integers(1, 9)))
    elif way == 5:
        attribute.type = int(rng.integers(0, 15))  # type: ignore[assignment]
    elif way == 6:
        del node.attribute[at]
    else:
        node.attribute.append(AttributeProto.FromString(attribute.SerializeToString()))
    return True


def add_attribute(rng: Random, model: onnx.ModelProto) -> bool:
    """An attribute that the operator's schema knows but the node lacks."""
    nodes = [node for node in _nodes(model) if onnx.defs.has(node.op_type)]
    if not nodes:
        return False
    node = pick(rng, nodes)
    schema = onnx.defs.get_schema(node.op_type)
    if not schema.attributes:
        return False
    key = pick(rng, sorted(schema.attributes))
    _set_attribute(rng, node.attribute.add(name=key), int(schema.attributes[key].type.value))
    return True


def change_dims(rng: Random, model: onnx.ModelProto) -> bool:
    """Dims of a declared value: numbers, symbols, more, fewer, none."""
    values = [value for value in _declared(model) if value.type.HasField("tensor_type")]
    if not values:
        return False
    tensor = pick(rng, values).type.tensor_type
    dims, way = tensor.shape.dim, int(rng.integers(6))
    if way <= 2 and dims:
        dims[int(rng.integers(len(dims)))].dim_value = _integer(rng)
    elif way == 3 and dims:
        dims[int(rng.integers(len(dims)))].dim_param = pick(rng, ("batch", "seq", "a+b", "?", "batch+-1", *ODD_NAMES))
    elif way == 4:
        for _ in range(pick(rng, (1, 2, 70))):
            dims.add().dim_value = pick(rng, (1, 2, _integer(rng)))
    elif dims and _chance(rng, 0.7):
        del dims[int(rng.integers(len(dims)))]
    else:
        tensor.ClearField("shape")
    return True


def change_type(rng: Random, model: onnx.ModelProto) -> bool:
    """Another element type, or no tensor at all."""
    values = _declared(model)
    if not values:
        return False
    value = pick(rng, values)
    if _chance(rng, 0.8):
        value.type.tensor_type.elem_type = int(rng.integers(0, 30))
    else:
        item = onnx.TypeProto.FromString(value.type.SerializeToString())
        value.type.Clear()
        if _chance(rng, 0.7):
            target = pick(rng, (value.type.sequence_type, value.type.optional_type))
            target.elem_type.CopyFrom(item)
    return True


# -- stored tensors --------------------------------------------------------------------------------------------------


def damage_tensor(rng: Random, tensor: TensorProto) -> None:
    """Lie about dims, element type, length or place."""
    way = int(rng.integers(9))
    if way == 0 and tensor.dims:
        tensor.dims[int(rng.integers(len(tensor.dims)))] = _integer(rng)
    elif way == 1:
        tensor.dims.extend(pick(rng, ((1,), (0,), (2**33, 2**33), (1,) * 70)))
    elif way == 2:
        tensor.data_type = int(rng.integers(0, 30))
    elif way == 3:
        tensor.raw_data = tensor.raw_data[: int(rng.integers(0, len(tensor.raw_data) + 1))]
    elif way == 4:
        tensor.raw_data = tensor.raw_data + rng.bytes(int(rng.integers(1, 9)))
    elif way == 5:
        tensor.float_data.extend([float("nan")] * 3)
        tensor.ClearField("raw_data")
    elif way == 6:
        tensor.string_data.extend([b"\xff", b"text"])
    elif way == 7:
        fields = {
            "location": pick(rng, ("w.bin", "../w.bin", "/etc/passwd", "", "a/../../b", "c:\\w", "sub/w", "w\x00", ".")),
            "offset": pick(rng, (0, -1, 2**62, "x", "1e3", "", "٣")),
            "length": pick(rng, (0, -1, 2**62, "x", 16)),
        }
        external(tensor, **{key: value for key, value in fields.items() if _chance(rng, 0.7)})
    else:
        del tensor.dims[:]


def change_tensor(rng: Random, model: onnx.ModelProto) -> bool:
    """Damage a stored tensor."""
    tensors = _tensors(model)
    if not tensors:
        return False
    damage_tensor(rng, pick(rng, tensors))
    return True


def change_integers(rng: Random, model: onnx.ModelProto) -> bool:
    """Other numbers in a stored integer tensor: targets, axes, counts."""
    tensors = [item for item in _tensors(model) if item.data_type == TensorProto.INT64 and len(item.dims) <= 2]
    tensors = [item for item in tensors if len(item.raw_data) >= 8 or item.int64_data]
    if not tensors:
        return False
    tensor = pick(rng, tensors)
    numbers = list(np.frombuffer(tensor.raw_data[: len(tensor.raw_data) // 8 * 8], np.int64)) or list(tensor.int64_data)
    for _ in range(int(rng.integers(1, 3))):
        numbers[int(rng.integers(len(numbers)))] = np.int64(_integer(rng))
    tensor.ClearField("int64_data")
    tensor.raw_data = np.array(numbers, np.int64).tobytes()
    return True


def make_sparse(rng: Random, model: onnx.ModelProto) -> bool:
    """Replace an initializer by a sparse one, whose indices may lie."""
    graph = pick(rng, _graphs(model))
    if not graph.initializer:
        return False
    at = int(rng.integers(len(graph.initializer)))
    old = graph.initializer[at]
    sparse = graph.sparse_initializer.add()
    count = int(rng.integers(0, 4))
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(count, np.float32), old.name))
    indices = np.array([pick(rng, (0, 1, 2, -1, 2**50)) for _ in range(count)], np.int64)
    sparse.indices.CopyFrom(numpy_helper.from_array(indices, "at"))
    sparse.dims.extend(old.dims if _chance(rng, 0.7) else (_integer(rng), 2))
    if _chance(rng, 0.8):
        del graph.initializer[at]
    return True


def change_name(rng: Random, model: onnx.ModelProto) -> bool:
    """An odd name, everywhere or in one place only; or two things of one name."""
    graph = pick(rng, _graphs(model))
    old = pick(rng, _values(graph))
    new = pick(rng, (*ODD_NAMES, pick(rng, _values(graph))))
    everywhere = _chance(rng, 0.6)
    for item in (*graph.input, *graph.output, *graph.initializer):
        if item.name == old and (everywhere or _chance(rng, 0.3)):
            item.name = new
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == old and (everywhere or _chance(rng, 0.3)):
                    names[index] = new
    if graph.node and _chance(rng, 0.3):
        pick(rng, graph.node).name = new
    return True


# -- whole models ------------------------------------------------------------------------------------------------------


def change_versions(rng: Random, model: onnx.ModelProto) -> bool:
    """Other operator sets and IR versions."""
    if model.opset_import and _chance(rng, 0.8):
        entry = pick(rng, model.opset_import)
        entry.version = pick(rng, (*range(1, 27), *range(7, 24), *EXTREME_INTS))
    elif _chance(rng, 0.5):
        model.ir_version = pick(rng, (*range(1, 12), *EXTREME_INTS))
    else:
        model.opset_import.add(domain=pick(rng, ("", "ai.onnx", "com.microsoft", "local")), version=_integer(rng))
    return True


def change_ends(rng: Random, model: onnx.ModelProto) -> bool:
    """Graph inputs and outputs: dropped, doubled, added, made of inner values."""
    graph = pick(rng, _graphs(model))
    part = pick(rng, (graph.input, graph.output))
    way = int(rng.integers(4))
    if way == 0 and part:
        del part[int(rng.integers(len(part)))]
    elif way == 1 and part:
        part.add().CopyFrom(pick(rng, list(part)))
    elif way == 2 and graph.output:
        pick(rng, graph.output).name = pick(rng, _values(graph))
    else:
        part.add().CopyFrom(helper.make_tensor_value_info(pick(rng, _values(graph)), TensorProto.FLOAT, [1]))
    return True


def nest(rng: Random, model: onnx.ModelProto) -> bool:
    """Put a node into branches of branches, or into the body of a loop."""
    graph = model.graph
    places = [index for index, node in enumerate(graph.node) if len(node.output) == 1 and node.output[0]]
    if not places:
        return False
    at = pick(rng, places)
    node = onnx.NodeProto.FromString(graph.node[at].SerializeToString())
    result = node.output[0]
    condition = helper.make_tensor("yes", TensorProto.BOOL, [], [_chance(rng, 0.5)])
    graph.initializer.append(condition)
    for level in range(pick(rng, (1, 1, 2, 5, 20))):
        name = f"{result}_{level}" if _chance(rng, 0.7) else result
        inner = onnx.NodeProto.FromString(node.SerializeToString())
        inner.output[0] = name
        value = onnx.ValueInfoProto(name=name)
        bodies = [helper.make_graph([inner], f"g{level}", [], [value]) for _ in range(2)]
        if level < 3 and _chance(rng, 0.2):
            node = helper.make_node("Loop", ["", "yes"], [result], body=bodies[0])
        elif level > 3:
            other = helper.make_graph([], "h", [], [value])
            node = helper.make_node("If", ["yes"], [result], then_branch=bodies[0], else_branch=other)
        else:
            node = helper.make_node("If", ["yes"], [result], then_branch=bodies[0], else_branch=bodies[1])
    graph.node[at].CopyFrom(node)
    return True


def add_functions(rng: Random, model: onnx.ModelProto) -> bool:
    """Local functions: one that calls itself, a ring, or a tree whose inlining doubles at each level."""
    graph = model.graph
    places = [index for index, node in enumerate(graph.node) if node.input]
    if not places:
        return False
    at = pick(rng, places)
    count = pick(rng, (1, 2, 5, 12, 30))
    way = pick(rng, ("ring", "tree", "chain"))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("bomb", 1)]
    for level in range(count):
        following = (level + 1) % count if way == "ring" else level + 1
        last = way != "ring" and following == count
        nodes = [helper.make_node("Neg" if last else f"F{following}", ["x"], ["m"], domain="" if last else "bomb")]
        calls = 2 if way == "tree" else 1
        if calls == 2 and not last:
            nodes.append(helper.make_node(f"F{following}", ["m"], ["y"], domain="bomb"))
        else:
            nodes.append(helper.make_node("Identity", ["m"], ["y"]))
        model.functions.append(helper.make_function("bomb", f"F{level}", ["x"], ["y"], nodes, opsets))
    model.opset_import.add(domain="bomb", version=1)
    source = graph.node[at].input[0]
    _insert(graph, at, [helper.make_node("F0", [source], ["fuzzed_f"], domain="bomb")], source, "fuzzed_f")
    return True


def scramble_metadata(rng: Random, model: onnx.ModelProto) -> bool:
    """Annotations, training information, doubled functions."""
    model.graph.quantization_annotation.add(tensor_name=pick(rng, _values(model.graph)))
    model.metadata_props.add(key=_text(rng), value=_text(rng))
    model.training_info.add().algorithm.CopyFrom(model.graph)
    if model.functions:
        model.functions.add().CopyFrom(model.functions[0])
    return True


MUTATORS: tuple[tuple[Mutator, int], ...] = (
    (change_operator, 8),
    (change_operands, 8),
    (change_results, 4),
    (move_nodes, 4),
    (insert_operator, 8),
    (insert_fused, 5),
    (insert_structure, 8),
    (insert_tower, 3),
    (insert_einsum, 2),
    (insert_sequence, 3),
    (change_attribute, 10),
    (add_attribute, 6),
    (change_dims, 6),
    (change_type, 4),
    (change_tensor, 8),
    (change_integers, 8),
    (make_sparse, 2),
    (change_name, 4),
    (change_versions, 3),
    (change_ends, 3),
    (nest, 3),
    (add_functions, 2),
    (scramble_metadata, 1),
)
"""Mutators with their weights."""


def damage_bytes(rng: Random, data: bytes) -> bytes:
    """Flip, cut, insert, double or overwrite bytes."""
    found = bytearray(data)
    for _ in range(pick(rng, (1, 1, 2, 8))):
        at = int(rng.integers(len(found) + 1))
        way = int(rng.integers(6))
        if way <= 1 and at < len(found):
            found[at] ^= 1 << int(rng.integers(8))
        elif way == 2:
            del found[at:]
        elif way == 3:
            found[at:at] = rng.bytes(int(rng.integers(1, 20)))
        elif way == 4:
            stop = at + int(rng.integers(1, 60))
            found[at:at] = found[at:stop]
        else:
            del found[at : at + int(rng.integers(1, 60))]
    return bytes(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A damaged model."""

    seed: str
    """Name of the model that it was made of."""
    steps: tuple[str, ...]
    """The mutators that were applied."""
    data: bytes


def _steps(rng: Random, model: onnx.ModelProto, others: Sequence[Seed]) -> Iterator[str]:
    if _chance(rng, JOINED_SHARE):
        join_models(others)(rng, model)
        yield "join_models"
    weights = np.array([weight for _, weight in MUTATORS], float)
    count = 1 + int(rng.geometric(0.55) - 1 if _chance(rng, 0.7) else 0)
    for _ in range(min(count, 5)):
        for _ in range(10):
            mutator = MUTATORS[int(rng.choice(len(MUTATORS), p=weights / weights.sum()))][0]
            if mutator(rng, model):
                yield mutator.__name__
                break


def make_mutation(groups: dict[str, list[Seed]], seed: int, index: int) -> Mutation:
    """Mutation number ``index`` of the stream ``seed``.

    Args:
        groups: models by group, see ``load_seeds``.
        seed: of the stream.
        index: of the mutation.
    """
    rng = np.random.default_rng((seed, index))
    shares = np.array([GROUP_SHARES[group] for group in groups])
    group = list(groups)[int(rng.choice(len(groups), p=shares / shares.sum()))]
    origin = pick(rng, groups[group])
    if _chance(rng, BYTE_SHARE):
        data = damage_bytes(rng, origin.proto.SerializeToString())
        return Mutation(seed=origin.name, steps=("damage_bytes",), data=data)
    model = onnx.ModelProto()
    model.CopyFrom(origin.proto)
    try:
        steps = tuple(_steps(rng, model, groups[list(groups)[-1]]))
        data = model.SerializeToString()
    except (DecodeError, EncodeError):  # nested deeper than protobuf itself goes
        data, steps = damage_bytes(rng, origin.proto.SerializeToString()), ("damage_bytes",)
    return Mutation(seed=origin.name, steps=steps, data=data)
