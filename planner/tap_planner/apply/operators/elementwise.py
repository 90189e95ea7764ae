"""Elementwise operators; operands broadcast."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tap_planner.apply.operators.context import (
    FUNCTIONS,
    Operands,
    OperatorContext,
    operator,
    optional,
    present,
    torch_dtype,
)
from tap_planner.apply.operators.small_floats import SMALL_FLOATS, power_of_two, rounded

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
    "Identity": lambda x: x.view_as(x),
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}

_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
}


def _register_tables() -> None:
    for name, unary in _UNARY.items():
        FUNCTIONS[name] = functools.partial(_run_unary, unary)
    for name, binary in _BINARY.items():
        FUNCTIONS[name] = functools.partial(_run_binary, binary)


def _run_unary(function: Callable[[Tensor], Tensor], context: OperatorContext, operands: Operands) -> Tensor:
    return function(present(operands, 0))


def _run_binary(function: Callable[[Tensor, Tensor], Tensor], context: OperatorContext, operands: Operands) -> Tensor:
    return function(present(operands, 0), present(operands, 1))


_register_tables()


@operator("Div")
def divide(context: OperatorContext, operands: Operands) -> Tensor:
    """Quotient; of integers it is cut towards zero."""
    left, right = present(operands, 0), present(operands, 1)
    return left / right if left.is_floating_point() else torch.div(left, right, rounding_mode="trunc")


@operator("Mod")
def modulo(context: OperatorContext, operands: Operands) -> Tensor:
    """Remainder with the divisor's sign, or with the dividend's (``fmod``)."""
    function = torch.fmod if context.flag("fmod") else torch.remainder
    return function(present(operands, 0), present(operands, 1))


@operator("Pow")
def power(context: OperatorContext, operands: Operands) -> Tensor:
    """Power in the type of the base."""
    base, exponent = present(operands, 0), present(operands, 1)
    return torch.pow(base, exponent).to(base.dtype)


_NARROW = {"uint2": 2, "int2": 2, "uint4": 4, "int4": 4, "uint16": 16, "uint32": 32}
"""Bits of the integer types that torch holds in wider ones."""


def _wrapped(context: OperatorContext, value: Tensor) -> Tensor:
    """Integers that are held in wider ones lose the bits that their type does not have."""
    dtype = context.signature.outputs[0].dtype
    bits = _NARROW.get(dtype)
    if bits is None or value.dtype == torch.bool:
        return value
    low = value & ((1 << bits) - 1)
    return low if dtype.startswith("u") else torch.where(low >= 1 << (bits - 1), low - (1 << bits), low)


@operator("BitwiseNot")
def bitwise_not(context: OperatorContext, operands: Operands) -> Tensor:
    """Every bit turned over."""
    return _wrapped(context, torch.bitwise_not(present(operands, 0)))


@operator("BitShift")
def bit_shift(context: OperatorContext, operands: Operands) -> Tensor:
    """Shift by a count."""
    left = context.text("direction") == "LEFT"
    function = torch.bitwise_left_shift if left else torch.bitwise_right_shift
    return _wrapped(context, function(present(operands, 0), present(operands, 1)))


@operator("Sum")
def variadic_sum(context: OperatorContext, operands: Operands) -> Tensor:
    """Sum of all operands."""
    return functools.reduce(torch.add, _all(operands)) if len(operands) > 1 else _all(operands)[0].clone()


@operator("Mean")
def variadic_mean(context: OperatorContext, operands: Operands) -> Tensor:
    """Mean of all operands."""
    return functools.reduce(torch.add, _all(operands)) / len(operands)


@operator("Max")
def variadic_max(context: OperatorContext, operands: Operands) -> Tensor:
    """Largest of all operands."""
    return functools.reduce(torch.maximum, _all(operands)) if len(operands) > 1 else _all(operands)[0].clone()


@operator("Min")
def variadic_min(context: OperatorContext, operands: Operands) -> Tensor:
    """Smallest of all operands."""
    return functools.reduce(torch.minimum, _all(operands)) if len(operands) > 1 else _all(operands)[0].clone()


def _all(operands: Operands) -> list[Tensor]:
    return [present(operands, index) for index in range(len(operands))]


@operator("Where")
def where(context: OperatorContext, operands: Operands) -> Tensor:
    """Choice by a condition."""
    return torch.where(present(operands, 0), present(operands, 1), present(operands, 2))


@operator("Cast")
def cast(context: OperatorContext, operands: Operands) -> Tensor:
    """Change of type. The usual floats are the one computed in; smaller ones round to the numbers that they have."""
    value, target = present(operands, 0), context.signature.outputs[0].dtype
    held = torch_dtype(target, context.dtype)
    if target == "float8e8m0":
        mode = context.text("round_mode", "up")
        return power_of_two(value.to(held), mode, saturate=context.flag("saturate", True))
    if target in SMALL_FLOATS:
        return rounded(value.to(held), target, saturate=context.flag("saturate", True))
    if target in _NARROW and value.is_floating_point():
        value = value.to(torch.int64)
    return _wrapped(context, value).to(held, copy=True)


_NATIVE = {
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Types as files store them, where others hold their values here."""


