"""Cases of recurrent layers and of those with a carried state, and their independent references.

LSTM, GRU and RNN are compared with torch's own layers, whose gates come in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from tap_planner.operators import Factor, OperatorSignature
from tests.operators.onnx_nodes import Array, evaluated
from tests.operators.operator_reference import LOCALISERS, REFERENCES, VALUES, Range, index_type, signature, tensor

_LSTM: dict[str, Any] = {"activations": ("Sigmoid", "Tanh", "Tanh"), "input_forget": 0, "layout": 0}
_GRU: dict[str, Any] = {"activations": ("Sigmoid", "Tanh"), "linear_before_reset": 1, "layout": 0}
_RNN: dict[str, Any] = {"activations": ("Tanh",), "layout": 0}


def _twice(attributes: dict[str, Any]) -> dict[str, Any]:
    return {**attributes, "activations": attributes["activations"] * 2, "direction": "bidirectional"}


CASES: tuple[OperatorSignature, ...] = (
    signature(
        "LSTM",
        *(tensor(5, 4, 3), tensor(2, 24, 3), tensor(2, 24, 6), tensor(2, 48), None, tensor(2, 4, 6), tensor(2, 4, 6)),
        num_outputs=3,
        **_twice(_LSTM),
    ),
    signature(
        "LSTM",
        *(tensor(4, 5, 3), tensor(1, 8, 3), tensor(1, 8, 2), tensor(1, 16), index_type(4)),
        num_outputs=3,
        **{**_LSTM, "layout": 1, "direction": "reverse"},
    ),
    signature("GRU", tensor(5, 4, 3), tensor(2, 18, 3), tensor(2, 18, 6), tensor(2, 36), num_outputs=2, **_twice(_GRU)),
    signature("RNN", tensor(5, 4, 3), tensor(1, 6, 3), tensor(1, 6, 6), num_outputs=1, direction="reverse", **_RNN),
    signature(
        "LinearAttention",
        *(tensor(4, 3, 24), tensor(4, 3, 12), tensor(4, 3, 6), tensor(4, 3, 4, 2), tensor(4, 3, 12), tensor(4, 3, 3)),
        num_outputs=2,
        q_num_heads=6,
        kv_num_heads=3,
        update_rule="gated_delta",
    ),
    signature(
        "LinearAttention",
        *(tensor(2, 3, 16), tensor(2, 3, 4), tensor(2, 3, 5), None, None, tensor(2, 3, 1)),
        q_num_heads=4,
        kv_num_heads=1,
        update_rule="delta",
    ),
    signature(
        "CausalConvWithState",
        *(tensor(4, 6, 5), tensor(6, 1, 3), tensor(6), tensor(4, 6, 2)),
        num_outputs=2,
        activation="silu",
    ),
)

_ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""Where torch's gates lie among ONNX's: LSTM i, f, g, o in i, o, f, c; GRU r, z, n in z, r, h."""


def _gates(kind: str, value: Array) -> torch.Tensor:
    parts = np.split(value, len(_ORDER[kind]))
    return torch.from_numpy(np.concatenate([parts[index] for index in _ORDER[kind]]))


def _layer(kind: str, operands: Sequence[Array | None], direction: int) -> nn.RNNBase:
    weight, recurrence, bias = operands[1], operands[2], operands[3] if len(operands) > 3 else None
    assert weight is not None and recurrence is not None
    size = recurrence.shape[-1]
    layer = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}[kind](weight.shape[-1], size).double()
    halves = np.split(bias[direction], 2) if bias is not None else [np.zeros(len(weight[0]))] * 2
    with torch.no_grad():
        layer.weight_ih_l0.copy_(_gates(kind, weight[direction]))
        layer.weight_hh_l0.copy_(_gates(kind, recurrence[direction]))
        layer.bias_ih_l0.copy_(_gates(kind, halves[0]))
        layer.bias_hh_l0.copy_(_gates(kind, halves[1]))
    return layer


