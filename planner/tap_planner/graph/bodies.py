"""Control flow that stays whole: the body that one operator carries, and how it is run.

A body is kept in a canonical form, with operands, results and inner values renamed by position and without anything
that is for people. Equal loops of two layers are then equal operators, so that they fold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper

from tap_planner.errors import UnsupportedGraphError
from tap_planner.graph.dtypes import dtype_name
from tap_planner.graph.nodes import Node
from tap_planner.graph.subgraphs import all_nodes, local_names, subgraphs
from tap_planner.graph.types import Body
from tap_planner.graph.values import Value

BODY = "body"
"""Attribute that names the body of an operator."""
_NUMBERS = {dtype_name(number): number for number in TensorProto.DataType.values()}


def make_body(
    node: Node, operands: Sequence[Value | None], num_outputs: int, imports: Sequence[onnx.OperatorSetIdProto]
) -> Body:
    """The body of a node that stays whole.

    Args:
        node: with captured values among its inputs.
        operands: its inputs, bound.
        num_outputs: results that somebody reads, counted from the first.
        imports: operator sets of the model.
    """
    outer = {name: f"i{index}" for index, name in enumerate(node.inputs) if name}
    proto = _canonical(node, outer)
    inputs = [
        helper.make_tensor_value_info(f"i{index}", _NUMBERS[value.type.dtype], value.shape)
        for index, value in enumerate(operands)
        if value is not None
    ]
    outputs = [helper.make_empty_tensor_value_info(f"o{index}") for index in range(num_outputs)]
    graph = helper.make_graph([proto], "body", inputs, outputs)
    model = helper.make_model(graph, opset_imports=sorted(imports, key=lambda entry: entry.domain), ir_version=8)
    model.ClearField("producer_name")
    content = model.SerializeToString(deterministic=True)
    return Body(
        content=content,
        key=hashlib.sha256(content).hexdigest(),
        num_nodes=sum(1 for _ in all_nodes((proto,))) - 1,
        label=node.where,
    )


def _canonical(node: Node, outer: Mapping[str, str]) -> onnx.NodeProto:
    proto = onnx.NodeProto()
    proto.CopyFrom(node.proto)
    names = dict(outer)
    names.update((name, f"o{index}") for index, name in enumerate(proto.output) if name)
    counter = 0
    pending: list[tuple[Sequence[onnx.NodeProto], Mapping[str, str]]] = [((proto,), names)]
    while pending:
        nodes, scope = pending.pop()
        for item in nodes:
            item.name, item.doc_string = "", ""
            del item.metadata_props[:]
            for field in (item.input, item.output):
                for index, name in enumerate(field):
                    field[index] = scope[name] if name else ""
            for graph in subgraphs(item):
                inner = dict(scope)
                for name in _in_order(graph):
                    inner[name] = f"v{counter}"
                    counter += 1
                _rename_graph(graph, inner)
                pending.append((graph.node, inner))
    return proto


def _in_order(graph: onnx.GraphProto) -> Iterator[str]:
    """Names that a graph defines, each once, in an order that does not depend on them."""
    seen: set[str] = {""}
    for name in (
        *(value.name for value in graph.input),
        *(tensor.name for tensor in graph.initializer),
        *(name for node in graph.node for name in node.output),
    ):
        if name not in seen:
            seen.add(name)
            yield name
    assert seen >= local_names(graph)


def _rename_graph(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    graph.name, graph.doc_string = "g", ""
    del graph.value_info[:]
    del graph.metadata_props[:]
    for tensor in graph.initializer:
        tensor.name = names[tensor.name]
    for value in (*graph.input, *graph.output):
        value.name = names[value.name]
        value.doc_string = ""
        del value.metadata_props[:]
        # Sizes are those of the export; operands say what they really are.
        value.type.tensor_type.ClearField("shape")


def run_body(body: Body, operands: Sequence[np.ndarray | None], *, wide: bool) -> list[np.ndarray]:
    """Results of an operator that stayed whole, by ONNX's reference implementation.

    Args:
        body: what to run.
        operands: by position; None for an absent one.
        wide: whether floats are computed in float64, whatever the file says.

    Raises:
        UnsupportedGraphError: the reference implementation cannot run it.
    """
    feeds = {f"i{index}": array for index, array in enumerate(operands) if array is not None}
    try:
        results = _evaluator(body.content, wide).run(None, feeds)
    except Exception as error:
        text = next(iter(str(error).splitlines()), type(error).__name__)
        raise UnsupportedGraphError(f"{body.label}: its body cannot be run ({text})") from error
    assert isinstance(results, list)
    return [np.asarray(result) for result in results]


@lru_cache(maxsize=64)
def _evaluator(content: bytes, wide: bool):
    from onnx.reference import ReferenceEvaluator

    from tap_planner.graph.looping import LOOPS

    model = onnx.ModelProto()
    model.ParseFromString(content)
    if wide:
        for node in all_nodes(model.graph.node):
            _widen(node)
    return ReferenceEvaluator(model, new_ops=LOOPS)


def _widen(node: onnx.NodeProto) -> None:
    """Let a node compute in float64: casts and constants to smaller floats become float64."""
    narrow = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    for attribute in node.attribute:
        if attribute.name in ("to", "dtype") and attribute.type == AttributeProto.INT and attribute.i in narrow:
            attribute.i = TensorProto.DOUBLE
        elif attribute.type == AttributeProto.TENSOR and attribute.t.data_type in narrow:
            array = onnx.numpy_helper.to_array(attribute.t).astype(np.float64)
            attribute.t.CopyFrom(onnx.numpy_helper.from_array(array, attribute.t.name))
    if node.op_type == "ConstantOfShape" and not node.attribute:
        zero = onnx.numpy_helper.from_array(np.zeros(1), "value")
        node.attribute.append(helper.make_attribute("value", zero))
