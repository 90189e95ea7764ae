"""Runs commands as processes of their own and measures them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_EVERY_S = 0.2
"""How often memory is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process that has ended."""

    seconds: float
    """Wall clock."""
    peak_bytes: int
    """Most memory of the process and its children together, pages that they share counted once (sampled)."""
    log: str
    """Standard output and error."""


def measured(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
    expected: Sequence[int] = (0,),
) -> Ended:
    """Run a command to its end.

    Args:
        command: program and arguments.
        environment: variables besides those of this process.
        before: called in the new process first.
        expected: exit codes; another one ends this process with the command's output.
    """
    read, write = os.pipe()
    os.set_blocking(read, False)
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=write,
        stderr=write,
        env={**os.environ, **(environment or {})},
        preexec_fn=before,
    )
    os.close(write)
    text, peak, seconds = b"", 0, None
    while seconds is None:
        try:
            process.wait(_EVERY_S)
            seconds = time.perf_counter() - started
        except subprocess.TimeoutExpired:
            peak = max(peak, sum(_proportional_bytes(pid) for pid in _family(process.pid)))
        text += b"".join(_available(read))
    os.close(read)
    log = text.decode(errors="replace")
    if process.returncode not in expected:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{log}")
    return Ended(seconds=seconds, peak_bytes=peak, log=log)


def _available(pipe: int) -> Iterator[bytes]:
    """What can be read without waiting."""
    while True:
        try:
            part = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return
        if not part:
            return
        yield part


def _family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return
    for child in children:
        yield from _family(int(child))


def _proportional_bytes(pid: int) -> int:
    """Memory of a process, each page divided by the number of processes that share it; 0 for one that has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)
