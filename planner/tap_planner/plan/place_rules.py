"""Where operators may lie, as users write it for device placement.

PATTERN: 0,2-3              on the devices (ranks) 0, 2 or 3
PATTERN: cpu                on the devices of a node group of cluster.yaml
PATTERN: together           all on one device, whichever
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tap_planner.errors import UsageError

__all__ = ["TOGETHER", "PlaceRule", "parse_place_rule"]

TOGETHER = "together"
"""The word for what is kept on one device."""
_MOST = 1 << 20
"""Ranks are below."""
_RANKS = re.compile(r"[0-9]{1,7}(?:-[0-9]{1,7})?(?:,[0-9]{1,7}(?:-[0-9]{1,7})?)*")
_NAME = re.compile(r"[A-Za-z_][^:]*")
_EXAMPLE = "As 'encoder.*: 0-1', 'embed*: cpu' or 'layer1.*: together'."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRule:
    """A rule that every placement keeps."""

    pattern: str
    """Shell pattern for operators, parameters and tensors, as those of constraints."""
    where: str
    """Ranks as ``0,2-3``, the name of a node group, or ``together``."""

    def __str__(self) -> str:
        return f"{self.pattern}: {self.where}"

    @property
    def is_together(self) -> bool:
        """Whether it says no more than that operators lie on one device."""
        return self.where == TOGETHER

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The ranks that it lists, ascending; None where it names a node group, or says ``together``."""
        if not _RANKS.fullmatch(self.where):
            return None
        spans = [[int(end) for end in part.split("-")] for part in self.where.split(",")]
        return tuple(sorted({rank for span in spans for rank in range(span[0], span[-1] + 1)}))


def parse_place_rule(text: str, *, origin: str = "--place") -> PlaceRule:
    """Read one rule.

    Args:
        text: the rule.
        origin: the option or place that it comes from, for messages.

    Raises:
        UsageError: the text is no rule.
    """
    pattern, colon, where = (part.strip() for part in text.rpartition(":"))
    listed = re.sub(r"\s*([,-])\s*", r"\1", where)
    where = listed if _RANKS.fullmatch(listed) else where
    if not colon or not pattern or not (_RANKS.fullmatch(where) or _NAME.fullmatch(where)):
        raise UsageError(
            f"{origin} {text!r} is not understood, expected PATTERN: DEVICES, PATTERN: GROUP or PATTERN: {TOGETHER}",
            hint=_EXAMPLE,
        )
    for part in where.split(",") if _RANKS.fullmatch(where) else ():
        first, _, last = part.partition("-")
        if int(first) > int(last or first) or int(last or first) >= _MOST:
            raise UsageError(f"{origin} {text!r}: {part!r} is no range of ranks", hint=_EXAMPLE)
    return PlaceRule(pattern=pattern, where=where)
