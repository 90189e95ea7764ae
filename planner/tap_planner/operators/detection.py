"""Operators of object detection: regions of interest, suppression of overlapping boxes."""

from __future__ import annotations

from tap_planner.operators.attributes import int_of, ints_of, operand, text_of
from tap_planner.operators.building import RuleBuilder, replicated_rule, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


def _region_rule(signature: OperatorSignature) -> FactorRule:
    """Channels and regions are parallel; a region may lie in any image, so the batch is fixed, as is space."""
    data, result = operand(signature, 0).shape, signature.outputs[0].shape
    builder = RuleBuilder(signature)
    regions, channels = builder.factor("r", result[0]), builder.factor("c", data[1])
    images, *space = builder.each("in", (data[0], *data[2:]), FactorKind.FIXED)
    output = (regions, channels, *builder.each("out", result[2:], FactorKind.FIXED))
    others = [
        (regions, *builder.each(f"box{index}_", operand(signature, index).shape[1:], FactorKind.FIXED))
        for index in range(1, len(signature.inputs))
    ]
    average = signature.type == "RoiAlign" and text_of(signature, "mode", "avg") == "avg"
    ways = (("P", *("R",) * len(others)),) if average else ()
    return builder.build(((images, channels, *space), *others), (output,), partial=ways)


def _roi_align_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, boxes, images = (operand(signature, index) for index in range(3))
    if len(data.shape) != 4 or len(boxes.shape) != 2 or boxes.shape[1] != 4 or images.shape != boxes.shape[:1]:
        raise shape_error(signature, "images [n, c, h, w], boxes [r, 4] and their images [r]")
    size = (int_of(signature, "output_height", 1), int_of(signature, "output_width", 1))
    return (TensorType(dtype=data.dtype, shape=(boxes.shape[0], data.shape[1], *size)),)


def _roi_pool_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, boxes = operand(signature, 0), operand(signature, 1)
    if len(data.shape) != 4 or len(boxes.shape) != 2 or boxes.shape[1] != 5:
        raise shape_error(signature, "images [n, c, h, w] and boxes [r, 5]")
    size = ints_of(signature, "pooled_shape")
    return (TensorType(dtype=data.dtype, shape=(boxes.shape[0], data.shape[1], *size)),)


def _suppression_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    boxes, scores = operand(signature, 0).shape, operand(signature, 1).shape
    if len(boxes) != 3 or boxes[2] != 4 or len(scores) != 3 or (scores[0], scores[2]) != boxes[:2]:
        raise shape_error(signature, "boxes [n, b, 4] and scores [n, c, b]")
    return (TensorType(dtype="int64", shape=(int_of(signature, "count"), 3)),)


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="RoiAlign",
        rule=_region_rule,
        infer=_roi_align_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1, 2),
        differentiable_operands=(0,),
    ),
    OperatorRecord(
        type="MaxRoiPool",
        rule=_region_rule,
        infer=_roi_pool_infer,
        kind=ComputeKind.MEMORY,
        saved_inputs=(0, 1),
        differentiable_operands=(0,),
    ),
    OperatorRecord(
        type="NonMaxSuppression",
        rule=replicated_rule,
        infer=_suppression_infer,
        kind=ComputeKind.MEMORY,
        differentiable_operands=(),
    ),
)
"""Records of the operators of object detection."""
