"""Types of what a branch or loop body makes, from the types of what it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from tap_planner.errors import ModelError
from tap_planner.graph.nodes import Node
from tap_planner.graph.types import TensorKind
from tap_planner.graph.unfolding import graph_of, scanned_of
from tap_planner.graph.values import Value
from tap_planner.operators import TensorType

BindBody = Callable[[onnx.GraphProto, Mapping[str, Value]], list[Value]]
"""Values of a subgraph's results, given what it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyTypes:
    """What is known of the results."""

    types: tuple[TensorType | None, ...]
    """None where the body does not tell."""
    reason: str
    """Why not, as words after "because"; empty if all are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operands:
    node: Node
    values: Mapping[str, Value]
    """By name, captured ones too."""
    bind_body: BindBody
    fetch: Callable[[str], np.ndarray]

    def constant(self, name: str) -> np.ndarray | None:
        value = self.values.get(name)
        return self.fetch(value.name).reshape(-1) if value is not None and value.is_constant else None

    def body(self, graph: str, formal: Sequence[Value]) -> list[Value]:
        """Results of the subgraph in attribute ``graph``."""
        body = graph_of(self.node, graph)
        given = dict(self.values)
        given.update(zip((value.name for value in body.input), formal, strict=True))
        return self.bind_body(body, given)


def body_types(
    node: Node, values: Mapping[str, Value], bind_body: BindBody, fetch: Callable[[str], np.ndarray]
) -> BodyTypes:
    """Types of a node's results as its body makes them.

    Args:
        node: an If, Loop or Scan.
        values: what it reads.
        bind_body: binds a subgraph.
        fetch: value of a constant by name.
    """
    operands = _Operands(node=node, values=values, bind_body=bind_body, fetch=fetch)
    rules = {"If": _if, "Loop": _loop, "Scan": _scan}
    try:
        return rules[node.type](operands)
    except ModelError as error:
        return BodyTypes(types=(None,) * len(node.outputs), reason=error.message)


def _if(operands: _Operands) -> BodyTypes:
    both = [[value.type for value in operands.body(name, ())] for name in ("then_branch", "else_branch")]
    types = tuple(yes if yes == no else None for yes, no in zip(*both, strict=True))
    differing = [f"{list(yes.shape)} and {list(no.shape)}" for yes, no in zip(*both, strict=True) if yes != no]
    reason = f"its branches give results of different types: {differing[0]}" if differing else ""
    return BodyTypes(types=types, reason=reason)


def _like(name: str, type_: TensorType) -> Value:
    return Value(name=name, type=type_, kind=TensorKind.INPUT)


def _steady(before: Sequence[TensorType], after: Sequence[TensorType]) -> tuple[list[TensorType | None], str]:
    """Types of carried values: known where a round does not change them."""
    types = [old if old == new else None for old, new in zip(before, after, strict=True)]
    changed = [f"{list(old.shape)} to {list(new.shape)}" for old, new in zip(before, after, strict=True) if old != new]
    return types, f"a round changes what it carries from {changed[0]}" if changed else ""


def _loop(operands: _Operands) -> BodyTypes:
    own = list(operands.node.proto.input)
    count = operands.constant(own[0]) if own[0] else None
    start = operands.constant(own[1]) if len(own) > 1 and own[1] else np.array([True])
    carried = [operands.values[name].type for name in own[2:]]
    condition = _like("condition", TensorType(dtype="bool", shape=()))
    if start is not None and start[0]:
        condition = Value(name="condition", type=condition.type, kind=TensorKind.CONSTANT, array=np.array(True))
    formal = [_like("round", TensorType(dtype="int64", shape=())), condition]
    formal.extend(_like(f"carried_{index}", type_) for index, type_ in enumerate(carried))
    results = operands.body("body", formal)
    known = results[0]
    goes_on = known.array is not None and bool(known.array.reshape(-1)[0]) and condition.is_constant
    types, reason = _steady(carried, [value.type for value in results[1 : 1 + len(carried)]])
    stacked: list[TensorType | None] = []
    for value in results[1 + len(carried) :]:
        if count is None or not (goes_on or count[0] <= 0) or reason:
            stacked.append(None)
            reason = reason or "how many rounds it takes depends on the data"
        else:
            shape = (max(int(count[0]), 0), *value.shape)
            stacked.append(TensorType(dtype=value.type.dtype, shape=shape))
    return BodyTypes(types=(*types, *stacked), reason=reason)


def _scan(operands: _Operands) -> BodyTypes:
    node = operands.node
    own = list(node.proto.input)
    split = len(own) - scanned_of(node)
    carried = [operands.values[name].type for name in own[:split]]
    formal = [_like(f"carried_{index}", type_) for index, type_ in enumerate(carried)]
    trip = 0
    for index, name in enumerate(own[split:]):
        type_ = operands.values[name].type
        axis = _axis(node, "scan_input_axes", index, len(type_.shape))
        trip = type_.shape[axis]
        formal.append(_like(f"row_{index}", TensorType(dtype=type_.dtype, shape=_without(type_.shape, axis))))
    results = operands.body("body", formal)
    types, reason = _steady(carried, [value.type for value in results[:split]])
    stacked: list[TensorType | None] = []
    for index, value in enumerate(results[split:]):
        axis = _axis(node, "scan_output_axes", index, value.rank + 1)
        shape = (*value.shape[:axis], trip, *value.shape[axis:])
        stacked.append(None if reason else TensorType(dtype=value.type.dtype, shape=shape))
    return BodyTypes(types=(*types, *stacked), reason=reason)


def _axis(node: Node, attribute: str, index: int, rank: int) -> int:
    found = node.attributes.get(attribute)
    axis = int(found[index]) if isinstance(found, tuple) else 0
    return axis + rank if axis < 0 else axis


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])
