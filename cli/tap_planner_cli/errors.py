"""Runs a command and turns whatever happens into an exit code and a message on stderr.

0 done    1 negative answer    2 wrong input    3 infeasible    4 limit    5 apply refused
70 our bug    130 interrupted    143 terminated
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

from tap_planner.errors import TapError

EXIT_NEGATIVE = 1
EXIT_USAGE = 2
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class _TerminatedError(BaseException):
    """SIGTERM arrived; temporary files are removed on the way out."""


def _terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise _TerminatedError


def run(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command as the process's main function.

    Args:
        command: its function returns the exit code (None counts as 0).
        name: how the command is called.
        arguments: default: those of the process.
    """
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(invoke(command, name, sys.argv[1:] if arguments is None else arguments))


def invoke(command: click.Command, name: str, arguments: Sequence[str]) -> int:
    """Run a command; returns the exit code."""
    try:
        code = command.main(args=list(arguments), prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.NoSuchOption as error:
        report(f"no such option: {error.option_name}", _near_option(error, command, name))
        return EXIT_USAGE
    except click.ClickException as error:
        report(error.format_message().rstrip("."), _see_help(name))
        return EXIT_USAGE
    except TapError as error:
        report(error.message, *error.hints)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        report("interrupted", "")
        return EXIT_INTERRUPTED
    except _TerminatedError:
        report("terminated", "")
        return EXIT_TERMINATED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        _report_bug(error, verbose=any(argument in ("-v", "--verbose") for argument in arguments))
        return EXIT_BUG


def report(message: str, *hints: str) -> None:
    """Print ``error:`` and, after an empty line, a ``hint:`` for each thing that can be done, on stderr."""
    click.echo(f"error: {printable(message)}", err=True)
    given = [hint for hint in hints if hint]
    if given:
        click.echo(err=True)
    for hint in given:
        click.echo(f"hint: {printable(hint)}", err=True)


def printable(text: str) -> str:
    """Text whose control characters (which a model file may put into names) are written as escapes."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def _see_help(name: str) -> str:
    return f"Run '{name} --help' for the options."


def _near_option(error: click.NoSuchOption, command: click.Command, name: str) -> str:
    known = [option for param in command.params for option in param.opts]
    near = difflib.get_close_matches(error.option_name, known, n=1)
    return f"Did you mean {near[0]}?" if near else _see_help(name)


def _report_bug(error: Exception, *, verbose: bool) -> None:
    if verbose:
        traceback.print_exception(error, file=sys.stderr)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())
    click.echo(f"internal error: {type(error).__name__}: {printable(message)}{place}", err=True)
    if not verbose:
        click.echo("\nhint: This is a bug of tap-planner; run again with -v and report the traceback.", err=True)
