"""Finds the record of an operator type and keeps the rules that were already worked out."""

from __future__ import annotations

from functools import cache, lru_cache

from tap_planner.errors import UnsupportedGraphError
from tap_planner.operators import (
    attention,
    contraction,
    contrib,
    convolution,
    detection,
    elementwise,
    indexing,
    loss,
    movement,
    normalization,
    quantised,
    recurrent,
    reduction,
    reshape,
    sampling,
)
from tap_planner.operators.building import ALL_OPERANDS, replicated_rule
from tap_planner.operators.types import ComputeKind, FactorRule, OperatorRecord, OperatorSignature, TensorType

__all__ = ["known_types", "lookup", "rule_of"]

_FAMILIES = (
    elementwise,
    contraction,
    convolution,
    reshape,
    movement,
    indexing,
    reduction,
    normalization,
    attention,
    contrib,
    quantised,
    recurrent,
    detection,
    sampling,
    loss,
)


def _collect() -> dict[str, OperatorRecord]:
    records: dict[str, OperatorRecord] = {}
    for family in _FAMILIES:
        for record in family.RECORDS:
            assert record.type not in records, f"two records of {record.type}"
            records[record.type] = record
    return records


_RECORDS = _collect()


def _infer_unknown(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    raise UnsupportedGraphError(
        f"operator {signature.type} is unknown and the file does not state the shapes of its {num_outputs} outputs",
        hint="add value_info for its outputs (onnx shape inference with the operator's schema), "
        "or a record as docs/adding-an-operator.md describes",
    )


@cache
def _unknown(type: str) -> OperatorRecord:
    return OperatorRecord(
        type=type,
        rule=replicated_rule,
        infer=_infer_unknown,
        kind=ComputeKind.MEMORY,
        saved_inputs=ALL_OPERANDS,
        saved_outputs=(0,),
        known=False,
    )


def lookup(type: str) -> OperatorRecord:
    """The record of the operator ``type``; for an unknown type a stand-in that is never split (``known`` is False)."""
    return _RECORDS.get(type) or _unknown(type)


def known_types() -> tuple[str, ...]:
    """All operator types that have a record, sorted."""
    return tuple(sorted(_RECORDS))


@lru_cache(maxsize=65536)
def rule_of(signature: OperatorSignature) -> FactorRule:
    """The factor rule of a signature with its outputs filled in; equal signatures share one rule."""
    return lookup(signature.type).rule(signature)
