"""Inputs of a step: synthetic ones by seed, or those of a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tap_planner.apply.weights import random_part
from tap_planner.errors import ApplyError
from tap_planner.graph import Graph

_SAME_VALUES = frozenset({"Reshape", "Transpose", "Expand", "Cast", "Slice", "Split", "Concat", "Identity", "Tile"})
"""Operators whose outputs hold the same integers as their inputs."""


def synthetic_inputs(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """Whole inputs of a bound graph, a function of names, positions and seed.

    Floats lie in [-1, 1). Integers that index a table or a vocabulary lie inside it, others are 0 or 1; masks are 1.
    """
    limits = _index_limits(graph)
    inputs: dict[str, np.ndarray] = {}
    for name in graph.inputs:
        tensor = graph.tensors[name].type
        indices = [np.arange(size) for size in tensor.shape]
        uniform = random_part(f"input {name}", tensor.shape, indices, seed)
        if tensor.is_float:
            inputs[name] = 2.0 * uniform - 1.0
        elif tensor.dtype == "bool":
            inputs[name] = np.ones(tensor.shape, np.bool_)
        elif "mask" in name.lower():
            inputs[name] = np.ones(tensor.shape, np.int64)
        else:
            inputs[name] = np.floor(uniform * limits.get(name, 2)).astype(np.int64)
    return inputs


def _index_limits(graph: Graph) -> dict[str, int]:
    """For each input the size of the smallest table that its values index."""
    limits: dict[str, int] = {}
    origins: dict[str, set[str]] = {name: {name} for name in graph.inputs}
    for operator in graph.operators:
        shapes = [None if operand is None else operand.shape for operand in operator.signature.inputs]
        indexed = _indexed_sizes(operator.type, operator.signature.attribute("axis", 0), shapes)
        if operator.type == "OneHot":
            indexed = ((0, int(operator.signature.attribute("depth", 1))),)  # type: ignore[arg-type]
        for position, size in indexed:
            for name in origins.get(operator.inputs[position] or "", ()):
                limits[name] = min(limits.get(name, size), size)
        if operator.type in _SAME_VALUES:
            for output in operator.outputs:
                origins.setdefault(output, set()).update(
                    *(origins.get(name, ()) for name in operator.inputs if name is not None)
                )
    return limits


def _indexed_sizes(type: str, axis: object, shapes: list[tuple[int, ...] | None]) -> tuple[tuple[int, int], ...]:
    """Pairs of the position of an index operand and the number of values it may take."""
    first = shapes[0] if shapes else None
    if first is None or len(shapes) < 2:
        return ()
    if type in ("Gather", "GatherElements") and isinstance(axis, int):
        return ((1, first[axis]),)
    if type == "RoiAlign":
        return ((2, first[0]),)
    if type in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):
        return ((1, first[1]),)
    if type == "GatherND":
        return ((1, min(first)),)
    if type == "com.microsoft::EmbedLayerNormalization":
        pairs = ((0, 2), (1, 4), (8, 3))
        return tuple(
            (position, rows[0])
            for position, table in pairs
            if position < len(shapes) and shapes[position] is not None and (rows := shapes[table]) is not None
        )
    return ((1, first[-1]),) if type == "Loss" else ()


def load_inputs(path: Path, graph: Graph) -> dict[str, np.ndarray]:
    """Inputs from an ``.npz`` file, checked against the graph.

    Raises:
        ApplyError: the file cannot be read, an input is missing or has another shape.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            found: Mapping[str, np.ndarray] = {name: stored[name] for name in stored.files}
    except (OSError, ValueError) as error:
        raise ApplyError(f"inputs {path.name!r} cannot be read: {error}", hint="write them with numpy.savez") from error
    for name in graph.inputs:
        if name not in found:
            raise ApplyError(f"inputs {path.name!r} lack {name!r}", hint=f"it needs {', '.join(graph.inputs)}")
        expected = graph.tensors[name].type.shape
        if found[name].shape != expected:
            raise ApplyError(
                f"input {name!r} in {path.name!r} has shape {list(found[name].shape)}, expected {list(expected)}",
                hint="the shapes are those of the plan's global batch",
            )
    return {name: found[name] for name in graph.inputs}
