"""The end of a graph in inference: an ``Output`` operator for everything that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tap_planner.graph.caches import find_caches
from tap_planner.graph.drafts import Draft
from tap_planner.graph.training import unique
from tap_planner.graph.types import TensorKind
from tap_planner.graph.values import Value
from tap_planner.operators import OUTPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """A graph with its outputs made explicit."""

    operators: list[Draft]
    results: list[Value]
    """What the ``Output`` operators return, by output."""
    new_positions: int | None
    """By how many positions a step advances the caches; None if there are none, or they differ."""


def append_outputs(operators: Sequence[Draft], outputs: Sequence[Value], names: Sequence[str], taken: set[str]) -> Ends:
    """Give every output an ``Output`` operator, right behind what makes its value: so repeats stay repeats.

    Args:
        operators: in topological order.
        outputs: values of the graph's outputs.
        names: their ONNX names.
        taken: names that are in use; those of the results are added.
    """
    caches = {cache.output: cache for cache in find_caches(operators, outputs, names)}
    makers = {value: (index, slot) for index, draft in enumerate(operators) for slot, value in enumerate(draft.outputs)}
    last = (len(operators), 0)
    behind: dict[int, list[Draft]] = {}
    results: dict[int, Value] = {}
    for position in sorted(range(len(outputs)), key=lambda p: (makers.get(outputs[p], last), p)):
        value = outputs[position]
        name = unique(f"{names[position]}__output", taken)
        taken.add(name)
        results[position] = Value(name=name, type=value.type, kind=TensorKind.ACTIVATION, batched=value.batched)
        inputs: list[Value | None] = [value]
        if position in caches:
            inputs.append(caches[position].past)
        draft = Draft(type=OUTPUT, attributes=(), inputs=inputs, outputs=[results[position]], name=name)
        behind.setdefault(makers.get(value, last)[0], []).append(draft)
    ordered: list[Draft] = []
    for index, operator in enumerate(operators):
        ordered.append(operator)
        ordered.extend(behind.get(index, ()))
    ordered.extend(behind.get(last[0], ()))
    steps = {cache.new_positions for cache in caches.values()} - {0}
    return Ends(
        operators=ordered,
        results=[results[position] for position in range(len(outputs))],
        new_positions=steps.pop() if len(steps) == 1 else None,
    )
