"""Cases of object detection, sampled space, signals, selection and losses in the file, and their references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tap_planner.operators import Factor, FactorKind, OperatorSignature
from tests.operators.onnx_nodes import Array, by_onnxruntime, evaluated
from tests.operators.operator_reference import (
    LOCALISERS,
    REFERENCES,
    STRUCTURE,
    VALUES,
    Range,
    index_type,
    signature,
    tensor,
)

_IMAGE = tensor(2, 4, 7, 6)
_DEFORM: dict[str, Any] = {"strides": (1, 2), "pads": (1, 0, 1, 1), "dilations": (2, 1)}

CASES: tuple[OperatorSignature, ...] = (
    signature("RoiAlign", _IMAGE, tensor(5, 4), index_type(5), output_height=3, output_width=2, spatial_scale=0.5),
    signature(
        "RoiAlign",
        *(_IMAGE, tensor(5, 4), index_type(5)),
        coordinate_transformation_mode="output_half_pixel",
        mode="max",
        output_height=2,
        output_width=2,
        sampling_ratio=2,
    ),
    signature("MaxRoiPool", _IMAGE, tensor(5, 5), pooled_shape=(3, 2), spatial_scale=0.5),
    signature(
        "NonMaxSuppression",
        *(tensor(2, 6, 4), tensor(2, 3, 6)),
        center_point_box=0,
        count=12,
        iou_threshold=0.3,
        max_output_boxes_per_class=2,
    ),
    signature("AffineGrid", tensor(4, 2, 3), size=(4, 3, 5, 6), align_corners=0),
    signature("AffineGrid", tensor(2, 3, 4), size=(2, 3, 2, 3, 4), align_corners=1),
    signature("GridSample", _IMAGE, tensor(2, 4, 6, 2), mode="linear", padding_mode="zeros", align_corners=0),
    signature("GridSample", _IMAGE, tensor(2, 4, 6, 2), mode="cubic", padding_mode="reflection", align_corners=1),
    signature("GridSample", tensor(2, 3, 4, 5, 3), tensor(2, 2, 3, 4, 3), mode="linear", padding_mode="border"),
    signature(
        "DeformConv",
        *(_IMAGE, tensor(6, 4, 3, 2), tensor(2, 24, 5, 3), tensor(6), tensor(2, 12, 5, 3)),
        group=1,
        offset_group=2,
        **_DEFORM,
    ),
    signature("DeformConv", _IMAGE, tensor(6, 2, 3, 2), tensor(2, 12, 5, 3), group=2, offset_group=1, **_DEFORM),
    signature("MaxUnpool", tensor(4, 3, 2, 3), index_type(4, 3, 2, 3), plane=(4, 6), shape=(4, 3, 5, 7)),
    signature(
        "Col2Im",
        tensor(4, 18, 9),
        image_shape=(5, 6),
        block_shape=(2, 3),
        strides=(2, 2),
        pads=(1, 0, 1, 2),
        dilations=(1, 1),
    ),
    signature("DFT", tensor(4, 6, 5, 2), axis=1, length=8, inverse=0, onesided=0),
    signature("DFT", tensor(4, 6, 1), axis=1, length=6, inverse=0, onesided=1),
    signature("DFT", tensor(4, 5, 2), axis=1, length=8, inverse=1, onesided=1),
    signature("STFT", tensor(4, 16, 1), tensor(6), length=6, step=3, onesided=1),
    signature("Det", tensor(4, 2, 3, 3)),
    signature("CumProd", tensor(4, 6, 3), axis=1, exclusive=1, reverse=1),
    signature("BitCast", tensor(4, 6), to="int64"),
    signature("Compress", tensor(4, 6, 3), tensor(5, dtype="bool"), axis=1, count=3),
    signature("Compress", tensor(4, 6), axis=0, indices=(0, 3), count=2),
    signature("Compress", tensor(4, 2), tensor(8, dtype="bool"), count=3),
    signature("NonZero", index_type(4, 6), count=8),
    signature("Unique", index_type(12), num_outputs=4, count=5, sorted=0),
    signature("Unique", index_type(6, 3), num_outputs=4, count=4, sorted=1, axis=0),
    signature("ReverseSequence", tensor(5, 4, 3), index_type(4), time_axis=0, batch_axis=1),
    signature("TensorScatter", tensor(4, 3, 6, 2), tensor(4, 3, 3, 2), index_type(4), axis=2, mode="circular"),
    signature(
        "TfIdfVectorizer",
        index_type(4, 9),
        max_gram_length=2,
        max_skip_count=1,
        min_gram_length=1,
        mode="TFIDF",
        ngram_counts=(0, 3),
        ngram_indexes=(0, 2, 1, 3, 4),
        pool_int64s=(0, 1, 2, 0, 1, 2, 2),
        weights=(0.5, 1.0, 2.0, 3.0, 4.0),
    ),
    *(
        signature(name, tensor(4, 5, 3), index_type(4, 3), reduction=reduction)
        for name in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
        for reduction in ("none", "mean", "sum")
    ),
    signature("NegativeLogLikelihoodLoss", tensor(6, 5), index_type(6), tensor(5), reduction="mean", ignore_index=1),
    signature("SoftmaxCrossEntropyLoss", tensor(6, 5), index_type(6), tensor(5), reduction="sum", ignore_index=1),
    signature("SoftmaxCrossEntropyLoss", tensor(4, 5, 3), index_type(4, 3), num_outputs=2, reduction="none"),
)

_Values = Sequence[Array | None]
_Operands = Callable[[dict[str, Any], list[Array | None]], list[Array | None]]


def _present(values: _Values, index: int) -> Array:
    value = values[index]
    assert value is not None
    return value


def _by_evaluator(opset: int, operands: _Operands) -> Callable[[OperatorSignature, _Values], list[Array]]:
    """ONNX's reference evaluator, with the attributes that ``operands`` takes away as operands."""

    def reference(sig: OperatorSignature, values: _Values) -> list[Array]:
        attributes = dict[str, Any](sig.attributes)
        given = operands(attributes, list(values))
        found = evaluated(sig.type, given, attributes, len(sig.outputs), opset)
        return [value.astype(declared.dtype, copy=False) for value, declared in zip(found, sig.outputs, strict=True)]

    return reference


