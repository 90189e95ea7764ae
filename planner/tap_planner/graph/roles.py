"""Which stored float tensors are parameters: decided by where they are used, never by their values.

A float initializer (or Constant, ConstantOfShape node) is a candidate. It is followed through operators that depend
on nothing but candidates and scalars. Where it meets an activation it is a parameter, trainable if it arrives at an
operand that the operator's record calls trainable; so is the table of a lookup at constant positions. Where it only
meets positions (the frequencies of a rotary embedding) it stays a constant.

Quantised weights are candidates too. With their scales and zero points, of whatever size, they are parameters that are
never trained; so is a float weight that is quantised on its way, or that scales integers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tap_planner.graph.contrib import TRAINABLE
from tap_planner.graph.nodes import Node
from tap_planner.operators import lookup

_FIRST_ONLY = frozenset(
    (
        *("Cast", "CastLike", "Dropout", "Expand", "Flatten", "Identity", "Pad", "Reshape", "Slice", "Split"),
        *("SequenceAt", "SplitToSequence"),
        *("Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze"),
        *("Clip", "CumSum", "ReduceMean", "ReduceSum", "Resize", "TopK"),
    )
)
"""Operators whose first operand is data and whose others are structure."""
_QUANTISING = frozenset(
    (
        *("DequantizeLinear", "QuantizeLinear", "DynamicQuantizeLinear"),
        *("com.microsoft::DequantizeLinear", "com.microsoft::QuantizeLinear"),
    )
)
_PACKED = frozenset(
    (
        *("int8", "uint8", "int4", "uint4", "int2", "uint2", "float4e2m1", "float8e8m0"),
        *("float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"),
    )
)
"""Integer-like element types in which weights, not shapes, are stored."""
_TABLES = frozenset(("Gather", "GatherND", "GatherElements", "com.microsoft::GatherBlockQuantized"))
_TINY_ROLES = frozenset(
    (
        *("Conv", "ConvTranspose", "Gemm", "MatMul", "PRelu"),
        *("BatchNormalization", "GroupNormalization", "InstanceNormalization"),
        *("LayerNormalization", "RMSNormalization"),
    )
)
"""Where even a tensor of one element is a weight; elsewhere it is a scalar constant."""
_NEVER_TRAINED = re.compile(
    r"rotary|(^|[._/])rope|inv_freq|cos_cached|sin_cached|(^|[._/])(cos|sin)$|running_(mean|var)|attn_mask|position_ids",
    re.IGNORECASE,
)


@dataclass(slots=True, eq=False)
class Roles:
    """Names of stored tensors by what they are; the others are constants."""

    trainable: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    """Meet an activation, but in no trainable role."""
    quantised: set[str] = field(default_factory=set)
    """Packed weights and their scales."""
    statistics: set[str] = field(default_factory=set)
    """Used by an operator that stores state in them (batch-norm)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A stored tensor as far as roles need it."""

    dtype: str
    size: int | None
    """Number of elements, None if not known yet."""
    rank: int | None
    external: bool = False

    @property
    def is_float(self) -> bool:
        """Whether a gradient could reach it."""
        return self.dtype in ("float64", "float32", "float16", "bfloat16")

    @property
    def is_candidate(self) -> bool:
        """Whether it could be a parameter."""
        weight_like = self.is_float or (self.dtype in _PACKED and self.size != 1)
        return self.external or (weight_like and self.rank != 0)


_Sources = frozenset[str]
_NOTHING: _Sources = frozenset()


class _Walk:
    """One pass over the sorted nodes."""

    def __init__(
        self, dynamic: Iterable[str], stored: Mapping[str, Stored], trainable: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.roles = Roles()
        self._trainable = trainable
        self._stored = stored
        self._dynamic = set(dynamic)
        self._sources: dict[str, _Sources] = {}
        self._through: set[str] = set()
        """Candidates that were quantised or restored on their way."""
        self._scalars: set[str] = set()
        for name, item in stored.items():
            self.add(name, item)

    def add(self, name: str, item: Stored) -> None:
        if item.is_candidate:
            self._sources[name] = frozenset((name,))
        if item.size == 1:
            self._scalars.add(name)

    def visit(self, node: Node) -> None:
        if node.type in ("Shape", "Size"):
            return
        if not node.inputs:
            if node.type != "Constant":
                self._dynamic.update(node.outputs)
            return
        if not self._dynamic.isdisjoint(node.inputs):
            self._meet(node)
            self._dynamic.update(node.outputs)
            return
        first = node.inputs[0]
        if first in self._sources and len(node.inputs) > 1 and node.type in _TABLES:
            self._meet(node, (0, *lookup(node.type).quantised_operands))
            self._dynamic.update(node.outputs)
            return
        if node.type in _QUANTISING:
            sources = self._origins(first)
            if sources:
                sources = sources.union(*(self._origins(name) for name in node.inputs))
                self._through.update(sources)
        else:
            sources = self._carried(node)
        if sources:
            for output in node.outputs:
                self._sources[output] = sources
        if all(name in self._scalars for name in node.inputs[:1]) and node.type in _FIRST_ONLY:
            self._scalars.update(node.outputs)

    def _carried(self, node: Node) -> _Sources:
        """Candidates that the node's result still is made of alone."""
        operands = node.inputs[:1] if node.type in _FIRST_ONLY else node.inputs
        found: _Sources = _NOTHING
        for name in operands:
            sources = self._sources.get(name)
            if sources is not None:
                found |= sources
            elif name and name not in self._scalars:
                return _NOTHING
        return found

    def _origins(self, name: str) -> _Sources:
        """Candidates that a value is made of; a stored one of whatever size is one here."""
        return self._sources.get(name) or (frozenset((name,)) if name in self._stored else _NOTHING)

    def _meet(self, node: Node, positions: Iterable[int] | None = None) -> None:
        quantised = lookup(node.type).quantised_operands
        for index in range(len(node.inputs)) if positions is None else positions:
            if index >= len(node.inputs):
                continue
            name = node.inputs[index]
            if index in quantised:
                self.roles.quantised.update(self._origins(name))
            elif name in self._sources:
                self._mark(node, index)

    def _mark(self, node: Node, index: int) -> None:
        known = TRAINABLE.get(node.type, lookup(node.type).trainable_operands)
        trainable = index in self._trainable.get(node.type, known)
        sources = self._sources[node.inputs[index]]
        packed = any(self._stored[source].dtype in _PACKED for source in sources)
        for source in sources:
            item = self._stored[source]
            if packed or source in self._through:
                self.roles.quantised.add(source)
                continue
            if item.size == 1 and not (trainable and node.type in _TINY_ROLES):
                if item.external:
                    self.roles.used.add(source)
                continue
            if trainable and item.is_float and not _NEVER_TRAINED.search(source):
                self.roles.trainable.add(source)
            else:
                self.roles.used.add(source)
                if node.type == "BatchNormalization":
                    self.roles.statistics.add(source)

    def finish(self, outputs: Iterable[str]) -> Roles:
        for name in outputs:
            found = self._sources.get(name, _NOTHING)
            self.roles.used.update(found)
            self.roles.quantised.update(found & self._through)
        self.roles.trainable -= self.roles.quantised
        self.roles.used |= self.roles.quantised
        self.roles.used -= self.roles.trainable
        return self.roles


def find_roles(
    nodes: Iterable[Node],
    dynamic: Iterable[str],
    stored: Mapping[str, Stored],
    outputs: Iterable[str],
    trainable: Mapping[str, tuple[int, ...]],
) -> Roles:
    """Decide which stored tensors are parameters.

    Args:
        nodes: sorted topologically.
        dynamic: graph inputs.
        stored: initializers, Constant and ConstantOfShape nodes by name of the tensor.
        outputs: graph outputs; a candidate that is returned as it is counts as used.
        trainable: per type with a custom rule the operands that are weights.
    """
    walk = _Walk(dynamic, stored, trainable)
    for node in nodes:
        if node.outputs and node.outputs[0] not in stored:
            walk.visit(node)
    return walk.finish(outputs)
