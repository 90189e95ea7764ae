"""Finds the record of an operator type and keeps the rules that were already worked out."""

from __future__ import annotations

from functools import cache, lru_cache

from tap_planner.errors import UnsupportedGraphError
from tap_planner.operators import (
    attention,
    contraction,
    contrib,
    contrib_attention,
    contrib_contraction,
    contrib_decoding,
    control,
    convolution,
    criteria,
    detection,
    elementwise,
    indexing,
    loss,
    movement,
    normalization,
    output,
    quantised,
    quantised_linear,
    quantised_packed,
    recurrent,
    reduction,
    reshape,
    sampling,
    selection,
    signals,
    spatial,
    state_space,
    transfer,
)
from tap_planner.operators.building import ALL_OPERANDS, replicated_rule
from tap_planner.operators.custom import CUSTOM_RULE
from tap_planner.operators.custom_records import custom_record
from tap_planner.operators.types import (
    AttributeValue,
    ComputeKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["known_types", "lookup", "record_for", "record_of", "rule_of"]

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
    contrib_attention,
    contrib_contraction,
    contrib_decoding,
    quantised,
    quantised_linear,
    quantised_packed,
    recurrent,
    detection,
    sampling,
    spatial,
    signals,
    selection,
    criteria,
    control,
    state_space,
    loss,
    output,
    transfer,
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
        hint="describe it with --custom-rule FILE (docs/custom-rules.md), or add value_info for its outputs",
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


def record_of(signature: OperatorSignature) -> OperatorRecord:
    """The record of an operator: that of its custom rule if its signature holds one, else that of its type."""
    return record_for(signature.type, signature.attributes, len(signature.outputs))


def record_for(type: str, attributes: tuple[tuple[str, AttributeValue], ...], num_outputs: int) -> OperatorRecord:
    """``record_of`` the parts of a signature."""
    for name, value in attributes:
        if name == CUSTOM_RULE:
            return custom_record(type, str(value), num_outputs)
    return lookup(type)


def known_types() -> tuple[str, ...]:
    """All operator types that have a record, sorted."""
    return tuple(sorted(_RECORDS))


@lru_cache(maxsize=65536)
def rule_of(signature: OperatorSignature) -> FactorRule:
    """The factor rule of a signature with its outputs filled in; equal signatures share one rule."""
    return record_of(signature).rule(signature)
