"""What a sweep has found so far, on disk: one line for each combination, as they come."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tap_planner.errors import UsageError
from tap_planner.sweep.rows import Outcome, Status

__all__ = ["Inputs", "StateFile", "opened"]

_KIND = "tap-planner sweep"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the outcomes depend on beside the combination."""

    version: str
    """Of this product and its solver."""
    model: str
    """Digest of the file."""
    cluster: str
    """Digest of the description."""
    options: Mapping[str, object]
    """What is the same in all combinations, as plans store it."""

    def head(self) -> dict[str, object]:
        """The first line."""
        return {
            "kind": _KIND,
            "format": _FORMAT,
            "version": self.version,
            "model": self.model,
            "cluster": self.cluster,
            "options": dict(self.options),
        }

    def differences(self, head: Mapping[str, Any]) -> tuple[str, ...]:
        """What is other than in the first line of a file."""
        words = {"version": "version of tap-planner", "model": "model", "cluster": "cluster"}
        found = [word for key, word in words.items() if head.get(key) != getattr(self, key)]
        theirs, mine = head.get("options"), json.loads(json.dumps(dict(self.options)))
        theirs = theirs if isinstance(theirs, dict) else {}
        changed = sorted(key for key in {*theirs, *mine} if theirs.get(key) != mine.get(key))
        return (*found, *(f"option {key}" for key in changed))


class StateFile:
    """Outcomes by the digest of their combination's options; what is added is on disk when ``add`` returns.

    Args:
        file: open for reading and writing, locked.
        path: of the file.
        inputs: what the outcomes must depend on.

    Raises:
        UsageError: the file is of other inputs, or is none of a sweep.
    """

    def __init__(self, file: BinaryIO, path: Path, inputs: Inputs) -> None:
        self._file = file
        self._path = path
        self.outcomes: dict[str, Outcome] = {}
        """Of this and earlier runs."""
        self._read(inputs)

    def add(self, key: str, outcome: Outcome) -> None:
        """Keep an outcome; one that failed is not kept, so that it is planned again.

        Raises:
            UsageError: it cannot be written.
        """
        if outcome.status is Status.FAILED:
            return
        self.outcomes[key] = outcome
        self._write({"key": key, "outcome": outcome.to_json()})

    def _write(self, line: Mapping[str, object]) -> None:
        try:
            self._file.write(json.dumps(line).encode("ascii") + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UsageError(f"{self._path}: cannot be written: {error.strerror or error}") from error

    def _read(self, inputs: Inputs) -> None:
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]  # a line that was cut off is planned again
        lines = whole.splitlines()
        if data and not lines and not json.dumps(inputs.head()).encode("ascii").startswith(data):
            raise self._foreign()
        for number, line in enumerate(lines, start=1):
            self._take(number, self._parsed(number, line), inputs)
        if len(whole) < len(data):
            self._file.seek(len(whole))
            self._file.truncate()
        if not lines:
            self._write(inputs.head())

    def _parsed(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
        raise self._foreign() if number == 1 else self._damaged(number)

    def _take(self, number: int, line: dict[str, Any], inputs: Inputs) -> None:
        if number == 1:
            self._check_head(line, inputs)
            return
        try:
            self.outcomes[str(line["key"])] = Outcome.from_json(line["outcome"])
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise self._damaged(number) from error

    def _check_head(self, head: dict[str, Any], inputs: Inputs) -> None:
        if head.get("kind") != _KIND or head.get("format") != _FORMAT:
            raise self._foreign()
        different = inputs.differences(head)
        if different:
            raise UsageError(
                f"{self._path} holds a sweep with another {' and another '.join(different)}",
                hint="Go on with what it was begun with, or delete the file to begin anew.",
            )

    def _foreign(self) -> UsageError:
        return UsageError(f"{self._path} is no state of a sweep", hint="Name another file with --resume.")

    def _damaged(self, number: int) -> UsageError:
        return UsageError(
            f"{self._path}: line {number} cannot be read", hint="Delete this line: its combination is planned again."
        )


@contextlib.contextmanager
def opened(path: Path | None, inputs: Inputs) -> Iterator[StateFile | None]:
    """A state file for one sweep alone, made where there is none; without a path None.

    Raises:
        UsageError: it cannot be opened, another sweep has it, or it is of something else.
    """
    if path is None:
        yield None
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UsageError(f"{path}: cannot be opened: {error.strerror or error}") from error
    with os.fdopen(descriptor, "r+b") as file:
        _lock(file, path)
        yield StateFile(file, path, inputs)


def _lock(file: BinaryIO, path: Path) -> None:
    """Refuse a file that another process writes to; where there are no such locks, trust."""
    try:
        import fcntl
    except ModuleNotFoundError:
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by processes that are forked
    except OSError as error:
        raise UsageError(
            f"{path}: another sweep is writing to it", hint="Wait for it, or name another file with --resume."
        ) from error
