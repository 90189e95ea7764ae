"""How many processes a search may use: it never changes what it answers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["allowed_processes", "usable_cores", "use_processes"]

_allowed: ContextVar[int] = ContextVar("processes", default=1)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allowed_processes() -> int:
    """What ``use_processes`` says, else 1: a program that starts threads may not want to be forked."""
    return _allowed.get()


@contextlib.contextmanager
def use_processes(count: int) -> Iterator[None]:
    """Let the searches inside use so many processes, where the system can fork and no thread is running.

    Args:
        count: more than two are of no use.
    """
    token = _allowed.set(count)
    try:
        yield
    finally:
        _allowed.reset(token)
