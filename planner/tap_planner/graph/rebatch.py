"""Proof that a model with a fixed leading 1 means the same with another batch.

The model is bound twice: as it is written, and with the batch in place of the leading 1. Where every value that
depends on a batched input differs in exactly one dim, by the factor of the batch, and a Reshape keeps the number of
elements in front of that dim, the batch is an outermost loop of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tap_planner.errors import UnsupportedGraphError
from tap_planner.graph.drafts import Draft
from tap_planner.graph.values import Value
from tap_planner.graph.whole import WHOLE
from tap_planner.operators import CUSTOM_RULE, FactorKind, rule_of


def _batch_position(before: Sequence[int], after: Sequence[int], batch: int) -> int | None:
    """The only dim that grew by the factor ``batch``, None if there is none or another one changed."""
    if len(before) != len(after):
        return None
    changed = [dim for dim, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    if len(changed) != 1 or after[changed[0]] != before[changed[0]] * batch:
        return None
    return changed[0]


def prove_rebatched(operators: Sequence[Draft], original: Mapping[str, Value], batch: int) -> None:
    """Check every operator of the re-batched model against the model as written.

    Args:
        operators: of the re-batched model.
        original: values of the model as written.
        batch: the new batch (not 1).

    Raises:
        UnsupportedGraphError: the first operator where the batch is not a loop of its own; it is named.
    """
    for operator in operators:
        for value in operator.outputs:
            if not value.batched or value.name not in original:
                continue
            before = original[value.name].shape
            if _batch_position(before, value.shape, batch) is None:
                raise _unproven(operator, f"its output is {list(before)} for a batch of 1, {list(value.shape)} now")
        if operator.type == "Reshape":
            _check_reshape(operator, original, batch)
        else:
            _check_dims(operator, original, batch)


def _coupled_dims(operator: Draft, rank: int) -> set[int]:
    """Dims of the first operand along which the operator mixes or orders elements."""
    attributes = dict(operator.attributes)
    if operator.type in ("LayerNormalization", "RMSNormalization"):
        return set(range(int(str(attributes["axis"])), rank))
    if operator.type == "OneHot":
        return set()
    found: set[int] = set()
    for name in ("axis", "axes"):
        value = attributes.get(name, ())
        found.update(int(item) for item in (value if isinstance(value, tuple) else (value,)))
    for name, neutral in (("repeats", 1), ("pads", 0)):
        values = attributes.get(name, ())
        if isinstance(values, tuple) and operator.type in ("Tile", "Pad"):
            found.update(index % rank for index, item in enumerate(values) if item != neutral)
    return found


def _check_dims(operator: Draft, original: Mapping[str, Value], batch: int) -> None:
    if operator.type in WHOLE and any(value is not None and value.batched for value in operator.inputs):
        raise _unproven(operator, "it is control flow on data, which may mix what lies in the batch")
    if CUSTOM_RULE in dict(operator.attributes):
        _check_factors(operator, original, batch)
        return
    operands = operator.inputs if operator.type == "Concat" else operator.inputs[:1]
    for value in operands:
        if value is None or not value.batched or value.name not in original:
            continue
        position = _batch_position(original[value.name].shape, value.shape, batch)
        if position is not None and position in _coupled_dims(operator, len(value.shape)):
            raise _unproven(operator, f"it works along dim {position} of {list(value.shape)}, which holds the batch")


def _check_factors(operator: Draft, original: Mapping[str, Value], batch: int) -> None:
    """By its custom rule, an operator must not mix what lies in the batch dim of any operand."""
    rule = rule_of(operator.signature)
    for value, dims in zip(operator.inputs, rule.inputs, strict=True):
        if value is None or dims is None or not value.batched or value.name not in original:
            continue
        position = _batch_position(original[value.name].shape, value.shape, batch)
        if position is not None and any(rule.factors[f].kind is not FactorKind.PARALLEL for f in dims[position]):
            raise _unproven(operator, f"its rule does not let dim {position} of {list(value.shape)} be split")


def _check_reshape(operator: Draft, original: Mapping[str, Value], batch: int) -> None:
    source, result = operator.inputs[0], operator.outputs[0]
    if source is None or not result.batched or source.name not in original or result.name not in original:
        return
    sizes = [original[value.name].shape for value in (source, result)]
    at = [_batch_position(old, value.shape, batch) for old, value in zip(sizes, (source, result), strict=True)]
    if at[0] is None or at[1] is None or math.prod(sizes[0][: at[0]]) != math.prod(sizes[1][: at[1]]):
        raise _unproven(operator, f"it mixes the batch of {list(source.shape)} into {list(result.shape)}")


def _unproven(operator: Draft, why: str) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        f"node {operator.name or operator.id!r} ({operator.type}): the model's batch is fixed at 1 and cannot be "
        f"changed here: {why}",
        hint="export the model with a dynamic batch dim",
    )
