"""Canonical forms of operators on space: resizing, sampling grids, deformed windows, unpooling, folding, cropping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tap_planner.graph.values import Call, Form, identity
from tap_planner.operators import AttributeValue


def _affine_grid(call: Call) -> Form:
    attributes: dict[str, AttributeValue] = {
        "align_corners": call.integer("align_corners", 0),
        "size": call.ints(1),
    }
    return Form(type="AffineGrid", attributes=attributes, inputs=[call.operand(0)])


def _grid_sample(call: Call) -> Form:
    """Opset 16 says bilinear and bicubic where opset 20 says linear and cubic."""
    mode = call.text("mode", "linear").removeprefix("bi")
    padding = call.text("padding_mode", "zeros")
    if mode not in ("linear", "nearest", "cubic") or padding not in ("zeros", "border", "reflection"):
        raise call.error(f"mode {mode!r} with padding {padding!r} is none that ONNX defines")
    attributes: dict[str, AttributeValue] = {
        "align_corners": call.integer("align_corners", 0),
        "mode": mode,
        "padding_mode": padding,
    }
    return Form(type="GridSample", attributes=attributes, inputs=call.data())


def _per_dim(call: Call, name: str, rank: int, default: int) -> tuple[int, ...]:
    values = call.integers(name) or (default,) * rank
    if len(values) != rank:
        raise call.error(f"{len(values)} entries in {name!r}, expected {rank}")
    return values


def _deform_conv(call: Call) -> Form:
    rank = call.operand(0).rank - 2
    attributes: dict[str, AttributeValue] = {
        "dilations": _per_dim(call, "dilations", rank, 1),
        "group": call.integer("group", 1),
        "offset_group": call.integer("offset_group", 1),
        "pads": _per_dim(call, "pads", 2 * rank, 0),
        "strides": _per_dim(call, "strides", rank, 1),
    }
    return Form(type="DeformConv", attributes=attributes, inputs=call.data())


def _max_unpool(call: Call) -> Form:
    """``plane`` is the space that positions count in; ``shape`` may be larger where the file asks for it."""
    value, kernel = call.operand(0), call.integers("kernel_shape")
    if kernel is None:
        raise call.error("has no kernel_shape")
    rank = len(kernel)
    if value.rank != rank + 2:
        raise call.error(f"a kernel of {rank} dims over {value.rank} dims")
    strides, pads = _per_dim(call, "strides", rank, 1), _per_dim(call, "pads", 2 * rank, 0)
    plane = tuple(
        (value.shape[dim + 2] - 1) * strides[dim] + kernel[dim] - pads[dim] - pads[dim + rank] for dim in range(rank)
    )
    shape = call.ints(2) if call.has(2) else (*value.shape[:2], *plane)
    attributes: dict[str, AttributeValue] = {"plane": plane, "shape": shape}
    return Form(type="MaxUnpool", attributes=attributes, inputs=call.inputs[:2])


def _col2im(call: Call) -> Form:
    image, block = call.ints(1), call.ints(2)
    rank = len(image)
    attributes: dict[str, AttributeValue] = {
        "block_shape": block,
        "dilations": _per_dim(call, "dilations", rank, 1),
        "image_shape": image,
        "pads": _per_dim(call, "pads", 2 * rank, 0),
        "strides": _per_dim(call, "strides", rank, 1),
    }
    return Form(type="Col2Im", attributes=attributes, inputs=[call.operand(0)])


def _center_crop_pad(call: Call) -> Form:
    """A Pad whose amounts are negative where it crops (centred as the function body of ONNX has it)."""
    value, sizes = call.operand(0), call.ints(1)
    axes = [call.axis(axis, value.rank) for axis in call.integers("axes") or range(value.rank)]
    if len(sizes) != len(axes):
        raise call.error(f"{len(sizes)} sizes for {len(axes)} dims")
    pads = [0] * (2 * value.rank)
    for dim, size in zip(axes, sizes, strict=True):
        missing = size - value.shape[dim]
        before = missing // 2 if missing >= 0 else -(-missing // 2)
        pads[dim], pads[dim + value.rank] = before, missing - before
    if not any(pads):
        return identity(value)
    attributes: dict[str, AttributeValue] = {"mode": "constant", "pads": tuple(pads), "value": 0.0}
    return Form(type="Pad", attributes=attributes, inputs=[value])


def _scaled(size: int, scale: float) -> int:
    """Output size of a scaled dim; ONNX multiplies in float32."""
    return math.floor(np.float32(size) * np.float32(scale))


def _kept_ratio(policy: str, old: Sequence[int], new: Sequence[int]) -> tuple[list[int], list[float]]:
    """Sizes and scales of the resized dims where the ratio of their sides is kept (halves round up)."""
    ratios = [after / before for before, after in zip(old, new, strict=True)]
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return [math.floor(scale * before + 0.5) for before in old], [scale] * len(old)


def _target(call: Call, shape: tuple[int, ...], axes: Sequence[int]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The whole output shape and the scale of every dim."""
    sizes, scales = list(shape), [1.0] * len(shape)
    if call.has(3):
        old, new = [shape[axis] for axis in axes], list(call.ints(3))
        if len(old) != len(new):
            raise call.error(f"{len(new)} sizes for {len(old)} dims")
        policy = call.text("keep_aspect_ratio_policy", "stretch")
        if policy == "stretch":
            ratios = [after / before if before else 1.0 for before, after in zip(old, new, strict=True)]
        else:
            new, ratios = _kept_ratio(policy, old, new)
    else:
        index = 1 if call.node.type == "Upsample" or (call.opset < 11 and call.has(1)) else 2
        given = call.array(index).reshape(-1).tolist() if call.has(index) else call.attributes.get("scales")
        if not isinstance(given, list | tuple) or len(given) != len(axes):
            raise call.error("has neither sizes nor scales of its dims")
        ratios = [float(scale) for scale in given]
        new = [_scaled(shape[axis], scale) for axis, scale in zip(axes, ratios, strict=True)]
    for axis, size, ratio in zip(axes, new, ratios, strict=True):
        sizes[axis], scales[axis] = size, ratio
    return tuple(sizes), tuple(scales)


