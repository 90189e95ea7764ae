"""Operators that work along dims: reductions, arg-reductions, softmax, scans, top-k."""

from __future__ import annotations

from collections.abc import Callable

from tap_planner.operators.attributes import flag_of, int_of, ints_of, operand
from tap_planner.operators.building import RuleBuilder, infer_first, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    DimFactors,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


def _reduced(signature: OperatorSignature) -> tuple[int, ...]:
    rank = len(operand(signature, 0).shape)
    if signature.type in ("ArgMax", "ArgMin"):
        return (int_of(signature, "axis", 0) % max(rank, 1),)
    return tuple(dim % rank for dim in ints_of(signature, "axes", tuple(range(rank))))


def _reduction_rule(signature: OperatorSignature, kind: FactorKind) -> FactorRule:
    shape, reduced = operand(signature, 0).shape, _reduced(signature)
    keep = flag_of(signature, "keepdims", True)
    builder = RuleBuilder(signature)
    inputs: list[DimFactors] = []
    outputs: list[DimFactors] = []
    for dim, size in enumerate(shape):
        if dim not in reduced:
            inputs.append(builder.factor(f"d{dim}", size))
            outputs.append(inputs[-1])
            continue
        make = builder.summed if kind is FactorKind.SUM else builder.fixed
        inputs.append(make(f"d{dim}", size))
        if keep:
            outputs.append(())
    ways = (("P",),) if signature.type in ("ReduceSum", "ReduceMean") else ()
    return builder.build((tuple(inputs),), (tuple(outputs),), partial=ways)


def _sum_rule(signature: OperatorSignature) -> FactorRule:
    """Reduced dims are summed over; a mean divides by the global count."""
    return _reduction_rule(signature, FactorKind.SUM)


def _whole_rule(signature: OperatorSignature) -> FactorRule:
    """Reduced dims are never split."""
    return _reduction_rule(signature, FactorKind.FIXED)


def _reduced_shape(signature: OperatorSignature) -> tuple[int, ...]:
    reduced, keep = _reduced(signature), flag_of(signature, "keepdims", True)
    shape = operand(signature, 0).shape
    return tuple(1 if dim in reduced else size for dim, size in enumerate(shape) if keep or dim not in reduced)


def _reduce_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    return (TensorType(dtype=operand(signature, 0).dtype, shape=_reduced_shape(signature)),)


def _arg_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    return (TensorType(dtype="int64", shape=_reduced_shape(signature)),)


def _along_rule(signature: OperatorSignature, dims: tuple[int, ...], linear: bool = False) -> FactorRule:
    shape = operand(signature, 0).shape
    whole = {dim % len(shape) for dim in dims}
    builder = RuleBuilder(signature)
    factors = tuple(
        builder.factor(f"d{dim}", size, FactorKind.FIXED if dim in whole else FactorKind.PARALLEL)
        for dim, size in enumerate(shape)
    )
    outputs = [factors] * len(signature.outputs)
    return builder.build((factors,), outputs, partial=(("P",),) if linear else ())


def _softmax_rule(signature: OperatorSignature) -> FactorRule:
    """The dims over which it normalises are never split."""
    return _along_rule(signature, ints_of(signature, "axes", (-1,)))


def _cumsum_rule(signature: OperatorSignature) -> FactorRule:
    """The scanned dim is never split; linear."""
    return _along_rule(signature, (int_of(signature, "axis"),), linear=True)


def _cumprod_rule(signature: OperatorSignature) -> FactorRule:
    """The scanned dim is never split."""
    return _along_rule(signature, (int_of(signature, "axis"),))


def _lp_normalization_rule(signature: OperatorSignature) -> FactorRule:
    """The normalised dim is never split."""
    return _along_rule(signature, (int_of(signature, "axis", -1),))


def _topk_rule(signature: OperatorSignature) -> FactorRule:
    """The compared dim is never split."""
    data = operand(signature, 0)
    axis = int_of(signature, "axis", -1) % len(data.shape)
    builder = RuleBuilder(signature)
    inputs = list(builder.each("d", data.shape[:axis]))
    after = builder.each("e", data.shape[axis + 1 :])
    outputs = (*inputs, builder.fixed("k", signature.outputs[0].shape[axis]), *after)
    inputs = (*inputs, builder.fixed("axis", data.shape[axis]), *after)
    return builder.build((inputs,), [outputs] * len(signature.outputs))


def _topk_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, count = operand(signature, 0), int_of(signature, "k")
    axis = int_of(signature, "axis", -1) % len(data.shape)
    if count > data.shape[axis]:
        raise shape_error(signature, f"at least k = {count} elements in dim {axis}")
    shape = (*data.shape[:axis], count, *data.shape[axis + 1 :])
    return (TensorType(dtype=data.dtype, shape=shape), TensorType(dtype="int64", shape=shape))[:num_outputs]


def _reduce(
    name: str,
    rule: Callable[[OperatorSignature], FactorRule],
    keep_inputs: tuple[int, ...] = (),
    keep_outputs: tuple[int, ...] = (),
) -> OperatorRecord:
    return OperatorRecord(
        type=name,
        rule=rule,
        infer=_reduce_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=keep_inputs,
        saved_outputs=keep_outputs,
    )


def _along(
    name: str, rule: Callable[[OperatorSignature], FactorRule], keep_outputs: tuple[int, ...] = (0,)
) -> OperatorRecord:
    return OperatorRecord(type=name, rule=rule, infer=infer_first, kind=ComputeKind.MEMORY, saved_outputs=keep_outputs)


RECORDS: tuple[OperatorRecord, ...] = (
    _reduce("ReduceSum", _sum_rule),
    _reduce("ReduceMean", _sum_rule),
    _reduce("ReduceL1", _sum_rule, (0,)),
    _reduce("ReduceSumSquare", _sum_rule, (0,)),
    *(
        _reduce(name, _whole_rule, (0,), (0,))
        for name in ("ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
    ),
    *(
        OperatorRecord(
            type=name, rule=_whole_rule, infer=_arg_infer, kind=ComputeKind.MEMORY, differentiable_operands=()
        )
        for name in ("ArgMax", "ArgMin")
    ),
    _along("Softmax", _softmax_rule),
    _along("LogSoftmax", _softmax_rule),
    _along("CumSum", _cumsum_rule, ()),
    OperatorRecord(type="CumProd", rule=_cumprod_rule, infer=infer_first, kind=ComputeKind.MEMORY, saved_inputs=(0,)),
    OperatorRecord(
        type="LpNormalization",
        rule=_lp_normalization_rule,
        infer=infer_first,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0,),
    ),
    OperatorRecord(
        type="Hardmax",
        rule=_softmax_rule,
        infer=infer_first,
        kind=ComputeKind.MEMORY,
        differentiable_operands=(),
    ),
    OperatorRecord(
        type="TopK",
        rule=_topk_rule,
        infer=_topk_infer,
        kind=ComputeKind.MEMORY,
        saved_outputs=(1,),
        differentiable_operands=(0,),
    ),
)
"""Records of the operators that work along dims."""
