"""The entries of a cluster.yaml: those of any YAML file, and quantities with units."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

import yaml

from tap_planner.cluster.units import Quantity, parse_quantity
from tap_planner.errors import ClusterError
from tap_planner.yaml_entries import YamlEntry, compose, near_miss

__all__ = ["Entry", "near_miss", "read_document"]

_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]{1,3})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(YamlEntry):
    """A value of the file, with its place."""

    def quantity(self, quantity: Quantity, *, zero: bool = False) -> int:
        """The value as a quantity with a unit, in its base unit; ``zero`` says whether it may be none."""
        value = self._scalar()
        try:
            return parse_quantity(value, quantity, zero=zero)
        except ValueError as error:
            least = "zero or more" if zero else "greater than zero"
            wanted = f"expected {quantity.name}, finite and {least}, with its unit: {quantity.example}"
            raise ClusterError(f"{self.place}: {self.path}: {value!r} {error}, {wanted}", hint=quantity.hint) from error

    def permille(self, least: int, most: int) -> int:
        """The value as a plain number with at most three decimals, in thousandths."""
        value = self._scalar()
        if not _NUMBER.fullmatch(value) or not least <= Fraction(value) * 1000 <= most:
            self.fail(f"{value!r} found, expected a number from {least / 1000:g} to {most / 1000:g}")
        return int(Fraction(value) * 1000)

    def _scalar(self) -> str:
        return self.node.value.strip() if isinstance(self.node, yaml.ScalarNode) else self.shown()


def read_document(text: str, file: str) -> Entry:
    """Compose one YAML document.

    Args:
        text: the file's text.
        file: how errors call the file.

    Raises:
        ClusterError: for text that is no single YAML document, and for aliases, anchors, tags and deep nesting.
    """
    node = compose(
        text,
        file,
        ClusterError,
        empty="the keys device, nodes and devices_per_node",
        hint="A cluster can also be given without a file, as 4x8:h100-sxm5-80gb.",
    )
    return Entry(file=file, path="", node=node, error=ClusterError)
