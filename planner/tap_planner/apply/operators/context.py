"""What a torch function of an operator may know, and the table that the functions register in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tap_planner.errors import ApplyError
from tap_planner.graph import Body
from tap_planner.operators import OperatorSignature
from tap_planner.sharding import Placements, local_indices, local_shape

Operands = Sequence[Tensor | None]
"""Local parts of the operands; None for an absent one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorContext:
    """An operator on one rank: global signature, placements, local output shapes."""

    signature: OperatorSignature
    """Types and shapes are global."""
    inputs: tuple[Placements | None, ...]
    outputs: tuple[Placements, ...]
    mesh_shape: tuple[int, ...]
    coordinates: tuple[int, ...]
    dtype: torch.dtype
    """What float tensors are computed in, whatever the file says."""
    id: str = ""
    """The operator's id in the graph: what an operator without a seed draws random numbers by."""
    step: int = 0
    """Number of the step: random numbers of one step differ from those of the next."""
    body: Body | None = None
    """What control flow carries."""

    @property
    def local_outputs(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of this rank's parts of the outputs."""
        return tuple(
            local_shape(output.shape, placements, self.mesh_shape, self.coordinates)
            for output, placements in zip(self.signature.outputs, self.outputs, strict=True)
        )

    def input_shape(self, index: int) -> tuple[int, ...]:
        """Global shape of an operand."""
        operand = self.signature.inputs[index]
        if operand is None:
            raise self.unsupported(f"operand {index} is absent")
        return operand.shape

    def input_indices(self, index: int, dim: int) -> np.ndarray:
        """Global indices, along one dim, of this rank's part of an operand."""
        placements = self.inputs[index]
        assert placements is not None
        return local_indices(self.input_shape(index), placements, self.mesh_shape, self.coordinates)[dim]

    def output_indices(self, index: int) -> tuple[np.ndarray, ...]:
        """Global indices, per dim, of this rank's part of an output."""
        shape = self.signature.outputs[index].shape
        return local_indices(shape, self.outputs[index], self.mesh_shape, self.coordinates)

    def is_split(self, index: int, dim: int) -> bool:
        """Whether a dim of an operand is sharded over some axis."""
        placements = self.inputs[index]
        return placements is not None and any(p.is_shard and p.dim == dim for p in placements)

    def int(self, name: str, default: int | None = None) -> int:
        """Integer attribute."""
        value = self.signature.attribute(name, default)
        if not isinstance(value, int):
            raise self.unsupported(f"attribute {name!r} is {value!r}, expected an integer")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Attribute that is 0 or 1."""
        return bool(self.int(name, int(default)))

    def float(self, name: str, default: float | None = None) -> float:
        """Number attribute."""
        value = self.signature.attribute(name, default)
        if not isinstance(value, int | float):
            raise self.unsupported(f"attribute {name!r} is {value!r}, expected a number")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        """Text attribute."""
        value = self.signature.attribute(name, default)
        if not isinstance(value, str):
            raise self.unsupported(f"attribute {name!r} is {value!r}, expected a text")
        return value

    def ints(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Attribute that is a list of integers."""
        value = self.signature.attribute(name, default)
        if not isinstance(value, tuple):
            raise self.unsupported(f"attribute {name!r} is {value!r}, expected a list of integers")
        return tuple(int(item) for item in value)

    def axis(self, default: int, rank: int | None = None) -> int:
        """Attribute ``axis``, counted from the front."""
        rank = len(self.input_shape(0)) if rank is None else rank
        return self.int("axis", default) % max(rank, 1)

    def check_count(self, found: int) -> None:
        """Check how many elements were selected.

        Raises:
            ApplyError: the plan was made for another number.
        """
        planned = self.int("count")
        if found != planned:
            name = f" {self.id!r}" if self.id else ""
            raise ApplyError(
                f"operator {self.signature.type}{name} selects {found} elements of these inputs, planned are {planned}",
                hint=f"plan with --dim for {found}, or feed inputs for which it selects {planned}",
            )

    def unsupported(self, what: str) -> ApplyError:
        """An error that names the operator."""
        return ApplyError(
            f"operator {self.signature.type} cannot be executed: {what}",
            hint="plan without this operator, or open an issue with the model",
        )


TorchFunction = Callable[[OperatorContext, Operands], Tensor | tuple[Tensor, ...]]
_Function = TypeVar("_Function", bound=TorchFunction)

FUNCTIONS: dict[str, TorchFunction] = {}
"""Torch function of each operator type."""


def operator(*types: str) -> Callable[[_Function], _Function]:
    """Registers a function under operator types."""

    def register(function: _Function) -> _Function:
        for name in types:
            assert name not in FUNCTIONS, name
            FUNCTIONS[name] = function
        return function

    return register


def present(operands: Operands, index: int) -> Tensor:
    """An operand that must be there."""
    value = operands[index]
    assert value is not None
    return value


def optional(operands: Operands, index: int) -> Tensor | None:
    """An operand that may be absent."""
    return operands[index] if index < len(operands) else None


_TORCH_DTYPES = {
    "bool": torch.bool,
    "int2": torch.int8,
    "int4": torch.int8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint2": torch.uint8,
    "uint4": torch.uint8,
    "uint8": torch.uint8,
    "uint16": torch.int32,
    "uint32": torch.int64,
    "uint64": torch.int64,
}
"""Unsigned types that torch hardly computes with are held in wider signed ones, elements under a byte in a byte."""


def torch_dtype(name: str, compute: torch.dtype) -> torch.dtype:
    """Torch type of an ONNX element type; floats are computed in ``compute``.

    Raises:
        ApplyError: torch has no such type.
    """
    if name.startswith(("float", "bfloat", "double")):
        return compute
    if name not in _TORCH_DTYPES:
        raise ApplyError(f"element type {name!r} cannot be executed", hint="quantised types are not executed")
    return _TORCH_DTYPES[name]
