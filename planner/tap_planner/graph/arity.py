"""How many operands and results a node may have, and which must be there: damaged files say otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import onnx

from tap_planner.errors import UnsupportedGraphError
from tap_planner.graph.nodes import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arity:
    operands: tuple[int, int]
    """Least and most."""
    results: tuple[int, int]
    required: tuple[int, ...]
    """Operands that may not be absent."""


@cache
def _arity(type: str, opset: int) -> _Arity | None:
    """By ONNX's schema; None for an operator that it does not know."""
    try:
        schema = onnx.defs.get_schema(type, opset, "")
    except onnx.defs.SchemaError:
        return None
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return _Arity(
        operands=(schema.min_input, schema.max_input),
        results=(schema.min_output, schema.max_output),
        required=tuple(index for index, item in enumerate(schema.inputs) if item.option == single),
    )


def check_arity(node: Node, opset: int) -> None:
    """Refuse a node with too many or too few operands or results.

    Raises:
        UnsupportedGraphError: the node is not what its operator's schema says.
    """
    arity = None if "::" in node.type else _arity(node.type, opset)
    if arity is None:
        return
    given = node.proto.input
    if not arity.operands[0] <= len(given) <= arity.operands[1]:
        raise UnsupportedGraphError(f"{node.where}: {len(given)} operands, expected {_range(*arity.operands)}")
    if not arity.results[0] <= len(node.outputs) <= arity.results[1]:
        raise UnsupportedGraphError(f"{node.where}: {len(node.outputs)} results, expected {_range(*arity.results)}")
    for index in arity.required:
        if not given[index]:
            raise UnsupportedGraphError(f"{node.where}: operand {index} is absent")


def _range(least: int, most: int) -> str:
    if least == most:
        return str(least)
    return f"at least {least}" if most > 1 << 30 else f"{least} to {most}"
