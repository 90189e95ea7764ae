"""Rules on the space as users write them; docs/constraints.md describes the language.

PATTERN: tp                 split along tp, whichever way
PATTERN: tp=column          split so along tp; also tp=n, tp=none, tp=column|row
PATTERN: tp!=column         not so
PATTERN: replicate          the parameters are whole on every device
batch=tp, batch!=tp         where there is a batch it is (not) split along tp
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from tap_planner.errors import UsageError

__all__ = ["Constraint", "parse_constraint", "parse_rule", "replicate_rule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A rule that every plan of the space must keep."""

    kind: Literal["batch", "operator", "replicate"]
    """``batch``: what splits the batch, in every operator; ``replicate``: parameters that are whole everywhere."""
    pattern: str = ""
    """Shell pattern for operators, parameters and tensors (not of kind ``batch``)."""
    axis: str = ""
    """Mesh axis (not of kind ``replicate``)."""
    value: str = ""
    """Strategy values on the axis, separated by ``|``: a factor, a role (``column``), ``ring``, ``none``, ``partial``;
    empty: any split (kind ``operator``)."""
    forbid: bool = False
    """True: the choice is not allowed; False: no other one is."""
    origin: str = field(default="--constraint", compare=False)
    """Where the rule comes from, for messages: an option, or ``rules.yaml:3``."""

    def __str__(self) -> str:
        sign = "!=" if self.forbid else "="
        if self.kind == "batch":
            return f"batch{sign}{self.axis}"
        if self.kind == "replicate":
            return f"{self.pattern}:replicate"
        if not self.value:
            return f"{self.pattern}:{'!' if self.forbid else ''}{self.axis}"
        return f"{self.pattern}:{self.axis}{sign}{self.value}"

    @property
    def shown(self) -> str:
        """The rule with its origin, as messages call it."""
        return f"{self.origin} '{self}'"

    @property
    def needs_axis(self) -> bool:
        """Whether a mesh without the axis cannot keep the rule."""
        return self.kind == "operator" and not self.forbid and "none" not in self.value.split("|")


_BATCH = re.compile(r"batch\s*(?P<sign>!?=)\s*(?P<axis>[A-Za-z_]\w*)")
_VALUE = r"[A-Za-z_]\w*(?:\[[0-9]+\])?"
_OPERATOR = re.compile(
    r"(?P<pattern>.*\S)\s*:\s*(?P<not>!?)(?P<axis>[A-Za-z_]\w*)"
    rf"(?:\s*(?P<sign>!?=)\s*(?P<value>{_VALUE}(?:\s*\|\s*{_VALUE})*))?"
)
_REPLICATE = "replicate"
_FORMS = "batch!=AXIS or PATTERN:AXIS=FACTOR"


def parse_rule(text: str, *, forbid: bool = False, origin: str) -> Constraint:
    """Read one rule.

    Args:
        text: the rule.
        forbid: whether it says what is not allowed (``--forbid``).
        origin: the option or place that the rule comes from.

    Raises:
        UsageError: the text is no rule.
    """
    found = _parse(text.strip(), origin)
    if found is None:
        raise UsageError(
            f"{origin} {text!r} is not understood, expected {_FORMS}",
            hint=f"For example: {origin if origin.startswith('--') else '--fix'} 'layers.*.mlp.*: tp'. "
            "See docs/constraints.md.",
        )
    if not forbid:
        return found
    if found.kind == "replicate" or found.forbid:
        raise UsageError(
            f"{origin} {text!r}: what is forbidden must be a split, as PATTERN: AXIS or PATTERN: AXIS=VALUE",
            hint=f"Leave {'the !' if found.forbid else 'replicate'} out, or use --fix.",
        )
    return _negated(found)


def _negated(rule: Constraint) -> Constraint:
    return Constraint(
        kind=rule.kind, pattern=rule.pattern, axis=rule.axis, value=rule.value, forbid=True, origin=rule.origin
    )


def _parse(text: str, origin: str) -> Constraint | None:
    match = _BATCH.fullmatch(text)
    if match:
        return Constraint(kind="batch", axis=match["axis"], forbid=match["sign"] == "!=", origin=origin)
    match = _OPERATOR.fullmatch(text)
    if match is None or (match["not"] and match["sign"]):
        return None
    if match["axis"] == _REPLICATE and not match["sign"] and not match["not"]:
        return replicate_rule(match["pattern"], origin=origin)
    return Constraint(
        kind="operator",
        pattern=match["pattern"],
        axis=match["axis"],
        value=re.sub(r"\s", "", match["value"] or ""),
        forbid=match["sign"] == "!=" or bool(match["not"]),
        origin=origin,
    )


def parse_constraint(text: str) -> Constraint:
    """Read the value of ``--constraint``.

    Raises:
        UsageError: the text is no rule.
    """
    return parse_rule(text, origin="--constraint")


def replicate_rule(pattern: str, *, origin: str) -> Constraint:
    """The rule that parameters are whole on every device.

    Raises:
        UsageError: the pattern is empty.
    """
    if not pattern.strip():
        raise UsageError(f"{origin} {pattern!r}: an empty pattern, expected names of parameters", hint="As '*.bias'.")
    return Constraint(kind="replicate", pattern=pattern.strip(), origin=origin)
