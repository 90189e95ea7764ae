"""One record per ONNX operator: factor rule, shapes, work, what backward keeps, linearity."""

from tap_planner.operators.custom import (
    CUSTOM_RULE,
    CustomRule,
    RuleProblemError,
    custom_rule,
    rule_to_json,
    rule_to_text,
)
from tap_planner.operators.custom_files import load_custom_rules
from tap_planner.operators.fitting import check_fit
from tap_planner.operators.output import CACHE_OPERAND, OUTPUT
from tap_planner.operators.registry import known_types, lookup, record_for, record_of, rule_of
from tap_planner.operators.saved import kept_for_backward
from tap_planner.operators.transfer import TRANSFER
from tap_planner.operators.types import (
    AttributeValue,
    ComputeKind,
    DimFactors,
    Factor,
    FactorKind,
    FactorRule,
    InternalCollective,
    OperatorRecord,
    OperatorSignature,
    Ring,
    TensorType,
)

__all__ = [
    "CACHE_OPERAND",
    "CUSTOM_RULE",
    "OUTPUT",
    "TRANSFER",
    "AttributeValue",
    "ComputeKind",
    "CustomRule",
    "DimFactors",
    "Factor",
    "FactorKind",
    "FactorRule",
    "InternalCollective",
    "OperatorRecord",
    "OperatorSignature",
    "Ring",
    "RuleProblemError",
    "TensorType",
    "check_fit",
    "custom_rule",
    "kept_for_backward",
    "known_types",
    "load_custom_rules",
    "lookup",
    "record_for",
    "record_of",
    "rule_of",
    "rule_to_json",
    "rule_to_text",
]
