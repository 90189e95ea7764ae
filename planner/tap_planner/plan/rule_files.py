"""Files of rules on the space: strict YAML to constraints. docs/constraints.md describes the form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tap_planner.errors import TapError, UsageError
from tap_planner.files import read_text
from tap_planner.plan.rules import Constraint, parse_rule, replicate_rule
from tap_planner.yaml_entries import YamlEntry, compose

__all__ = ["load_constraints", "parse_constraints"]

_KEYS = ("fix", "forbid", "replicate")
_EXAMPLE = "constraints: [fix: 'layers.*.mlp.*: tp', forbid: 'lm_head: tp', replicate: '*.bias']"
_QUOTES = "Put each rule in quotes, as - fix: 'layers.*.mlp.*: tp'."


def load_constraints(paths: Sequence[Path]) -> tuple[Constraint, ...]:
    """Read files of rules, in order.

    Raises:
        UsageError: a file cannot be read or understood; the message names file, line and rule.
    """
    rules: list[Constraint] = []
    for path in paths:
        text = read_text(path, "the file of constraints", UsageError, "Check the path after --constraints.")
        rules.extend(parse_constraints(text, file=path.name))
    return tuple(rules)


def parse_constraints(text: str, *, file: str) -> tuple[Constraint, ...]:
    """Read the text of a file of rules.

    Args:
        text: the YAML text.
        file: how errors, and a plan's origin of rules, call the file.

    Raises:
        UsageError: as ``load_constraints``.
    """
    try:
        node = compose(text, file, UsageError, empty="the key constraints", hint=f"For example {_EXAMPLE}.")
    except TapError as error:
        error.hint = error.hint or _QUOTES
        raise
    document = YamlEntry(file=file, path="", node=node, error=UsageError)
    keys = document.mapping(("constraints",))
    if "constraints" not in keys:
        document.fail("the key 'constraints' is missing", f"For example {_EXAMPLE}.")
    listed = keys["constraints"]
    if not listed.is_sequence:
        listed.fail(f"{listed.shown()} found, expected a list of rules", f"For example {_EXAMPLE}.")
    return tuple(_rule(entry) for entry in listed.sequence(empty=True))


def _rule(entry: YamlEntry) -> Constraint:
    if entry.is_text:
        return parse_rule(entry.text(), origin=entry.place)
    keys = entry.mapping(_KEYS)
    if len(keys) != 1:
        entry.fail(f"{len(keys)} rules in one entry, expected one of {', '.join(_KEYS)}", "Begin each rule with '- '.")
    (key, value), *_ = keys.items()
    if not value.is_text:
        value.fail(f"{value.shown()} found, expected a rule", _QUOTES)
    if key == "replicate":
        return replicate_rule(value.text(), origin=value.place)
    return parse_rule(value.text(), forbid=key == "forbid", origin=value.place)
