"""Operators that make values from shapes; graphs mostly have them folded away."""

from __future__ import annotations

import torch
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, torch_dtype


@operator("Shape")
def shape_of(context: OperatorContext, operands: Operands) -> Tensor:
    """The global shape."""
    shape = context.input_shape(0)
    return torch.tensor(shape[slice(context.int("start", 0), context.int("end", len(shape)))], dtype=torch.int64)


@operator("Size")
def size_of(context: OperatorContext, operands: Operands) -> Tensor:
    """The global number of elements."""
    operand = context.signature.inputs[0]
    assert operand is not None
    return torch.tensor(operand.num_elements, dtype=torch.int64)


@operator("ConstantOfShape")
def constant_of_shape(context: OperatorContext, operands: Operands) -> Tensor:
    """One value everywhere."""
    dtype = torch_dtype(context.signature.outputs[0].dtype, context.dtype)
    value = context.signature.attribute("value", 0)
    if isinstance(value, tuple):
        value = value[0]
    return torch.full(context.local_outputs[0], float(value), dtype=dtype)  # type: ignore[arg-type]


@operator("Range")
def range_of(context: OperatorContext, operands: Operands) -> Tensor:
    """Equally spaced numbers."""
    dtype = torch_dtype(context.signature.outputs[0].dtype, context.dtype)
    bounds = (context.float("start"), context.float("limit"), context.float("delta"))
    return torch.arange(*bounds, dtype=torch.float64).to(dtype)
