"""The whole graph in one process in float64: what distributed execution is compared with.

It shares the operators' torch functions with the executor (those are tested against onnxruntime) and nothing else: no
placements, no instructions; torch's autograd runs from end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.operators import NO_CUSTOM, CustomFunctions, OperatorContext, run_operator, torch_dtype
from tap_planner.apply.parameters import plain_array, read_part
from tap_planner.apply.weights import WeightSource
from tap_planner.graph import Graph, Operator, TensorKind
from tap_planner.sharding import REPLICATE

DTYPE = torch.float64


@dataclass(slots=True)
class ReferenceResult:
    """Values of one step (before the optimizer)."""

    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    """By ONNX name."""
    loss: float | None = None
    loss_scale: float = 0.0
    """Size of what the loss adds up: the same loss of absolute values."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """Of trainable parameters."""


def run_reference(
    graph: Graph,
    weights: WeightSource,
    inputs: Mapping[str, np.ndarray],
    gradient_factor: Callable[[tuple[int, ...]], np.ndarray] | None = None,
    custom: CustomFunctions = NO_CUSTOM,
) -> ReferenceResult:
    """Run a graph forward and, if it has a loss, backward.

    Args:
        graph: bound with the global batch.
        weights: values of the parameters.
        inputs: whole inputs.
        gradient_factor: what the gradient at the loss's operand is multiplied by, given that operand's shape.
        custom: torch functions of the user's.
    """
    result = ReferenceResult()
    for parameter in graph.parameters:
        indices = [np.arange(size) for size in parameter.type.shape]
        value = torch.from_numpy(plain_array(weights.part(parameter, indices)))
        value = value.to(torch_dtype(parameter.type.dtype, DTYPE), copy=True)
        result.parameters[parameter.name] = value.requires_grad_(parameter.trainable and graph.loss is not None)
    values = _Values(graph, inputs, result.parameters, weights, custom)
    for operator in graph.operators:
        if operator.type == "Loss":
            _run_loss(operator, values, result, gradient_factor)
        else:
            values.run(operator)
    shown = zip(graph.output_names, graph.outputs, strict=True)
    result.outputs = {name: values.get(tensor).detach().numpy() for name, tensor in shown}
    for parameter in graph.parameters:
        leaf = result.parameters[parameter.name]
        if leaf.requires_grad:
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            result.gradients[parameter.name] = gradient.numpy()
    return result


class _Values:
    """Tensors by name, made when first asked for."""

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[str, np.ndarray],
        parameters: Mapping[str, Tensor],
        weights: WeightSource,
        custom: CustomFunctions,
    ) -> None:
        self._weights = weights
        self._custom = custom
        self._graph = graph
        self._inputs = inputs
        self._parameters = parameters
        self._values: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor:
        """Value of a tensor."""
        if name not in self._values:
            tensor = self._graph.tensors[name]
            if tensor.read is not None:
                self._values[name] = read_part(self._parameters[tensor.read.parameter], tensor.read)
            else:
                if tensor.kind is TensorKind.INPUT:
                    whole = self._inputs[name]
                else:
                    whole = self._graph.constants.value(name, self._weights.constant)
                self._values[name] = torch.from_numpy(plain_array(whole)).to(torch_dtype(tensor.type.dtype, DTYPE))
        return self._values[name]

    def run(self, operator: Operator) -> None:
        """Run one operator on whole tensors."""
        whole = (REPLICATE,)
        context = OperatorContext(
            signature=operator.signature,
            inputs=tuple(None if name is None else whole for name in operator.inputs),
            outputs=(whole,) * len(operator.outputs),
            mesh_shape=(1,),
            coordinates=(0,),
            dtype=DTYPE,
            id=operator.id,
            body=self._graph.body(operator),
        )
        operands = [None if name is None else self.get(name) for name in operator.inputs]
        self._values.update(zip(operator.outputs, run_operator(context, operands, self._custom), strict=True))


def _run_loss(
    operator: Operator,
    values: _Values,
    result: ReferenceResult,
    gradient_factor: Callable[[tuple[int, ...]], np.ndarray] | None,
) -> None:
    first, second = operator.inputs[0], operator.inputs[1] if len(operator.inputs) > 1 else None
    assert first is not None
    operand = values.get(first) * 1.0
    if gradient_factor is not None and operand.requires_grad:
        factor = torch.from_numpy(np.asarray(gradient_factor(tuple(operand.shape))))
        operand.register_hook(lambda gradient: gradient * factor)
    kind = operator.signature.attribute("kind")
    if kind == "cross-entropy":
        assert second is not None
        classes = operand.shape[-1]
        terms = torch.nn.functional.cross_entropy(
            operand.reshape(-1, classes), values.get(second).reshape(-1), reduction="none"
        )
    else:
        terms = operand
    loss = terms.sum() if kind == "sum" else terms.mean()
    result.loss = float(loss.detach())
    result.loss_scale = float(terms.detach().abs().sum() if kind == "sum" else terms.detach().abs().mean())
    if loss.requires_grad:
        loss.backward()
