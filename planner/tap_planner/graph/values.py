"""What the binder knows of each ONNX value, and the canonical form of one node."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from onnx import TensorProto

from tap_planner.errors import UnsupportedGraphError
from tap_planner.graph.dtypes import name_of_numpy
from tap_planner.graph.limits import MAX_STRUCTURE
from tap_planner.graph.nodes import Node, RawAttribute
from tap_planner.graph.types import ParameterRead, TensorKind
from tap_planner.operators import AttributeValue, TensorType


@dataclass(slots=True, kw_only=True, eq=False)
class Value:
    """A value during binding."""

    name: str
    """Name of the canonical tensor."""
    type: TensorType
    kind: TensorKind
    array: np.ndarray | None = None
    """Ready value of a small constant."""
    read: ParameterRead | None = None
    deferred: bool = False
    """A constant that rests on a stored table or on a value outside the file: what it holds decides nothing, and is
    not looked at to plan."""
    batched: bool = False
    """Whether it depends on an input that carries the batch."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Static shape."""
        return self.type.shape

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.type.shape)

    @property
    def is_constant(self) -> bool:
        """Whether the value depends on no input and no parameter."""
        return self.kind is TensorKind.CONSTANT


class Origin(Protocol):
    """Where a value comes from, in words."""

    @property
    def words(self) -> str:
        """As words after "depends on"."""
        ...

    @property
    def settling(self) -> str:
        """Options that would make the value a constant; empty if there are none."""
        ...


class CountUnknownError(UnsupportedGraphError):
    """A size depends on the data and was not given.

    Args:
        where: the node, in words.
        name: of the value.
        dim: whose size it is.
    """

    def __init__(self, where: str, name: str, dim: int) -> None:
        super().__init__(
            f"{where}: how many elements {name!r} holds depends on the data",
            hint=f"say how many it shall be planned for: --dim {name}.{dim}=N",
        )
        self.name = name
        self.dim = dim


@dataclass(slots=True, kw_only=True, eq=False)
class Form:
    """A node in canonical form: structure in attributes, data in inputs. ``Identity`` stands for its first input."""

    type: str
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    inputs: list[Value | None]


def identity(value: Value) -> Form:
    """The form of a node that changes nothing."""
    return Form(type="Identity", inputs=[value])


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A node with its operands, as the canonicalisers see it."""

    node: Node
    inputs: list[Value | None]
    opset: int
    fetch: Callable[[str], np.ndarray]
    """Value of a constant by name."""
    rebatch: int | None = None
    """The batch that replaces a leading 1 of constant shapes, where the model is re-batched."""
    wanted: Collection[str] = ()
    """Names that some node or the graph's outputs read."""
    declared: Callable[[str], TensorType | None] = lambda _: None
    """Type that the file declares of a value, with the symbolic dims bound."""
    count: Callable[[str, int], int | None] = lambda _, __: None
    """Size of a dim of a value that depends on the data, as the user gave it."""
    origin: Callable[[Value], Origin | None] = lambda _: None
    """Where a value comes from."""

    @property
    def attributes(self) -> dict[str, RawAttribute]:
        """Attributes as they are in the file."""
        return self.node.attributes

    @property
    def num_outputs(self) -> int:
        """Number of outputs that the node lists."""
        return len(self.node.outputs)

    def error(self, text: str, hint: str = "") -> UnsupportedGraphError:
        """An error that names the node."""
        return UnsupportedGraphError(f"{self.node.where}: {text}", hint=hint)

    def has(self, index: int) -> bool:
        """Whether operand ``index`` is there."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def operand(self, index: int) -> Value:
        """Operand ``index``, which must be there."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None:
            raise self.error(f"operand {index} is absent")
        return found

    def wants(self, output: int) -> bool:
        """Whether somebody reads an output."""
        return output < len(self.node.outputs) and self.node.outputs[output] in self.wanted

    def declared_size(self, output: int, dim: AttributeValue) -> int:
        """Size of a dim that depends on the data, as the file declares it (a symbolic dim that has a value)."""
        assert isinstance(dim, int)
        name = self.node.outputs[output]
        given = self.count(name, dim) if name else None
        if given is not None:
            return given
        found = self.declared(name) if name else None
        if found is None or dim >= len(found.shape):
            raise CountUnknownError(self.node.where, name, dim)
        return found.shape[dim]

    def data(self) -> list[Value | None]:
        """All operands, without absent ones at the end."""
        operands = list(self.inputs)
        while operands and operands[-1] is None:
            operands.pop()
        return operands

    def array(self, index: int) -> np.ndarray:
        """Value of a structural operand, which must be a constant."""
        found = self.operand(index)
        if found.array is not None:
            return found.array
        if not found.is_constant:
            source = self.origin(found)
            words = "depends on the data" if source is None else f"depends on {source.words}"
            settling = "" if source is None else source.settling
            hint = f"give the value: {settling}" if settling else "export the model with static shapes"
            raise self.error(f"operand {index} ({found.name!r}) decides shapes but {words}", hint=hint)
        return self.fetch(found.name)

    def ints(self, index: int) -> tuple[int, ...]:
        """Integers of a structural operand."""
        array = self.array(index)
        if array.size > MAX_STRUCTURE:
            raise self.error(f"operand {index} has {array.size} elements, expected at most {MAX_STRUCTURE}")
        if array.dtype.kind not in "iub":
            raise self.error(f"operand {index} is {name_of_numpy(array.dtype)}, expected integers")
        return tuple(int(item) for item in array.reshape(-1).tolist())

    def scalar(self, index: int) -> int | float:
        """The one number of a structural operand."""
        value = self.array(index)
        if value.size != 1:
            raise self.error(f"operand {index} has {value.size} elements, expected 1")
        return value.reshape(-1)[0].item()

    def integer(self, name: str, default: int | None = None) -> int:
        """Integer attribute."""
        value = self.attributes.get(name, default)
        if not isinstance(value, int):
            raise self.error(f"attribute {name!r} is {value!r}, expected an integer")
        return value

    def number(self, name: str, default: float) -> float:
        """Float attribute."""
        value = self.attributes.get(name, default)
        if not isinstance(value, int | float):
            raise self.error(f"attribute {name!r} is {value!r}, expected a number")
        return float(value)

    def text(self, name: str, default: str) -> str:
        """Text attribute."""
        return str(self.attributes.get(name, default))

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Integer list attribute, or None."""
        value = self.attributes.get(name)
        if not isinstance(value, tuple):
            return None
        if not all(isinstance(item, int) for item in value):
            raise self.error(f"attribute {name!r} is not a list of integers")
        return value

    def ints_either(self, name: str, index: int) -> tuple[int, ...] | None:
        """Integers from operand ``index`` (newer operator sets) or from attribute ``name`` (older ones)."""
        if self.has(index):
            return self.ints(index)
        return self.integers(name)

    def axis(self, axis: int, rank: int) -> int:
        """A non-negative dim."""
        if not -rank <= axis < max(rank, 1):
            raise self.error(f"dim {axis} is outside a tensor of {rank} dims")
        return axis + rank if axis < 0 else axis

    def tensor(self, name: str) -> TensorProto | None:
        """Tensor attribute, or None."""
        value = self.attributes.get(name)
        return value if isinstance(value, TensorProto) else None
