"""Resize and Upsample: interpolation by one matrix per dim. A dim that is split repeats its rows."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, present

_REACH = {"nearest": 1, "linear": 1, "bilinear": 1, "cubic": 2}
"""How many neighbours to each side an interpolation reads."""


@operator("Resize", "Upsample")
def resize(context: OperatorContext, operands: Operands) -> Tensor:
    """Nearest, linear or cubic, one dim after another; what a crop reads outside is the extrapolation value."""
    value = present(operands, 0)
    before, after = context.input_shape(0), context.signature.outputs[0].shape
    outside: list[tuple[int, np.ndarray]] = []
    for dim, (old, new) in enumerate(zip(before, after, strict=True)):
        source = _sources(context, dim, old, new)
        if old == new and np.array_equal(source, np.arange(old)):
            continue
        weights = _weights(context, source, old, _scale(context, dim, old, new))
        weights = weights[np.ix_(context.output_indices(0)[dim], context.input_indices(0, dim))]
        matrix = torch.from_numpy(weights).to(value.device, torch.float64)
        floating = value if value.is_floating_point() else value.double()
        value = (floating.movedim(dim, -1) @ matrix.to(floating.dtype).T).movedim(-1, dim)
        if context.text("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
            outside.append((dim, (source < 0) | (source > old - 1)))
    for dim, mask in outside:
        where = torch.from_numpy(mask).to(value.device).reshape([-1 if at == dim else 1 for at in range(value.dim())])
        value = value.masked_fill(where, context.float("extrapolation_value", 0.0))
    result = present(operands, 0)
    if result.is_floating_point():
        return value.clone() if value is result else value
    return value.round().to(result.dtype) if value.is_floating_point() else value.clone()


def _scale(context: OperatorContext, dim: int, old: int, new: int) -> float:
    scales = context.signature.attribute("scales")
    if isinstance(scales, tuple) and scales:
        return float(scales[dim])
    return new / old if old else 1.0


def _sources(context: OperatorContext, dim: int, old: int, new: int) -> np.ndarray:
    """[new] positions in the old dim (ONNX Resize, attribute coordinate_transformation_mode)."""
    mode = context.text("coordinate_transformation_mode", "half_pixel")
    if context.signature.type == "Upsample":
        mode = "asymmetric"
    scale, index = _scale(context, dim, old, new), np.arange(new, dtype=np.float64)
    if mode == "asymmetric":
        return index / scale
    if mode == "align_corners":
        return index * ((old - 1) / (new - 1) if new > 1 else 0.0)
    if mode == "half_pixel":
        return (index + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return (index + 0.5) / scale - 0.5 if new > 1 else np.zeros(new)
    if mode == "half_pixel_symmetric":
        centre = old / 2 * (1 - new / (scale * old))
        return centre + (index + 0.5) / scale - 0.5
    if mode == "tf_crop_and_resize":
        region, rank = context.signature.attribute("roi"), len(context.input_shape(0))
        assert isinstance(region, tuple)
        start, end = float(region[dim]), float(region[dim + rank])
        if new == 1:
            return np.full(1, 0.5 * (start + end) * (old - 1))
        return start * (old - 1) + index * (end - start) * (old - 1) / (new - 1)
    raise context.unsupported(f"coordinate transformation {mode!r}")


def _weights(context: OperatorContext, source: np.ndarray, old: int, scale: float) -> np.ndarray:
    """[new, old]: what each new position takes from the old ones; beyond the edge the edge is repeated."""
    mode = context.text("mode", "nearest")
    if mode not in _REACH:
        raise context.unsupported(f"mode {mode!r}")
    weights = np.zeros((len(source), old))
    rows = np.arange(len(source))
    if mode == "nearest":
        picked = _nearest(context, source)
        weights[rows, np.clip(picked, 0, old - 1)] = 1.0
        return weights
    shrink = min(scale, 1.0) if context.flag("antialias") else 1.0
    reach = math.ceil(_REACH[mode] / shrink)
    low = np.floor(source).astype(np.int64)
    taps = low[:, None] + np.arange(1 - reach, reach + 1)
    distance = np.abs(taps - source[:, None]) * shrink
    parts = _cubic(distance, context.float("cubic_coeff_a", -0.75)) if mode == "cubic" else np.maximum(1 - distance, 0)
    if context.flag("exclude_outside"):
        parts = np.where((taps < 0) | (taps >= old), 0.0, parts)
    if context.flag("exclude_outside") or shrink != 1.0:
        parts = parts / parts.sum(1, keepdims=True)
    np.add.at(weights, (np.broadcast_to(rows[:, None], taps.shape), np.clip(taps, 0, old - 1)), parts)
    return weights


def _nearest(context: OperatorContext, source: np.ndarray) -> np.ndarray:
    rounding = context.text("nearest_mode", "round_prefer_floor")
    if context.signature.type == "Upsample" or rounding == "floor":
        return np.floor(source).astype(np.int64)
    if rounding == "ceil":
        return np.ceil(source).astype(np.int64)
    down = rounding == "round_prefer_floor"
    return (np.ceil(source - 0.5) if down else np.floor(source + 0.5)).astype(np.int64)


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Kernel of cubic convolution (Keys 1981, with free parameter a)."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
