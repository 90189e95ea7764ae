"""Recurrent layers: LSTM, GRU, RNN. Batch and directions are split, time and the hidden state never.

Every step needs the whole hidden state of the step before: a split of the hidden size would cost a collective a step.
"""

from __future__ import annotations

from tap_planner.operators.attributes import int_of, operand, text_of
from tap_planner.operators.building import Dims, RuleBuilder, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def _directions(signature: OperatorSignature) -> int:
    return 2 if text_of(signature, "direction", "forward") == "bidirectional" else 1


def _batch_first(signature: OperatorSignature) -> bool:
    return int_of(signature, "layout", 0) == 1


def _rule(signature: OperatorSignature) -> FactorRule:
    """``(t, n, i) (d, g h, i) (d, g h, h) -> (t, d, n, h) (d, n, h)``, in layout 1 with the batch in front.

    The product of the factors is the number of multiplications: time x batch x directions x gates x hidden x (input +
    hidden), so that no operand holds a factor for its input size alone.
    """
    data, hidden = operand(signature, 0).shape, operand(signature, 2).shape[-1]
    length, batch = (data[1], data[0]) if _batch_first(signature) else data[:2]
    builder = RuleBuilder(signature)
    n, d = builder.factor("n", batch), builder.factor("d", _directions(signature))
    t, h = builder.fixed("t", length), builder.fixed("h", hidden)
    gates = builder.fixed("gates", _GATES[signature.type])
    builder.fixed("inputs", data[2] + hidden)
    state = (n, d, h) if _batch_first(signature) else (d, n, h)
    every = (n, t, d, h) if _batch_first(signature) else (t, d, n, h)
    steps = (n, t, ()) if _batch_first(signature) else (t, n, ())
    known: list[Dims] = [steps, (d, gates + h, ()), (d, gates + h, ()), (d, ()), (n,), state, state, (d, ())]
    inputs = [None if found is None else dims for found, dims in zip(signature.inputs, known, strict=False)]
    return builder.build(inputs, [every, state, state][: len(signature.outputs)])


def _infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    data, weight, recurrence = (operand(signature, index) for index in range(3))
    directions, gates, hidden = _directions(signature), _GATES[signature.type], recurrence.shape[-1]
    if len(data.shape) != 3 or weight.shape != (directions, gates * hidden, data.shape[-1]):
        raise shape_error(signature, f"data of 3 dims and weights [{directions}, {gates} x hidden, input]")
    if recurrence.shape != (directions, gates * hidden, hidden):
        raise shape_error(signature, f"recurrence weights [{directions}, {gates} x hidden, hidden]")
    if _batch_first(signature):
        batch, length = data.shape[:2]
        every, state = (batch, length, directions, hidden), (batch, directions, hidden)
    else:
        length, batch = data.shape[:2]
        every, state = (length, directions, batch, hidden), (directions, batch, hidden)
    shapes = (every, state, state)[:num_outputs]
    return tuple(TensorType(dtype=data.dtype, shape=shape) for shape in shapes)


def _record(name: str, *, trainable: tuple[int, ...], differentiable: tuple[int, ...]) -> OperatorRecord:
    return OperatorRecord(
        type=name,
        rule=_rule,
        infer=_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1, 2),
        saved_outputs=(0,),
        trainable_operands=trainable,
        differentiable_operands=differentiable,
    )


RECORDS: tuple[OperatorRecord, ...] = (
    _record("RNN", trainable=(1, 2, 3), differentiable=(0, 1, 2, 3, 5)),
    _record("GRU", trainable=(1, 2, 3), differentiable=(0, 1, 2, 3, 5)),
    _record("LSTM", trainable=(1, 2, 3, 7), differentiable=(0, 1, 2, 3, 5, 6, 7)),
)
"""Records of the recurrent layers."""