def _plain(attributes: dict[str, Any], values: list[Array | None]) -> list[Array | None]:
    return values


def _dft(attributes: dict[str, Any]) -> list[Array | None]:
    return [np.array(attributes.pop("length")), np.array(attributes.pop("axis"))]


def _stft(attributes: dict[str, Any], values: list[Array | None]) -> list[Array | None]:
    return [values[0], np.array(attributes.pop("step")), values[1], np.array(attributes.pop("length"))]


def _size(attributes: dict[str, Any]) -> list[Array | None]:
    return [np.array(attributes.pop("size"))]


def _axis(attributes: dict[str, Any]) -> list[Array | None]:
    return [np.array(attributes.pop("axis"))]


def _affine_grid(sig: OperatorSignature, values: _Values) -> list[Array]:
    size, align = sig.attribute("size"), bool(sig.attribute("align_corners"))
    assert isinstance(size, tuple)
    theta = torch.from_numpy(_present(values, 0))
    return [torch.nn.functional.affine_grid(theta, [int(item) for item in size], align).numpy()]


def _without_count(attributes: dict[str, Any], values: list[Array | None]) -> list[Array | None]:
    attributes.pop("count")
    indices = attributes.pop("indices", None)
    if indices is not None:
        size = _present(values, 0).shape[attributes["axis"]]
        values = [*values, np.isin(np.arange(size), indices)]
    return values


def _non_max_suppression(sig: OperatorSignature, values: _Values) -> list[Array]:
    attributes = dict[str, Any](sig.attributes)
    limits = (
        np.array([attributes["max_output_boxes_per_class"]]),
        np.array([attributes["iou_threshold"]], np.float32),
    )
    operands = [*(_present(values, index).astype(np.float32) for index in range(2)), *limits]
    return by_onnxruntime(sig.type, operands, {"center_point_box": attributes["center_point_box"]})


def _max_roi_pool(sig: OperatorSignature, values: _Values) -> list[Array]:
    operands = [_present(values, index).astype(np.float32) for index in range(2)]
    return [by_onnxruntime(sig.type, operands, dict(sig.attributes))[0].astype(np.float64)]


