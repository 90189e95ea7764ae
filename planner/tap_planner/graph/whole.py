"""Control flow that depends on data: each node one operator, run in full on every device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx

from tap_planner.errors import UnsupportedGraphError
from tap_planner.graph.bodies import BODY, make_body
from tap_planner.graph.body_types import body_types
from tap_planner.graph.drafts import Draft
from tap_planner.graph.nodes import Node
from tap_planner.graph.origins import Origin, origin
from tap_planner.graph.types import Body
from tap_planner.graph.values import Form, Value
from tap_planner.operators import TensorType

WHOLE = frozenset(("If", "Loop", "Scan"))
"""Operators with subgraphs that can stay whole."""
_MAX_WARNINGS = 3


class Host(Protocol):
    """The binder, as control flow sees it."""

    values: dict[str, Value]
    operators: list[Draft]

    def operand(self, name: str, where: str) -> Value:
        """A value that must be there."""
        ...

    def bind_body(self, graph: onnx.GraphProto, given: Mapping[str, Value]) -> list[Value]:
        """Values of a subgraph's results, given what it reads."""
        ...

    def declared_type(self, name: str) -> TensorType | None:
        """What the file declares."""
        ...

    def is_wanted(self, name: str) -> bool:
        """Whether somebody reads a value."""
        ...

    def fetch(self, name: str) -> np.ndarray:
        """Value of a constant."""
        ...

    def add(self, form: Form, names: Sequence[str], label: str, types: Sequence[TensorType]) -> list[Value]:
        """Append an operator."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    body: Body
    source: Origin | None
    """Where its condition or number of rounds comes from."""


class WholeFlow:
    """The control flow of a graph that stays whole.

    Args:
        host: the binder.
        imports: operator sets of the model.
    """

    def __init__(self, host: Host, imports: Sequence[onnx.OperatorSetIdProto]) -> None:
        self._host = host
        self._imports = imports
        self._kept: dict[str, _Kept] = {}

    def bind(self, node: Node) -> None:
        """Make one operator of a node, with its captured values as operands.

        Raises:
            UnsupportedGraphError: its results have no static shape.
        """
        host = self._host
        operands = [host.operand(name, node.where) if name else None for name in node.inputs]
        names = list(node.outputs)
        while len(names) > 1 and not host.is_wanted(names[-1]):
            names.pop()
        types = self._types(node, dict(zip(node.inputs, operands, strict=True)), names)
        body = make_body(node, operands, len(names), self._imports)
        first = next(name for name in names if name)
        made = [name or f"{first}__unused_{index}" for index, name in enumerate(names)]
        self._kept[made[0]] = _Kept(body=body, source=self._source(node))
        host.add(Form(type=node.type, attributes={BODY: body.key}, inputs=operands), made, node.name, types)

    def _types(self, node: Node, operands: Mapping[str, Value | None], names: Sequence[str]) -> list[TensorType]:
        given = {name: value for name, value in operands.items() if value is not None}
        found = body_types(node, given, self._host.bind_body, self._host.fetch)
        types: list[TensorType] = []
        for name, type_ in zip(names, found.types, strict=False):
            known = type_ or (self._host.declared_type(name) if name else None)
            if known is None:
                raise self._undecided(node, name, found.reason)
            types.append(known)
        return types

    def _undecided(self, node: Node, name: str, reason: str) -> UnsupportedGraphError:
        """Control flow whose results have no static shape: what would settle it."""
        source = self._source(node)
        words = f"its course depends on {source.words}, and " if source is not None else ""
        hint = "export the model without control flow on data"
        if source is not None and source.settling:
            hint = f"give the value: {source.settling}"
        return UnsupportedGraphError(f"{node.where}: {words}the shape of {name!r} is not known ({reason})", hint=hint)

    def _source(self, node: Node) -> Origin | None:
        """Where the condition or the number of rounds comes from, None if they are constants."""
        own = list(node.proto.input)
        for name in own[: {"If": 1, "Loop": 2}.get(node.type, 0)]:
            value = self._host.values.get(name)
            if value is not None and not value.is_constant:
                return origin(self._host.operators, value, self._host.fetch)
        return None

    def carried(self, drafts: Sequence[Draft]) -> dict[str, Body]:
        """Bodies of the operators that remain, by key."""
        return {kept.body.key: kept.body for draft in drafts if (kept := self._kept.get(draft.id)) is not None}

    def warnings(self, drafts: Sequence[Draft], *, training: bool) -> list[str]:
        """What it costs that control flow stays whole.

        Args:
            drafts: the operators that remain.
            training: whether weights inside would be trained elsewhere.
        """
        mine = [(draft, kept) for draft in drafts if (kept := self._kept.get(draft.id)) is not None]
        everything = sum(size for draft in drafts for size in _weights(draft).values())
        texts = [_warning(draft, kept, everything, training=training) for draft, kept in mine[:_MAX_WARNINGS]]
        if len(mine) > _MAX_WARNINGS:
            nodes = sum(kept.body.num_nodes for _, kept in mine[_MAX_WARNINGS:])
            texts.append(f"{len(mine) - _MAX_WARNINGS} more nodes of control flow stay whole, {nodes} nodes in all")
        return texts

    def check_gradients(self, drafts: Sequence[Draft], with_gradient: Collection[Value]) -> None:
        """Refuse a gradient that would have to go through a body.

        Raises:
            UnsupportedGraphError: the first such operator; it is named.
        """
        for draft in drafts:
            kept = self._kept.get(draft.id)
            if kept is None or with_gradient.isdisjoint(draft.outputs):  # type: ignore[attr-defined]
                continue
            names = [value.name for value in draft.inputs if value is not None and value in with_gradient]
            hint = "plan it with --mode infer, or --freeze what lies before it"
            if kept.source is not None and kept.source.settling:
                hint = f"settle its course with {kept.source.settling}, or {hint}"
            raise UnsupportedGraphError(
                f"{kept.body.label}: training needs a gradient of {names[0]!r} through control flow on data", hint=hint
            )


def _weights(draft: Draft) -> dict[str, int]:
    """Parameters that an operator reads, with their numbers of elements."""
    reads = (value for value in draft.inputs if value is not None and value.read is not None)
    return {value.read.parameter: value.type.num_elements for value in reads if value.read is not None}


def _warning(draft: Draft, kept: _Kept, everything: int, *, training: bool) -> str:
    why = "it cannot be unfolded (no round, too many, or too many nodes)"
    if kept.source is not None:
        why = f"its course depends on {kept.source.words}"
    weights = sum(_weights(draft).values())
    text = (
        f"{kept.body.label} stays one operator, because {why}: every device runs all {kept.body.num_nodes} nodes in it"
    )
    if weights:
        share = 100 * weights / max(everything, 1)
        text += f" and holds its {weights} weights ({share:.1f} % of the model's)"
        if training:
            text += ", which are not trained"
    text += "; only its operands and results count in the predicted time"
    if kept.source is not None and kept.source.settling:
        text += f"; it is planned like any nodes with {kept.source.settling}"
    return text
