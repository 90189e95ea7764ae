"""Run the commands shown in README.md and docs/ and write their real output: ``python docs/refresh.py``.

A block of the kind ``console`` under a comment ``<!-- run -->`` is run line by line (``$ command``) in a copy of the
checkout's inputs. What follows a command is replaced by its output; ``<!-- run: N lines -->`` keeps the first N lines,
``<!-- run: last N lines -->`` the last. ``<!-- run in place -->`` needs the checkout itself (``make demo``): such
blocks are run with ``--in-place`` only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"<!-- run(?P<place> in place)?(?:: (?P<last>last )?(?P<lines>\d+) lines)? -->\n```console\n(?P<body>.*?)```",
    re.DOTALL,
)


def prepare(folder: Path) -> None:
    """Put the inputs that documents use into an empty folder."""
    shutil.copytree(ROOT / "plans", folder / "plans")
    (folder / "tests").mkdir()
    shutil.copytree(ROOT / "tests" / "data", folder / "tests" / "data")


def commands(body: str) -> list[str]:
    """The commands of a block, continued lines joined."""
    found: list[str] = []
    open_line = False
    for line in body.splitlines():
        if line.startswith("$ ") or open_line:
            found.append(line) if line.startswith("$ ") else found.append(f"{found.pop()}\n{line}")
            open_line = line.endswith("\\")
    return [text[2:] for text in found]


def _output(command: str, folder: Path) -> str:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "118",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(f"{done.returncode:3d}  {command.splitlines()[0]}", file=sys.stderr)
    return done.stdout


def _refreshed(match: re.Match[str], folder: Path, in_place: bool) -> str:
    if match["place"] and not in_place:
        return match[0]
    most = int(match["lines"]) if match["lines"] else None
    body = ""
    for command in commands(match["body"]):
        lines = [line.rstrip() for line in _output(command, ROOT if match["place"] else folder).splitlines()]
        if most is not None and len(lines) > most:
            lines = ["...", *lines[-most:]] if match["last"] else [*lines[:most], "..."]
        body += "\n".join([f"$ {command}", *lines]).rstrip() + "\n"
    head = match[0].partition("```console")[0]
    return f"{head}```console\n{body}```"


def main(names: list[str]) -> None:
    """Refresh the documents given, by default README.md and those under docs/."""
    in_place = "--in-place" in names
    paths = [Path(name) for name in names if name != "--in-place"] or [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for path in paths:
            text = path.read_text(encoding="utf-8")
            changed = BLOCK.sub(lambda match: _refreshed(match, folder, in_place), text)
            if changed != text:
                path.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
