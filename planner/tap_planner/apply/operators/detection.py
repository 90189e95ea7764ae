"""Object detection: pooling of regions, suppression of overlapping boxes. Boxes are no place for gradients."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, present


def _positions(start: float, size: float, bins: int, samples: int) -> np.ndarray:
    """[bins x samples] positions at which a region's bins are sampled along one dim."""
    step = size / bins
    inside = (np.arange(samples) + 0.5) * step / max(samples, 1)
    return (start + np.arange(bins)[:, None] * step + inside).reshape(-1)


def _bilinear(positions: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Low and high neighbour and their weights; beyond one pixel outside the weights are zero (as in Caffe2)."""
    outside = (positions < -1.0) | (positions > size)
    clipped = np.clip(positions, 0.0, size - 1)
    low = np.minimum(clipped.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    part = np.where(low >= size - 1, 0.0, clipped - low)
    return low, high, np.where(outside, 0.0, 1.0 - part), np.where(outside, 0.0, part)


def _matrix(positions: np.ndarray, size: int, like: Tensor) -> Tensor:
    """[positions, size] interpolation weights."""
    low, high, first, second = _bilinear(positions, size)
    weights = np.zeros((len(positions), size))
    rows = np.arange(len(positions))
    np.add.at(weights, (rows, low), first)
    np.add.at(weights, (rows, high), second)
    return torch.from_numpy(weights).to(like)


def _largest(image: Tensor, rows: np.ndarray, columns: np.ndarray) -> Tensor:
    """[c, rows, columns]: the largest weighted neighbour of each position (ONNX takes no sum in mode max)."""
    sizes = image.shape[1:]
    corners = []
    for y_index, y_weight in _pairs(rows, sizes[0]):
        for x_index, x_weight in _pairs(columns, sizes[1]):
            picked = image[:, torch.from_numpy(y_index)][:, :, torch.from_numpy(x_index)]
            corners.append(picked * torch.from_numpy(y_weight[:, None] * x_weight[None, :]).to(image))
    return torch.stack(corners).amax(0)


def _pairs(positions: np.ndarray, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    low, high, first, second = _bilinear(positions, size)
    return [(low, first), (high, second)]


@operator("RoiAlign")
def roi_align(context: OperatorContext, operands: Operands) -> Tensor:
    """Mean or maximum over sampled positions of each bin of each region (He et al. 2017, Mask R-CNN)."""
    value, boxes, images = (present(operands, index) for index in range(3))
    height, width = context.int("output_height", 1), context.int("output_width", 1)
    half = context.text("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    ratio, scale = context.int("sampling_ratio", 0), context.float("spatial_scale", 1.0)
    average = context.text("mode", "avg") == "avg"
    made: list[Tensor] = []
    stored = context.signature.inputs[1]
    # How many samples a bin has is rounded up, so that the file's own precision counts.
    exact = np.float64 if stored is not None and stored.dtype == "float64" else np.float32
    scaled = boxes.detach().cpu().numpy().astype(exact) * exact(scale) - exact(0.5 if half else 0.0)
    for (left, top, right, bottom), image in zip(scaled, images.tolist(), strict=True):
        tall, wide = bottom - top, right - left
        tall, wide = (tall, wide) if half else (max(tall, 1.0), max(wide, 1.0))
        down, across = (ratio, ratio) if ratio > 0 else (math.ceil(tall / height), math.ceil(wide / width))
        if down <= 0 or across <= 0:
            made.append(value.new_zeros((value.shape[1], height, width)))
            continue
        rows, columns = _positions(top, tall, height, down), _positions(left, wide, width, across)
        if average:
            y = _matrix(rows, value.shape[2], value).unflatten(0, (height, down)).mean(1)
            x = _matrix(columns, value.shape[3], value).unflatten(0, (width, across)).mean(1)
            made.append(y @ value[image] @ x.mT)
        else:
            sampled = _largest(value[image], rows, columns)
            made.append(sampled.unflatten(2, (width, across)).unflatten(1, (height, down)).amax((2, 4)))
    return torch.stack(made)


def _round(number: float) -> int:
    """Halves away from zero, as C rounds."""
    return math.floor(number + 0.5) if number >= 0 else math.ceil(number - 0.5)


def _bins(start: int, end: int, bins: int, size: int) -> list[tuple[int, int]]:
    length = max(end - start + 1, 1)
    edges = [(index * length // bins + start, -((-(index + 1) * length) // bins) + start) for index in range(bins)]
    return [(min(max(low, 0), size), min(max(high, 0), size)) for low, high in edges]


@operator("MaxRoiPool")
def max_roi_pool(context: OperatorContext, operands: Operands) -> Tensor:
    """Maximum of each bin of each region (Girshick 2015, Fast R-CNN); an empty bin gives zero."""
    value, boxes = present(operands, 0), present(operands, 1)
    height, width = context.ints("pooled_shape")
    scale = context.float("spatial_scale", 1.0)
    made: list[Tensor] = []
    for image, left, top, right, bottom in boxes.detach().tolist():
        rows = _bins(_round(top * scale), _round(bottom * scale), height, value.shape[2])
        columns = _bins(_round(left * scale), _round(right * scale), width, value.shape[3])
        cells = [
            value[int(image), :, y0:y1, x0:x1].amax((1, 2)) if y0 < y1 and x0 < x1 else value.new_zeros(value.shape[1])
            for y0, y1 in rows
            for x0, x1 in columns
        ]
        made.append(torch.stack(cells, 1).unflatten(1, (height, width)))
    return torch.stack(made)


def _corners(boxes: np.ndarray, centred: bool) -> np.ndarray:
    """[b, 4] as y1, x1, y2, x2 with the smaller first; a centred box is x, y, width, height."""
    if centred:
        x, y, width, height = boxes.T
        return np.stack([y - height / 2, x - width / 2, y + height / 2, x + width / 2], 1)
    low, high = np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])
    return np.concatenate([low, high], 1)


def _overlaps(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union of one box with others; of empty boxes it is zero."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    shared = np.prod(np.maximum(high - low, 0.0), 1)
    union = np.prod(box[2:] - box[:2]) + np.prod(others[:, 2:] - others[:, :2], 1) - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=(union > 0) & (shared > 0))


def _kept(boxes: np.ndarray, scores: np.ndarray, most: int, overlap: float, least: float | None) -> list[int]:
    order = [int(index) for index in np.argsort(-scores, kind="stable") if least is None or scores[index] > least]
    kept: list[int] = []
    for index in order:
        if len(kept) == most:
            break
        if not kept or np.all(_overlaps(boxes[index], boxes[kept]) <= overlap):
            kept.append(index)
    return kept


@operator("NonMaxSuppression")
def non_max_suppression(context: OperatorContext, operands: Operands) -> Tensor:
    """[count, 3]: (batch, class, box) of the boxes that no better one of their class overlaps too much."""
    boxes, scores = (present(operands, index).detach().cpu().double().numpy() for index in range(2))
    least = context.signature.attribute("score_threshold")
    threshold = float(least) if isinstance(least, int | float) else None
    most, overlap = context.int("max_output_boxes_per_class", 0), context.float("iou_threshold", 0.0)
    centred = context.flag("center_point_box")
    rows = [
        (batch, kind, index)
        for batch in range(scores.shape[0])
        for kind in range(scores.shape[1])
        for index in _kept(_corners(boxes[batch], centred), scores[batch, kind], most, overlap, threshold)
    ]
    context.check_count(len(rows))
    return torch.tensor(rows, dtype=torch.int64, device=present(operands, 0).device).reshape(-1, 3)
