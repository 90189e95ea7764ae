"""Option types and the options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import click

from tap_planner.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kMGT]?B|[KMGT]iB)")
_FACTORS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{prefix}iB": 1024 ** (power + 1) for power, prefix in enumerate("KMGT")
}


class SizeType(click.ParamType):
    """``80GiB``, ``none`` (no limit) or ``device``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Bytes, or one of the words."""
        if isinstance(value, int) or value in ("none", "device"):
            return value
        match = _SIZE.fullmatch(value)
        size = int(Fraction(match[1]) * _FACTORS[match[2]]) if match else 0
        if size <= 0:
            self.fail(
                f"{value!r} is no size with its unit, expected for example 80GiB, 500MB, none or device", param, ctx
            )
        return size


class PercentType(click.ParamType):
    """``0.1%``: hundredths of a percent (basis points) are the finest."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Basis points."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([0-9]{1,3})(?:\.([0-9]{1,2}))?%", value)
        if match is None:
            self.fail(f"{value!r} is no percentage, expected for example 0.1% or 0%", param, ctx)
        return 100 * int(match[1]) + int((match[2] or "0").ljust(2, "0"))


class SecondsType(click.ParamType):
    """``90s`` or ``5min``."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?(s|min|h)", value)
        seconds = float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]] if match else 0.0
        if seconds <= 0:
            self.fail(f"{value!r} is no time with its unit, expected for example 60s or 5min", param, ctx)
        return seconds


class NumberOrAuto(click.ParamType):
    """``auto`` or a number in a range."""

    name = "number"

    def __init__(self, least: int, most: int | None = None) -> None:
        self._least = least
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """The number, or ``auto``."""
        if value == "auto" or isinstance(value, int):
            return value
        number = int(value) if re.fullmatch(r"[0-9]{1,9}", value) else -1
        if number < self._least or (self._most is not None and number > self._most):
            upper = f"to {self._most}" if self._most is not None else "up"
            self.fail(f"{value!r}, expected auto or a number from {self._least} {upper}", param, ctx)
        return number


class Assignment(click.ParamType):
    """``name=value`` with an integer (or, on request, several, or numbers and booleans)."""

    name = "name=value"

    def __init__(self, *, several: bool = False, values: bool = False) -> None:
        self._several = several
        self._values = values

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        """Name and value."""
        if isinstance(value, tuple):
            return value
        name, equals, text = value.rpartition("=")
        example = "x=4,8" if self._several or self._values else "seq=128"
        if not name or not equals:
            self.fail(f"{value!r}, expected NAME=VALUE as {example}", param, ctx)
        if self._several:
            parts = text.split(",")
            if all(re.fullmatch(r"[0-9]{1,12}", part) for part in parts):
                return name, tuple(map(int, parts))
        elif self._values:
            numbers = tuple(_number(part) for part in text.split(","))
            if None not in numbers:
                return name, numbers[0] if len(numbers) == 1 else numbers
        elif re.fullmatch(r"[1-9][0-9]{0,11}", text):
            return name, int(text)
        self.fail(f"{value!r}: {text!r} is no value for {name!r}, expected for example {example}", param, ctx)


def _number(text: str) -> int | None:
    """An integer or boolean, None for anything else."""
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


PERCENT = PercentType()
SIZE = SizeType()
SECONDS = SecondsType()
COLORS = ("auto", "always", "never")


def common_options(command: F) -> F:
    """``-q``, ``-v``, ``--color`` and ``--version``."""
    for option in (
        click.version_option(_version(), "--version", message="%(prog)s %(version)s"),
        click.option(
            "--color", type=click.Choice(COLORS), default="auto", show_default=True, help="Colour the output."
        ),
        click.option("-v", "--verbose", is_flag=True, help="Say more on stderr; show tracebacks."),
        click.option("-q", "--quiet", is_flag=True, help="Say only errors on stderr."),
    ):
        command = option(command)
    return command


def check_writable(output: Path | None, example: str) -> None:
    """Fail before the work, not after it; ``example`` is a name for such a file."""
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"{output}: the folder {output.parent} does not exist", hint=f"mkdir -p {output.parent}")
    if output is not None and output.is_dir():
        raise UsageError(f"{output} is a folder, expected a file name", hint=f"Try -o {output / example}")


def _version() -> str:
    try:
        return metadata.version("tap-planner")
    except metadata.PackageNotFoundError:
        return "unknown"


def settings(name: str) -> dict[str, Any]:
    """Context settings of a command: ``-h``, and environment variables ``TAP_PLAN_BATCH`` and the like."""
    return {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": name.upper().replace("-", "_")}
