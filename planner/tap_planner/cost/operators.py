"""Time of one operator on local parts."""

from __future__ import annotations

from collections.abc import Sequence

from tap_planner.cost.compute import ComputeModel, Work, is_attention, operator_work
from tap_planner.cost.products import padded_points
from tap_planner.operators import OperatorSignature, record_of, rule_of


def local_work(
    compute: ComputeModel,
    signature: OperatorSignature,
    *,
    factor_sizes: tuple[int, ...],
    input_elements: Sequence[int],
    output_elements: Sequence[int],
    requires_gradient: Sequence[bool],
) -> Work:
    """FLOPs and bytes of an operator on local parts; arguments as ``operator_times_ns``."""
    record, rule = record_of(signature), rule_of(signature)
    padding = compute.device.matrix_padding
    input_bytes = tuple(
        0 if operand is None else compute.tensor_bytes(operand.dtype, count)
        for operand, count in zip(signature.inputs, input_elements, strict=True)
    )
    output_bytes = tuple(
        compute.tensor_bytes(output.dtype, count)
        for output, count in zip(signature.outputs, output_elements, strict=True)
    )
    return operator_work(
        record,
        factor_sizes=tuple(size for index, size in enumerate(factor_sizes) if index not in rule.layout),
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        gradient_operands=sum(requires_gradient),
        gradient_bytes=sum(size for size, needed in zip(input_bytes, requires_gradient, strict=True) if needed),
        points=padded_points(rule, factor_sizes, padding) if padding > 1 else None,
    )


def operator_times_ns(
    compute: ComputeModel,
    signature: OperatorSignature,
    *,
    factor_sizes: tuple[int, ...],
    input_elements: Sequence[int],
    output_elements: Sequence[int],
    requires_gradient: Sequence[bool],
) -> tuple[int, int]:
    """Forward and backward time of an operator on one device, without collectives.

    Args:
        compute: the device at a precision.
        signature: the operator with its global types.
        factor_sizes: local sizes of the rule's factors.
        input_elements: local elements of each operand (0 where absent).
        output_elements: local elements of each output.
        requires_gradient: per operand, whether backward makes its gradient.
    """
    work = local_work(
        compute,
        signature,
        factor_sizes=factor_sizes,
        input_elements=input_elements,
        output_elements=output_elements,
        requires_gradient=requires_gradient,
    )
    record = record_of(signature)
    kind, attention = record.kind, is_attention(record)
    return (
        compute.time_ns(work.forward_flops, work.forward_bytes, kind, attention=attention),
        compute.time_ns(work.backward_flops, work.backward_bytes, kind, backward=True, attention=attention),
    )


def whole_operator_ns(
    compute: ComputeModel, signature: OperatorSignature, requires_gradient: Sequence[bool]
) -> tuple[int, int]:
    """Forward and backward time of an operator that one device does all of.

    Args:
        compute: the device at a precision.
        signature: the operator.
        requires_gradient: per operand, whether backward makes its gradient.
    """
    return operator_times_ns(
        compute,
        signature,
        factor_sizes=tuple(factor.size for factor in rule_of(signature).factors),
        input_elements=[0 if operand is None else operand.num_elements for operand in signature.inputs],
        output_elements=[output.num_elements for output in signature.outputs],
        requires_gradient=requires_gradient,
    )
