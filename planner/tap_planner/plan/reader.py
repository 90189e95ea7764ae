"""A JSON value whose parts are checked as they are read; every error names place, value and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

from tap_planner.errors import PlanFormatError
from tap_planner.sharding import Placement, Placements, parse_placement

T = TypeVar("T")

MAX_INTEGER = (1 << 63) - 1
REMEDY = "Write the plan again with tap-plan instead of editing it."


def fail(place: str, got: object, expected: str, *, hint: str = REMEDY) -> NoReturn:
    """Raise the error for a value that is not what was expected."""
    shown = json.dumps(got, default=str)
    raise PlanFormatError(
        f"{place}: {shown if len(shown) <= 80 else shown[:77] + '...'}, expected {expected}", hint=hint
    )


class Value:
    """A JSON value and its place in the plan, as ``blocks[0].operators[2].id``."""

    __slots__ = ("data", "place")

    def __init__(self, data: object, place: str) -> None:
        self.data = data
        self.place = place

    def text(self, allowed: Sequence[str] = ()) -> str:
        """A string, one of ``allowed`` if there are any."""
        if not isinstance(self.data, str) or (allowed and self.data not in allowed):
            fail(self.place, self.data, " or ".join(allowed) if allowed else "a string")
        return self.data

    def integer(self, least: int = 0, most: int = MAX_INTEGER) -> int:
        """An integer from ``least`` to ``most``."""
        if not isinstance(self.data, int) or isinstance(self.data, bool) or not least <= self.data <= most:
            upper = f"at least {least}" if most == MAX_INTEGER else f"{least} to {most}"
            fail(self.place, self.data, f"an integer of {upper}")
        return self.data

    def flag(self) -> bool:
        """``true`` or ``false``."""
        if not isinstance(self.data, bool):
            fail(self.place, self.data, "true or false")
        return self.data

    @property
    def is_null(self) -> bool:
        """Whether the value is ``null``."""
        return self.data is None

    def items(self) -> Iterator[Value]:
        """The items of a list."""
        if not isinstance(self.data, list):
            fail(self.place, self.data, "a list")
        for index, item in enumerate(self.data):
            yield Value(item, f"{self.place}[{index}]")

    def each(self, read: Callable[[Value], T]) -> tuple[T, ...]:
        """The items of a list, read one by one."""
        return tuple(read(item) for item in self.items())

    def entries(self) -> Iterator[tuple[str, Value]]:
        """The keys and values of an object."""
        for key, value in self._mapping().items():
            yield key, Value(value, f"{self.place}.{key}" if self.place else key)

    def _mapping(self) -> Mapping[str, object]:
        if not isinstance(self.data, dict):
            fail(self.place or "plan", self.data, "an object")
        return self.data

    def __contains__(self, key: str) -> bool:
        return key in self._mapping()

    def __getitem__(self, key: str) -> Value:
        mapping = self._mapping()
        if key not in mapping:
            raise PlanFormatError(
                f"{self.place + '.' if self.place else ''}{key}: the key is missing, "
                f"found {', '.join(mapping) if mapping else 'none'}",
                hint=REMEDY,
            )
        return Value(mapping[key], f"{self.place}.{key}" if self.place else key)

    def get(self, key: str) -> Value | None:
        """The value of a key that may be absent or null."""
        value = self._mapping().get(key)
        return None if value is None else Value(value, f"{self.place}.{key}" if self.place else key)

    def texts(self) -> tuple[str, ...]:
        """A list of strings."""
        return self.each(Value.text)

    def integers(self) -> tuple[int, ...]:
        """A list of integers of at least 0."""
        return self.each(Value.integer)

    def counts(self) -> dict[str, int]:
        """An object whose values are integers of at least 0."""
        return {key: value.integer() for key, value in self.entries()}

    def axes(self, names: Sequence[str]) -> tuple[int, ...]:
        """A list of axis names, as indices into ``names``."""
        return tuple(names.index(value.text(names or ("no axis",))) for value in self.items())

    def placements(self, names: Sequence[str]) -> Placements:
        """An object with one placement for every axis."""
        mapping = self._mapping()
        if sorted(mapping) != sorted(names):
            fail(self.place, list(mapping), f"the axes {', '.join(names)}")
        return tuple(self[name].placement() for name in names)

    def placement(self) -> Placement:
        """A placement."""
        try:
            return parse_placement(self.text())
        except PlanFormatError as error:
            raise PlanFormatError(f"{self.place}: {error.message}", hint=REMEDY) from error
