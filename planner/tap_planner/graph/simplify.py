"""Rewrites after binding: chains of Reshape become one, and what nothing needs is dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tap_planner.graph.drafts import Draft
from tap_planner.graph.values import Value


def merge_reshapes(operators: Sequence[Draft], outputs: Sequence[Value]) -> tuple[list[Draft], dict[Value, Value]]:
    """Merge a Reshape into the one before it where nobody else reads the middle; drop those that change nothing.

    Args:
        operators: in topological order; their inputs are updated in place.
        outputs: values that must stay.

    Returns:
        The operators that remain, and for each dropped value the one that stands for it.
    """
    uses = Counter(value for operator in operators for value in operator.inputs if value is not None)
    uses.update(outputs)
    producers: dict[Value, Draft] = {}
    renamed: dict[Value, Value] = {}
    dropped: set[Draft] = set()
    for operator in operators:
        operator.inputs = [renamed.get(value, value) if value is not None else None for value in operator.inputs]
        if operator.type == "Reshape":
            source = operator.inputs[0]
            assert source is not None
            before = producers.get(source)
            if before is not None and before.type == "Reshape" and uses[source] == 1:
                dropped.add(before)
                source = operator.inputs[0] = before.inputs[0]
                assert source is not None
            if source.shape == operator.outputs[0].shape:
                dropped.add(operator)
                renamed[operator.outputs[0]] = source
                uses[source] += uses[operator.outputs[0]] - 1
        for value in operator.outputs:
            producers[value] = operator
    return [operator for operator in operators if operator not in dropped], renamed


def drop_dead(operators: Sequence[Draft], outputs: Sequence[Value]) -> list[Draft]:
    """Operators that the outputs depend on, in the same order."""
    needed = set(outputs)
    kept: list[Draft] = []
    for operator in reversed(operators):
        if not needed.isdisjoint(operator.outputs):
            kept.append(operator)
            needed.update(value for value in operator.inputs if value is not None)
    kept.reverse()
    return kept


def hoist_preamble(operators: Sequence[Draft]) -> list[Draft]:
    """Operators that depend on no parameter first (masks, positions), then the others; each part in the given order.

    Exports compute a shared mask wherever it is first needed, often in the middle of the first layer, which would
    make that layer look unlike the others.
    """
    weighted: set[Value] = set()
    preamble: list[Draft] = []
    body: list[Draft] = []
    for operator in operators:
        if any(value is not None and (value.read is not None or value in weighted) for value in operator.inputs):
            weighted.update(operator.outputs)
            body.append(operator)
        else:
            preamble.append(operator)
    return preamble + body


def resolve(value: Value, renamed: Mapping[Value, Value]) -> Value:
    """The value that stands for ``value`` in the end."""
    while value in renamed:
        value = renamed[value]
    return value
