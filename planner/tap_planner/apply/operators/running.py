"""Runs an operator's torch function and checks what it returns."""

from __future__ import annotations

import torch
from torch import Tensor

from tap_planner.apply.operators.context import FUNCTIONS, Operands, OperatorContext, torch_dtype
from tap_planner.apply.operators.custom import NO_CUSTOM, CustomFunctions, run_custom


def run_operator(
    context: OperatorContext, operands: Operands, custom: CustomFunctions = NO_CUSTOM
) -> tuple[Tensor, ...]:
    """Local outputs of an operator.

    Args:
        context: the operator on this rank.
        operands: local parts.
        custom: functions of the user's, which come before those here.

    Raises:
        ApplyError: the operator has no torch function, or cannot be run with these attributes.
    """
    own = custom.get(context.signature.type)
    function = own or FUNCTIONS.get(context.signature.type)
    if function is None:
        raise context.unsupported("no torch function is known for it")
    shapes = context.local_outputs
    if all(0 in shape for shape in shapes):
        return tuple(_empty(context, operands, index, shape) for index, shape in enumerate(shapes))
    result = function(context, operands) if own is None else run_custom(own, context, operands)
    outputs = result if isinstance(result, tuple) else (result,)
    for output, shape in zip(outputs, shapes, strict=True):
        if tuple(output.shape) != shape:
            raise context.unsupported(f"it made a part of shape {tuple(output.shape)}, expected {shape}")
    return tuple(
        output.detach() if output.requires_grad and counted_elsewhere(context, index) else output
        for index, output in enumerate(outputs)
    )


def counted_elsewhere(context: OperatorContext, index: int) -> bool:
    """Whether an output's gradient counts on another rank.

    Where one output is split and another (a cache beside a result) is the same on all ranks of an axis, the gradients
    of operands are sums over the axis, so that what comes back through the second must count once.
    """
    return any(
        coordinate
        and context.outputs[index][axis].is_replicate
        and any(not output[axis].is_replicate for output in context.outputs)
        for axis, coordinate in enumerate(context.coordinates)
    )


def _empty(context: OperatorContext, operands: Operands, index: int, shape: tuple[int, ...]) -> Tensor:
    dtype = torch_dtype(context.signature.outputs[index].dtype, context.dtype)
    first = next((operand for operand in operands if operand is not None), None)
    return torch.zeros(shape, dtype=dtype, device=None if first is None else first.device)
