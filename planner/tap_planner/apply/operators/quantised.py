"""Quantising and restoring. Elements under a byte are held one to a byte, so that a part may start anywhere."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present, torch_dtype

_LIMITS = {
    f"{sign}int{bits}": (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for sign in ("", "u")
    for bits in (2, 4, 8, 16, 32)
}
"""Least and largest value of quantised integers."""
_FLOATS = {
    "float8e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8e5m2": ml_dtypes.float8_e5m2,
    "float8e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float4e2m1": ml_dtypes.float4_e2m1fn,
}


def wide_dtype(context: OperatorContext) -> torch.dtype:
    """What restored elements are computed in: an int16 does not fit a bfloat16."""
    return torch.float64 if context.dtype == torch.float64 else torch.float32


def along(context: OperatorContext, index: int, value: Tensor, dim: int, rank: int) -> Tensor:
    """A scale or zero point, broadcast against data of ``rank`` dims: one number, one per index of a dim, or aligned.

    Args:
        context: the operator.
        index: which operand it is.
        value: its local part.
        dim: the dim along which it varies.
        rank: of the data.
    """
    shape = context.input_shape(index)
    if all(size == 1 for size in shape):
        return value.reshape(())
    if len(shape) > 1:
        return value
    return value.reshape([-1 if position == dim % rank else 1 for position in range(rank)])


def quantised(context: OperatorContext, value: Tensor, scale: Tensor, points: Tensor | None, dtype: str) -> Tensor:
    """``saturate(round(value / scale) + zero point)``, half to even; a float type rounds by itself."""
    ratio = value / scale
    if dtype in _FLOATS:
        return _rounded(context, ratio, dtype)
    if dtype not in _LIMITS:
        raise context.unsupported(f"quantised type {dtype}")
    low, high = _LIMITS[dtype]
    number = torch.round(ratio)
    if points is not None:
        number = number + points.to(number.dtype)
    return number.clamp(low, high).to(torch_dtype(dtype, context.dtype))


def _rounded(context: OperatorContext, value: Tensor, dtype: str) -> Tensor:
    """Nearest number of a float type of 8 or 4 bits; saturating, what is too large becomes the largest."""
    kind = np.dtype(_FLOATS[dtype])
    array = value.detach().cpu().to(torch.float64).numpy()
    if context.flag("saturate", True):
        largest = float(ml_dtypes.finfo(kind).max)
        array = np.clip(array, -largest, largest)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = array.astype(kind).astype(np.float64)
    return torch.from_numpy(rounded).to(value.device, context.dtype)


def restored(context: OperatorContext, value: Tensor, scale: Tensor, points: Tensor | None) -> Tensor:
    """``(value - zero point) scale``, in a type that holds every element."""
    dtype = wide_dtype(context)
    number = value.to(dtype)
    if points is not None:
        number = number - points.to(dtype)
    return number * scale.to(dtype)


def _spread(context: OperatorContext, operands: Operands, index: int) -> Tensor | None:
    """A scale or zero point of QuantizeLinear or DequantizeLinear against the data."""
    value, data = optional(operands, index), present(operands, 0)
    if value is None:
        return None
    axis, block = context.axis(1), context.int("block_size", 0)
    if not block or all(size == 1 for size in context.input_shape(index)):
        return along(context, index, value, axis, data.dim())
    return value.repeat_interleave(block, axis).narrow(axis, 0, data.shape[axis])


@operator("QuantizeLinear")
def quantize_linear(context: OperatorContext, operands: Operands) -> Tensor:
    """Quantised elements; no gradient passes."""
    scale = _spread(context, operands, 1)
    assert scale is not None
    value = present(operands, 0).detach().to(wide_dtype(context))
    points = _spread(context, operands, 2)
    return quantised(context, value, scale.to(value.dtype), points, context.signature.outputs[0].dtype)


@operator("DequantizeLinear")
def dequantize_linear(context: OperatorContext, operands: Operands) -> Tensor:
    """Restored elements; the gradient reaches the scale."""
    scale = _spread(context, operands, 1)
    assert scale is not None
    result = restored(context, present(operands, 0), scale, _spread(context, operands, 2))
    return result.to(torch_dtype(context.signature.outputs[0].dtype, context.dtype))


def dynamic_range(context: OperatorContext, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 elements with scale and zero point, such that 0 and the least and largest element are held."""
    value = value.detach().to(wide_dtype(context))
    low = torch.clamp(value.min() if value.numel() else value.new_zeros(()), max=0.0)
    high = torch.clamp(value.max() if value.numel() else value.new_zeros(()), min=0.0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    point = torch.round(torch.clamp(-low / scale, 0, 255))
    return quantised(context, value, scale, point, "uint8"), scale, point.to(torch.uint8)


@operator("DynamicQuantizeLinear")
def dynamic_quantize_linear(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """See ``dynamic_range``; the whole tensor is here, for nothing of it may be split."""
    number, scale, point = dynamic_range(context, present(operands, 0))
    return (number, scale.to(context.dtype), point)[: len(context.outputs)]
