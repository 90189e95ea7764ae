"""How many operands and results a node may have: damaged files name more or fewer than the operator has."""

from __future__ import annotations

from functools import cache

import onnx

from tap_planner.errors import UnsupportedGraphError
from tap_planner.graph.nodes import Node


@cache
def _bounds(type: str, opset: int) -> tuple[int, int, int, int] | None:
    """Least and most operands, least and most results by ONNX's schema; None for an operator that it does not know."""
    try:
        schema = onnx.defs.get_schema(type, opset, "")
    except onnx.defs.SchemaError:
        return None
    return schema.min_input, schema.max_input, schema.min_output, schema.max_output


def check_arity(node: Node, opset: int) -> None:
    """Refuse a node with too many or too few operands or results.

    Raises:
        UnsupportedGraphError: the node is not what its operator's schema says.
    """
    bounds = None if "::" in node.type else _bounds(node.type, opset)
    if bounds is None:
        return
    given, made = len(node.proto.input), len(node.outputs)
    if not bounds[0] <= given <= bounds[1]:
        raise UnsupportedGraphError(f"{node.where}: {given} operands, expected {_range(bounds[0], bounds[1])}")
    if not bounds[2] <= made <= bounds[3]:
        raise UnsupportedGraphError(f"{node.where}: {made} results, expected {_range(bounds[2], bounds[3])}")


def _range(least: int, most: int) -> str:
    if least == most:
        return str(least)
    return f"at least {least}" if most > 1 << 30 else f"{least} to {most}"
