"""Operators on quantised elements (QLinear*, *Integer and mixed ones): each is a float operator with scales.

The rule of the float operator says how data may be split; scales and zero points follow the dim along which they vary.
Results that are quantised or integers are never partial sums, so what is summed over is split only where the result is
float.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tap_planner.operators import contraction, convolution, elementwise, movement, reduction
from tap_planner.operators.attributes import operand
from tap_planner.operators.building import ALL_OPERANDS, Dims, aligned, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    Factor,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]

_FLOAT = {
    record.type: record
    for family in (contraction, convolution, elementwise, movement, reduction)
    for record in family.RECORDS
}
_RESULT = -1
"""Stands for the result where an operand of the float operator is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counterpart:
    """How an operator on quantised elements relates to a float one."""

    base: str
    """The float operator."""
    data: Callable[[int], tuple[int, ...]]
    """Positions of the float operator's operands, given the number of operands."""
    dtype: Callable[[OperatorSignature], str]
    """Element type of the result."""
    varies: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Scales and zero points of one dim: (operand of the float operator, dim) along which they vary."""
    whole: frozenset[str] = frozenset()
    """First letters of factors that are never split here, though the float operator lets them be."""
    bias: int | None = None
    """An operand that is added to the float operator's result."""

    def signature(self, signature: OperatorSignature) -> OperatorSignature:
        """The float operator on the same shapes."""
        found = signature.inputs
        inputs = tuple(found[position] for position in self.data(len(found)) if position < len(found))
        return OperatorSignature(
            type=self.base, attributes=signature.attributes, inputs=inputs, outputs=signature.outputs
        )

    def rule(self, signature: OperatorSignature) -> FactorRule:
        """The float operator's rule, with scales and zero points."""
        base = _FLOAT[self.base].rule(self.signature(signature))
        positions = self.data(len(signature.inputs))
        inputs: list[Dims | None] = []
        for position, found in enumerate(signature.inputs):
            if found is None:
                inputs.append(None)
            elif position in positions:
                inputs.append(base.inputs[positions.index(position)])
            else:
                inputs.append(self._scale_dims(signature, position, found.shape, base))
        factors = tuple(
            Factor(name=item.name, size=item.size, kind=FactorKind.FIXED) if item.name[0] in self.whole else item
            for item in base.factors
        )
        split = frozenset(index for index, item in enumerate(factors) if item.kind is not FactorKind.FIXED)
        additive = {positions[index] for index in base.additive}
        if self.bias is not None and self.bias < len(inputs) and inputs[self.bias] is not None:
            additive.add(self.bias)
        return replace(
            base,
            factors=factors,
            inputs=tuple(inputs),
            additive=frozenset(additive),
            partial=(),
            collectives=tuple(item for item in base.collectives if item.factor in split),
        )

    def _scale_dims(
        self, signature: OperatorSignature, position: int, shape: tuple[int, ...], base: FactorRule
    ) -> Dims:
        if all(size == 1 for size in shape):
            return ((),) * len(shape)
        if position not in self.varies:
            raise shape_error(signature, f"one number as operand {position}")
        of, dim = self.varies[position]
        dims = base.outputs[0] if of == _RESULT else base.inputs[of]
        data = signature.outputs[0] if of == _RESULT else self.signature(signature).inputs[of]
        assert dims is not None and data is not None
        if len(shape) == 1 and -len(dims) <= dim < len(dims) and shape[0] == data.shape[dim]:
            return (dims[dim],)
        fits = len(shape) > 1 and len(shape) <= len(dims)
        if not fits or any(size not in (1, whole) for size, whole in zip(shape[::-1], data.shape[::-1], strict=False)):
            raise shape_error(signature, f"operand {position} to be one number or one per index of dim {dim}")
        return aligned(shape, dims)

    def infer(self, signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
        """The float operator's shapes with the result's element type."""
        made = _FLOAT[self.base].infer(self.signature(signature), num_outputs)
        dtype = self.dtype(signature)
        return tuple(TensorType(dtype=dtype, shape=item.shape) for item in made)


def _at(*positions: int) -> Callable[[int], tuple[int, ...]]:
    return lambda count: positions


def _type_of(position: int) -> Callable[[OperatorSignature], str]:
    """The element type of an operand (a zero point, or the data where the point is absent)."""

    def dtype(signature: OperatorSignature) -> str:
        given = signature.inputs[position] if position < len(signature.inputs) else None
        return operand(signature, 0).dtype if given is None else given.dtype

    return dtype


def _int32(signature: OperatorSignature) -> str:
    return "int32"


def _gemm_type(signature: OperatorSignature) -> str:
    """Float where no scale of the result is given."""
    scale = signature.inputs[7] if len(signature.inputs) > 7 else None
    return _type_of(8)(signature) if scale is not None else operand(signature, 1).dtype


def _gemm_rule(signature: OperatorSignature) -> FactorRule:
    """As Gemm; where integers are added (C) the inner dim is never split, for they cannot be a partial sum."""
    added = signature.inputs[6] if len(signature.inputs) > 6 else None
    whole = frozenset("k") if added is not None else frozenset[str]()
    return replace(_GEMM, whole=whole).rule(signature)


_ROWS, _COLUMNS = (0, -2), (1, -1)
_GEMM = _Counterpart(
    base="Gemm", data=_at(0, 3, 6), dtype=_gemm_type, varies={4: (_RESULT, 1), 5: (_RESULT, 1), 7: (_RESULT, 1)}
)


_NO_HALO = frozenset("s")
"""Space of windows: what lies in the padding is the zero point, which an exchange of rows does not know."""


def _activation(base: str) -> _Counterpart:
    """X, its scale and zero point, the result's scale and zero point."""
    whole = _NO_HALO if base == "AveragePool" else frozenset[str]()
    return _Counterpart(base=base, data=_at(0), dtype=_type_of(4), whole=whole)


def _broadcast(base: str) -> _Counterpart:
    return _Counterpart(base=base, data=_at(0, 3), dtype=_type_of(7))


def _record(
    name: str,
    counterpart: _Counterpart,
    *,
    quantised: tuple[int, ...],
    trainable: tuple[int, ...] = (),
    differentiable: tuple[int, ...] = (),
    rule: Callable[[OperatorSignature], FactorRule] | None = None,
) -> OperatorRecord:
    contracts = _FLOAT[counterpart.base].kind is ComputeKind.CONTRACTION
    return OperatorRecord(
        type=name,
        rule=rule or counterpart.rule,
        infer=counterpart.infer,
        kind=ComputeKind.CONTRACTION if contracts else ComputeKind.MEMORY,
        trainable_operands=trainable,
        differentiable_operands=differentiable,
        quantised_operands=quantised,
    )


def _microsoft(name: str) -> str:
    return f"com.microsoft::{name}"


RECORDS: tuple[OperatorRecord, ...] = (
    _record(
        "QLinearConv",
        _Counterpart(
            base="Conv",
            data=_at(0, 3, 8),
            dtype=_type_of(7),
            varies={4: (1, 0), 5: (1, 0)},
            whole=_NO_HALO,
        ),
        quantised=tuple(range(9)),
    ),
    _record(
        "ConvInteger",
        _Counterpart(base="Conv", data=_at(0, 1), dtype=_int32, varies={3: (1, 0)}, whole=_NO_HALO),
        quantised=tuple(range(4)),
    ),
    _record(
        "MatMulInteger",
        _Counterpart(base="MatMul", data=_at(0, 1), dtype=_int32, varies={2: _ROWS, 3: _COLUMNS}),
        quantised=tuple(range(4)),
    ),
    _record(
        "QLinearMatMul",
        _Counterpart(
            base="MatMul",
            data=_at(0, 3),
            dtype=_type_of(7),
            varies={1: _ROWS, 2: _ROWS, 4: _COLUMNS, 5: _COLUMNS, 6: (_RESULT, -2), 7: (_RESULT, -2)},
        ),
        quantised=tuple(range(8)),
    ),
    _record(
        _microsoft("MatMulIntegerToFloat"),
        _Counterpart(
            base="MatMul",
            data=_at(0, 1),
            dtype=_type_of(2),
            varies={2: _ROWS, 3: _COLUMNS, 4: _ROWS, 5: _COLUMNS, 6: (_RESULT, -1)},
            bias=6,
        ),
        quantised=tuple(range(6)),
        trainable=(6,),
        differentiable=(6,),
    ),
    _record(
        _microsoft("DynamicQuantizeMatMul"),
        # Scale and zero point of A come from all of A: only the columns of B may be split.
        _Counterpart(
            base="MatMul",
            data=_at(0, 1),
            dtype=_type_of(0),
            varies={2: _COLUMNS, 3: _COLUMNS, 4: (_RESULT, -1)},
            whole=frozenset("bmk"),
            bias=4,
        ),
        quantised=(1, 2, 3),
        trainable=(4,),
        differentiable=(4,),
    ),
    _record(_microsoft("QGemm"), _GEMM, quantised=tuple(range(9)), rule=_gemm_rule),
    _record(_microsoft("QLinearAdd"), _broadcast("Add"), quantised=tuple(range(8))),
    _record(_microsoft("QLinearMul"), _broadcast("Mul"), quantised=tuple(range(8))),
    _record(
        _microsoft("QLinearWhere"),
        _Counterpart(base="Where", data=_at(0, 1, 4), dtype=_type_of(8)),
        quantised=tuple(range(1, 9)),
    ),
    _record(
        _microsoft("QLinearConcat"),
        _Counterpart(base="Concat", data=lambda count: tuple(range(2, count, 3)), dtype=_type_of(1)),
        quantised=ALL_OPERANDS,
    ),
    *(
        _record(_microsoft(f"QLinear{base}"), _activation(base), quantised=tuple(range(5)))
        for base in ("Sigmoid", "LeakyRelu", "Softmax", "AveragePool", "GlobalAveragePool", "ReduceMean")
    ),
)
"""Records of the operators on quantised elements."""
