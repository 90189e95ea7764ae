"""The digest of a bound graph: what is computed, not which file or which weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from tap_planner.graph.constants import ConstantStore
from tap_planner.graph.types import Operator, Parameter, Tensor, TensorKind

_SMALL = 64
"""Integer constants up to so many elements count by value."""


def _tensor_line(tensor: Tensor, constants: ConstantStore) -> str:
    parts = [tensor.kind.value, tensor.type.dtype, ",".join(map(str, tensor.type.shape))]
    if tensor.requires_gradient:
        parts.append("gradient")
    if tensor.read is not None:
        parts.append(f"{tensor.read.parameter!r}{tensor.read.dims}")
    if tensor.kind is TensorKind.CONSTANT:
        value = constants.small(tensor.name)
        if value is not None and (value.size == 1 or (not tensor.type.is_float and value.size <= _SMALL)):
            parts.append(str(value.tolist()))
    return " ".join(parts)


def graph_digest(
    operators: Sequence[Operator],
    tensors: Mapping[str, Tensor],
    parameters: Sequence[Parameter],
    inputs: Sequence[str],
    outputs: Sequence[str],
    constants: ConstantStore,
) -> str:
    """SHA-256 over a canonical text of the graph."""
    lines = [f"inputs {list(inputs)}", f"outputs {list(outputs)}"]
    lines.extend(f"parameter {item.name!r} {item.type.dtype} {item.type.shape} {item.trainable}" for item in parameters)
    lines.extend(f"tensor {name!r} {_tensor_line(tensors[name], constants)}" for name in sorted(tensors))
    lines.extend(f"{item.type} {item.attributes} {item.inputs} {item.outputs}" for item in operators)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
