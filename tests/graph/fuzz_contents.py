"""Damage to what a model holds and declares: attributes, dims, element types, stored tensors, names."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, numpy_helper

from tests.graph.fuzz_places import (
    EXTREME_FLOATS,
    LOCATIONS,
    ODD_NAMES,
    Random,
    all_nodes,
    all_tensors,
    chance,
    declared_values,
    graphs,
    integer,
    odd_text,
    pick,
    value_names,
)
from tests.graph.fuzz_seeds import external


def set_attribute(rng: Random, attribute: AttributeProto, kind: int) -> None:
    """Give an attribute a value of this kind."""
    name = attribute.name
    attribute.Clear()
    attribute.name, attribute.type = name, kind  # type: ignore[assignment]
    if kind == AttributeProto.INT:
        attribute.i = integer(rng)
    elif kind == AttributeProto.INTS:
        attribute.ints.extend(integer(rng) for _ in range(pick(rng, (0, 1, 2, 3, 4, 9, 3000))))
    elif kind == AttributeProto.FLOAT:
        attribute.f = pick(rng, EXTREME_FLOATS)
    elif kind == AttributeProto.FLOATS:
        attribute.floats.extend(pick(rng, EXTREME_FLOATS) for _ in range(int(rng.integers(0, 5))))
    elif kind == AttributeProto.STRING:
        attribute.s = pick(rng, (b"", b"SAME_UPPER", b"\xff\xfe", b"forward", b"linear", odd_text(rng).encode()))
    elif kind == AttributeProto.STRINGS:
        attribute.strings.extend([b"Tanh", b"\xff", odd_text(rng).encode()][: int(rng.integers(0, 4))])
    elif kind == AttributeProto.TENSOR:
        attribute.t.CopyFrom(numpy_helper.from_array(np.array([integer(rng)], np.int64), "t"))
        damage_tensor(rng, attribute.t)


def change_attribute(rng: Random, model: onnx.ModelProto) -> bool:
    """Another value, another kind, a lying kind, a second copy, or none."""
    nodes = [node for node in all_nodes(model) if node.attribute]
    if not nodes:
        return False
    node = pick(rng, nodes)
    at = int(rng.integers(len(node.attribute)))
    attribute, way = node.attribute[at], int(rng.integers(8))
    if way <= 3 and attribute.type == AttributeProto.INTS and attribute.ints:
        attribute.ints[int(rng.integers(len(attribute.ints)))] = integer(rng)
    elif way <= 3 and attribute.type not in (AttributeProto.GRAPH, AttributeProto.TENSOR):
        set_attribute(rng, attribute, attribute.type)
    elif way == 4:
        set_attribute(rng, attribute, int(rng.integers(1, 9)))
    elif way == 5:
        attribute.type = int(rng.integers(0, 15))  # type: ignore[assignment]
    elif way == 6:
        del node.attribute[at]
    else:
        node.attribute.append(AttributeProto.FromString(attribute.SerializeToString()))
    return True


def add_attribute(rng: Random, model: onnx.ModelProto) -> bool:
    """An attribute that the operator's schema knows but the node lacks."""
    nodes = [node for node in all_nodes(model) if onnx.defs.has(node.op_type)]
    if not nodes:
        return False
    node = pick(rng, nodes)
    schema = onnx.defs.get_schema(node.op_type)
    if not schema.attributes:
        return False
    key = pick(rng, sorted(schema.attributes))
    set_attribute(rng, node.attribute.add(name=key), int(schema.attributes[key].type.value))
    return True


def change_dims(rng: Random, model: onnx.ModelProto) -> bool:
    """Dims of a declared value: numbers, symbols, more, fewer, none."""
    values = [value for value in declared_values(model) if value.type.HasField("tensor_type")]
    if not values:
        return False
    tensor = pick(rng, values).type.tensor_type
    dims, way = tensor.shape.dim, int(rng.integers(6))
    if way <= 2 and dims:
        dims[int(rng.integers(len(dims)))].dim_value = integer(rng)
    elif way == 3 and dims:
        dims[int(rng.integers(len(dims)))].dim_param = pick(rng, ("batch", "seq", "a+b", "?", "batch+-1", *ODD_NAMES))
    elif way == 4:
        for _ in range(pick(rng, (1, 2, 70))):
            dims.add().dim_value = pick(rng, (1, 2, integer(rng)))
    elif dims and chance(rng, 0.7):
        del dims[int(rng.integers(len(dims)))]
    else:
        tensor.ClearField("shape")
    return True


