"""Which graph inputs a value depends on, and how the user could settle it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tap_planner.graph.drafts import Draft
from tap_planner.graph.types import TensorKind
from tap_planner.graph.values import Value

_COMPARISONS = frozenset(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value comes from."""

    inputs: tuple[Value, ...]
    """Graph inputs that it depends on, nearest first."""
    compared: int | None
    """The constant that it is compared with on the way, if there is one."""

    @property
    def words(self) -> str:
        """The inputs, as words after "depends on"."""
        if not self.inputs:
            return "the data"
        names = ", ".join(repr(value.name) for value in self.inputs[:3])
        more = f" and {len(self.inputs) - 3} more" if len(self.inputs) > 3 else ""
        return f"{'input' if len(self.inputs) == 1 else 'inputs'} {names}{more}"

    @property
    def settling(self) -> str:
        """Options that would make the value a constant; empty where some input is no integer or boolean."""
        if not self.inputs or any(not _can_be_fixed(value) for value in self.inputs):
            return ""
        return " ".join(f"--value {value.name}={self._example(value)}" for value in self.inputs)

    def _example(self, value: Value) -> str:
        if value.type.dtype == "bool":
            one = "true"
        else:
            one = "N" if self.compared is None else str(self.compared)
        return ",".join([one] * min(value.type.num_elements, 8))


def _can_be_fixed(value: Value) -> bool:
    return value.type.dtype == "bool" or value.type.dtype.startswith(("int", "uint"))


def origin(drafts: Sequence[Draft], value: Value, fetch: Callable[[str], np.ndarray]) -> Origin:
    """Trace a value back to the graph inputs.

    Args:
        drafts: operators made so far.
        value: an operand of the next one.
        fetch: value of a constant by name.
    """
    producers = {output: draft for draft in drafts for output in draft.outputs}
    inputs: list[Value] = []
    compared: int | None = None
    pending, seen = [value], {value}
    while pending:
        layer, pending = pending, []
        for current in layer:
            draft = producers.get(current)
            if draft is None:
                if current.kind is TensorKind.INPUT:
                    inputs.append(current)
                continue
            if compared is None and draft.type in _COMPARISONS:
                compared = _compared(draft, fetch)
            for operand in draft.inputs:
                if operand is not None and operand not in seen:
                    seen.add(operand)
                    pending.append(operand)
    return Origin(inputs=tuple(inputs), compared=compared)


def _compared(draft: Draft, fetch: Callable[[str], np.ndarray]) -> int | None:
    for operand in draft.inputs:
        if operand is not None and operand.is_constant and operand.type.num_elements == 1:
            number = fetch(operand.name).reshape(-1)[0]
            return int(number) if float(number).is_integer() else None
    return None