def _region(call: Call, rank: int, axes: Sequence[int]) -> tuple[float, ...]:
    """Start and end of the cropped region per dim, all starts first."""
    given = call.array(1).reshape(-1).tolist() if call.has(1) else []
    region = [0.0] * rank + [1.0] * rank
    if given:
        for index, axis in enumerate(axes):
            region[axis], region[axis + rank] = given[index], given[index + len(axes)]
    return tuple(region)


def _resize(call: Call) -> Form:
    """Resize to a static shape: ``sizes`` holds the whole output shape. What is as usual is left out."""
    value = call.operand(0)
    axes = [call.axis(axis, value.rank) for axis in call.integers("axes") or range(value.rank)]
    sizes, scales = _target(call, value.shape, axes)
    modern = call.opset >= 11 and call.node.type == "Resize"
    transformation = call.text("coordinate_transformation_mode", "half_pixel") if modern else "asymmetric"
    attributes: dict[str, AttributeValue] = {
        "coordinate_transformation_mode": transformation,
        "cubic_coeff_a": call.number("cubic_coeff_a", -0.75),
        "mode": call.text("mode", "nearest"),
        "nearest_mode": call.text("nearest_mode", "round_prefer_floor" if modern else "floor"),
        "scales": scales,
        "sizes": sizes,
    }
    for name in ("antialias", "exclude_outside"):
        if call.integer(name, 0):
            attributes[name] = 1
    if transformation == "tf_crop_and_resize":
        attributes["roi"] = _region(call, value.rank, axes)
        attributes["extrapolation_value"] = call.number("extrapolation_value", 0.0)
    elif sizes == value.shape and all(scale == 1.0 for scale in scales):
        return identity(value)
    return Form(type="Resize", attributes=attributes, inputs=[value])


CANONICAL: dict[str, Callable[[Call], Form]] = {
    "AffineGrid": _affine_grid,
    "CenterCropPad": _center_crop_pad,
    "Col2Im": _col2im,
    "DeformConv": _deform_conv,
    "GridSample": _grid_sample,
    "MaxUnpool": _max_unpool,
    "Resize": _resize,
    "Upsample": _resize,
}