def change_type(rng: Random, model: onnx.ModelProto) -> bool:
    """Another element type, or no tensor at all."""
    values = declared_values(model)
    if not values:
        return False
    value = pick(rng, values)
    if chance(rng, 0.8):
        value.type.tensor_type.elem_type = int(rng.integers(0, 30))
    else:
        item = onnx.TypeProto.FromString(value.type.SerializeToString())
        value.type.Clear()
        if chance(rng, 0.7):
            target = pick(rng, (value.type.sequence_type, value.type.optional_type))
            target.elem_type.CopyFrom(item)
    return True


def damage_tensor(rng: Random, tensor: TensorProto) -> None:
    """Lie about dims, element type, length or place."""
    way = int(rng.integers(9))
    if way == 0 and tensor.dims:
        tensor.dims[int(rng.integers(len(tensor.dims)))] = integer(rng)
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
            "location": pick(rng, LOCATIONS),
            "offset": pick(rng, (0, -1, 2**62, "x", "1e3", "", "٣")),
            "length": pick(rng, (0, -1, 2**62, "x", 16)),
        }
        external(tensor, **{key: value for key, value in fields.items() if chance(rng, 0.7)})
    else:
        del tensor.dims[:]


def change_tensor(rng: Random, model: onnx.ModelProto) -> bool:
    """Damage a stored tensor."""
    tensors = all_tensors(model)
    if not tensors:
        return False
    damage_tensor(rng, pick(rng, tensors))
    return True


def change_integers(rng: Random, model: onnx.ModelProto) -> bool:
    """Other numbers in a stored integer tensor: targets, axes, counts."""
    tensors = [item for item in all_tensors(model) if item.data_type == TensorProto.INT64 and len(item.dims) <= 2]
    tensors = [item for item in tensors if len(item.raw_data) >= 8 or item.int64_data]
    if not tensors:
        return False
    tensor = pick(rng, tensors)
    numbers = list(np.frombuffer(tensor.raw_data[: len(tensor.raw_data) // 8 * 8], np.int64)) or list(tensor.int64_data)
    for _ in range(int(rng.integers(1, 3))):
        numbers[int(rng.integers(len(numbers)))] = np.int64(integer(rng))
    tensor.ClearField("int64_data")
    tensor.raw_data = np.array(numbers, np.int64).tobytes()
    return True


def make_sparse(rng: Random, model: onnx.ModelProto) -> bool:
    """Replace an initializer by a sparse one, whose indices may lie."""
    graph = pick(rng, graphs(model))
    if not graph.initializer:
        return False
    at = int(rng.integers(len(graph.initializer)))
    old = graph.initializer[at]
    sparse = graph.sparse_initializer.add()
    count = int(rng.integers(0, 4))
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(count, np.float32), old.name))
    indices = np.array([pick(rng, (0, 1, 2, -1, 2**50)) for _ in range(count)], np.int64)
    sparse.indices.CopyFrom(numpy_helper.from_array(indices, "at"))
    sparse.dims.extend(old.dims if chance(rng, 0.7) else (integer(rng), 2))
    if chance(rng, 0.8):
        del graph.initializer[at]
    return True


def change_name(rng: Random, model: onnx.ModelProto) -> bool:
    """An odd name, everywhere or in one place only; or two things of one name."""
    graph = pick(rng, graphs(model))
    old = pick(rng, value_names(graph))
    new = pick(rng, (*ODD_NAMES, pick(rng, value_names(graph))))
    everywhere = chance(rng, 0.6)
    for item in (*graph.input, *graph.output, *graph.initializer):
        if item.name == old and (everywhere or chance(rng, 0.3)):
            item.name = new
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == old and (everywhere or chance(rng, 0.3)):
                    names[index] = new
    if graph.node and chance(rng, 0.3):
        pick(rng, graph.node).name = new
    return True
