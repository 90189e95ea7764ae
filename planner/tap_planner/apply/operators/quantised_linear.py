"""Operators on quantised elements. Sums of integers are made in float64, which holds them exactly on every device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present
from tap_planner.apply.operators.convolution import average_pool, convolution
from tap_planner.apply.operators.quantised import along, dynamic_range, quantised, restored, wide_dtype

_MICROSOFT = "com.microsoft::"


def _shifted(context: OperatorContext, operands: Operands, data: int, points: int, dim: int) -> Tensor:
    """An integer operand without its zero point, in float64."""
    value = present(operands, data)
    number = value.to(torch.float64)
    point = optional(operands, points)
    return number if point is None else number - along(context, points, point.to(torch.float64), dim, value.dim())


def _scale(context: OperatorContext, operands: Operands, index: int, dim: int, rank: int) -> Tensor:
    return along(context, index, present(operands, index).to(wide_dtype(context)), dim, rank)


def _given(context: OperatorContext, operands: Operands, data: int) -> Tensor:
    """An operand that is followed by its scale and zero point, restored."""
    value = present(operands, data)
    scale = _scale(context, operands, data + 1, 0, value.dim())
    point = optional(operands, data + 2)
    return restored(context, value, scale, None if point is None else along(context, data + 2, point, 0, value.dim()))


def _made(context: OperatorContext, operands: Operands, value: Tensor, scale: int, dim: int = 0) -> Tensor:
    """A result quantised by the scale at ``scale`` and the zero point behind it."""
    point = optional(operands, scale + 1)
    return quantised(
        context,
        value.to(wide_dtype(context)),
        _scale(context, operands, scale, dim, value.dim()),
        None if point is None else along(context, scale + 1, point, dim, value.dim()),
        context.signature.outputs[0].dtype,
    )


def _integers(value: Tensor) -> Tensor:
    return value.to(torch.int32)


@operator("MatMulInteger")
def matmul_integer(context: OperatorContext, operands: Operands) -> Tensor:
    """Product of integers without their zero points (of A per row, of B per column)."""
    return _integers(_shifted(context, operands, 0, 2, -2) @ _shifted(context, operands, 1, 3, -1))


@operator("ConvInteger")
def conv_integer(context: OperatorContext, operands: Operands) -> Tensor:
    """Convolution of integers without their zero points; padding counts as the zero point."""
    data, weight = _shifted(context, operands, 0, 2, 0), _shifted(context, operands, 1, 3, 0)
    return _integers(convolution(context, (data, weight, None)))


@operator("QLinearConv")
def qlinear_conv(context: OperatorContext, operands: Operands) -> Tensor:
    """Convolution of integers, with the int32 bias, scaled and quantised again."""
    data, weight, bias = (
        _shifted(context, operands, 0, 2, 0),
        _shifted(context, operands, 3, 5, 0),
        optional(operands, 8),
    )
    total = convolution(context, (data, weight, None if bias is None else bias.to(torch.float64)))
    scale = _scale(context, operands, 1, 1, total.dim()) * along(
        context, 4, present(operands, 4).to(wide_dtype(context)), 1, total.dim()
    )
    return _made(context, operands, total.to(wide_dtype(context)) * scale, 6)


@operator("QLinearMatMul")
def qlinear_matmul(context: OperatorContext, operands: Operands) -> Tensor:
    """Product of integers, scaled and quantised again."""
    total = _shifted(context, operands, 0, 2, -2) @ _shifted(context, operands, 3, 5, -1)
    left, right = (present(operands, index).dim() for index in (0, 3))
    scales = _scale(context, operands, 1, -2, left) * _scale(context, operands, 4, -1, right)
    return _made(context, operands, total.to(wide_dtype(context)) * scales, 6, -2)


@operator(f"{_MICROSOFT}MatMulIntegerToFloat")
def matmul_integer_to_float(context: OperatorContext, operands: Operands) -> Tensor:
    """Product of integers, scaled. Where the sum is split, the bias comes as P(sum), so that it counts once."""
    total = _shifted(context, operands, 0, 4, -2) @ _shifted(context, operands, 1, 5, -1)
    left, right = (present(operands, index).dim() for index in (0, 1))
    result = total.to(wide_dtype(context)) * _scale(context, operands, 2, -2, left)
    result = (result * _scale(context, operands, 3, -1, right)).to(context.dtype)
    bias = optional(operands, 6)
    return result if bias is None else result + bias


@operator(f"{_MICROSOFT}DynamicQuantizeMatMul")
def dynamic_quantize_matmul(context: OperatorContext, operands: Operands) -> Tensor:
    """A quantised by its own range, times B, scaled."""
    number, scale, point = dynamic_range(context, present(operands, 0))
    weight = _shifted(context, operands, 1, 3, -1)
    total = (number.to(torch.float64) - point.to(torch.float64)) @ weight
    result = total.to(scale.dtype) * scale * _scale(context, operands, 2, -1, weight.dim())
    bias = optional(operands, 4)
    result = result.to(context.dtype)
    return result if bias is None else result + bias


@operator(f"{_MICROSOFT}QGemm")
def qgemm(context: OperatorContext, operands: Operands) -> Tensor:
    """``alpha a_scale b_scale (A B + C)``, quantised where the result has a scale."""
    left, right = _shifted(context, operands, 0, 2, 0), _shifted_columns(context, operands)
    left = left.mT if context.flag("transA") else left
    total = left @ (right.mT if context.flag("transB") else right)
    added = optional(operands, 6)
    total = total if added is None else total + added.to(torch.float64)
    scale = context.float("alpha", 1.0) * _scale(context, operands, 1, 0, 2) * _scale(context, operands, 4, 1, 2)
    result = total.to(wide_dtype(context)) * scale
    return result.to(context.dtype) if optional(operands, 7) is None else _made(context, operands, result, 7, 1)


def _shifted_columns(context: OperatorContext, operands: Operands) -> Tensor:
    return _shifted(context, operands, 3, 5, 0 if context.flag("transB") else 1)


@operator(f"{_MICROSOFT}QLinearAdd")
def qlinear_add(context: OperatorContext, operands: Operands) -> Tensor:
    """Sum of restored elements, quantised."""
    return _made(context, operands, _given(context, operands, 0) + _given(context, operands, 3), 6)


@operator(f"{_MICROSOFT}QLinearMul")
def qlinear_mul(context: OperatorContext, operands: Operands) -> Tensor:
    """Product of restored elements, quantised."""
    return _made(context, operands, _given(context, operands, 0) * _given(context, operands, 3), 6)


@operator(f"{_MICROSOFT}QLinearWhere")
def qlinear_where(context: OperatorContext, operands: Operands) -> Tensor:
    """Choice of restored elements, quantised."""
    chosen = torch.where(present(operands, 0), _given(context, operands, 1), _given(context, operands, 4))
    return _made(context, operands, chosen, 7)


@operator(f"{_MICROSOFT}QLinearConcat")
def qlinear_concat(context: OperatorContext, operands: Operands) -> Tensor:
    """Restored elements joined, quantised."""
    parts = [_given(context, operands, index) for index in range(2, len(operands), 3)]
    return _made(context, operands, torch.cat(parts, context.int("axis")), 0)


def _softmax(context: OperatorContext, value: Tensor) -> Tensor:
    axes = context.ints("axes")
    shifted = torch.exp(value - value.amax(axes, keepdim=True))
    return shifted / shifted.sum(axes, keepdim=True)


def _reduce_mean(context: OperatorContext, value: Tensor) -> Tensor:
    return value.mean(context.ints("axes"), keepdim=context.flag("keepdims", True))


_RESTORED: dict[str, Callable[[OperatorContext, Tensor], Tensor]] = {
    "AveragePool": lambda context, value: average_pool(context, (value,)),
    "GlobalAveragePool": lambda context, value: value.mean(tuple(range(2, value.dim())), keepdim=True),
    "LeakyRelu": lambda context, value: F.leaky_relu(value, context.float("alpha", 0.01)),
    "ReduceMean": _reduce_mean,
    "Sigmoid": lambda context, value: torch.sigmoid(value),
    "Softmax": _softmax,
}
"""Float operators of one operand that are run between restoring and quantising."""


def _register(name: str, function: Callable[[OperatorContext, Tensor], Tensor]) -> None:
    @operator(f"{_MICROSOFT}QLinear{name}")
    def run(context: OperatorContext, operands: Operands) -> Tensor:
        return _made(context, operands, function(context, _given(context, operands, 0)), 3)


for _name, _function in _RESTORED.items():
    _register(_name, _function)
