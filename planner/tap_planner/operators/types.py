"""What the planner knows of an operator, as values: signatures, factor rules, records.

A signature holds everything that a rule may depend on. Integer operands that define structure (the target of a
Reshape, the axes of a reduction, the starts of a Slice) have been turned into attributes by ``graph``, so that a
rule never looks at a tensor's values.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
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


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalCollective:
    """A collective inside an operator, run over the axes that split ``factor`` (vocabulary-sharded cross-entropy)."""

    factor: int
    kind: str
    """``all_reduce``."""
    elements: tuple[int, ...]
    """Factors whose local sizes multiply to the number of elements."""
    multiplier: int = 1


DimFactors = tuple[int, ...]
"""Factors (indices into ``FactorRule.factors``) that make up one dim, outermost first; () for a broadcast dim of 1."""


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
    quantised_operands: tuple[int, ...] = ()
    """Operands that hold quantised data, scales or zero points: stored ones are parameters of whatever size, which are
    never trained and whose values count for nothing."""
    known: bool = True
    """False for the record that stands in for an operator nobody knows: replicated, with a warning."""
