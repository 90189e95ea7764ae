"""Shared means of building factor rules and of inferring shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tap_planner.errors import UnsupportedGraphError
from tap_planner.operators.attributes import operand
from tap_planner.operators.types import (
    DimFactors,
    Factor,
    FactorKind,
    FactorRule,
    InternalCollective,
    OperatorSignature,
    Ring,
    TensorType,
)

__all__ = [
    "ALL_OPERANDS",
    "Dims",
    "RuleBuilder",
    "Way",
    "aligned",
    "broadcast_shapes",
    "infer_first",
    "one_of",
    "replicated_rule",
    "shape_error",
]

Dims = tuple[DimFactors, ...]
"""Factors of every dim of one tensor."""

Way = tuple[str, ...]
"""One letter per operand, ``P`` or ``R``."""

ALL_OPERANDS = tuple(range(256))
"""Indices of the operands of a variadic operator; those beyond the operands that are there do not apply."""


class RuleBuilder:
    """Collects the factors of one rule."""

    def __init__(self, signature: OperatorSignature) -> None:
        self._signature = signature
        self._factors: list[Factor] = []

    def factor(
        self, name: str, size: int, kind: FactorKind = FactorKind.PARALLEL, *, least_part: int = 0
    ) -> DimFactors:
        """Adds a factor and returns it as the content of a dim; a size of 1 has no factor: ()."""
        if size == 1:
            return ()
        self._factors.append(Factor(name=name, size=size, kind=kind, least_part=least_part))
        return (len(self._factors) - 1,)

    def fixed(self, name: str, size: int) -> DimFactors:
        """Adds a factor that is never split."""
        return self.factor(name, size, FactorKind.FIXED)

    def summed(self, name: str, size: int) -> DimFactors:
        """Adds a factor that is summed over; integers are never summed across devices, so there it is fixed."""
        is_float = self._signature.outputs[0].is_float
        return self.factor(name, size, FactorKind.SUM if is_float else FactorKind.FIXED)

    def each(self, prefix: str, shape: Sequence[int], kind: FactorKind = FactorKind.PARALLEL) -> Dims:
        """One factor per dim, called ``prefix`` and the dim's index."""
        return tuple(self.factor(f"{prefix}{dim}", size, kind) for dim, size in enumerate(shape))

    def build(
        self,
        inputs: Sequence[Dims | None],
        outputs: Sequence[Dims],
        *,
        additive: Iterable[int] = (),
        partial: Iterable[Way] = (),
        collectives: tuple[InternalCollective, ...] = (),
        layout: Iterable[int] = (),
        rings: tuple[Ring, ...] = (),
    ) -> FactorRule:
        """The finished rule.

        Args:
            inputs: factors of each operand; None for an absent one.
            outputs: factors of each output.
            additive: operands that are added to a sum; absent ones are dropped.
            partial: ways in which P(sum) may pass; a way that would make an operand P that is not float is dropped.
            collectives: collectives inside the operator.
            layout: factors that are no loop of the computation.
            rings: ways to split it in a ring.
        """
        return FactorRule(
            factors=tuple(self._factors),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            additive=frozenset(index for index in additive if index < len(inputs) and inputs[index] is not None),
            partial=self._usable(partial),
            collectives=collectives,
            layout=frozenset(layout),
            rings=rings,
        )

    def _usable(self, ways: Iterable[Way]) -> tuple[Way, ...]:
        types = self._signature.inputs
        if not self._signature.outputs[0].is_float:
            return ()
        kept: list[Way] = []
        for way in ways:
            pairs = list(zip(way, types, strict=False))
            if any(letter == "P" and found is not None and not found.is_float for letter, found in pairs):
                continue
            letters = tuple("R" if found is None else letter for letter, found in pairs)
            if "P" in letters and letters not in kept:
                kept.append(letters)
        return tuple(kept)


def aligned(shape: Sequence[int], dims: Dims) -> Dims:
    """Factors of an operand of shape ``shape`` that is broadcast (from the right) to a tensor with factors ``dims``."""
    offset = len(dims) - len(shape)
    return tuple(() if size == 1 else dims[offset + dim] for dim, size in enumerate(shape))


def one_of(count: int) -> tuple[Way, ...]:
    """The ways of a multilinear operator: one of its ``count`` operands is P, the others R."""
    return tuple(tuple("P" if other == index else "R" for other in range(count)) for index in range(count))


def replicated_rule(signature: OperatorSignature) -> FactorRule:
    """The rule of an operator that is never split: every dim has a fixed factor of its own."""
    builder = RuleBuilder(signature)
    inputs = [
        None if found is None else builder.each(f"in{index}_", found.shape, FactorKind.FIXED)
        for index, found in enumerate(signature.inputs)
    ]
    outputs = [
        builder.each(f"out{index}_", found.shape, FactorKind.FIXED) for index, found in enumerate(signature.outputs)
    ]
    return builder.build(inputs, outputs)


def shape_error(signature: OperatorSignature, expected: str) -> UnsupportedGraphError:
    """An error that names the operator and the shapes that it cannot work on."""
    shapes = ", ".join("absent" if found is None else str(list(found.shape)) for found in signature.inputs)
    return UnsupportedGraphError(
        f"operator {signature.type}: operands of shape {shapes}, expected {expected}",
        hint="check the values given to the model's dims",
    )


def broadcast_shapes(signature: OperatorSignature, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The common shape of ``shapes`` by numpy's broadcasting."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    rank = max(len(shape) for shape in shapes)
    result = [1] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, start=rank - len(shape)):
            if size == 1 or size == result[dim]:
                continue
            if result[dim] != 1:
                raise shape_error(signature, "shapes that broadcast")
            result[dim] = size
    return tuple(result)


def infer_first(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    """Every output has the type of the first operand."""
    return (operand(signature, 0),) * num_outputs
