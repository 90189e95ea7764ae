"""Damage to the nodes of a model: operators, operands, results, order; and nodes that are put in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import AttributeProto, helper, numpy_helper

from tap_planner.operators import known_types
from tests.graph.fuzz_contents import set_attribute
from tests.graph.fuzz_places import (
    EQUATIONS,
    FUSED_ATTRIBUTES,
    ODD_NAMES,
    Mutator,
    Random,
    all_nodes,
    chance,
    graphs,
    integer,
    odd_text,
    pick,
    schemas,
    value_names,
)
from tests.graph.fuzz_seeds import Seed


def change_operator(rng: Random, model: onnx.ModelProto) -> bool:
    """Another operator type or domain."""
    nodes = all_nodes(model)
    if not nodes:
        return False
    node = pick(rng, nodes)
    schema = pick(rng, schemas())
    node.op_type = pick(rng, (schema.name, schema.name, schema.name, pick(rng, nodes).op_type, odd_text(rng), ""))
    if chance(rng, 0.2):
        node.domain = pick(rng, ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "nobody.knows", "\n"))
    return True


def change_operands(rng: Random, model: onnx.ModelProto) -> bool:
    """Swap, drop, double, rewire or empty what a node reads."""
    graph = pick(rng, graphs(model))
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
        names[at] = pick(rng, value_names(graph))
    elif way == 4:
        names[at] = pick(rng, ("", "nobody makes this"))
    elif way == 5:
        names.extend([names[at]] * pick(rng, (1, 3, 300)))
    else:
        names.append(pick(rng, value_names(graph)))
    del node.input[:]
    node.input.extend(names)
    return True


def change_results(rng: Random, model: onnx.ModelProto) -> bool:
    """Drop, double, rename or add what a node makes."""
    graph = pick(rng, graphs(model))
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
        names[at] = pick(rng, (*ODD_NAMES, pick(rng, value_names(graph))))
    elif way == 3:
        names.extend(f"more_{index}" for index in range(pick(rng, (1, 2, 7, 2000))))
    else:
        names.insert(0, "")
    del node.output[:]
    node.output.extend(names)
    return True


def move_nodes(rng: Random, model: onnx.ModelProto) -> bool:
    """Delete, double, reorder nodes, or close a cycle."""
    graph = pick(rng, graphs(model))
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
    graph = pick(rng, graphs(model))
    places = [index for index, node in enumerate(graph.node) if node.input]
    if not places:
        return False
    at, schema = pick(rng, places), pick(rng, schemas())
    names = value_names(graph)
    count = min(schema.min_input + int(rng.integers(0, 3)), schema.max_input, 8)
    source = graph.node[at].input[0]
    operands = [source, *(pick(rng, names) for _ in range(count - 1))][:count]
    results = ["fuzzed_value", *(f"fuzzed_{index}" for index in range(max(schema.min_output, 1) - 1))]
    node = helper.make_node(schema.name, operands, results, domain=schema.domain)
    for key, attribute in sorted(schema.attributes.items()):
        if attribute.required or chance(rng, 0.3):
            set_attribute(rng, node.attribute.add(name=key), int(attribute.type.value))
    insert(graph, at, [node], source, "fuzzed_value")
    return True


def insert_fused(rng: Random, model: onnx.ModelProto) -> bool:
    """Put an operator of another domain between a value and its reader."""
    graph = pick(rng, graphs(model))
    places = [index for index, node in enumerate(graph.node) if node.input]
    if not places:
        return False
    at = pick(rng, places)
    names, source = value_names(graph), graph.node[at].input[0]
    domain, kind = pick(rng, [name for name in known_types() if "::" in name]).split("::")
    operands = [source, *(pick(rng, (source, "", pick(rng, names))) for _ in range(int(rng.integers(0, 7))))]
    node = helper.make_node(kind, operands, ["fuzzed_c"], domain=domain)
    for key in FUSED_ATTRIBUTES:
        if chance(rng, 0.3):
            node.attribute.add(name=key, type=AttributeProto.INT).i = integer(rng)
    if all(entry.domain != domain for entry in model.opset_import):
        model.opset_import.add(domain=domain, version=1)
    insert(graph, at, [node], source, "fuzzed_c")
    return True


def join_models(others: Sequence[Seed]) -> Mutator:
    """A mutator that puts the nodes of another model behind values of this one."""

    def join(rng: Random, model: onnx.ModelProto) -> bool:
        other = pick(rng, others).proto
        graph, names = model.graph, value_names(model.graph)
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


def insert(graph: onnx.GraphProto, at: int, made: Sequence[onnx.NodeProto], old: str, new: str) -> None:
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
    *(("Tile", (-3, 1)), ("Pad", (0, 2**40, 0, 0)), ("Pad", (-9, -9, -9, -9)), ("Unsqueeze", (0, 0))),
    ("Unsqueeze", (99,)),
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
    insert(graph, at, [node], source, "fuzzed_value")
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
    if chance(rng, 0.5):
        nodes.append(helper.make_node("Constant", [], ["tower"], value_ints=[1, 2, 3]))
        current = "tower"
    kind = pick(rng, ("Concat", "Concat", "Add", "Mul", "Pow", "BitShift"))
    for step in range(pick(rng, (3, 20, 40, 70))):
        extra = {"axis": 0} if kind == "Concat" else {"direction": "LEFT"} if kind == "BitShift" else {}
        nodes.append(helper.make_node(kind, [current, current], [f"tower_{step}"], **extra))
        current = f"tower_{step}"
    if chance(rng, 0.4):
        nodes.append(helper.make_node("ConstantOfShape", [current], ["tower_filled"]))
        current = "tower_filled"
    insert(graph, at, nodes, source, current)
    return True


def insert_einsum(rng: Random, model: onnx.ModelProto) -> bool:
    """An Einsum of odd equation over some values."""
    graph = pick(rng, graphs(model))
    places = [index for index, node in enumerate(graph.node) if node.input]
    if not places:
        return False
    at, equation = pick(rng, places), pick(rng, EQUATIONS)
    source = graph.node[at].input[0]
    names = [source, *(pick(rng, (source, pick(rng, value_names(graph)))) for _ in range(equation.count(",")))]
    insert(graph, at, [helper.make_node("Einsum", names, ["fuzzed_e"], equation=equation)], source, "fuzzed_e")
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
    insert(graph, at, [index, made, read], source, "seq_out")
    return True
