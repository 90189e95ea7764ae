"""Native code of the onnx package, kept at a distance: it trusts the file that it reads.

onnx's shape inference, inliner and version converter are C++ that a damaged file can crash (an empty ``rho`` of an
SVMRegressor does). They run in a forked child with a limit on time; a child that dies is a model that is refused.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

LEAST_SECONDS = 1
BYTES_PER_SECOND = 200_000
"""A call may take so many processor seconds: a fixed part, and one for so many bytes of the model (far more than a
model that is what it claims to be needs)."""
ADDED_BYTES = 4 << 30
"""Address space that a call may take besides what the process has."""


class NativeError(Exception):
    """The native code refused the model."""


class NativeCrashError(NativeError):
    """It took too long, or crashed: it will do so again."""


def isolated(function: Callable[[], bytes], size_bytes: int = 0) -> bytes:
    """The result of ``function``, run in a forked child where the platform has fork.

    Args:
        function: runs native code and gives bytes (a serialised model, say).
        size_bytes: size of what it works on.

    Raises:
        NativeError: with the first line of what it raised.
        NativeCrashError: with how it died.
    """
    if not hasattr(os, "fork"):
        return _direct(function)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(function, reading, writing, LEAST_SECONDS + size_bytes // BYTES_PER_SECOND)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        answer = stream.read()
    _, status = os.waitpid(child, 0)
    if status != 0:
        code = os.waitstatus_to_exitcode(status)
        reason = signal.strsignal(-code) if code < 0 else "it could not answer"
        raise NativeCrashError(f"onnx's own code failed on it: {reason}")
    if answer[:1] != b"+":
        raise NativeError(answer[1:].decode("utf-8", "replace"))
    return answer[1:]


def _direct(function: Callable[[], bytes]) -> bytes:
    try:
        return function()
    except Exception as error:
        raise NativeError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _run_child(function: Callable[[], bytes], reading: int, writing: int, seconds: int) -> None:
    """Answer through the pipe and end, without the parent's exit handlers."""
    code = 1
    try:
        os.close(reading)
        with contextlib.suppress(Exception):
            _limit(seconds)
        try:
            answer = b"+" + function()
        except Exception as error:
            answer = b"-" + _first_line(error).encode("utf-8", "replace")
        with os.fdopen(writing, "wb") as stream:
            stream.write(answer)
        code = 0
    finally:
        os._exit(code)


def _limit(seconds: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    with open("/proc/self/statm") as stream:
        pages = int(stream.read().split()[0])
    limit = pages * resource.getpagesize() + ADDED_BYTES
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
