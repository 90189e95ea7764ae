"""Typed reading of a signature's attributes and operands."""

from __future__ import annotations

from tap_planner.errors import UnsupportedGraphError
from tap_planner.operators.types import OperatorSignature, TensorType

__all__ = ["flag_of", "float_of", "int_of", "ints_of", "operand", "text_of"]


def _wrong(signature: OperatorSignature, name: str, got: object, expected: str) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        f"operator {signature.type}: attribute {name!r} is {got!r}, expected {expected}",
        hint=f"give {signature.type} a static {name!r}, or export the model with static shapes",
    )


def int_of(signature: OperatorSignature, name: str, default: int | None = None) -> int:
    """Integer attribute ``name``; without a default it must be there."""
    value = signature.attribute(name, default)
    if not isinstance(value, int):
        raise _wrong(signature, name, value, "an integer")
    return value


def float_of(signature: OperatorSignature, name: str, default: float) -> float:
    """Float attribute ``name``, or ``default``."""
    value = signature.attribute(name, default)
    if not isinstance(value, int | float):
        raise _wrong(signature, name, value, "a number")
    return float(value)


def flag_of(signature: OperatorSignature, name: str, default: bool = False) -> bool:
    """Whether the 0/1 attribute ``name`` is set."""
    return bool(int_of(signature, name, int(default)))


def text_of(signature: OperatorSignature, name: str, default: str | None = None) -> str:
    """Text attribute ``name``; without a default it must be there."""
    value = signature.attribute(name, default)
    if not isinstance(value, str):
        raise _wrong(signature, name, value, "a text")
    return value


def ints_of(signature: OperatorSignature, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Attribute ``name`` as integers; without a default it must be there."""
    value = signature.attribute(name, default)
    if not isinstance(value, tuple):
        raise _wrong(signature, name, value, "a list of integers")
    return tuple(int(item) for item in value)


def operand(signature: OperatorSignature, index: int) -> TensorType:
    """Type of the operand ``index``, which must be there."""
    found = signature.inputs[index] if index < len(signature.inputs) else None
    if found is None:
        raise UnsupportedGraphError(
            f"operator {signature.type}: operand {index} is absent, expected a tensor",
            hint=f"connect input {index} of {signature.type}",
        )
    return found
