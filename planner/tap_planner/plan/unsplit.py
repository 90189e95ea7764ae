"""The plan of one device: every operator whole, nothing sent."""

from __future__ import annotations

from tap_planner.graph import Graph, Operator
from tap_planner.plan.decisions import (
    Decisions,
    LossDecision,
    OperandDecision,
    OperatorDecision,
    OutputDecision,
    ParameterDecision,
    Region,
)
from tap_planner.schedule import made_gradients

__all__ = ["unsplit_decisions"]


def unsplit_decisions(
    graph: Graph,
    *,
    training: bool,
    precision: str,
    optimizer: str = "adamw",
    optimizer_states: str = "fp32",
    loss_output: str = "",
) -> Decisions:
    """Decisions on a mesh without axes, of one stage and one microbatch; nothing runs again.

    Args:
        graph: bound with the whole batch.
        training: whether there is a backward.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.
        optimizer: ``adamw`` or ``sgd``; in training.
        optimizer_states: of AdamW's moments, ``fp32`` or ``bf16``.
        loss_output: ONNX name of the output that the loss reads.
    """
    loss = None
    if training:
        loss = LossDecision(kind=str(graph.operators[-1].signature.attribute("kind")), output=loss_output)
    read = {
        tensor.read.parameter
        for operator in graph.operators
        for name in operator.inputs
        if name is not None and (tensor := graph.tensors[name]).read is not None
    }
    return Decisions(
        mode="train" if training else "infer",
        precision=precision,
        optimizer=optimizer if training else "",
        optimizer_states=optimizer_states,
        loss=loss,
        microbatches=1,
        axes=(),
        operators=tuple(_operator(graph, operator, training) for operator in graph.operators),
        parameters=tuple(
            ParameterDecision(
                name=parameter.name,
                shape=parameter.type.shape,
                dtype=parameter.type.dtype,
                trainable=parameter.trainable and training,
                placement=(),
                gradient=() if parameter.trainable and training else None,
                zero_level=0,
                zero_axes=(),
                bucket=None,
            )
            for parameter in graph.parameters
            if parameter.name in read
        ),
        redistributions=(),
        buckets=(),
        regions=(Region(operators=tuple(o.id for o in graph.operators), run=None, occurrence=0, recompute="none"),)
        if graph.operators
        else (),
    )


def _operator(graph: Graph, operator: Operator, training: bool) -> OperatorDecision:
    needed = made_gradients(graph, operator) if training else (False,) * len(operator.inputs)
    operands = zip(operator.inputs, needed, strict=True)
    return OperatorDecision(
        id=operator.id,
        name=operator.name,
        type=operator.type,
        strategy=(),
        inputs=tuple(
            None if name is None else OperandDecision(tensor=name, placement=(), gradient=() if makes else None)
            for name, makes in operands
        ),
        outputs=tuple(
            OutputDecision(tensor=name, shape=output.shape, placement=())
            for name, output in zip(operator.outputs, operator.signature.outputs, strict=True)
        ),
    )
