"""From a custom rule and an operator's operands to sizes, output types and the factor rule."""

from __future__ import annotations

import math
from functools import cache

from tap_planner.errors import UnsupportedGraphError
from tap_planner.operators.building import Dims, RuleBuilder
from tap_planner.operators.custom import CUSTOM_RULE, CustomRule, OperandPattern, rule_from_text
from tap_planner.operators.types import (
    DimFactors,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["custom_record", "factor_sizes"]

_HINT = "Correct the rule, or the values given to the model's dims."


def _wrong(problem: str, hint: str = _HINT) -> UnsupportedGraphError:
    return UnsupportedGraphError(problem, hint=hint)


@cache
def custom_record(type: str, text: str, num_outputs: int) -> OperatorRecord:
    """The record that a custom rule makes.

    Args:
        type: operator type.
        text: the rule's canonical text.
        num_outputs: outputs that the operator has; the rule may describe more.
    """
    rule = rule_from_text(text)
    return OperatorRecord(
        type=f"custom {type}",
        rule=lambda signature: _factor_rule(rule, signature),
        infer=lambda signature, count: _infer(rule, signature, count),
        kind=rule.kind,
        saved_inputs=rule.saved_inputs,
        saved_outputs=tuple(position for position in rule.saved_outputs if position < num_outputs),
        trainable_operands=rule.trainable,
        differentiable_operands=rule.differentiable,
    )


def factor_sizes(rule: CustomRule, signature: OperatorSignature) -> dict[str, int]:
    """Sizes of the factors, from the rule's own sizes and the operands' shapes.

    Raises:
        UnsupportedGraphError: the operands are not as the rule says; the message names operand, got and expected.
    """
    sizes = {name: _stated_size(signature, name, size) for name, size in rule.sizes}
    pending = [
        (f"operand {index}, dim {dim}", pattern, factors, size)
        for index, pattern, found in _operands(rule, signature)
        for dim, (factors, size) in enumerate(zip(pattern.dims, found.shape, strict=True))
    ]
    while pending:
        left = [each for each in pending if not _settle(*each, sizes)]
        if len(left) == len(pending):
            place, pattern, factors, _ = left[0]
            unknown = [name for name in factors if name not in sizes]
            raise _wrong(
                f"{place} of '{pattern}': the sizes of {' and '.join(unknown)} do not follow from the operands",
                hint=f"Give sizes: {{{unknown[0]}: 8}} in the rule, or the name of an attribute.",
            )
        pending = left
    return sizes


def _stated_size(signature: OperatorSignature, name: str, size: int | str) -> int:
    if isinstance(size, int):
        return size
    value = signature.attribute(size)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        known = ", ".join(key for key, _ in signature.attributes if key != CUSTOM_RULE) or "none"
        got = "absent" if value is None else repr(value)
        raise _wrong(
            f"factor {name!r}: its size is attribute {size!r}, which is {got}, expected an integer of at least 1",
            hint=f"The operator's attributes: {known}.",
        )
    return value


def _operands(rule: CustomRule, signature: OperatorSignature) -> list[tuple[int, OperandPattern, TensorType]]:
    """Position, expression and type of the operands that are there."""
    if len(signature.inputs) > len(rule.inputs):
        raise _wrong(f"{len(signature.inputs)} operands found, the rule describes {len(rule.inputs)}")
    present: list[tuple[int, OperandPattern, TensorType]] = []
    for index, pattern in enumerate(rule.inputs):
        found = signature.inputs[index] if index < len(signature.inputs) else None
        if found is None:
            if pattern is not None and not pattern.optional:
                raise _wrong(f"operand {index} is absent, expected '{pattern}'", hint=f"If it may be: '{pattern}?'.")
            continue
        if pattern is None:
            raise _wrong(f"operand {index} has shape {list(found.shape)}, the rule says that it is always absent")
        if len(pattern.dims) != len(found.shape):
            raise _wrong(
                f"operand {index} has shape {list(found.shape)}, expected {len(pattern.dims)} dims as '{pattern}'"
            )
        present.append((index, pattern, found))
    return present


def _settle(place: str, pattern: OperandPattern, factors: tuple[str, ...], size: int, sizes: dict[str, int]) -> bool:
    """Compare a dim with the sizes of its factors, or work out the one that is missing; False: not yet."""
    unknown = [name for name in factors if name not in sizes]
    product = math.prod(sizes[name] for name in factors if name in sizes)
    if len(unknown) > 1 or (unknown and product == 0):
        return False
    if unknown and size % product == 0:
        sizes[unknown[0]] = size // product
        return True
    if unknown or product != size:
        raise _mismatch(place, pattern, factors, size, sizes)
    return True


def _mismatch(
    place: str, pattern: OperandPattern, factors: tuple[str, ...], size: int, sizes: dict[str, int]
) -> UnsupportedGraphError:
    known = " x ".join(f"{name}={sizes[name]}" for name in factors if name in sizes)
    complete = all(name in sizes for name in factors)
    expected = f"{'' if complete else 'a multiple of '}{known}" if factors else "1"
    hint = _HINT
    if size == 1 and factors:
        hint = "Write 1 in the rule for a dim that is broadcast."
    return _wrong(f"{place} of '{pattern}' has size {size}, expected {expected}", hint=hint)


def _infer(rule: CustomRule, signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    if num_outputs > len(rule.outputs):
        raise _wrong(f"{num_outputs} outputs found, the rule describes {len(rule.outputs)}")
    sizes = factor_sizes(rule, signature)
    outputs: list[TensorType] = []
    for index, (pattern, dtype) in enumerate(zip(rule.outputs[:num_outputs], rule.dtypes, strict=False)):
        missing = next((name for name in pattern.names if name not in sizes), None)
        if missing is not None:
            raise _wrong(
                f"output {index} '{pattern}': the size of {missing} does not follow from the operands",
                hint=f"Give sizes: {{{missing}: 8}} in the rule, or the name of an attribute.",
            )
        first = signature.inputs[0]
        assert dtype is not None or first is not None
        shape = tuple(math.prod(sizes[name] for name in dim) for dim in pattern.dims)
        outputs.append(TensorType(dtype=dtype or first.dtype, shape=shape))  # type: ignore[union-attr]
    return tuple(outputs)


def _factor_rule(rule: CustomRule, signature: OperatorSignature) -> FactorRule:
    """The rule on these sizes. Integers are never summed across devices: there a sum is fixed and nothing is linear."""
    sizes = factor_sizes(rule, signature)
    summable = all(output.is_float for output in signature.outputs)
    builder = RuleBuilder(signature)
    made: dict[str, DimFactors] = {}
    for name, kind in rule.factors:
        if name in sizes:
            fixed = kind is FactorKind.SUM and not summable
            made[name] = builder.factor(name, sizes[name], FactorKind.FIXED if fixed else kind)
    if rule.flops > 1:
        builder.fixed("*flops", rule.flops)
    count = len(signature.outputs)
    return builder.build(
        [
            None if found is None or pattern is None else _dims(pattern, made)
            for pattern, found in zip(rule.inputs, signature.inputs, strict=False)
        ],
        [_dims(pattern, made) for pattern in rule.outputs[:count]],
        additive=rule.additive,
        partial=rule.linear if summable else (),
    )


def _dims(pattern: OperandPattern, made: dict[str, DimFactors]) -> Dims:
    return tuple(tuple(index for name in dim for index in made[name]) for dim in pattern.dims)
