"""Caches: graph inputs that a step returns in their next state, as a decoder does with its keys and values.

They are found by structure: the output is made of the input by operators that only move contents, put new ones beside
them or in their place, or by an operator whose record says that the operand is its state. All sizes are equal but for
the one dim in which the cache may grow. Names decide only where several inputs fit one output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tap_planner.graph.drafts import Draft
from tap_planner.graph.types import TensorKind
from tap_planner.graph.values import Value
from tap_planner.operators import record_for

_MOVES: Mapping[str, tuple[int, ...] | None] = {
    "Concat": None,
    "Gather": (0,),
    "Identity": (0,),
    "Pad": (0,),
    "Reshape": (0,),
    "ScatterElements": (0,),
    "ScatterND": (0,),
    "Slice": (0,),
    "Split": (0,),
    "TensorScatter": (0,),
    "Transpose": (0,),
    "Where": (1, 2),
}
"""Operators whose results hold the contents of operands, and of which; None: of all."""
_UPDATES: Mapping[str, int] = {"ScatterElements": 2, "TensorScatter": 1}
"""Operators that put new contents in place of old ones, and the operand that holds them."""
_MOST = 64
"""What holds contents of more inputs than that is no cache."""
_PREFIX = re.compile(r"past_key_values|past|present|cache|new|out|in", re.IGNORECASE)
_Reached = dict[Value, int | None]
"""Graph inputs whose contents a value holds, and how many new positions were put in place of old ones on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A graph input and the output that is its next state."""

    past: Value
    output: int
    """Position among the graph's outputs."""
    new_positions: int | None
    """By how many positions a step advances it; 0: it is handed on as it is; None: unknown."""


def find_caches(operators: Sequence[Draft], outputs: Sequence[Value], names: Sequence[str]) -> tuple[Cache, ...]:
    """The caches of a graph, by output; each input and each output is in one at most.

    Args:
        operators: in topological order.
        outputs: values of the graph's outputs.
        names: their ONNX names.
    """
    held = _contents(operators)
    fitting = {
        position: [past for past in held.get(value, _own(value)) if _fits(past, value)]
        for position, value in enumerate(outputs)
    }
    found: list[Cache] = []
    taken: set[Value] = set()
    while True:
        open_ = {p: [past for past in pasts if past not in taken] for p, pasts in fitting.items()}
        fitting = {position: pasts for position, pasts in open_.items() if pasts}
        if not fitting:
            return tuple(sorted(found, key=lambda cache: cache.output))
        position = min(fitting, key=lambda p: (len(fitting[p]), p))
        past = min(fitting.pop(position), key=lambda value: _stem(value.name) != _stem(names[position]))
        taken.add(past)
        value = outputs[position]
        grown = sum(value.shape) - sum(past.shape)
        found.append(Cache(past=past, output=position, new_positions=grown or held.get(value, _own(value))[past]))


def _own(value: Value) -> _Reached:
    return {value: 0} if value.kind is TensorKind.INPUT else {}


def _contents(operators: Sequence[Draft]) -> dict[Value, _Reached]:
    """What values hold of graph inputs."""
    held: dict[Value, _Reached] = {}
    for operator in operators:
        for slot, output in _flows(operator):
            value = operator.inputs[slot]
            if value is None:
                continue
            reached = held.get(value) or _own(value)
            if 0 < len(reached) <= _MOST:
                new = _replaced(operator, value)
                known = held.setdefault(operator.outputs[output], {})
                known.update((past, new or positions) for past, positions in reached.items())
    return held


def _flows(operator: Draft) -> Sequence[tuple[int, int]]:
    """(operand, output) pairs in which contents go through an operator."""
    if operator.type not in _MOVES:
        caches = record_for(operator.type, operator.attributes, len(operator.outputs)).caches
        return [pair for pair in caches if pair[0] < len(operator.inputs) and pair[1] < len(operator.outputs)]
    slots = _MOVES[operator.type]
    present = range(len(operator.inputs)) if slots is None else slots
    return [(slot, output) for slot in present for output in range(len(operator.outputs))]


def _replaced(operator: Draft, past: Value) -> int | None:
    """How many positions of a cache an operator writes anew in a place of equal size, None if it does not say."""
    if operator.type in _UPDATES:
        new = operator.inputs[_UPDATES[operator.type]]
        different = [a for a, b in zip(new.shape, past.shape, strict=False) if a != b] if new is not None else []
        return different[0] if len(different) == 1 else None
    if operator.type in _MOVES or operator.inputs[0] is None:
        return None
    data = operator.inputs[0].shape  # [b, s, ...], or by heads [b, h, s, d], or by channels [n, c, l]
    return data[2] if len(data) == 4 or operator.type == "CausalConvWithState" else data[1]


def _fits(past: Value, present: Value) -> bool:
    """Whether all sizes are equal, but for one dim that may have grown."""
    if past.type.dtype != present.type.dtype or len(past.shape) != len(present.shape) or not past.shape:
        return False
    different = [(old, new) for old, new in zip(past.shape, present.shape, strict=True) if old != new]
    return not different or (len(different) == 1 and different[0][0] < different[0][1])


def _stem(name: str) -> str:
    """What the names of a cache's two ends have in common."""
    return "".join(re.findall(r"[a-z0-9]+", _PREFIX.sub("", name.lower())))