@operator("BitCast")
def bit_cast(context: OperatorContext, operands: Operands) -> Tensor:
    """The same bits read as another type."""
    value, source = present(operands, 0), context.signature.inputs[0]
    target = context.signature.outputs[0].dtype
    assert source is not None
    stored = value.to(_NATIVE.get(source.dtype, value.dtype))
    held = torch_dtype(target, context.dtype)
    return stored.view(_NATIVE.get(target, held)).to(held)


@operator("Clip")
def clip(context: OperatorContext, operands: Operands) -> Tensor:
    """Limits, given as attributes or as operands."""
    value = present(operands, 0)
    limits: list[Tensor | None] = []
    for index, name in ((1, "min"), (2, "max")):
        limit = optional(operands, index)
        attribute = context.signature.attribute(name)
        if limit is None and isinstance(attribute, int | float):
            limit = torch.as_tensor(attribute, dtype=value.dtype, device=value.device)
        limits.append(limit)
    if limits == [None, None]:
        return value.clone()
    return torch.clamp(value, limits[0], limits[1])


@operator("Gelu")
def gelu(context: OperatorContext, operands: Operands) -> Tensor:
    """Gaussian error linear unit, exact or by tanh."""
    return F.gelu(present(operands, 0), approximate=context.text("approximate", "none"))


@operator("Swish")
def swish(context: OperatorContext, operands: Operands) -> Tensor:
    """``x * sigmoid(alpha x)``."""
    value = present(operands, 0)
    return value * torch.sigmoid(context.float("alpha", 1.0) * value)


@operator("Elu")
def elu(context: OperatorContext, operands: Operands) -> Tensor:
    """Exponential linear unit."""
    return F.elu(present(operands, 0), context.float("alpha", 1.0))


@operator("Celu")
def celu(context: OperatorContext, operands: Operands) -> Tensor:
    """Continuously differentiable exponential linear unit."""
    return F.celu(present(operands, 0), context.float("alpha", 1.0))


@operator("Selu")
def selu(context: OperatorContext, operands: Operands) -> Tensor:
    """Scaled exponential linear unit (default constants of ONNX Selu-6)."""
    value = present(operands, 0)
    alpha, gamma = context.float("alpha", 1.67326319217681884765625), context.float("gamma", 1.05070102214813232421875)
    return gamma * torch.where(value > 0, value, alpha * torch.expm1(value))


@operator("LeakyRelu")
def leaky_relu(context: OperatorContext, operands: Operands) -> Tensor:
    """Relu with a slope on the left."""
    return F.leaky_relu(present(operands, 0), context.float("alpha", 0.01))


@operator("ThresholdedRelu")
def thresholded_relu(context: OperatorContext, operands: Operands) -> Tensor:
    """Zero up to a threshold."""
    return F.threshold(present(operands, 0), context.float("alpha", 1.0), 0.0)


@operator("HardSigmoid")
def hard_sigmoid(context: OperatorContext, operands: Operands) -> Tensor:
    """Line cut at 0 and 1."""
    return torch.clamp(context.float("alpha", 0.2) * present(operands, 0) + context.float("beta", 0.5), 0.0, 1.0)


@operator("Shrink")
def shrink(context: OperatorContext, operands: Operands) -> Tensor:
    """Zero near zero, moved by a bias elsewhere."""
    value, bias, limit = present(operands, 0), context.float("bias", 0.0), context.float("lambd", 0.5)
    zero = torch.zeros_like(value)
    return torch.where(value < -limit, value + bias, torch.where(value > limit, value - bias, zero))


@operator("IsInf")
def is_inf(context: OperatorContext, operands: Operands) -> Tensor:
    """Whether infinite, of either or of one sign."""
    value = present(operands, 0)
    result = torch.zeros_like(value, dtype=torch.bool)
    if context.flag("detect_positive", True):
        result = result | (value == math.inf)
    if context.flag("detect_negative", True):
        result = result | (value == -math.inf)
    return result
