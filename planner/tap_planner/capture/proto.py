"""The traced graph as protobuf: names of dims as given, nothing that planning does not read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import onnx
import torch
from onnx import AttributeProto, helper

from tap_planner.capture.arguments import Arguments
from tap_planner.capture.naming import NamedGraph
from tap_planner.errors import CaptureError

_WORD = re.compile(r"\w+")


def finished_proto(program: torch.onnx.ONNXProgram, names: NamedGraph, arguments: Arguments) -> onnx.ModelProto:
    """The model without its stored tensors.

    Raises:
        CaptureError: a dim that was to stay open is fixed, or equal to one of another name.
    """
    proto = program.model_proto
    graph = proto.graph
    _strip(proto)
    _use_batch_statistics(graph.node, names.batch_statistics)
    for value, output in names.copies:
        graph.node.append(helper.make_node("Identity", [value], [output], name=f"node_{output}"))
    for info, name in zip(graph.output, names.outputs, strict=True):
        info.name = name
    _rename_dims(graph, _symbols(graph, names, arguments))
    return proto


def _strip(proto: onnx.ModelProto) -> None:
    """Remove stack traces and the like: 95 % of the bytes."""
    for graph in _graphs(proto.graph):
        graph.ClearField("doc_string")
        graph.ClearField("metadata_props")
        _strip_nodes(graph.node)
        for info in (*graph.input, *graph.output, *graph.value_info):
            info.ClearField("doc_string")
            info.ClearField("metadata_props")
    for function in proto.functions:
        function.ClearField("doc_string")
        function.ClearField("metadata_props")
        _strip_nodes(function.node)
        for info in function.value_info:
            info.ClearField("metadata_props")
    proto.ClearField("metadata_props")


def _strip_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        node.ClearField("doc_string")
        node.ClearField("metadata_props")


def _graphs(root: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those inside its nodes."""
    pending = [root]
    while pending:
        graph = pending.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    pending.append(attribute.g)
                pending.extend(attribute.graphs)


def _use_batch_statistics(nodes: Iterable[onnx.NodeProto], outputs: frozenset[str]) -> None:
    """Turn batch-norm nodes into their training form, which also gives the running statistics."""
    for node in nodes:
        if node.op_type == "BatchNormalization" and node.output[0] in outputs:
            node.attribute.append(helper.make_attribute("training_mode", 1))
            name = node.output[0]
            del node.output[1:]
            node.output.extend((f"{name}_running_mean", f"{name}_running_var"))


def _symbols(graph: onnx.GraphProto, names: NamedGraph, arguments: Arguments) -> dict[str, str]:
    """The exporter's symbols (or expressions of them) for open dims, and the names that were asked for."""
    symbols: dict[str, str] = {}
    for info, argument, shown in zip(graph.input, arguments.names, names.inputs, strict=True):
        for dim, label in arguments.dims.get(argument, {}).items():
            size = info.type.tensor_type.shape.dim[dim]
            if not size.dim_param:
                raise CaptureError(
                    f"dim {dim} of {shown!r} ({label!r}) was to stay open, but the module fixes it to {size.dim_value}",
                    hint="leave that dim out of dynamic_dims, or take its size from the input inside forward",
                )
            known = symbols.setdefault(size.dim_param, label)
            if known != label:
                raise CaptureError(
                    f"dim {dim} of {shown!r} is called {label!r}, but the module needs it to equal dim {known!r}",
                    hint="give both dims one name",
                )
    return symbols


def _rename_dims(graph: onnx.GraphProto, symbols: Mapping[str, str]) -> None:
    for scope in _graphs(graph):
        for info in (*scope.input, *scope.output, *scope.value_info):
            for size in info.type.tensor_type.shape.dim:
                if size.dim_param:
                    size.dim_param = _renamed(size.dim_param, symbols)


def _renamed(expression: str, symbols: Mapping[str, str]) -> str:
    """Symbols replaced in an expression such as ``s0 + 2*s1``."""
    if expression in symbols:
        return symbols[expression]
    return _WORD.sub(lambda word: symbols.get(word[0], word[0]), expression)
