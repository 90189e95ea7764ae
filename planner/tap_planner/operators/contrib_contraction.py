"""Fused matrix products and convolutions of the com.microsoft domain.

Each is a standard operator with something before or after it: its rule is that of the standard one with dims moved,
and with no split of the summed factor where a nonlinear function follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tap_planner.operators import contraction, convolution
from tap_planner.operators.attributes import flag_of, operand, text_of
from tap_planner.operators.building import Dims, aligned, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]

_STANDARD = {record.type: record for family in (contraction, convolution) for record in family.RECORDS}
_MATMUL, _GEMM, _CONV = (_STANDARD[name] for name in ("MatMul", "Gemm", "Conv"))


def _operand_order(signature: OperatorSignature, index: int) -> tuple[int, ...]:
    """Which dim of an operand of FusedMatMul each dim of the plain matrix is.

    ``transBatch`` brings the first dim behind the batch dims, then ``trans`` exchanges the last two.
    """
    rank = len(operand(signature, index).shape)
    order = list(range(rank))
    if rank < 2:
        return tuple(order)
    letter = "AB"[index]
    if flag_of(signature, f"transBatch{letter}"):
        order = [*range(1, rank - 1), 0, rank - 1]
    if flag_of(signature, f"trans{letter}"):
        order[-2:] = reversed(order[-2:])
    return tuple(order)


def _plain(signature: OperatorSignature) -> tuple[OperatorSignature, tuple[tuple[int, ...], ...]]:
    """The MatMul that a FusedMatMul amounts to, and where the dims of its operands lie."""
    orders = tuple(_operand_order(signature, index) for index in range(2))
    operands = tuple(
        TensorType(dtype=found.dtype, shape=tuple(found.shape[dim] for dim in order))
        for found, order in zip((operand(signature, 0), operand(signature, 1)), orders, strict=True)
    )
    return replace(signature, type="MatMul", attributes=(), inputs=operands), orders


def _matmul_rule(signature: OperatorSignature) -> FactorRule:
    """``alpha A B`` with the dims of A and B in other orders; linear as the plain product is."""
    plain, orders = _plain(signature)
    rule = _MATMUL.rule(plain)
    inputs: list[Dims] = []
    for dims, order in zip(rule.inputs, orders, strict=True):
        assert dims is not None
        inputs.append(tuple(dims[order.index(dim)] for dim in range(len(order))))
    return replace(rule, inputs=tuple(inputs))


def _matmul_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    return _MATMUL.infer(_plain(signature)[0], num_outputs)


def _unsummed(rule: FactorRule) -> FactorRule:
    """The rule without splits of what is summed, and without partial ways: a nonlinear function follows."""
    factors = tuple(
        replace(factor, kind=FactorKind.FIXED) if factor.kind is FactorKind.SUM else factor for factor in rule.factors
    )
    return replace(rule, factors=factors, additive=frozenset(), partial=())


def _gemm_rule(signature: OperatorSignature) -> FactorRule:
    """Gemm, then an activation."""
    return _unsummed(_GEMM.rule(signature))


def _conv_rule(signature: OperatorSignature) -> FactorRule:
    """Conv, then a tensor of the result's shape is added, then an activation (if there is one)."""
    plain = _CONV.rule(replace(signature, inputs=signature.inputs[:3]))
    inputs = (*plain.inputs, *(plain.outputs[0] for found in signature.inputs[3:] if found is not None))
    if text_of(signature, "activation", ""):
        return replace(_unsummed(plain), inputs=inputs)
    added = frozenset(range(3, len(inputs)))
    ways = tuple((*way, *("P" for _ in added)) for way in plain.partial)
    return replace(plain, inputs=inputs, additive=plain.additive | added, partial=ways)


def _conv_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    result = _CONV.infer(replace(signature, inputs=signature.inputs[:3]), num_outputs)
    if any(found is not None and found.shape != result[0].shape for found in signature.inputs[3:]):
        raise shape_error(signature, f"a sum operand of the result's shape {list(result[0].shape)}")
    return result


def _gelu_rule(signature: OperatorSignature) -> FactorRule:
    """MatMul, a bias over the columns, then Gelu."""
    rule = _unsummed(_MATMUL.rule(replace(signature, inputs=signature.inputs[:2])))
    biases: Sequence[Dims | None] = [
        None if found is None else aligned(found.shape, rule.outputs[0]) for found in signature.inputs[2:]
    ]
    return replace(rule, inputs=(*rule.inputs, *biases))


def _gelu_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    return _MATMUL.infer(replace(signature, inputs=signature.inputs[:2]), num_outputs)


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="com.microsoft::FusedMatMul",
        rule=_matmul_rule,
        infer=_matmul_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1),
        trainable_operands=(0, 1),
    ),
    OperatorRecord(
        type="com.microsoft::FusedGemm",
        rule=_gemm_rule,
        infer=_GEMM.infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1),
        saved_outputs=(0,),
        trainable_operands=(0, 1, 2),
    ),
    OperatorRecord(
        type="com.microsoft::FusedConv",
        rule=_conv_rule,
        infer=_conv_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1),
        saved_outputs=(0,),
        trainable_operands=(1, 2),
    ),
    OperatorRecord(
        type="com.microsoft::GemmFastGelu",
        rule=_gelu_rule,
        infer=_gelu_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1),
        saved_outputs=(0,),
        trainable_operands=(1, 2),
    ),
)
"""Records of the fused products and convolutions."""
