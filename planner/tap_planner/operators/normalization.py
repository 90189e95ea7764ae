"""Normalisations: over trailing dims, over the batch, over groups of channels."""

from __future__ import annotations

from tap_planner.operators.attributes import flag_of, int_of, ints_of, operand
from tap_planner.operators.building import Dims, RuleBuilder, aligned, infer_first
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


def _trailing_axis(signature: OperatorSignature) -> int:
    return int_of(signature, "axis", -1) % len(operand(signature, 0).shape)


def _trailing_rule(signature: OperatorSignature) -> FactorRule:
    """Dims from the axis on are normalised together and never split; leading dims are parallel."""
    shape, axis = operand(signature, 0).shape, _trailing_axis(signature)
    builder = RuleBuilder(signature)
    leading = builder.each("d", shape[:axis])
    dims = (*leading, *builder.each("h", shape[axis:], FactorKind.FIXED))
    inputs: list[Dims | None] = [dims]
    inputs.extend(None if found is None else aligned(found.shape, dims) for found in signature.inputs[1:])
    statistics = (*leading, *((),) * (len(shape) - axis))
    return builder.build(inputs, (dims, *(statistics,) * (len(signature.outputs) - 1)))


def _trailing_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, axis = operand(signature, 0), _trailing_axis(signature)
    statistics = TensorType(dtype="float32", shape=(*data.shape[:axis], *(1,) * (len(data.shape) - axis)))
    return (data, *(statistics,) * (num_outputs - 1))


def _channels(builder: RuleBuilder, signature: OperatorSignature, dims: Dims, channels: DimFactors) -> FactorRule:
    inputs: list[Dims | None] = [dims]
    inputs.extend(None if found is None else (channels,) for found in signature.inputs[1:])
    return builder.build(inputs, (dims, *((channels,),) * (len(signature.outputs) - 1)))


def _batch_rule(signature: OperatorSignature) -> FactorRule:
    """Stored statistics: everything is parallel; statistics of the batch: only channels are."""
    shape = operand(signature, 0).shape
    kind = FactorKind.FIXED if flag_of(signature, "training_mode") else FactorKind.PARALLEL
    builder = RuleBuilder(signature)
    batch = builder.each("n", shape[:1], kind)
    channels = builder.factor("c", shape[1]) if len(shape) > 1 else ()
    dims = (*batch, channels, *builder.each("s", shape[2:], kind)) if len(shape) > 1 else batch
    return _channels(builder, signature, dims, channels)


def _batch_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    running = signature.inputs[3:5]
    statistics = tuple(found for found in running if found is not None)
    return (operand(signature, 0), *statistics)[:num_outputs]


def _instance_rule(signature: OperatorSignature) -> FactorRule:
    """Batch and channels are parallel, space is never split."""
    shape = operand(signature, 0).shape
    builder = RuleBuilder(signature)
    batch, channels = builder.factor("n", shape[0]), builder.factor("c", shape[1])
    dims = (batch, channels, *builder.each("s", shape[2:], FactorKind.FIXED))
    return _channels(builder, signature, dims, channels)


def _group_rule(signature: OperatorSignature) -> FactorRule:
    """Batch and groups are parallel; channels inside a group and space are never split."""
    shape, count = operand(signature, 0).shape, int_of(signature, "num_groups")
    builder = RuleBuilder(signature)
    batch, groups = builder.factor("n", shape[0]), builder.factor("g", count)
    channels = groups + builder.fixed("c", shape[1] // count)
    dims = (batch, channels, *builder.each("s", shape[2:], FactorKind.FIXED))
    inputs: list[Dims | None] = [dims]
    for found in signature.inputs[1:]:
        per_group = found is not None and found.shape == (count,) and count != shape[1]
        inputs.append(None if found is None else (groups if per_group else channels,))
    return builder.build(inputs, (dims,))


def _local_response_rule(signature: OperatorSignature) -> FactorRule:
    """Neighbouring channels meet; batch and space are parallel."""
    shape = operand(signature, 0).shape
    builder = RuleBuilder(signature)
    dims = (builder.factor("n", shape[0]), builder.fixed("c", shape[1]), *builder.each("s", shape[2:]))
    return builder.build((dims,), (dims,))


def _mean_variance_rule(signature: OperatorSignature) -> FactorRule:
    """The normalised dims are never split."""
    shape = operand(signature, 0).shape
    whole = {dim % len(shape) for dim in ints_of(signature, "axes", (0, 2, 3))}
    builder = RuleBuilder(signature)
    dims = tuple(
        builder.factor(f"d{dim}", size, FactorKind.FIXED if dim in whole else FactorKind.PARALLEL)
        for dim, size in enumerate(shape)
    )
    return builder.build((dims,), (dims,))


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="LayerNormalization",
        rule=_trailing_rule,
        infer=_trailing_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1),
        trainable_operands=(1, 2),
    ),
    OperatorRecord(
        type="RMSNormalization",
        rule=_trailing_rule,
        infer=_trailing_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1),
        trainable_operands=(1,),
    ),
    OperatorRecord(
        type="BatchNormalization",
        rule=_batch_rule,
        infer=_batch_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1, 3, 4),
        trainable_operands=(1, 2),
        differentiable_operands=(0, 1, 2),
    ),
    OperatorRecord(
        type="InstanceNormalization",
        rule=_instance_rule,
        infer=infer_first,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1),
        trainable_operands=(1, 2),
    ),
    OperatorRecord(
        type="GroupNormalization",
        rule=_group_rule,
        infer=infer_first,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1),
        trainable_operands=(1, 2),
    ),
    OperatorRecord(
        type="LRN",
        rule=_local_response_rule,
        infer=infer_first,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0,),
        saved_outputs=(0,),
    ),
    OperatorRecord(
        type="MeanVarianceNormalization",
        rule=_mean_variance_rule,
        infer=infer_first,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0,),
    ),
)
"""Records of the normalisations."""
