"""Files of custom rules: strict YAML to rules. docs/custom-rules.md describes the form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tap_planner.errors import CustomRuleError
from tap_planner.files import read_text
from tap_planner.operators.custom import RULE_KEYS, CustomRule, RuleProblemError, custom_rule
from tap_planner.operators.registry import known_types
from tap_planner.operators.types import ComputeKind, FactorKind
from tap_planner.yaml_entries import YamlEntry, compose

__all__ = ["load_custom_rules", "parse_custom_rules"]

_MAX_FLOPS = 1000
_MAX_OPERANDS = 256
_KINDS = tuple(kind.value for kind in ComputeKind)
_FACTOR_KINDS = tuple(kind.value for kind in FactorKind)
_TYPE = re.compile(r"[A-Za-z_][\w.\-]*(::[A-Za-z_]\w*)?")
_PART = re.compile(r"\[\d+\]$|\.[^.\[\]]*$")
_EXAMPLE = "operators: {acme.ops::FlashThing: {inputs: ['b h'], outputs: ['b h']}}"


def load_custom_rules(paths: Sequence[Path]) -> tuple[CustomRule, ...]:
    """Read files of custom rules, in order.

    Raises:
        CustomRuleError: a file cannot be read or understood, or two files have a rule for one type; the message names
            file, line and key.
    """
    rules: dict[str, CustomRule] = {}
    for path in paths:
        text = read_text(path, "the file of custom rules", CustomRuleError, "Check the path after --custom-rule.")
        for rule in parse_custom_rules(text, file=str(path)):
            if rule.type in rules:
                raise CustomRuleError(
                    f"{rule.source}: operators.{rule.type}: there is a rule in {rules[rule.type].source} already",
                    hint="Keep one of them.",
                )
            rules[rule.type] = rule
    return tuple(rules.values())


def parse_custom_rules(text: str, *, file: str) -> tuple[CustomRule, ...]:
    """Read the text of a file of custom rules.

    Args:
        text: the YAML text.
        file: how errors call the file.

    Raises:
        CustomRuleError: as ``load_custom_rules``.
    """
    node = compose(text, file, CustomRuleError, empty="the key operators", hint=f"For example {_EXAMPLE}.")
    document = YamlEntry(file=file, path="", node=node, error=CustomRuleError)
    keys = document.mapping(("operators",))
    if "operators" not in keys:
        document.fail("the key 'operators' is missing", f"For example {_EXAMPLE}.")
    operators = keys["operators"].entries("a mapping from operator type to rule")
    if not operators:
        keys["operators"].fail("no rule found, expected at least one", f"For example {_EXAMPLE}.")
    return tuple(_rule(type, at_key, entry) for type, (at_key, entry) in operators.items())


def _rule(type: str, at_key: YamlEntry, entry: YamlEntry) -> CustomRule:
    if not _TYPE.fullmatch(type):
        at_key.fail(f"{type!r} is no operator type, expected NAME, or DOMAIN::NAME as acme.ops::FlashThing")
    keys = entry.mapping(RULE_KEYS)
    for key in ("inputs", "outputs"):
        if key not in keys:
            at_key.fail(f"the key {key!r} is missing", "inputs and outputs are required.")
    places = _Places(at_key)
    try:
        rule = _read(type, keys, places, at_key.place)
    except RuleProblemError as problem:
        places.of(problem.key).fail(problem.problem, problem.hint)
    if type in known_types() and not rule.override:
        at_key.fail(
            f"{type} has a built-in rule", "To replace it, add override: true; the rule then describes its operands."
        )
    return rule


class _Places:
    """Entries of one rule by their key in it."""

    def __init__(self, rule: YamlEntry) -> None:
        self._rule = rule
        self._entries: dict[str, YamlEntry] = {}

    def note(self, key: str, entry: YamlEntry) -> YamlEntry:
        """Remember an entry."""
        self._entries[key] = entry
        return entry

    def of(self, key: str) -> YamlEntry:
        """The entry of a key, or the innermost around it. Its path is that of the whole key."""
        shorter = key
        while shorter not in self._entries and _PART.search(shorter):
            shorter = _PART.sub("", shorter)
        entry = self._entries.get(shorter, self._rule)
        return YamlEntry(file=entry.file, path=f"{self._rule.path}.{key}", node=entry.node, error=entry.error)


def _read(type: str, keys: dict[str, YamlEntry], places: _Places, source: str) -> CustomRule:
    for key, entry in keys.items():
        places.note(key, entry)
    factors = {
        name: places.note(f"factors.{name}", value).text(_FACTOR_KINDS)
        for name, (_, value) in _entries(keys, "factors", "a mapping from factor to kind").items()
    }
    sizes = {
        name: _size(places.note(f"sizes.{name}", value))
        for name, (_, value) in _entries(keys, "sizes", "a mapping from factor to size or attribute").items()
    }
    linear = [
        [letter.text(("P", "R")) for letter in places.note(f"linear[{index}]", way).sequence()]
        for index, way in enumerate(keys["linear"].sequence(empty=True) if "linear" in keys else ())
    ]
    dtype = keys.get("dtype")
    return custom_rule(
        type=type,
        inputs=[_expression(places, item, f"inputs[{i}]") for i, item in enumerate(keys["inputs"].sequence())],
        outputs=[_output(places, item, f"outputs[{i}]") for i, item in enumerate(keys["outputs"].sequence())],
        factors=factors,
        sizes=sizes,
        linear=linear,
        additive=_positions(keys, "additive") or (),
        kind=keys["kind"].text(_KINDS) if "kind" in keys else "memory",
        flops=keys["flops"].whole(1, _MAX_FLOPS) if "flops" in keys else 1,
        saved_inputs=_positions(keys, "saved_inputs"),
        saved_outputs=_positions(keys, "saved_outputs"),
        trainable=_positions(keys, "trainable") or (),
        differentiable=_positions(keys, "differentiable"),
        dtype=None if dtype is None else _dtype(dtype),
        override="override" in keys and keys["override"].text(("true", "false")) == "true",
        source=source,
    )


def _entries(keys: dict[str, YamlEntry], key: str, expected: str) -> dict[str, tuple[YamlEntry, YamlEntry]]:
    return keys[key].entries(expected) if key in keys else {}


def _expression(places: _Places, entry: YamlEntry, key: str) -> str | None:
    """The text of an operand's expression, which may be empty in quotes (a scalar); None for null."""
    places.note(key, entry)
    if entry.is_null:
        return None
    if not entry.is_text:
        entry.fail(f"{entry.shown()} found, expected an expression as 'b s (h d)', or null")
    return str(entry.node.value)


def _output(places: _Places, entry: YamlEntry, key: str) -> str:
    text = _expression(places, entry, key)
    if text is None:
        entry.fail("null found, expected an expression as 'b s (h d)'")
    return text


def _size(entry: YamlEntry) -> int | str:
    text = entry.text()
    return entry.count(10**15) if text[0].isdigit() or text[0] in "+-." else text


def _positions(keys: dict[str, YamlEntry], key: str) -> list[int] | None:
    if key not in keys:
        return None
    return [item.whole(0, _MAX_OPERANDS - 1) for item in keys[key].sequence(empty=True)]


def _dtype(entry: YamlEntry) -> str | list[str | None]:
    if entry.is_sequence:
        return [None if item.is_null else item.text() for item in entry.sequence()]
    return entry.text()
