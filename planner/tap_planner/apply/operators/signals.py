"""Fourier transforms and determinants."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present


def _complex(value: Tensor) -> Tensor:
    """The signal of [..., 1] (real) or [..., 2] (real and imaginary part)."""
    if value.shape[-1] == 1:
        return value[..., 0]
    return torch.complex(value[..., 0], value[..., 1])


@operator("DFT")
def fourier(context: OperatorContext, operands: Operands) -> Tensor:
    """Discrete Fourier transform of a dim, or its inverse; one-sided keeps the half that a real signal has."""
    signal, dim, length = _complex(present(operands, 0)), context.int("axis"), context.int("length")
    onesided, inverse = context.flag("onesided"), context.flag("inverse")
    if inverse and onesided:
        return torch.fft.irfft(signal, length, dim).unsqueeze(-1)
    function = torch.fft.ifft if inverse else torch.fft.fft
    result = torch.view_as_real(function(signal, length, dim))
    return result.narrow(dim, 0, length // 2 + 1) if onesided else result


@operator("STFT")
def short_fourier(context: OperatorContext, operands: Operands) -> Tensor:
    """Fourier transforms of windowed frames."""
    value, window = present(operands, 0), optional(operands, 1)
    signal = value if value.dim() == 2 else _complex(value)
    length = context.int("length")
    frames = signal.unfold(1, length, context.int("step"))
    if window is not None:
        frames = frames * window
    result = torch.view_as_real(torch.fft.fft(frames))
    return result.narrow(2, 0, length // 2 + 1) if context.flag("onesided", True) else result


@operator("Det")
def determinant(context: OperatorContext, operands: Operands) -> Tensor:
    """Determinants of the matrices in the last two dims."""
    return torch.linalg.det(present(operands, 0))


@operator("CumProd")
def cumulative_product(context: OperatorContext, operands: Operands) -> Tensor:
    """Running product along a dim."""
    value, dim = present(operands, 0), context.axis(0)
    backwards = context.flag("reverse")
    value = value.flip(dim) if backwards else value
    if context.flag("exclusive"):
        kept = value.narrow(dim, 0, max(value.shape[dim] - 1, 0))
        pads = [0, 0] * (value.dim() - 1 - dim) + [value.shape[dim] - kept.shape[dim], 0]
        value = F.pad(kept, pads, value=1)
    result = torch.cumprod(value, dim, dtype=value.dtype)
    return result.flip(dim) if backwards else result
