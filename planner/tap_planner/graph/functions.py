"""Local functions: replaced by their nodes, after counting how many nodes that makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from tap_planner.errors import ModelError
from tap_planner.graph.native import NativeError, isolated
from tap_planner.graph.subgraphs import all_nodes

MAX_INLINED_NODES = 200_000
MAX_INLINED_BYTES = 1 << 30
_Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """What one function adds where it is called."""

    nodes: int
    size_bytes: int
    calls: tuple[_Key, ...]
    """One entry a call."""


def inline_functions(path: Path, proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its local functions replaced by their nodes, nested ones too.

    Raises:
        ModelError: functions call themselves, grow beyond all bounds, or cannot be inlined.
    """
    if not proto.functions:
        return proto
    from onnx import inliner, shape_inference

    _check_growth(path, proto)
    _restate(proto)
    keys = {(item.domain, item.name, item.overload) for item in proto.functions}

    def inline() -> bytes:
        return inliner.inline_local_functions(proto).SerializeToString()

    def convert() -> bytes:
        # Converting a function to the model's operator set needs the types of what it is called with.
        typed = shape_inference.infer_shapes(proto)
        return inliner.inline_local_functions(typed, convert_version=True).SerializeToString()

    try:
        for way in (inline, convert):
            result = onnx.ModelProto.FromString(isolated(way, proto.ByteSize()))
            left = next((node for node in all_nodes(result.graph.node) if _key(node) in keys), None)
            if left is None:
                return result
    except (NativeError, DecodeError) as error:
        raise ModelError(f"{path}: its local functions cannot be inlined ({error})") from error
    name = left.name or next(iter(left.output), "")
    raise ModelError(
        f"{path}: node {name!r} calls function {left.domain}::{left.op_type}, which is written for another operator "
        f"set than the model and cannot be converted to it",
        hint="export the model with one operator set version throughout",
    )


def _restate(proto: onnx.ModelProto) -> None:
    """Let functions be written in the model's operator set where their operators are the same in both."""
    versions = {entry.domain: entry.version for entry in proto.opset_import}
    for function in proto.functions:
        for entry in function.opset_import:
            wanted = versions.get(entry.domain)
            if wanted is None:
                versions[entry.domain] = entry.version
                proto.opset_import.add(domain=entry.domain, version=entry.version)
            elif wanted != entry.version and _is_same(function, entry, wanted):
                entry.version = wanted


def _is_same(function: onnx.FunctionProto, entry: onnx.OperatorSetIdProto, wanted: int) -> bool:
    """Whether the operators of a domain that a function uses did not change between two versions."""
    try:
        return all(
            onnx.defs.get_schema(kind, entry.version, entry.domain).since_version
            == onnx.defs.get_schema(kind, wanted, entry.domain).since_version
            for kind in {node.op_type for node in all_nodes(function.node) if node.domain == entry.domain}
        )
    except onnx.defs.SchemaError:
        return False


def _key(node: onnx.NodeProto) -> _Key:
    return (node.domain, node.op_type, node.overload)


def _body(nodes: list[onnx.NodeProto], keys: set[_Key]) -> _Body:
    calls = tuple(key for node in nodes if (key := _key(node)) in keys)
    return _Body(nodes=len(nodes) - len(calls), size_bytes=sum(node.ByteSize() for node in nodes), calls=calls)


def _check_growth(path: Path, proto: onnx.ModelProto) -> None:
    """Add up nodes and bytes after inlining, callees first."""
    keys = {(item.domain, item.name, item.overload) for item in proto.functions}
    bodies = {
        (item.domain, item.name, item.overload): _body(list(all_nodes(item.node)), keys) for item in proto.functions
    }
    main: _Key = ("", "", "the main graph")
    bodies[main] = _body(list(all_nodes(proto.graph.node)), keys)
    sizes: dict[_Key, tuple[int, int]] = {}
    for key in _callees_first(path, bodies, main):
        body = bodies[key]
        inner = [sizes[call] for call in body.calls]
        nodes = body.nodes + sum(item[0] for item in inner)
        size = body.size_bytes + sum(item[1] for item in inner)
        if nodes > MAX_INLINED_NODES or size > MAX_INLINED_BYTES:
            what = "the model" if key == main else f"function {key[0]}::{key[1]}"
            raise ModelError(
                f"{path}: {what} grows to {nodes} nodes and {size} bytes when its local functions are inlined, "
                f"more than {MAX_INLINED_NODES} nodes or {MAX_INLINED_BYTES} bytes",
                hint="the file calls its functions too often; export the model again",
            )
        sizes[key] = (nodes, size)


def _callees_first(path: Path, bodies: Mapping[_Key, _Body], root: _Key) -> list[_Key]:
    order: list[_Key] = []
    done: set[_Key] = set()
    on_path: dict[_Key, None] = {}
    pending: list[tuple[_Key, bool]] = [(root, False)]
    while pending:
        key, leaving = pending.pop()
        if leaving:
            del on_path[key]
            done.add(key)
            order.append(key)
            continue
        if key in done:
            continue
        if key in on_path:
            loop = [f"{domain}::{name}" for domain, name, _ in list(on_path)[list(on_path).index(key) :]]
            shown = " -> ".join([*loop[:8], "..." if len(loop) > 8 else loop[0]])
            raise ModelError(f"{path}: local functions call themselves: {shown}", hint="ONNX functions cannot recur")
        on_path[key] = None
        pending.append((key, True))
        pending.extend((call, False) for call in reversed(dict.fromkeys(bodies[key].calls)))
    return order
