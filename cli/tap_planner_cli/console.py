"""Where output goes: data to stdout, talk to stderr."""

from __future__ import annotations

import logging
import os
import sys

from rich.console import Console

from tap_planner.logs import NOTE
from tap_planner_cli.errors import printable

_WIDTH = 120
"""Columns where the output is no terminal."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to ``errors.invoke``: a reader that has seen enough is no failure."""
        raise BrokenPipeError


def make_console(color: str = "auto", *, stderr: bool = False) -> Console:
    """A console for stdout or stderr.

    Args:
        color: ``auto`` (on a terminal, unless NO_COLOR is set), ``always`` or ``never``.
        stderr: whether it writes to stderr.
    """
    stream = sys.stderr if stderr else sys.stdout
    terminal = stream.isatty()
    return _Console(
        file=stream,
        force_terminal=True if color == "always" else (False if color == "never" else None),
        color_system="standard" if color == "always" else ("auto" if color == "auto" and terminal else None),
        no_color=color == "never" or (color == "auto" and bool(os.environ.get("NO_COLOR"))),
        width=None if terminal or "COLUMNS" in os.environ else _WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, ``warning: ...`` or ``note: ...``."""
        kind = "warning" if record.levelno >= logging.WARNING else "note"
        sys.stderr.write(f"{kind}: {printable(record.getMessage())}\n")


def show_warnings(*, quiet: bool, verbose: bool) -> None:
    """Send what ``tap_planner`` logs to stderr: warnings and important notes, with ``verbose`` all, with ``quiet``
    nothing."""
    logger = logging.getLogger("tap_planner")
    logger.handlers = [logging.NullHandler() if quiet else _StderrHandler()]
    logger.propagate = False
    logger.setLevel(logging.INFO if verbose else NOTE)