def _one(kind: str, layer: nn.RNNBase, steps: Array, states: list[Array], backwards: bool) -> tuple[Array, list[Array]]:
    """One direction over one sequence [t, 1, i]: all hidden states and the last states."""
    steps = steps[::-1].copy() if backwards else steps
    first = [torch.from_numpy(state) for state in states]
    with torch.no_grad():
        made, last = layer(torch.from_numpy(steps), tuple(first) if kind == "LSTM" else first[0])
    every = made.numpy()[::-1] if backwards else made.numpy()
    ends = [state.numpy() for state in last] if isinstance(last, tuple) else [last.numpy()]
    return every, ends


def _recurrent(sig: OperatorSignature, values: Sequence[Array | None]) -> list[Array]:
    """Sequence by sequence, cut to its length."""
    kind, operands = sig.type, [*values, *[None] * (8 - len(values))]
    data, weight = operands[0], operands[1]
    recurrence, lengths = operands[2], operands[4]
    assert data is not None and weight is not None and recurrence is not None
    batch_first = sig.attribute("layout") == 1
    data = data.swapaxes(0, 1) if batch_first else data
    time, batch, hidden = *data.shape[:2], recurrence.shape[-1]
    count = 2 if kind == "LSTM" else 1
    every = np.zeros((time, weight.shape[0], batch, hidden))
    ends = [np.zeros((weight.shape[0], batch, hidden)) for _ in range(count)]
    held = sig.attribute("held", tuple(range(weight.shape[0])))
    assert isinstance(held, tuple)
    for local, direction in enumerate(held):
        layer = _layer(kind, operands, local)
        backwards = sig.attribute("direction") == "reverse" or direction == 1
        for row in range(batch):
            end = time if lengths is None else int(lengths[row])
            starts = []
            for index in range(count):
                start = operands[5 + index]
                starts.append(np.zeros((1, 1, hidden)) if start is None else start[local : local + 1, row : row + 1])
            made, last = _one(kind, layer, data[:end, row : row + 1], starts, backwards)
            every[:end, local, row] = made[:, 0]
            for index in range(count):
                ends[index][local, row] = last[index][0, 0]
    if batch_first:
        every, ends = every.transpose(2, 0, 1, 3), [state.swapaxes(0, 1) for state in ends]
    return [every, *ends][: len(sig.outputs)]


def _directions(attributes: dict[str, Any], factor: Factor, part: Range, sig: OperatorSignature) -> None:
    if factor.name == "d":
        attributes["held"] = tuple(range(*part))


def _values(sig: OperatorSignature, rng: np.random.Generator) -> list[Array | None]:
    made: list[Array | None] = []
    for found in sig.inputs:
        if found is None:
            made.append(None)
        elif found.is_float:
            made.append(rng.uniform(-0.9, 0.9, found.shape))
        else:
            made.append(rng.integers(1, 6, found.shape))
    return made


def _attributes(sig: OperatorSignature) -> dict[str, Any]:
    return dict(sig.attributes)


def _heads(attributes: dict[str, Any], factor: Factor, part: Range, sig: OperatorSignature) -> None:
    share = part[1] - part[0]
    if factor.name == "h":
        attributes["q_num_heads"] = attributes["q_num_heads"] // factor.size * share
        attributes["kv_num_heads"] = attributes["kv_num_heads"] // factor.size * share
    if factor.name == "g":
        attributes["q_num_heads"] = attributes["q_num_heads"] // factor.size * share


for _name in ("LSTM", "GRU", "RNN"):
    REFERENCES[_name], VALUES[_name], LOCALISERS[_name] = _recurrent, _values, _directions
for _name in ("LinearAttention", "CausalConvWithState"):
    REFERENCES[_name] = lambda sig, values: evaluated(sig.type, values, _attributes(sig), len(sig.outputs), 27)
    LOCALISERS[_name] = _heads
