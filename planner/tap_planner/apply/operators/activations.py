"""Activations that fused operators name by text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tap_planner.apply.operators.context import OperatorContext

_ALPHA = {
    "Elu": 1.0,
    "HardSigmoid": 0.2,
    "LeakyRelu": 0.01,
    "ThresholdedRelu": 1.0,
}
"""First parameter where the operator does not give it: as in the ONNX operator of that name."""

_ACTIVATIONS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "Clip": lambda x, low, high: x.clamp(low, high),
    "Elu": lambda x, alpha, _: F.elu(x, alpha),
    "HardSigmoid": lambda x, alpha, beta: (alpha * x + beta).clamp(0.0, 1.0),
    "LeakyRelu": lambda x, alpha, _: F.leaky_relu(x, alpha),
    "Relu": lambda x, *_: torch.relu(x),
    "Sigmoid": lambda x, *_: torch.sigmoid(x),
    "Softplus": lambda x, *_: torch.logaddexp(x, torch.zeros_like(x)),
    "Softsign": lambda x, *_: F.softsign(x),
    "Tanh": lambda x, *_: torch.tanh(x),
    "ThresholdedRelu": lambda x, alpha, _: torch.where(x > alpha, x, torch.zeros_like(x)),
}


def activated(context: OperatorContext, value: Tensor, name: str, parameters: Sequence[float | None]) -> Tensor:
    """An activation by name.

    Args:
        context: of the fused operator.
        value: what it is applied to.
        name: ONNX operator type; empty for none.
        parameters: alpha and beta (for Clip the bounds), None or missing for the default.

    Raises:
        ApplyError: the activation is not known.
    """
    if not name:
        return value
    if name not in _ACTIVATIONS:
        raise context.unsupported(f"activation {name!r}, expected one of {', '.join(_ACTIVATIONS)}")
    alpha, beta = (*parameters, None, None)[:2]
    if name == "Clip" and (alpha is None or beta is None):
        raise context.unsupported("activation 'Clip' without its two bounds")
    first = _ALPHA.get(name, 0.0) if alpha is None else alpha
    return _ACTIVATIONS[name](value, first, 0.5 if beta is None else beta)
