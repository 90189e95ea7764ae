"""Sizes, factors and dims that the attention operators of the com.microsoft domain have in common.

Factors: ``b`` batch, ``h`` key heads, ``g`` query heads for each, ``s`` queries, ``all`` keys with the cache, ``t`` new
keys, ``past`` cached ones, ``d`` width of a head, ``e`` width of a value. What only lies in packed operands is layout;
``products`` is the work for each query head, query and key. Dims that are never split and shared hold no factor.
"""

from __future__ import annotations

from dataclasses import dataclass

from tap_planner.operators.attributes import operand
from tap_planner.operators.building import Dims, RuleBuilder, aligned
from tap_planner.operators.types import (
    DimFactors,
    FactorKind,
    FactorRule,
    InternalCollective,
    OperatorSignature,
    Ring,
    TensorType,
)

__all__ = ["Factors", "Sizes", "counts_batch", "given", "ring_collectives", "types_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of an attention."""

    batch: int
    key_heads: int
    group: int = 1
    """Query heads for each key head."""
    queries: int
    keys: int
    """New keys, without the cache."""
    cached: int = 0
    """Length of the cache that comes in."""
    total: int
    """Length of the cache that goes out."""
    width: int
    value_width: int

    @property
    def output(self) -> tuple[int, ...]:
        """Shape of the result."""
        return (self.batch, self.queries, self.key_heads * self.group * self.value_width)

    def present(self, width: int) -> tuple[int, ...]:
        """Shape of a cache that goes out."""
        return (self.batch, self.key_heads, self.total, width)

    @property
    def width_of_both(self) -> int:
        """Elements of a key and its value, of one head."""
        return self.width + self.value_width

    @property
    def scores(self) -> tuple[int, ...]:
        """Shape of the scores."""
        return (self.batch, self.key_heads * self.group, self.queries, self.total)


class Factors:
    """Factors of an attention, and the dims of what all variants have.

    Args:
        signature: of the operator.
        sizes: of the operator.
        whole_heads: heads cannot be split, because a packed operand holds them in no equal blocks.
        whole_queries: queries cannot be split, because one operand holds them and the keys.
        whole_batch: the batch cannot be split, because a mask counts over it.
        products: multiplications for each query head, query and key; two products without further ones.
    """

    def __init__(
        self,
        signature: OperatorSignature,
        sizes: Sizes,
        *,
        whole_heads: bool = False,
        whole_queries: bool = False,
        whole_batch: bool = False,
        products: int | None = None,
    ) -> None:
        self._signature = signature
        self._builder = builder = RuleBuilder(signature)
        self._layout: list[int] = []
        self._sizes = sizes
        heads = FactorKind.FIXED if whole_heads else FactorKind.PARALLEL
        self.b = builder.factor("b", sizes.batch, FactorKind.FIXED if whole_batch else FactorKind.PARALLEL)
        self.h = builder.factor("h", sizes.key_heads, heads)
        self.heads = self.h + builder.factor("g", sizes.group, heads if sizes.key_heads == 1 else FactorKind.FIXED)
        self.s = builder.factor("s", sizes.queries, FactorKind.FIXED if whole_queries else FactorKind.PARALLEL)
        self.all = builder.fixed("all", sizes.total)
        self.t = self.all if sizes.keys == sizes.total else self.laid_out("t", sizes.keys)
        self.past = self.all if sizes.cached == sizes.total else self.laid_out("past", sizes.cached)
        self.d = self.e = self.laid_out("d", sizes.width)
        if sizes.value_width != sizes.width:
            self.e = self.laid_out("e", sizes.value_width)
        builder.fixed("products", products or sizes.width + sizes.value_width)

    def laid_out(self, name: str, size: int) -> DimFactors:
        """A factor that is no loop of the computation."""
        made = self._builder.fixed(name, size)
        self._layout.extend(made)
        return made

    def packed(self) -> DimFactors:
        """Queries, keys and values of one dim: three blocks of heads, or a dim that is never split."""
        equal = self._sizes.group == 1 and self._sizes.width == self._sizes.value_width
        return self.laid_out("parts", 3) + self.h + self.d if equal else ()

    def mask(self, index: int) -> Dims:
        """Dims of a mask: lengths, ends and starts, or values by key, by query and key, or of a whole square."""
        shape = operand(self._signature, index).shape
        if len(shape) == 1:
            if shape[0] == self._sizes.batch:
                return (self.b,)
            return (self.laid_out("ends", 2) + self.b,) if shape[0] == 2 * self._sizes.batch else ((),)
        if len(shape) == 3:
            return aligned(shape, (self.b, self.s, ()))
        return (*aligned(shape[:1], (self.b,)), *((),) * (len(shape) - 1))

    def bias(self, index: int) -> Dims:
        """Dims of what is added to the scores; it may hold fewer keys than there is room for."""
        return aligned(operand(self._signature, index).shape, (self.b, self.heads, self.s, ()))

    def build(
        self,
        inputs: dict[int, Dims],
        caches: tuple[Dims, ...],
        keys: tuple[int, ...] = (),
        made_of: tuple[int, ...] = (),
    ) -> FactorRule:
        """The rule: operands that ``inputs`` does not name are never split; outputs are result, caches, scores.

        Args:
            inputs: dims by position.
            caches: dims of the caches that go out.
            keys: operands that hold keys or values by position, which go round in a ring; (): there is no ring.
            made_of: further operands that keys or values are made of.
        """
        known = [
            None if found is None else inputs.get(index, ((),) * len(found.shape))
            for index, found in enumerate(self._signature.inputs)
        ]
        outputs = ((self.b, self.s, self.heads + self.e), *caches, (self.b, self.heads, self.s, self.all))
        ring = self._ring(keys) if len(self._signature.outputs) <= 1 + len(caches) else ()
        return self._builder.build(
            known,
            outputs[: len(self._signature.outputs)],
            layout=self._layout,
            rings=ring,
            collectives=ring_collectives(ring, (*keys, *made_of), self.b + self.h, self._sizes.width_of_both),
        )

    def _ring(self, operands: tuple[int, ...]) -> tuple[Ring, ...]:
        """Queries against keys that go round: where no keys lie in a cache, or are still to be filled in."""
        whole = self._sizes.cached == 0 and self._sizes.keys == self._sizes.total
        return tuple(
            Ring(queries=queries, keys=keys, operands=operands)
            for queries, keys in zip(self.s, self.all, strict=False)
            if operands and whole
        )

    def caches(self, length: DimFactors) -> tuple[Dims, Dims]:
        """Dims of cached keys and values."""
        return (self.b, self.h, length, self.d), (self.b, self.h, length, self.e)


def given(signature: OperatorSignature, index: int) -> TensorType | None:
    """Type of an operand, None if it is absent."""
    return signature.inputs[index] if index < len(signature.inputs) else None


def ring_collectives(
    rings: tuple[Ring, ...], made_of: tuple[int, ...], rows: DimFactors, width: int
) -> tuple[InternalCollective, ...]:
    """What goes round in a ring: keys and values.

    Args:
        rings: ways to split an attention in a ring.
        made_of: operands that keys and values are made of.
        rows: factors beside the keys: batch and key heads.
        width: elements of a key and its value.
    """
    return tuple(
        InternalCollective(
            factor=ring.keys, kind="ring_exchange", elements=(*rows, ring.keys), multiplier=width, ring=made_of
        )
        for ring in rings
    )


def counts_batch(signature: OperatorSignature, index: int, batch: int) -> bool:
    """Whether a mask holds running sums over the batch."""
    found = given(signature, index)
    return found is not None and len(found.shape) == 1 and found.shape[0] not in (batch, 2 * batch)


def types_of(signature: OperatorSignature, shapes: tuple[tuple[int, ...], ...], count: int) -> tuple[TensorType, ...]:
    """Types of the first outputs, of the dtype of the first operand."""
    dtype = operand(signature, 0).dtype
    return tuple(TensorType(dtype=dtype, shape=shape) for shape in shapes[:count])
