"""Cases of random operators. The reference is the generator written out number by number in whole Python integers."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tap_planner.operators import Factor, OperatorSignature
from tests.operators.operator_reference import LOCALISERS, REFERENCES, VALUES, Array, Range, signature, tensor

CASES: tuple[OperatorSignature, ...] = (
    signature("RandomNormal", shape=(4, 6), dtype="float64", mean=1.0, scale=2.0),
    signature("RandomUniform", shape=(4, 6), dtype="float64", low=-1.0, high=3.0, seed=7),
    signature("RandomNormalLike", tensor(4, 6), dtype="float64", mean=0.0, scale=1.0),
    signature("RandomUniformLike", tensor(4, 6), dtype="float64", low=0.0, high=1.0),
    signature("Bernoulli", tensor(4, 6), dtype="float64"),
    signature("Multinomial", tensor(6, 5), dtype="int64", sample_size=8),
    signature("Dropout", tensor(4, 6), num_outputs=2, ratio=0.4, training_mode=1, seed=3),
)

_MASK = (1 << 64) - 1


def _uniform(key: str, position: int) -> float:
    """Two rounds of splitmix64's finaliser over key and counter (Steele, Lea and Flood 2014)."""
    state = ((position + 1) * 0x9E3779B97F4A7C15 + (zlib.crc32(key.encode()) << 32)) & _MASK
    for _ in range(2):
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


def _numbers(sig: OperatorSignature, stream: str) -> Array:
    """One number per position of the (part of the) first output."""
    seed, shape = sig.attribute("seed"), sig.attribute("whole", sig.outputs[0].shape)
    key = f"{stream} {'' if seed is None else seed} 0"
    split, start = sig.attribute("split", -1), sig.attribute("start", 0)
    assert isinstance(shape, tuple) and isinstance(start, int)
    sizes = sig.outputs[0].shape
    made = np.empty(sizes)
    for place in itertools.product(*map(range, sizes)):
        position = 0
        for dim, index in enumerate(place):
            position = position * int(shape[dim]) + index + (start if dim == split else 0)
        made[place] = _uniform(key, position)
    return made


def _drawn(sig: OperatorSignature, values: Sequence[Array | None]) -> list[Array]:
    attributes: dict[str, Any] = dict(sig.attributes)
    data = values[0] if values else None
    if sig.type.startswith("RandomUniform"):
        return [attributes["low"] + (attributes["high"] - attributes["low"]) * _numbers(sig, "uniform")]
    if sig.type.startswith("RandomNormal"):
        radius = np.sqrt(-2 * np.log(1 - _numbers(sig, "radius")))
        normal = radius * np.cos(2 * math.pi * _numbers(sig, "angle"))
        return [attributes["mean"] + attributes["scale"] * normal]
    assert data is not None
    if sig.type == "Bernoulli":
        return [(_numbers(sig, "bernoulli") < data).astype(np.float64)]
    if sig.type == "Multinomial":
        odds = np.exp(data) / np.exp(data).sum(1, keepdims=True)
        ends = odds.cumsum(1)
        return [(_numbers(sig, "multinomial")[:, :, None] >= ends[:, None, :]).sum(-1)]
    ratio = attributes.get("ratio", 0.0)
    kept = _numbers(sig, "dropout") >= ratio if ratio else np.ones(data.shape, np.bool_)
    return [np.where(kept, data / (1 - ratio), 0.0), kept][: len(sig.outputs)]


def _place(attributes: dict[str, Any], factor: Factor, part: Range, sig: OperatorSignature) -> None:
    """Where a part lies in the whole output; the sizes of an output that is made from nothing."""
    dim = 0 if factor.name == "n" else int(factor.name[1:])
    attributes.update(whole=sig.outputs[0].shape, split=dim, start=part[0])


def _values(sig: OperatorSignature, rng: np.random.Generator) -> list[Array | None]:
    return [None if found is None else rng.uniform(0.2, 0.9, found.shape) for found in sig.inputs]


for _sig in CASES:
    REFERENCES[_sig.type], LOCALISERS[_sig.type], VALUES[_sig.type] = _drawn, _place, _values
