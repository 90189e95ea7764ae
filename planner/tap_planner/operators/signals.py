"""Fourier transforms and determinants: whole dims in, whole dims out."""

from __future__ import annotations

from tap_planner.operators.attributes import flag_of, int_of, operand
from tap_planner.operators.building import Dims, RuleBuilder, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


def _fourier_rule(signature: OperatorSignature) -> FactorRule:
    """The transformed dim and the pairs of real and imaginary parts are fixed; linear."""
    data, result = operand(signature, 0).shape, signature.outputs[0].shape
    axis = int_of(signature, "axis")
    builder = RuleBuilder(signature)
    kept = {dim: builder.factor(f"d{dim}", size) for dim, size in enumerate(data[:-1]) if dim != axis}
    inputs = [kept.get(dim) or builder.fixed(f"in{dim}", size) for dim, size in enumerate(data)]
    outputs = [kept.get(dim) or builder.fixed(f"out{dim}", size) for dim, size in enumerate(result)]
    return builder.build((tuple(inputs),), (tuple(outputs),), partial=(("P",),))


def _fourier_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, axis, length = operand(signature, 0), int_of(signature, "axis"), int_of(signature, "length")
    if len(data.shape) < 2 or data.shape[-1] not in (1, 2) or axis >= len(data.shape) - 1:
        raise shape_error(signature, "a signal whose last dim holds 1 (real) or 2 (complex) parts")
    onesided, inverse = flag_of(signature, "onesided"), flag_of(signature, "inverse")
    parts = 1 if onesided and inverse else 2
    size = length // 2 + 1 if onesided and not inverse else length
    return (TensorType(dtype=data.dtype, shape=(*data.shape[:axis], size, *data.shape[axis + 1 : -1], parts)),)


def _short_rule(signature: OperatorSignature) -> FactorRule:
    """Signals of a batch are independent; linear in the signal."""
    data, result = operand(signature, 0).shape, signature.outputs[0].shape
    builder = RuleBuilder(signature)
    n = builder.factor("n", data[0])
    inputs: list[Dims] = [(n, *builder.each("in", data[1:], FactorKind.FIXED))]
    inputs.extend(builder.each("w", found.shape, FactorKind.FIXED) for found in signature.inputs[1:] if found)
    output = (n, *builder.each("out", result[1:], FactorKind.FIXED))
    return builder.build(inputs, (output,), partial=(("P", *("R",) * (len(inputs) - 1)),))


def _short_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, step, length = operand(signature, 0), int_of(signature, "step"), int_of(signature, "length")
    if len(data.shape) == 2:
        data = TensorType(dtype=data.dtype, shape=(*data.shape, 1))
    if len(data.shape) != 3 or data.shape[2] not in (1, 2) or not 0 < length <= data.shape[1] or step < 1:
        raise shape_error(signature, f"signals [n, at least {length}, 1 or 2]")
    frames = (data.shape[1] - length) // step + 1
    bins = length // 2 + 1 if flag_of(signature, "onesided", True) else length
    return (TensorType(dtype=data.dtype, shape=(data.shape[0], frames, bins, 2)),)


def _determinant_rule(signature: OperatorSignature) -> FactorRule:
    """Matrices of a batch are independent."""
    shape = operand(signature, 0).shape
    builder = RuleBuilder(signature)
    dims = builder.each("d", shape[:-2])
    matrix = (builder.fixed("rows", shape[-2]), builder.fixed("columns", shape[-1]))
    return builder.build(((*dims, *matrix),), (dims,))


def _determinant_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data = operand(signature, 0)
    if len(data.shape) < 2 or data.shape[-1] != data.shape[-2]:
        raise shape_error(signature, "square matrices")
    return (TensorType(dtype=data.dtype, shape=data.shape[:-2]),)


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(type="DFT", rule=_fourier_rule, infer=_fourier_infer, kind=ComputeKind.MEMORY),
    OperatorRecord(
        type="STFT",
        rule=_short_rule,
        infer=_short_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1),
        trainable_operands=(1,),
    ),
    OperatorRecord(
        type="Det",
        rule=_determinant_rule,
        infer=_determinant_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0,),
        saved_outputs=(0,),
    ),
)
"""Records of Fourier transforms and determinants."""
