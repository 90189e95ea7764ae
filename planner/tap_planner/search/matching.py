"""Which operators and parameters a pattern of the user names."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tap_planner.graph import Graph, TensorKind

__all__ = ["Match", "Names", "Readers", "make_matcher"]


def make_matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a name, or a part of it that begins after a ``.`` or ``/``, fits a shell pattern.

    ``layers.*.mlp.*`` fits ``model.layers.0.mlp.up.weight`` and ``/layers.0/mlp/up/MatMul``: a slash counts as a dot.
    """
    expression = re.compile(r"(?s:.*[./])?" + fnmatch.translate(pattern))

    def matches(name: str) -> bool:
        return bool(expression.match(name) or ("/" in name and expression.match(name.replace("/", "."))))

    return matches


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """An operator that a pattern names."""

    index: int
    itself: bool
    """By its id, name or type, or by a tensor that it makes or (of the graph's inputs) reads."""
    operands: tuple[int, ...]
    """Operands that read a parameter whose name fits."""


Readers = Mapping[str, tuple[tuple[int, int], ...]]
"""Per parameter the (operator, operand) pairs that read it."""


class Names:
    """The names of a graph, to be matched."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    @cached_property
    def readers(self) -> Readers:
        """Who reads each parameter."""
        found: dict[str, list[tuple[int, int]]] = {parameter.name: [] for parameter in self._graph.parameters}
        for index, operator in enumerate(self._graph.operators):
            for position, name in enumerate(operator.inputs):
                read = None if name is None else self._graph.tensors[name].read
                if read is not None:
                    found[read.parameter].append((index, position))
        return {name: tuple(slots) for name, slots in found.items()}

    @cached_property
    def _own(self) -> tuple[tuple[str, ...], ...]:
        """Per operator what it is called beside its parameters."""
        tensors = self._graph.tensors
        return tuple(
            tuple(
                dict.fromkeys(
                    (
                        *filter(None, (operator.id, operator.name, *operator.outputs)),
                        *(name for name in operator.inputs if name and tensors[name].kind is TensorKind.INPUT),
                    )
                )
            )
            for operator in self._graph.operators
        )

    def parameters(self, pattern: str) -> tuple[str, ...]:
        """Parameters that the pattern names, in graph order."""
        return tuple(filter(make_matcher(pattern), self.readers))

    def operators(self, pattern: str) -> tuple[Match, ...]:
        """Operators that the pattern names, in graph order."""
        matches = make_matcher(pattern)
        operands: dict[int, list[int]] = {}
        for name, slots in self.readers.items():
            if matches(name):
                for index, position in slots:
                    operands.setdefault(index, []).append(position)
        types = {operator.type for operator in self._graph.operators}
        named_types = {type for type in types if fnmatch.fnmatchcase(type, pattern) or _short_type(type, pattern)}
        found: list[Match] = []
        for index, (operator, own) in enumerate(zip(self._graph.operators, self._own, strict=True)):
            itself = operator.type in named_types or any(map(matches, own))
            if itself or index in operands:
                found.append(Match(index=index, itself=itself, operands=tuple(sorted(operands.get(index, ())))))
        return tuple(found)

    def near(self, pattern: str, *, parameters_only: bool = False) -> str:
        """Names that look like the pattern, as a hint; what there is, where nothing does."""
        known = list(self.readers)
        if not parameters_only:
            known += sorted({operator.type for operator in self._graph.operators})
            known += [name for own in self._own for name in own]
        found = _nearest(pattern, known)
        if found:
            return "Did you mean " + " or ".join(repr(name) for name in found) + "?"
        shown = ", ".join(repr(name) for name in list(self.readers)[:3])
        return f"Parameters are called {shown}, ..." if shown else "The model has no parameters."


def _short_type(type: str, pattern: str) -> bool:
    return "::" in type and fnmatch.fnmatchcase(type.rpartition("::")[2], pattern)


_INDEX = re.compile(r"\d+")
_NEAR = 0.75
"""Mean likeness of parts from which a name counts as near."""


def _nearest(pattern: str, known: Sequence[str]) -> list[str]:
    """Up to three near names, part by part; numbers of layers count for nothing, a name's front may be missing."""
    wanted = pattern.lower().split(".")
    names = dict.fromkeys(
        ".".join("*" if _INDEX.fullmatch(part) else part for part in name.split(".")) for name in known
    )
    scored = [(-_likeness(wanted, name.lower().split(".")), name) for name in names]
    near = sorted((score, place, name) for place, (score, name) in enumerate(scored) if -score >= _NEAR)
    return [name for _, _, name in near[:3]]


def _likeness(wanted: Sequence[str], parts: Sequence[str]) -> float:
    """How like the pattern is to the likest stretch of as many parts, from 0 to 1."""
    stretches = [parts[start : start + len(wanted)] for start in range(max(1, len(parts) - len(wanted) + 1))]
    return max(sum(map(_part_likeness, wanted, stretch)) / max(len(wanted), len(stretch)) for stretch in stretches)


def _part_likeness(wanted: str, part: str) -> float:
    if fnmatch.fnmatchcase(part, wanted):
        return 1.0
    if part == "*":
        return float(_INDEX.fullmatch(wanted) is not None)
    return difflib.SequenceMatcher(None, wanted, part).ratio()
