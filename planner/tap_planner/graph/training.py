"""The loss operator, the trainable set, and which tensors need a gradient."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx

from tap_planner.errors import UsageError
from tap_planner.graph.drafts import Draft, Types
from tap_planner.graph.options import LossOptions
from tap_planner.graph.types import TensorKind
from tap_planner.graph.values import Value
from tap_planner.operators import TensorType, record_for


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDraft:
    """A loss to append."""

    operator: Draft
    labels: Value | None
    """The added graph input, where the loss needs one."""
    warnings: tuple[str, ...]


def make_loss(
    options: LossOptions, outputs: Sequence[Value], names: Sequence[str], taken: Collection[str], types: Types
) -> LossDraft:
    """The Loss operator over one of the graph's outputs.

    Args:
        options: what the user asked for.
        outputs: values of the graph outputs.
        names: their ONNX names.
        taken: names that are in use.
        types: interned types.

    Raises:
        UsageError: no such output, or none that a loss can be made of.
    """
    name, value = _loss_output(options, outputs, names)
    warnings: tuple[str, ...] = ()
    kind = options.kind
    if kind is None:
        kind = "mean"
        warnings = (f"no loss was given: training minimises the mean of output {name!r} (see --loss)",)
    inputs: list[Value | None] = [value]
    labels = None
    count = value.type.num_elements
    if kind == "cross-entropy":
        if not value.shape:
            raise UsageError(f"--loss cross-entropy: output {name!r} is a scalar, expected logits")
        labels_type = types.get("int64", value.shape[:-1])
        labels = Value(name=unique("labels", taken), type=labels_type, kind=TensorKind.INPUT, batched=value.batched)
        inputs.append(labels)
        count = labels_type.num_elements
    loss = Value(name=unique("loss", taken), type=types.get(value.type.dtype, ()), kind=TensorKind.ACTIVATION)
    operator = Draft(
        type="Loss", attributes=(("count", count), ("kind", kind)), inputs=inputs, outputs=[loss], name=loss.name
    )
    return LossDraft(operator=operator, labels=labels, warnings=warnings)


def _loss_output(options: LossOptions, outputs: Sequence[Value], names: Sequence[str]) -> tuple[str, Value]:
    if options.output is None:
        for name, value in zip(names, outputs, strict=True):
            if value.type.is_float:
                return name, value
        raise UsageError("training needs a float output, the model has none", hint="plan it with --mode infer")
    if options.output not in names:
        near = difflib.get_close_matches(options.output, names, n=3, cutoff=0.4) or list(names)
        raise UsageError(f"--loss-output {options.output}: no such output", hint=f"outputs: {', '.join(near)}")
    value = outputs[names.index(options.output)]
    if not value.type.is_float:
        raise UsageError(f"--loss-output {options.output}: it is {value.type.dtype}, expected a float tensor")
    return options.output, value


def unique(name: str, taken: Collection[str]) -> str:
    """``name``, with underscores added until it is new."""
    while name in taken:
        name += "_"
    return name


TRAINABLE_KEY = "tap_planner.trainable"
"""Metadata of an initializer; the value ``false`` says that it is a buffer or was frozen where it was exported."""


def declared_untrained(proto: onnx.ModelProto) -> set[str]:
    """Initializers that the file itself says are not trained, whatever their use."""
    return {
        tensor.name
        for tensor in proto.graph.initializer
        if any(entry.key == TRAINABLE_KEY and entry.value == "false" for entry in tensor.metadata_props)
    }


def choose_trainable(
    parameters: dict[str, TensorType], roles: Collection[str], freeze: Sequence[str], train: Sequence[str]
) -> set[str]:
    """Parameters that are meant to be trained.

    Args:
        parameters: stored types by name.
        roles: names whose use makes them trainable.
        freeze: patterns that take out.
        train: patterns that put (back) in.

    Raises:
        UsageError: a pattern matches nothing.
    """
    chosen = {name for name in parameters if name in roles}
    for option, patterns, keep in (("--freeze", freeze, False), ("--train", train, True)):
        for pattern in patterns:
            matches = fnmatch.filter(parameters, pattern)
            if not matches:
                near = difflib.get_close_matches(pattern, list(parameters), n=3, cutoff=0.4)
                raise UsageError(
                    f"{option} {pattern}: no parameter has such a name",
                    hint=f"did you mean {' or '.join(near)}?" if near else "",
                )
            if keep:
                chosen.update(name for name in matches if parameters[name].is_float)
            else:
                chosen.difference_update(matches)
    return chosen


def gradient_values(operators: Sequence[Draft], loss: Value, trainable: Collection[str]) -> set[Value]:
    """Values that carry a gradient: they depend on a trainable parameter, and the loss depends on them.

    Both directions go only through operands that a gradient can reach.
    """
    reached: set[Value] = set()
    for operator in operators:
        for value in _differentiable(operator):
            if value.read is not None and value.read.parameter in trainable:
                reached.add(value)
        if any(value in reached for value in _differentiable(operator)):
            reached.update(value for value in operator.outputs if value.type.is_float)
    needed = {loss}
    for operator in reversed(operators):
        if not needed.isdisjoint(operator.outputs):
            needed.update(_differentiable(operator))
    return reached & needed


def _differentiable(operator: Draft) -> list[Value]:
    """Float operands that a gradient can reach."""
    allowed = record_for(operator.type, operator.attributes, len(operator.outputs)).differentiable_operands
    return [
        value
        for index, value in enumerate(operator.inputs)
        if value is not None and value.type.is_float and (allowed is None or index in allowed)
    ]
