"""What the planner knows of an operator, as values: signatures, factor rules, records.

A signature holds everything that a rule may depend on. Integer operands that define structure (the target of a
Reshape, the axes of a reduction, the starts of a Slice) have been turned into attributes by ``graph``, so that a
rule never looks at a tensor's values.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

AttributeValue = int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Element type and static shape of a tensor."""

    dtype: str
    """ONNX element type in lower case: ``float32``, ``float16``, ``bfloat16``, ``int64``, ``bool``, ..."""
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements (1 for a scalar)."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def is_float(self) -> bool:
        """Whether gradients can flow through the tensor."""
        return self.dtype in ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSignature:
    """An operator without its names: equal signatures have equal rules, shapes and costs."""

    type: str
    """``MatMul``; operators of other domains as ``com.microsoft::FastGelu``."""
    attributes: tuple[tuple[str, AttributeValue], ...]
    """Sorted by name."""
    inputs: tuple[TensorType | None, ...]
    """None where an optional operand is absent."""
    outputs: tuple[TensorType, ...]

    def attribute(self, name: str, default: AttributeValue | None = None) -> AttributeValue | None:
        """Value of the attribute ``name``, or ``default``."""
        for key, value in self.attributes:
            if key == name:
                return value
        return default


class FactorKind(enum.Enum):
    """How a factor (a named loop index of an operator) may be split over an axis."""

    PARALLEL = "parallel"
    """Every rank computes its part of the outputs; the factor is in every output or the output is replicated."""
    SUM = "sum"
    """The factor is summed over: the outputs become P(sum)."""
    FIXED = "fixed"
    """Never split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One loop index of an operator."""

    name: str
    """Unique within the rule: ``b``, ``m``, ``k``, ``d0``, ..."""
    size: int
    kind: FactorKind
    least_part: int = 0
    """Where above 0, neighbouring parts meet (a halo): every split must leave equal, contiguous parts of at least so
    many, so that a part needs no more than its direct neighbours hold."""

    def allows(self, ranks: int, blocks: int = 1) -> bool:
        """Whether ``least_part`` lets ``ranks`` ranks (over all axes that split the factor) share it in ``blocks``."""
        if self.least_part == 0 or ranks == 1:
            return True
        return blocks == 1 and self.size % ranks == 0 and self.size // ranks >= self.least_part


