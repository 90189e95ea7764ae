"""A YAML file as checked entries that know their line and key path.

The file is composed to nodes, never to Python objects, so that YAML's own guesses (octal and sexagesimal numbers,
``.inf``, tags) have no effect: every value is the text that the user wrote.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NoReturn, Self

import yaml

from tap_planner.errors import TapError

__all__ = ["YamlEntry", "compose", "near_miss"]

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 16
_WHOLE = re.compile(r"0|[1-9][0-9]*")
_NULLS = frozenset(("", "~", "null"))


def near_miss(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` when a known word is close, else an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlEntry:
    """A value of the file, with its place."""

    file: str
    path: str
    """Keys from the top, as ``intra_node.bandwidth``; empty for the whole document."""
    node: yaml.Node
    error: type[TapError]
    """What is raised where a value is wrong."""

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.node.start_mark.line + 1}"

    @property
    def is_text(self) -> bool:
        """Whether the value is a scalar."""
        return isinstance(self.node, yaml.ScalarNode)

    @property
    def is_sequence(self) -> bool:
        """Whether the value is a list."""
        return isinstance(self.node, yaml.SequenceNode)

    @property
    def is_null(self) -> bool:
        """Whether the value is ``null``, ``~`` or nothing (not in quotes)."""
        return isinstance(self.node, yaml.ScalarNode) and self.node.style is None and self.node.value in _NULLS

    def fail(self, problem: str, hint: str = "") -> NoReturn:
        """Raise an error that begins with the place and the key path."""
        raise self.error(f"{self.place}: {self.path + ': ' if self.path else ''}{problem}", hint=hint)

    def _pairs(self, expected: str) -> Iterable[tuple[str, Self, Self]]:
        """(key, entry at the key, entry of the value); keys are unique."""
        if not isinstance(self.node, yaml.MappingNode):
            self.fail(f"{self.shown()} found, expected {expected}")
        lines: dict[str, int] = {}
        for key_node, value_node in self.node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            path = f"{self.path}.{key}" if self.path else key
            at_key = replace(self, path=path, node=key_node)
            if key in lines:
                at_key.fail(f"the key {key!r} occurs twice, first in line {lines[key]}")
            lines[key] = value_node.start_mark.line + 1
            yield key, at_key, replace(self, path=path, node=value_node)

    def mapping(self, known: tuple[str, ...]) -> dict[str, Self]:
        """The value as a mapping whose keys are all in ``known``."""
        entries: dict[str, Self] = {}
        for key, at_key, entry in self._pairs(f"a mapping with the keys {', '.join(known)}"):
            if key not in known:
                at_key.fail(f"unknown key {key!r}{near_miss(key, known)}", f"Known keys here: {', '.join(known)}.")
            entries[key] = entry
        return entries

    def entries(self, expected: str) -> dict[str, tuple[Self, Self]]:
        """The value as a mapping with keys of the user's own.

        Args:
            expected: words for an error, as ``a mapping from factor to kind``.

        Returns:
            Per key the entry of the key and that of the value.
        """
        return {key: (at_key, entry) for key, at_key, entry in self._pairs(expected)}

    def sequence(self, *, empty: bool = False) -> tuple[Self, ...]:
        """The value as a list with at least one entry (or, with ``empty``, none)."""
        if not isinstance(self.node, yaml.SequenceNode) or not (self.node.value or empty):
            self.fail(f"{self.shown()} found, expected a list")
        return tuple(
            replace(self, path=f"{self.path}[{index}]", node=node) for index, node in enumerate(self.node.value)
        )

    def text(self, allowed: tuple[str, ...] = ()) -> str:
        """The value as a non-empty string, one of ``allowed`` if there are any."""
        if not isinstance(self.node, yaml.ScalarNode) or not self.node.value.strip():
            self.fail(f"{self.shown()} found, expected " + (" or ".join(allowed) if allowed else "a string"))
        value: str = self.node.value.strip()
        if allowed and value not in allowed:
            self.fail(f"{value!r} found, expected {' or '.join(allowed)}{near_miss(value, allowed)}")
        return value

    def whole(self, least: int, most: int) -> int:
        """The value as a whole number from ``least`` to ``most``, in plain decimal digits."""
        value = self.node.value.strip() if isinstance(self.node, yaml.ScalarNode) else self.shown()
        if not _WHOLE.fullmatch(value) or len(value) > 18 or not least <= int(value) <= most:
            self.fail(f"{value!r} found, expected a whole number from {least} to {most}")
        return int(value)

    def count(self, most: int) -> int:
        """The value as a whole number from 1 to ``most``."""
        return self.whole(1, most)

    def shown(self) -> str:
        """The value in the words of an error."""
        if isinstance(self.node, yaml.MappingNode):
            return "a mapping"
        if isinstance(self.node, yaml.SequenceNode):
            return "a list" if self.node.value else "an empty list"
        return repr(self.node.value) if self.node.value else "nothing"


def compose(text: str, file: str, error: type[TapError], *, empty: str, hint: str) -> yaml.Node:
    """Compose one YAML document.

    Args:
        text: the file's text.
        file: how errors call the file.
        error: what is raised.
        empty: what an empty file should have held, in words.
        hint: what to do about an empty file.

    Raises:
        TapError: of type ``error``, for text that is no single YAML document, and for aliases, anchors, tags and deep
            nesting.
    """
    if len(text) > _MAX_BYTES:
        raise error(f"{file}: {len(text)} characters, expected at most {_MAX_BYTES}")
    try:
        _check_events(text, file, error)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as found:
        mark = found.problem_mark or found.context_mark
        place = f"{file}:{mark.line + 1}" if mark else file
        tabs = "Indent with spaces, not with tabs." if "\\t" in (found.problem or "") else ""
        raise error(f"{place}: not valid YAML: {found.problem or found.context}", hint=tabs) from found
    except yaml.YAMLError as found:
        raise error(f"{file}: not valid YAML: {str(found).splitlines()[0]}") from found
    if node is None:
        raise error(f"{file}:1: the file is empty, expected {empty}", hint=hint)
    return node


def _check_events(text: str, file: str, error: type[TapError]) -> None:
    """Refuse what such a file never needs, before anything is built from it."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = f"{file}:{event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise error(f"{place}: YAML anchors and aliases are not accepted here, expected plain values")
        if getattr(event, "tag", None) is not None:
            raise error(f"{place}: the YAML tag {event.tag!r} is not accepted here, expected plain values")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise error(f"{place}: nested deeper than {_MAX_DEPTH} levels")
