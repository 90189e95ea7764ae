"""Runs an operator's torch function and checks what it returns."""

from __future__ import annotations

from torch import Tensor

from tap_planner.apply.operators.context import FUNCTIONS, Operands, OperatorContext, torch_dtype


def run_operator(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """Local outputs of an operator.

    Raises:
        ApplyError: the operator has no torch function, or cannot be run with these attributes.
    """
    function = FUNCTIONS.get(context.signature.type)
    if function is None:
        raise context.unsupported("no torch function is known for it")
    shapes = context.local_outputs
    if all(0 in shape for shape in shapes):
        return tuple(_empty(context, operands, index, shape) for index, shape in enumerate(shapes))
    result = function(context, operands)
    outputs = result if isinstance(result, tuple) else (result,)
    for output, shape in zip(outputs, shapes, strict=True):
        if tuple(output.shape) != shape:
            raise context.unsupported(f"it made a part of shape {tuple(output.shape)}, expected {shape}")
    return outputs


def _empty(context: OperatorContext, operands: Operands, index: int, shape: tuple[int, ...]) -> Tensor:
    dtype = torch_dtype(context.signature.outputs[index].dtype, context.dtype)
    first = next(operand for operand in operands if operand is not None)
    return first.new_zeros(shape, dtype=dtype)