DimFactors = tuple[int, ...]
"""Factors (indices into ``FactorRule.factors``) that make up one dim, outermost first; () for a broadcast dim of 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalCollective:
    """A collective inside an operator, run over the axes that split ``factor`` (vocabulary-sharded cross-entropy, the
    halo of a convolution) or on which parts of it go round (the keys of a ring)."""

    factor: int
    kind: str
    """``all_reduce``, ``halo_exchange`` or ``ring_exchange``."""
    elements: tuple[int, ...]
    """Factors whose local sizes multiply to the number of elements."""
    multiplier: int = 1
    halo: tuple[int, int] | None = None
    """Rows of the dim that a part needs from the previous and from the next one: they multiply too. A part between two
    others receives both, so that is what counts; of two parts each has one neighbour, and the larger counts."""
    widened: tuple[tuple[DimFactors, int], ...] = ()
    """Dims (they multiply too) to which an earlier exchange has added rows, where their first factor is split."""
    backward_of: int | None = None
    """The operand whose gradient needs the same collective again in backward; None: backward has none."""
    ring: tuple[int, ...] | None = None
    """For ``ring_exchange``: operands that what goes round is made of. It goes round in forward, again in backward, and
    there its gradient goes round as well if one of these operands gets a gradient."""

    def times(self, ranks: Sequence[int], needed: Sequence[bool] | None = None) -> int:
        """How often it is issued; axes of one rank split nothing, and such a part has no neighbours.

        Args:
            ranks: over how many ranks every factor is spread (1: not at all).
            needed: None for forward; for backward, per operand, whether its gradient is made.
        """
        if self.ring is not None:
            return (ranks[self.factor] - 1) * (1 if needed is None else self._rounds_back(needed))
        if self.halo is not None and ranks[self.factor] == 1:
            return 0
        return int(needed is None or (self.backward_of is not None and needed[self.backward_of]))

    def _rounds_back(self, needed: Sequence[bool]) -> int:
        assert self.ring is not None
        return int(any(needed)) + int(any(needed[operand] for operand in self.ring if operand < len(needed)))

    def num_elements(self, sizes: Sequence[int], ranks: Sequence[int]) -> int:
        """Logical payload on one rank, each time.

        Args:
            sizes: local size of every factor of the rule.
            ranks: over how many ranks every factor is spread (1: not at all).
        """
        count = self.multiplier
        for factor in self.elements:
            count *= sizes[factor]
        if self.ring is not None:
            count //= ranks[self.factor]
        if self.halo is not None:
            count *= sum(self.halo) if ranks[self.factor] > 2 else max(self.halo)
        for dim, rows in self.widened:
            length = 1
            for factor in dim:
                length *= sizes[factor]
            count *= length + (rows if ranks[dim[0]] > 1 else 0)
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A way to split an operator in which every part of one factor meets every part of another in turn.

    Each rank holds a part of both; the parts of ``keys`` go round. Only even splits are possible.
    """

    queries: int
    """Factor that is divided: a rank computes its part of it against all of ``keys``."""
    keys: int
    """Factor of which every rank computes all, though it holds a part of it."""
    operands: tuple[int, ...]
    """Operands that are held by parts of ``keys`` (or of ``queries``, where one operand holds both)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorRule:
    """Which factors the dims of each operand are made of (as Shardy's sharding rules)."""

    factors: tuple[Factor, ...]
    inputs: tuple[tuple[DimFactors, ...] | None, ...]
    """Per operand, per dim; None for an absent operand."""
    outputs: tuple[tuple[DimFactors, ...], ...]
    additive: frozenset[int] = frozenset()
    """Operands that are added to a sum (a bias): where a SUM factor is split they count once, on coordinate 0, so
    they are wanted as P(sum)."""
    partial: tuple[tuple[str, ...], ...] = ()
    """Ways in which P(sum) passes through the operator unreduced (it is linear in the operands marked ``P``): per
    way one letter per operand, ``P`` or ``R``. Empty for operators that are not linear."""
    collectives: tuple[InternalCollective, ...] = ()
    """Collectives inside the operator, in order."""
    layout: frozenset[int] = frozenset()
    """Factors that only lay out a packed operand: no loop of the computation, so they do not count as work."""
    rings: tuple[Ring, ...] = ()
    """Ways to split it in a ring."""


class ComputeKind(enum.Enum):
    """Which part of the roofline bounds an operator."""

    CONTRACTION = "contraction"
    """Matrix units: 2 x product of all factors FLOPs."""
    MEMORY = "memory"
    """Elementwise, reductions, normalisations, data movement: bytes over the memory bandwidth."""
    VIEW = "view"
    """Costs nothing (Reshape, Unsqueeze, Identity)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRecord:
    """Everything that the planner knows of one operator type. A new operator is one such record."""

    type: str
    rule: Callable[[OperatorSignature], FactorRule]
    """The factor rule of a signature (outputs filled in)."""
    infer: Callable[[OperatorSignature, int], tuple[TensorType, ...]]
    """Output types of a signature whose ``outputs`` are still empty; second argument: number of outputs."""
    kind: ComputeKind
    saved_inputs: tuple[int, ...] = ()
    """Operands that backward reads (an operand is kept only if some gradient needs it)."""
    saved_outputs: tuple[int, ...] = ()
    """Outputs that backward reads (Relu, Softmax, Sigmoid)."""
    trainable_operands: tuple[int, ...] = ()
    """Operands whose role is weight, bias, scale or table."""
    differentiable_operands: tuple[int, ...] | None = None
    """Operands that a gradient can reach; None means every float operand."""
    random: bool = False
    """Whether it draws random numbers, a function of each element's position in the whole batch."""
    caches: tuple[tuple[int, int], ...] = ()
    """(operand, output) pairs of states that a step finds and leaves for the next one: the keys of a decoder."""
    quantised_operands: tuple[int, ...] = ()
    """Operands that hold quantised data, scales or zero points: stored ones are parameters of whatever size, which are
    never trained and whose values count for nothing."""
    known: bool = True
    """False for the record that stands in for an operator nobody knows: replicated, with a warning."""
