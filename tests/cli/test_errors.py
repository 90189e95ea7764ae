"""What happens to a process, in exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tap_planner_cli.errors import printable

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, types
import tap_planner
from tap_planner_cli.errors import run
from tap_planner_cli.plan import command

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell inherit it ignored

def make_plan(request, old=None):
    os.kill(os.getpid(), signal.{signal})
    raise AssertionError("the signal did not arrive")

tap_planner.api = types.SimpleNamespace(make_plan=make_plan)
run(command, "tap-plan", ["model.onnx", "--cluster", "2x2:cpu-core"])
"""


@pytest.mark.parametrize(("signal", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_signals(signal: str, code: int, word: str) -> None:
    """An interrupted process says so in one line and exits with 128 + the signal."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(signal=signal)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{ROOT / 'planner'}:{ROOT / 'cli'}"},
    )
    assert (result.returncode, result.stdout, result.stderr.strip()) == (code, "", f"error: {word}")


def test_printable() -> None:
    """Control characters are written as escapes, other text is kept."""
    assert printable("ä\x1b[0m\u202eb\n") == "ä\\x1b[0m\\u202eb\n"
