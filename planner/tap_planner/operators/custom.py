"""Factor rules that users write for operators without a record: what they say, and whether that makes sense.

A rule is a value. The binder puts its canonical text into the signature (attribute ``CUSTOM_RULE``), so that equal
signatures still have equal rules and nothing global needs to be known.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from tap_planner.operators.types import ComputeKind, FactorKind

__all__ = [
    "CUSTOM_RULE",
    "CustomRule",
    "OperandPattern",
    "RuleProblemError",
    "custom_rule",
    "parse_pattern",
    "rule_from_text",
    "rule_to_json",
    "rule_to_text",
]

CUSTOM_RULE = "tap_planner.custom_rule"
"""The attribute of a signature that holds a rule; no operator of a file may have one of this name."""

RULE_KEYS = (
    "inputs",
    "outputs",
    "factors",
    "sizes",
    "linear",
    "additive",
    "kind",
    "flops",
    "saved_inputs",
    "saved_outputs",
    "trainable",
    "differentiable",
    "dtype",
    "override",
)
"""Everything that a rule may say, in the order in which it is written."""
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8"),
    *("uint64", "uint32", "uint16", "uint8", "bool"),
)
"""Element types that an output may be given."""
_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[()?]|\S)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = frozenset(("none", "partial", "ring"))
"""Strategies that are no factors."""
_MAX_SIZE = 10**15


class RuleProblemError(Exception):
    """Something in a rule that makes no sense; whoever knows the rule's place turns it into an error for the user.

    Args:
        key: where in the rule, as ``factors.b`` or ``inputs[0]``.
        problem: what was got and what was expected.
        hint: what to do.
    """

    def __init__(self, key: str, problem: str, hint: str = "") -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem
        self.hint = hint


def _fail(key: str, problem: str, hint: str = "") -> NoReturn:
    raise RuleProblemError(key, problem, hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandPattern:
    """The factors of one operand or output, as ``b s (h d)``."""

    dims: tuple[tuple[str, ...], ...]
    """Per dim its factors, outermost first; () for a dim of size 1."""
    optional: bool = False
    """The operand may be absent."""

    @property
    def names(self) -> tuple[str, ...]:
        """All factors in order, as often as they occur."""
        return tuple(name for dim in self.dims for name in dim)

    def __str__(self) -> str:
        shown = (f"({' '.join(dim)})" if len(dim) > 1 else dim[0] if dim else "1" for dim in self.dims)
        return " ".join(shown) + ("?" if self.optional else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomRule:
    """What a user says of one operator type. Every default has been filled in."""

    type: str
    inputs: tuple[OperandPattern | None, ...]
    """None for an operand that is always absent."""
    outputs: tuple[OperandPattern, ...]
    factors: tuple[tuple[str, FactorKind], ...]
    """In order of first appearance."""
    sizes: tuple[tuple[str, int | str], ...]
    """Sizes of factors: a number, or the name of the attribute that holds it."""
    linear: tuple[tuple[str, ...], ...]
    """Ways in which P(sum) passes: one letter per operand, ``P`` or ``R``."""
    additive: tuple[int, ...]
    kind: ComputeKind
    flops: int
    """What 2 x the product of the factors is multiplied by (contractions)."""
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    trainable: tuple[int, ...]
    differentiable: tuple[int, ...] | None
    """None: every float operand."""
    dtypes: tuple[str | None, ...]
    """Per output; None: that of operand 0."""
    override: bool
    """The rule may take the place of a built-in record."""
    source: str = field(default="", compare=False)
    """Where the rule stands, for messages: ``rules.yaml:2``."""


def parse_pattern(text: str) -> OperandPattern:
    """Read ``b s (h d)``, ``b 1 t?`` or the empty text (a scalar).

    Raises:
        ValueError: the text is no such expression; the message says why.
    """
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    optional = False
    for token in _tokens(text):
        if optional:
            raise ValueError("'?' stands at the very end")
        if token == "(":
            if group is not None:
                raise ValueError("parentheses stand inside parentheses")
            group = []
        elif token == ")":
            if not group:
                raise ValueError(
                    "')' closes nothing" if group is None else "'()' is empty, write 1 for a dim of size 1"
                )
            dims.append(tuple(group))
            group = None
        elif token == "?":
            optional = True
        elif token == "1" and group is None:
            dims.append(())
        elif not _NAME.fullmatch(token):
            raise ValueError(f"{token!r} is no factor, expected names as b, 1 for a dim of size 1, or (h d)")
        elif token in _RESERVED:
            raise ValueError(f"{token!r} is the name of a strategy, choose another one for the factor")
        elif group is not None:
            group.append(token)
        else:
            dims.append((token,))
    if group is not None:
        raise ValueError("'(' is not closed")
    return OperandPattern(dims=tuple(dims), optional=optional)


def _tokens(text: str) -> Iterator[str]:
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        assert match is not None
        yield match[1]
        position = match.end()


def _pattern(key: str, text: str) -> OperandPattern:
    try:
        return parse_pattern(text)
    except ValueError as error:
        return _fail(key, f"{text!r}: {error}", "Write one factor per dim, as 'b s (h d)'.")


def custom_rule(
    *,
    type: str,
    inputs: Sequence[str | None],
    outputs: Sequence[str],
    factors: Mapping[str, str] | None = None,
    sizes: Mapping[str, int | str] | None = None,
    linear: Sequence[Sequence[str]] = (),
    additive: Sequence[int] = (),
    kind: str = "memory",
    flops: int = 1,
    saved_inputs: Sequence[int] | None = None,
    saved_outputs: Sequence[int] | None = None,
    trainable: Sequence[int] = (),
    differentiable: Sequence[int] | None = None,
    dtype: str | Sequence[str | None] | None = None,
    override: bool = False,
    source: str = "",
) -> CustomRule:
    """Make a rule from what a user says of an operator type; docs/custom-rules.md explains the arguments.

    Raises:
        RuleProblemError: it makes no sense.
    """
    operands = tuple(None if text is None else _pattern(f"inputs[{i}]", text) for i, text in enumerate(inputs))
    results = tuple(_pattern(f"outputs[{i}]", text) for i, text in enumerate(outputs))
    _check_operands(operands, results)
    names = tuple(dict.fromkeys(name for each in (*operands, *results) if each is not None for name in each.names))
    given_sizes = _sizes(sizes or {}, names)
    _check_solvable(operands, names, given_sizes)
    compute = ComputeKind(kind)
    if flops != 1 and compute is not ComputeKind.CONTRACTION:
        _fail(
            "flops", f"given for kind {kind}, whose time is that of its bytes", "Leave flops out, or kind: contraction."
        )
    for key, positions, count in (
        ("additive", additive, len(operands)),
        ("saved_inputs", saved_inputs, len(operands)),
        ("saved_outputs", saved_outputs, len(results)),
        ("trainable", trainable, len(operands)),
        ("differentiable", differentiable, len(operands)),
    ):
        _check_positions(key, positions or (), count)
    is_view = compute is ComputeKind.VIEW
    by_default = range(0 if is_view else len(operands))
    results_by_default = range(len(results) if compute is ComputeKind.MEMORY else 0)
    return CustomRule(
        type=type,
        inputs=operands,
        outputs=results,
        factors=_kinds(factors or {}, names, operands, results),
        sizes=given_sizes,
        linear=_ways(linear, len(operands)),
        additive=tuple(sorted(additive)),
        kind=compute,
        flops=flops,
        saved_inputs=tuple(sorted(by_default if saved_inputs is None else saved_inputs)),
        saved_outputs=tuple(sorted(results_by_default if saved_outputs is None else saved_outputs)),
        trainable=tuple(sorted(trainable)),
        differentiable=None if differentiable is None else tuple(sorted(differentiable)),
        dtypes=_dtypes(dtype, operands, len(results)),
        override=override,
        source=source,
    )


def _check_operands(operands: Sequence[OperandPattern | None], results: Sequence[OperandPattern]) -> None:
    if not operands:
        _fail("inputs", "an empty list found, expected one expression per operand")
    if not results:
        _fail("outputs", "an empty list found, expected one expression per output")
    for index, result in enumerate(results):
        if result.optional:
            _fail(f"outputs[{index}]", f"'{result}' is optional, expected '?' at operands only")


def _sizes(sizes: Mapping[str, int | str], names: Sequence[str]) -> tuple[tuple[str, int | str], ...]:
    for name, size in sizes.items():
        if name not in names:
            _fail(f"sizes.{name}", f"no such factor in inputs and outputs{_near(name, names)}")
        if isinstance(size, int) and not 1 <= size <= _MAX_SIZE:
            _fail(f"sizes.{name}", f"{size} found, expected a size of at least 1 or the name of an attribute")
    return tuple((name, sizes[name]) for name in names if name in sizes)


def _check_solvable(
    operands: Sequence[OperandPattern | None], names: Sequence[str], sizes: Iterable[tuple[str, object]]
) -> None:
    """Every factor's size must follow from the operands' shapes, if all operands are there."""
    known = {name for name, _ in sizes}
    dims = [dim for operand in operands if operand is not None for dim in operand.dims]
    while True:
        found = {rest[0] for dim in dims if len(rest := [name for name in dim if name not in known]) == 1}
        if not found:
            break
        known |= found
    for name in names:
        if name not in known:
            where = (
                "occurs only together with other factors of unknown size"
                if any(name in dim for dim in dims)
                else ("occurs in no operand")
            )
            _fail(
                "sizes",
                f"the size of factor {name!r} is not determined: it {where}",
                f"Add sizes: {{{name}: 8}}, or the name of an attribute, as sizes: {{{name}: num_heads}}.",
            )


def _kinds(
    given: Mapping[str, str],
    names: Sequence[str],
    operands: Sequence[OperandPattern | None],
    results: Sequence[OperandPattern],
) -> tuple[tuple[str, FactorKind], ...]:
    for name in given:
        if name not in names:
            _fail(f"factors.{name}", f"no such factor in inputs and outputs{_near(name, names)}")
    patterns = [pattern for pattern in (*operands, *results) if pattern is not None]
    return tuple((name, _kind(name, given.get(name), patterns, results)) for name in names)


def _kind(
    name: str, given: str | None, patterns: Sequence[OperandPattern], results: Sequence[OperandPattern]
) -> FactorKind:
    holding = sum(name in result.names for result in results)
    doubled = next((pattern for pattern in patterns if pattern.names.count(name) > 1), None)
    in_operands = sum(name in pattern.names for pattern in patterns) > holding
    if doubled is not None or 0 < holding < len(results) or not in_operands:
        default = FactorKind.FIXED
    else:
        default = FactorKind.PARALLEL if holding else FactorKind.SUM
    kind = default if given is None else FactorKind(given)
    key = f"factors.{name}"
    if doubled is not None and kind is not FactorKind.FIXED:
        _fail(key, f"{kind.value} found, but the factor occurs twice in '{doubled}', expected fixed")
    if kind is FactorKind.SUM and holding:
        _fail(key, "sum found, but an output holds the factor, expected parallel or fixed")
    if kind is FactorKind.PARALLEL and holding < len(results):
        missing = next(index for index, result in enumerate(results) if name not in result.names)
        other = "fixed" if holding else "sum or fixed"
        _fail(key, f"parallel found, but output {missing} does not hold the factor, expected {other}")
    return kind


def _ways(linear: Sequence[Sequence[str]], count: int) -> tuple[tuple[str, ...], ...]:
    for index, way in enumerate(linear):
        shown = f"[{', '.join(way)}]"
        if len(way) != count or not set(way) <= {"P", "R"}:
            _fail(f"linear[{index}]", f"{shown} found, expected P or R for each of the {count} operands")
        if "P" not in way:
            _fail(f"linear[{index}]", f"{shown} found, expected at least one P")
    return tuple(dict.fromkeys(tuple(way) for way in linear))


def _check_positions(key: str, positions: Sequence[int], count: int) -> None:
    for position in positions:
        if not 0 <= position < count:
            _fail(key, f"{position} found, expected positions from 0 to {count - 1}")
    if len(set(positions)) != len(positions):
        _fail(key, f"{list(positions)} found, expected each position once")


def _dtypes(
    dtype: str | Sequence[str | None] | None, operands: Sequence[OperandPattern | None], count: int
) -> tuple[str | None, ...]:
    dtypes = (dtype,) * count if dtype is None or isinstance(dtype, str) else tuple(dtype)
    if len(dtypes) != count:
        _fail("dtype", f"{len(dtypes)} element types found, expected one for each of the {count} outputs")
    for each in dtypes:
        if each is not None and each not in DTYPES:
            _fail("dtype", f"{each!r} found, expected {', '.join(DTYPES)}{_near(each, DTYPES)}")
    if None in dtypes and (operands[0] is None or operands[0].optional):
        _fail("dtype", "missing, and operand 0, whose element type is the default, may be absent")
    return dtypes


def _near(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else f", the factors are {', '.join(known)}" if known else ""


def rule_to_json(rule: CustomRule) -> dict[str, object]:
    """The rule as JSON values, complete and in a fixed order: the keyword arguments of ``custom_rule``."""
    return {
        "type": rule.type,
        "inputs": [None if operand is None else str(operand) for operand in rule.inputs],
        "outputs": [str(result) for result in rule.outputs],
        "factors": {name: kind.value for name, kind in rule.factors},
        "sizes": dict(rule.sizes),
        "linear": [list(way) for way in rule.linear],
        "additive": list(rule.additive),
        "kind": rule.kind.value,
        "flops": rule.flops,
        "saved_inputs": list(rule.saved_inputs),
        "saved_outputs": list(rule.saved_outputs),
        "trainable": list(rule.trainable),
        "differentiable": None if rule.differentiable is None else list(rule.differentiable),
        "dtype": list(rule.dtypes),
        "override": rule.override,
    }


def rule_to_text(rule: CustomRule) -> str:
    """Canonical text: equal rules have equal texts."""
    return json.dumps(rule_to_json(rule), ensure_ascii=True, separators=(",", ":"))


def rule_from_text(text: str) -> CustomRule:
    """Inverse of ``rule_to_text``."""
    return custom_rule(**json.loads(text))
