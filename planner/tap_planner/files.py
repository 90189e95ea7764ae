"""Files of users: texts that are read, and files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from tap_planner.errors import TapError


def read_text(path: Path | str, what: str, error: type[TapError], hint: str) -> str:
    """Read a text in UTF-8.

    Args:
        path: the file.
        what: what it is, as messages call it.
        error: raised where the file cannot be read.
        hint: what to do then.

    Raises:
        TapError: of class ``error``.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "not UTF-8 text"
        raise error(f"{path}: {what} cannot be read: {reason}", hint=hint) from problem


def write_whole(path: Path, write: Callable[[BinaryIO], object], error: type[TapError], hint: str) -> None:
    """Write a temporary file in the same folder, then rename it.

    Args:
        path: the file; one that is there is replaced.
        write: fills the open file.
        error: raised where the file cannot be written.
        hint: what to do then.

    Raises:
        TapError: of class ``error``; the old file is as it was.
    """
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(descriptor, "wb") as file:
            write(file)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as problem:
        raise error(f"{path}: cannot be written: {problem.strerror or problem}", hint=hint) from problem
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
