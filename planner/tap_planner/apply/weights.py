"""Values of parameters: read from the model, or random parts that every rank makes for itself."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tap_planner.apply.quantised_values import element_range, quantised_range
from tap_planner.errors import ApplyError, TapError
from tap_planner.graph import Graph, Parameter, TensorKind
from tap_planner.operators import TensorType


class WeightSource(Protocol):
    """Where parameters come from."""

    def part(self, parameter: Parameter, indices: Sequence[np.ndarray]) -> np.ndarray:
        """The part of a parameter at the cross product of ``indices`` (one array per stored dim)."""
        ...

    def constant(self, name: str, type: TensorType) -> np.ndarray | None:
        """Value of a constant that lies outside the model file (a rotary table); None: read it there."""
        ...


class WeightFile(Protocol):
    """What is needed of ``graph.WeightReader``."""

    def problem(self, parameter: str) -> TapError | None:
        """Why ``read`` would not find the value."""
        ...

    def read(self, parameter: str) -> np.ndarray:
        """The stored value."""
        ...


class StoredWeights:
    """Parameters as the model file holds them.

    Args:
        reader: reads whole parameters by name.
    """

    def __init__(self, reader: WeightFile) -> None:
        self._reader = reader

    def part(self, parameter: Parameter, indices: Sequence[np.ndarray]) -> np.ndarray:
        """See ``WeightSource.part``.

        Raises:
            ApplyError: the model's weights are absent.
        """
        problem = self._reader.problem(parameter.name)
        if problem is not None:
            raise ApplyError(f"parameter {parameter.name!r} has no value: {problem.message}", hint=problem.hint)
        whole = self._reader.read(parameter.name)
        return whole[np.ix_(*indices)] if indices else whole

    def constant(self, name: str, type: TensorType) -> np.ndarray | None:
        """See ``WeightSource.constant``."""
        return None


class RandomWeights:
    """Random parameters, a function of name, global position and seed: parts agree without the whole ever existing.

    Matrices are uniform with the variance of 1 / fan-in, scales of normalisations lie around 1, variances are positive.
    Quantised weights take all values of their type, and their scales bring them to the same variance.

    Args:
        graph: says how parameters are used.
        seed: any integer.
    """

    def __init__(self, graph: Graph, seed: int = 0) -> None:
        self._seed = seed
        self._ranges = _value_ranges(graph)

    def part(self, parameter: Parameter, indices: Sequence[np.ndarray]) -> np.ndarray:
        """See ``WeightSource.part``."""
        uniform = random_part(parameter.name, parameter.type.shape, indices, self._seed)
        if parameter.type.is_float:
            low, high = self._ranges.get(parameter.name, (-0.1, 0.1))
            return low + (high - low) * uniform
        low, high = self._ranges.get(parameter.name) or element_range(parameter.type.dtype) or (0, 0)
        return np.floor(low + (high - low + 1) * uniform).astype(np.int64)

    def constant(self, name: str, type: TensorType) -> np.ndarray | None:
        """See ``WeightSource.constant``: floats in (0, 1], integers zero, which is a position in any table."""
        if not type.is_float:
            return np.zeros(type.shape, np.bool_ if type.dtype == "bool" else np.int64)
        return 1.0 - random_part(name, type.shape, [np.arange(size) for size in type.shape], self._seed)


def random_part(name: str, shape: tuple[int, ...], indices: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """Uniform numbers in [0, 1) at the cross product of ``indices``: a hash of name, seed and flat global position.

    The hash is the finaliser of splitmix64 (Steele, Lea and Flood 2014) over a counter.

    Args:
        name: any text; different names give independent numbers.
        shape: global shape.
        indices: global indices per dim.
        seed: any integer.
    """
    flat = np.zeros(1, np.uint64)  # never 0-d: numpy warns of scalars that wrap around
    for size, held in zip(shape, indices, strict=True):
        flat = (flat[:, None] * np.uint64(size) + held.astype(np.uint64)).reshape(-1)
    key = (zlib.crc32(name.encode()) << 32) ^ (seed * 0x9E3779B97F4A7C15)
    state = (flat + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    for _ in range(2):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    uniform = (state >> np.uint64(11)).astype(np.float64) / float(1 << 53)
    return uniform.reshape([len(held) for held in indices])


_SCALED = tuple(f"{kind}Normalization" for kind in ("Layer", "RMS", "Batch", "Instance", "Group"))


def _value_ranges(graph: Graph) -> dict[str, tuple[float, float]]:
    """Lowest and highest random value of each parameter, by its first use."""
    shapes = {parameter.name: parameter.type.shape for parameter in graph.parameters}
    ranges: dict[str, tuple[float, float]] = {}
    for operator in graph.operators:
        for position, name in enumerate(operator.inputs):
            if name is None or graph.tensors[name].kind is not TensorKind.PARAMETER:
                continue
            read = graph.tensors[name].read
            if read is None or read.parameter in ranges:
                continue
            quantised = quantised_range(graph, operator, position)
            if quantised is not None:
                ranges[read.parameter] = quantised
            elif graph.tensors[name].type.is_float:
                shape = graph.tensors[name].type.shape
                ranges[read.parameter] = _value_range(operator.type, position, shape, shapes[read.parameter])
    return ranges


def _value_range(type: str, position: int, shape: tuple[int, ...], stored: tuple[int, ...]) -> tuple[float, float]:
    if (type in _SCALED and position == 1) or (type == "BatchNormalization" and position == 4):
        return 0.5, 1.5
    if type == "Mul" and sum(size > 1 for size in stored) <= 1:
        return 0.5, 1.5
    if len(shape) < 2 or type in ("Add", "Sub"):
        return -0.1, 0.1
    if type in ("Conv", "ConvTranspose"):
        fan_in = math.prod(shape[1:])
    else:
        fan_in = shape[-1] if type == "Gather" else shape[-2]
    bound = math.sqrt(3.0 / max(fan_in, 1))
    return -bound, bound
