"""Recurrent layers, step by step in plain tensor operations, so that every variant of ONNX has a backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present

_Activation = Callable[[Tensor], Tensor]


def _activation(name: str, alpha: float, beta: float) -> _Activation:
    """Activations as the recurrent operators' schemas define them."""
    table: dict[str, _Activation] = {
        "Affine": lambda x: alpha * x + beta,
        "Elu": lambda x: F.elu(x, alpha),
        "HardSigmoid": lambda x: torch.clamp(alpha * x + beta, 0, 1),
        "LeakyRelu": lambda x: F.leaky_relu(x, alpha),
        "Relu": torch.relu,
        "ScaledTanh": lambda x: alpha * torch.tanh(beta * x),
        "Sigmoid": torch.sigmoid,
        "Softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
        "Softsign": F.softsign,
        "Tanh": torch.tanh,
        "ThresholdedRelu": lambda x: torch.where(x > alpha, x, torch.zeros_like(x)),
    }
    return table[name]


@dataclass(slots=True)
class _Direction:
    """Operands of one direction: W [g h, i], R [g h, h], biases [g h], peepholes [3 h]."""

    weight: Tensor
    recurrence: Tensor
    input_bias: Tensor
    recurrent_bias: Tensor
    peepholes: Tensor | None
    activations: list[_Activation]
    clip: float | None
    switch: bool
    """``input_forget`` of an LSTM, ``linear_before_reset`` of a GRU."""

    def limit(self, value: Tensor) -> Tensor:
        """What goes into an activation."""
        return value if self.clip is None else value.clamp(-self.clip, self.clip)


_State = tuple[Tensor, ...]
"""Hidden state [n, h], and the cell state of an LSTM."""


def _rnn_step(layer: _Direction, projected: Tensor, state: _State) -> _State:
    (hidden,) = state
    (f,) = layer.activations
    total = projected + hidden @ layer.recurrence.mT + layer.input_bias + layer.recurrent_bias
    return (f(layer.limit(total)),)


def _gru_step(layer: _Direction, projected: Tensor, state: _State) -> _State:
    """Gates z, r, h: equations of the ONNX operator GRU."""
    (hidden,) = state
    f, g = layer.activations
    weights, biases = layer.recurrence.chunk(3), layer.recurrent_bias.chunk(3)
    update, reset, candidate = (projected + layer.input_bias).chunk(3, -1)
    z = f(layer.limit(update + hidden @ weights[0].mT + biases[0]))
    r = f(layer.limit(reset + hidden @ weights[1].mT + biases[1]))
    if layer.switch:
        recurrent = r * (hidden @ weights[2].mT + biases[2])
    else:
        recurrent = (r * hidden) @ weights[2].mT + biases[2]
    return ((1 - z) * g(layer.limit(candidate + recurrent)) + z * hidden,)


def _lstm_step(layer: _Direction, projected: Tensor, state: _State) -> _State:
    """Gates i, o, f, c with peepholes i, o, f: equations of the ONNX operator LSTM."""
    hidden, cell = state
    f, g, h = layer.activations
    total = projected + hidden @ layer.recurrence.mT + layer.input_bias + layer.recurrent_bias
    enter, leave, keep, candidate = total.chunk(4, -1)
    peek_in, peek_out, peek_keep = (0.0, 0.0, 0.0) if layer.peepholes is None else layer.peepholes.chunk(3)
    i = f(layer.limit(enter + peek_in * cell))
    kept = 1 - i if layer.switch else f(layer.limit(keep + peek_keep * cell))
    new = kept * cell + i * g(layer.limit(candidate))
    return f(layer.limit(leave + peek_out * new)) * h(new), new


_STEPS = {"RNN": _rnn_step, "GRU": _gru_step, "LSTM": _lstm_step}


def _layers(context: OperatorContext, operands: Operands) -> list[_Direction]:
    """The directions that this rank holds."""
    names = context.signature.attribute("activations")
    assert isinstance(names, tuple)
    values = context.signature.attribute("activation_values", (0.0,) * (2 * len(names)))
    assert isinstance(values, tuple)
    made = [_activation(str(name), float(values[2 * at]), float(values[2 * at + 1])) for at, name in enumerate(names)]
    weight, recurrence, bias, peepholes = (present(operands, 1), present(operands, 2), optional(operands, 3), None)
    if context.signature.type == "LSTM":
        peepholes = optional(operands, 7)
    if bias is None:
        bias = weight.new_zeros((weight.shape[0], 2 * weight.shape[1]))
    clip = context.signature.attribute("clip")
    held = context.input_indices(1, 0)
    count = len(made) // context.input_shape(1)[0]
    return [
        _Direction(
            weight=weight[local],
            recurrence=recurrence[local],
            input_bias=bias[local].chunk(2)[0],
            recurrent_bias=bias[local].chunk(2)[1],
            peepholes=None if peepholes is None else peepholes[local],
            activations=made[int(whole) * count : (int(whole) + 1) * count],
            clip=float(clip) if isinstance(clip, int | float) else None,
            switch=context.flag("input_forget") or context.flag("linear_before_reset"),
        )
        for local, whole in enumerate(held)
    ]


def _scan(
    step: Callable[[_Direction, Tensor, _State], _State],
    layer: _Direction,
    value: Tensor,
    state: _State,
    lengths: Tensor,
    backwards: bool,
) -> tuple[Tensor, _State]:
    """All hidden states [t, n, h] and the last states; behind a sequence's end outputs are zero and states stay."""
    projected = value @ layer.weight.mT
    made: list[Tensor] = []
    times = range(value.shape[0])
    for time in reversed(times) if backwards else times:
        alive = (lengths > time).unsqueeze(-1)
        new = step(layer, projected[time], state)
        state = tuple(torch.where(alive, after, before) for after, before in zip(new, state, strict=True))
        made.append(torch.where(alive, new[0], torch.zeros_like(new[0])))
    if backwards:
        made.reverse()
    return torch.stack(made), state


@operator("RNN", "GRU", "LSTM")
def recurrent(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """All hidden states, the last one, and the last cell state."""
    kind = context.signature.type
    value, lengths = present(operands, 0), optional(operands, 4)
    batch_first = context.int("layout", 0) == 1
    value = value.transpose(0, 1) if batch_first else value
    steps, batch = value.shape[:2]
    if lengths is None:
        lengths = torch.full((batch,), steps, device=value.device)
    layers = _layers(context, operands)
    hidden = layers[0].recurrence.shape[-1]
    zeros = value.new_zeros((len(layers), batch, hidden))
    starts = [optional(operands, 5), optional(operands, 6)][: 2 if kind == "LSTM" else 1]
    starts = [zeros if start is None else start.transpose(0, 1) if batch_first else start for start in starts]
    whole = context.input_indices(1, 0)
    reverse = context.text("direction", "forward") == "reverse"
    every: list[Tensor] = []
    ends: list[_State] = []
    for local, layer in enumerate(layers):
        state = tuple(start[local] for start in starts)
        backwards = reverse or int(whole[local]) == 1
        states, last = _scan(_STEPS[kind], layer, value, state, lengths, backwards)
        every.append(states)
        ends.append(last)
    final = [torch.stack(states, 1 if batch_first else 0) for states in zip(*ends, strict=True)]
    outputs = torch.stack(every, 1)
    outputs = outputs.permute(2, 0, 1, 3) if batch_first else outputs
    return (outputs, *final)[: len(context.outputs)]