def _col2im(sig: OperatorSignature, values: _Values) -> list[Array]:
    """Block by block."""
    attributes, columns = dict[str, Any](sig.attributes), _present(values, 0)
    image, block, strides, pads = (attributes[name] for name in ("image_shape", "block_shape", "strides", "pads"))
    padded = np.zeros((*sig.outputs[0].shape[:2], image[0] + pads[0] + pads[2], image[1] + pads[1] + pads[3]))
    wide = (padded.shape[3] - block[1]) // strides[1] + 1
    for index in range(columns.shape[2]):
        y, x = (index // wide) * strides[0], (index % wide) * strides[1]
        tile = columns[:, :, index].reshape(*padded.shape[:2], *block)
        padded[:, :, y : y + block[0], x : x + block[1]] += tile
    return [padded[:, :, pads[0] : pads[0] + image[0], pads[1] : pads[1] + image[1]]]


def _max_unpool(sig: OperatorSignature, values: _Values) -> list[Array]:
    """Positions that count over a larger whole are brought to this part first."""
    attributes, data = dict[str, Any](sig.attributes), _present(values, 0)
    plane, shape = attributes["plane"], sig.outputs[0].shape
    first = np.arange(data.shape[0] * data.shape[1]).reshape(*data.shape[:2], 1, 1) * int(np.prod(plane))
    flat = np.zeros(first.size * int(np.prod(plane)))
    flat[(first + _present(values, 1) % int(np.prod(plane))).reshape(-1)] = data.reshape(-1)
    made = np.zeros(shape)
    made[:, :, : plane[0], : plane[1]] = flat.reshape(*data.shape[:2], *plane)
    return [made]


def _loss(sig: OperatorSignature, values: _Values) -> list[Array]:
    """Torch's losses; the mean of a part divides by the count of the whole."""
    attributes = dict[str, Any](sig.attributes)
    scores, labels = (torch.from_numpy(_present(values, index)) for index in range(2))
    weight = torch.from_numpy(_present(values, 2)) if len(values) > 2 else None
    logs = torch.log_softmax(scores, 1) if sig.type == "SoftmaxCrossEntropyLoss" else scores
    count = attributes.get("whole_count")
    loss = torch.nn.functional.nll_loss(
        logs,
        labels,
        weight,
        reduction="sum" if count else attributes["reduction"],
        ignore_index=attributes.get("ignore_index", -100),
    )
    return [(loss / count if count else loss).numpy(), logs.numpy()][: len(sig.outputs)]


def _bit_cast(sig: OperatorSignature, values: _Values) -> list[Array]:
    return [_present(values, 0).view(np.int64)]


def _count_whole(attributes: dict[str, Any], factor: Factor, part: Range, sig: OperatorSignature) -> None:
    if factor.kind is FactorKind.SUM and attributes["reduction"] == "mean":
        labels = sig.inputs[1]
        assert labels is not None
        attributes["whole_count"] = labels.num_elements


def _sizes(attributes: dict[str, Any], factor: Factor, part: Range, sig: OperatorSignature) -> None:
    if factor.name == "n" and "size" in attributes:
        attributes["size"] = (part[1] - part[0], *attributes["size"][1:])


def _random(*kinds: str) -> Callable[[OperatorSignature, np.random.Generator], list[Array | None]]:
    """Per operand: ``float``, or the values that the name stands for."""

    def values(sig: OperatorSignature, rng: np.random.Generator) -> list[Array | None]:
        made: list[Array | None] = []
        for kind, found in zip(kinds, sig.inputs, strict=False):
            assert found is not None
            made.append(_MAKERS[kind](sig, found.shape, rng))
        return made

    return values


def _boxes(sig: OperatorSignature, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    corner, size = rng.uniform(-1, 8, (*shape[:-1], 2)), rng.uniform(0.5, 8, (*shape[:-1], 2))
    return np.concatenate([corner, corner + size], -1)


def _boxes_of_images(sig: OperatorSignature, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    boxes = _boxes(sig, (shape[0], 4), rng).astype(np.float32)
    return np.concatenate([rng.integers(0, 2, (shape[0], 1)), boxes], 1).astype(np.float64)


def _positions(sig: OperatorSignature, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """A different position of its plane for each element, counted over the whole tensor."""
    plane = sig.attribute("plane")
    assert isinstance(plane, tuple)
    size = int(plane[0]) * int(plane[1])
    rows = [rng.permutation(size)[: shape[2] * shape[3]] + index * size for index in range(shape[0] * shape[1])]
    return np.concatenate(rows).reshape(shape)


def _condition(sig: OperatorSignature, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    count = sig.attribute("count")
    assert isinstance(count, int)
    return rng.permutation(np.arange(shape[0]) < count)


def _sparse(sig: OperatorSignature, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    count = sig.attribute("count")
    assert isinstance(count, int)
    return rng.permutation((np.arange(int(np.prod(shape))) < count).astype(np.int64) * 3).reshape(shape)


def _repeated(sig: OperatorSignature, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """As many distinct entries along dim 0 as the case says."""
    count = sig.attribute("count")
    assert isinstance(count, int)
    entries = rng.permutation(np.arange(count * int(np.prod(shape[1:])))).reshape(count, *shape[1:])
    return entries[rng.permutation(np.arange(shape[0]) % count)]


_MAKERS: dict[str, Callable[[OperatorSignature, tuple[int, ...], np.random.Generator], Array]] = {
    "boxes": _boxes,
    "boxes of images": _boxes_of_images,
    "condition": _condition,
    "float": lambda sig, shape, rng: rng.uniform(-0.9, 0.9, shape),
    "image": lambda sig, shape, rng: rng.integers(0, 2, shape),
    "label": lambda sig, shape, rng: rng.integers(0, 5, shape),
    "length": lambda sig, shape, rng: rng.integers(1, 6, shape),
    "pixels": lambda sig, shape, rng: rng.uniform(0.1, 1, shape).astype(np.float32).astype(np.float64),
    "positions": _positions,
    "positive": lambda sig, shape, rng: rng.uniform(0.2, 0.9, shape),
    "repeated": _repeated,
    "sparse": _sparse,
    "word": lambda sig, shape, rng: rng.integers(0, 4, shape),
}

_OPERANDS = {
    "AffineGrid": ("float",),
    "BitCast": ("float",),
    "Col2Im": ("float",),
    "Compress": ("float", "condition"),
    "CumProd": ("positive",),
    "DFT": ("float",),
    "DeformConv": ("float", "float", "float", "float", "positive"),
    "Det": ("float",),
    "GridSample": ("float", "float"),
    "MaxRoiPool": ("pixels", "boxes of images"),
    "MaxUnpool": ("float", "positions"),
    "NegativeLogLikelihoodLoss": ("float", "label", "positive"),
    "NonMaxSuppression": ("boxes", "pixels"),
    "NonZero": ("sparse",),
    "ReverseSequence": ("float", "length"),
    "RoiAlign": ("float", "boxes", "image"),
    "STFT": ("float", "positive"),
    "SoftmaxCrossEntropyLoss": ("float", "label", "positive"),
    "TensorScatter": ("float", "float", "length"),
    "TfIdfVectorizer": ("word",),
    "Unique": ("repeated",),
}
for _name, _kinds in _OPERANDS.items():
    VALUES[_name] = _random(*_kinds)
for _name in ("GridSample", "DeformConv", "Det", "ReverseSequence", "RoiAlign", "TensorScatter"):
    REFERENCES[_name] = _by_evaluator(24, _plain)
for _name in ("Compress", "NonZero", "Unique"):
    REFERENCES[_name] = _by_evaluator(24, _without_count)
STRUCTURE.update(AffineGrid=_size, CumProd=_axis, DFT=_dft)
REFERENCES["DFT"] = _by_evaluator(24, lambda attributes, values: [*values, *_dft(attributes)])
REFERENCES["STFT"] = _by_evaluator(24, _stft)
REFERENCES["AffineGrid"] = _affine_grid
REFERENCES["CumProd"] = _by_evaluator(26, lambda attributes, values: [*values, *_axis(attributes)])
REFERENCES["NonMaxSuppression"] = _non_max_suppression
REFERENCES["TfIdfVectorizer"] = lambda sig, values: by_onnxruntime(sig.type, values, dict(sig.attributes))
REFERENCES["MaxRoiPool"] = _max_roi_pool
REFERENCES["Col2Im"] = _col2im
REFERENCES["MaxUnpool"] = _max_unpool
REFERENCES["BitCast"] = _bit_cast
for _name in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):
    REFERENCES[_name], LOCALISERS[_name] = _loss, _count_whole
LOCALISERS["AffineGrid"] = _sizes
