"""Canonical forms of the operators of object detection."""

from __future__ import annotations

from collections.abc import Callable

from tap_planner.graph.values import Call, Form
from tap_planner.operators import AttributeValue


def _roi_align(call: Call) -> Form:
    """Before opset 16 positions count from the corners of the pixels (``output_half_pixel``)."""
    transformation = "half_pixel" if call.opset >= 16 else "output_half_pixel"
    attributes: dict[str, AttributeValue] = {
        "coordinate_transformation_mode": call.text("coordinate_transformation_mode", transformation),
        "mode": call.text("mode", "avg"),
        "output_height": call.integer("output_height", 1),
        "output_width": call.integer("output_width", 1),
        "sampling_ratio": call.integer("sampling_ratio", 0),
        "spatial_scale": call.number("spatial_scale", 1.0),
    }
    return Form(type="RoiAlign", attributes=attributes, inputs=call.data())


def _max_roi_pool(call: Call) -> Form:
    shape = call.integers("pooled_shape")
    if shape is None or len(shape) != 2:
        raise call.error("has no pooled_shape of two sizes")
    attributes: dict[str, AttributeValue] = {"pooled_shape": shape, "spatial_scale": call.number("spatial_scale", 1.0)}
    return Form(type="MaxRoiPool", attributes=attributes, inputs=call.data())


def _suppression(call: Call) -> Form:
    """Limits are attributes; how many boxes remain is what the file declares of the output."""
    attributes: dict[str, AttributeValue] = {
        "center_point_box": call.integer("center_point_box", 0),
        "count": call.declared_size(0, 0),
        "max_output_boxes_per_class": int(call.scalar(2)) if call.has(2) else 0,
        "iou_threshold": float(call.scalar(3)) if call.has(3) else 0.0,
    }
    if call.has(4):
        attributes["score_threshold"] = float(call.scalar(4))
    return Form(type="NonMaxSuppression", attributes=attributes, inputs=call.inputs[:2])


CANONICAL: dict[str, Callable[[Call], Form]] = {
    "MaxRoiPool": _max_roi_pool,
    "NonMaxSuppression": _suppression,
    "RoiAlign": _roi_align,
}
