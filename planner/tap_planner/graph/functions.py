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

MAX_INLINED_NODES = 1_000_000
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
    from onnx import inliner

    _check_growth(path, proto)
    keys = {(item.domain, item.name, item.overload) for item in proto.functions}
    result = proto
    try:
        for convert in (False, True):
            made = isolated(lambda: inliner.inline_local_functions(proto, convert).SerializeToString())  # noqa: B023
            result = onnx.ModelProto.FromString(made)
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
