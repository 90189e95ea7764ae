"""A YAML file as checked entries that know their line and key path.

The file is composed to nodes, never to Python objects, so that YAML's own guesses (octal and sexagesimal numbers,
``.inf``, tags) have no effect: every value is the text that the user wrote.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn

import yaml

from tap_planner.cluster.units import Quantity, parse_quantity
from tap_planner.errors import ClusterError

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 16
_COUNT = re.compile(r"[1-9][0-9]*")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]{1,3})?")


def near_miss(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` when a known word is close, else an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A value of the file, with its place."""

    file: str
    path: str
    """Keys from the top, as ``intra_node.bandwidth``; empty for the whole document."""
    node: yaml.Node

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.node.start_mark.line + 1}"

    @property
    def is_text(self) -> bool:
        """Whether the value is a scalar."""
        return isinstance(self.node, yaml.ScalarNode)

    def fail(self, problem: str, hint: str = "") -> NoReturn:
        """Raise a ClusterError that begins with the place and the key path."""
        raise ClusterError(f"{self.place}: {self.path + ': ' if self.path else ''}{problem}", hint=hint)

    def mapping(self, known: tuple[str, ...]) -> dict[str, Entry]:
        """The value as a mapping whose keys are all in ``known``."""
        if not isinstance(self.node, yaml.MappingNode):
            self.fail(f"{self._shown()} found, expected a mapping with the keys {', '.join(known)}")
        entries: dict[str, Entry] = {}
        for key_node, value_node in self.node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            path = f"{self.path}.{key}" if self.path else key
            at_key = Entry(file=self.file, path=path, node=key_node)
            if key not in known:
                at_key.fail(f"unknown key {key!r}{near_miss(key, known)}", f"Known keys here: {', '.join(known)}.")
            if key in entries:
                at_key.fail(f"the key {key!r} occurs twice, first in line {entries[key].node.start_mark.line + 1}")
            entries[key] = Entry(file=self.file, path=path, node=value_node)
        return entries

    def sequence(self) -> tuple[Entry, ...]:
        """The value as a list with at least one entry."""
        if not isinstance(self.node, yaml.SequenceNode) or not self.node.value:
            self.fail(f"{self._shown()} found, expected a list")
        return tuple(
            Entry(file=self.file, path=f"{self.path}[{index}]", node=node) for index, node in enumerate(self.node.value)
        )

    def text(self, allowed: tuple[str, ...] = ()) -> str:
        """The value as a non-empty string, one of ``allowed`` if there are any."""
        if not isinstance(self.node, yaml.ScalarNode) or not self.node.value.strip():
            self.fail(f"{self._shown()} found, expected " + (" or ".join(allowed) if allowed else "a string"))
        value: str = self.node.value.strip()
        if allowed and value not in allowed:
            self.fail(f"{value!r} found, expected {' or '.join(allowed)}{near_miss(value, allowed)}")
        return value

    def quantity(self, quantity: Quantity) -> int:
        """The value as a quantity with a unit, in its base unit."""
        value = self.node.value.strip() if isinstance(self.node, yaml.ScalarNode) else self._shown()
        try:
            return parse_quantity(value, quantity)
        except ValueError as error:
            wanted = f"expected {quantity.name}, finite and greater than zero, with its unit: {quantity.example}"
            raise ClusterError(f"{self.place}: {self.path}: {value!r} {error}, {wanted}", hint=quantity.hint) from error

    def count(self, most: int) -> int:
        """The value as a whole number from 1 to ``most``, in plain decimal digits."""
        value = self.node.value.strip() if isinstance(self.node, yaml.ScalarNode) else self._shown()
        if not _COUNT.fullmatch(value) or len(value) > 18 or int(value) > most:
            self.fail(f"{value!r} found, expected a whole number from 1 to {most}")
        return int(value)

    def permille(self, least: int, most: int) -> int:
        """The value as a plain number with at most three decimals, in thousandths."""
        value = self.node.value.strip() if isinstance(self.node, yaml.ScalarNode) else self._shown()
        if not _NUMBER.fullmatch(value) or not least <= Fraction(value) * 1000 <= most:
            self.fail(f"{value!r} found, expected a number from {least / 1000:g} to {most / 1000:g}")
        return int(Fraction(value) * 1000)

    def _shown(self) -> str:
        if isinstance(self.node, yaml.MappingNode):
            return "a mapping"
        if isinstance(self.node, yaml.SequenceNode):
            return "a list" if self.node.value else "an empty list"
        return repr(self.node.value) if self.node.value else "nothing"


def read_document(text: str, file: str) -> Entry:
    """Compose one YAML document.

    Args:
        text: the file's text.
        file: how errors call the file.

    Raises:
        ClusterError: for text that is no single YAML document, and for aliases, anchors, tags and deep nesting.
    """
    if len(text) > _MAX_BYTES:
        raise ClusterError(f"{file}: {len(text)} characters, expected at most {_MAX_BYTES}")
    try:
        _check_events(text, file)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}" if mark else file
        hint = "Indent with spaces, not with tabs." if "\\t" in (error.problem or "") else ""
        raise ClusterError(f"{place}: not valid YAML: {error.problem or error.context}", hint=hint) from error
    except yaml.YAMLError as error:
        raise ClusterError(f"{file}: not valid YAML: {str(error).splitlines()[0]}") from error
    if node is None:
        raise ClusterError(
            f"{file}:1: the file is empty, expected the keys device, nodes and devices_per_node",
            hint="A cluster can also be given without a file, as 4x8:h100-sxm5-80gb.",
        )
    return Entry(file=file, path="", node=node)


def _check_events(text: str, file: str) -> None:
    """Refuse what a cluster file never needs, before anything is built from it."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = f"{file}:{event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ClusterError(f"{place}: YAML anchors and aliases are not accepted here, expected plain values")
        if getattr(event, "tag", None) is not None:
            raise ClusterError(f"{place}: the YAML tag {event.tag!r} is not accepted here, expected plain values")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ClusterError(f"{place}: nested deeper than {_MAX_DEPTH} levels")
