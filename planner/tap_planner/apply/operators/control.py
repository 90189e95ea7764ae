"""Control flow that depends on data: its body runs by ONNX's reference implementation, on whole operands."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, torch_dtype
from tap_planner.errors import ApplyError, TapError
from tap_planner.graph import run_body
from tap_planner.operators import TensorType


def _array(value: Tensor, type_: TensorType, *, wide: bool) -> np.ndarray:
    """An operand as the body wants it: floats in one precision, the others as the file has them."""
    array = value.detach().cpu()
    if type_.is_float:
        return array.to(torch.float64 if wide else torch.float32).numpy()
    return array.numpy().astype(np.dtype(type_.dtype), copy=False)


@operator("If", "Loop", "Scan")
def control_flow(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """Results of the body; no gradient goes through it."""
    if context.body is None:
        raise context.unsupported("its body is not there")
    wide = context.dtype is torch.float64
    arrays = [
        None if value is None or type_ is None else _array(value, type_, wide=wide)
        for value, type_ in zip(operands, context.signature.inputs, strict=True)
    ]
    try:
        results = run_body(context.body, arrays, wide=wide)
    except TapError as error:
        raise ApplyError(error.message, hint=error.hint) from error
    device = next((value.device for value in operands if value is not None), None)
    # What no round stacks up has no shape of its own.
    shaped = [
        np.zeros(type_.shape) if result.size == type_.num_elements == 0 else result
        for result, type_ in zip(results, context.signature.outputs, strict=True)
    ]
    return tuple(
        torch.from_numpy(np.array(result)).to(device, torch_dtype(type_.dtype, context.dtype))
        for result, type_ in zip(shaped, context.signature.outputs, strict=True)
    )
