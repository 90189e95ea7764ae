"""Write the reference plans anew: ``python plans/regenerate.py [NAME ...]``, from the environment of tap-plan.

Look at what changed with ``tap-diff`` before you commit it; the message of the commit shows the difference.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import yaml

PLANS = Path(__file__).resolve().parent
ROOT = PLANS.parent


def main(names: list[str]) -> int:
    """Plan each entry of index.yaml (or those named); the exit code of the first failure, else 0."""
    index = yaml.safe_load((PLANS / "index.yaml").read_text(encoding="utf-8"))
    unknown = sorted(set(names) - set(index))
    if unknown:
        print(f"error: no reference plan {unknown[0]!r}, there are {', '.join(index)}", file=sys.stderr)
        return 2
    for name in names or index:
        entry = index[name]
        command = [
            str(Path(sys.executable).with_name("tap-plan")),
            *(entry["model"], "--cluster", entry["cluster"], *shlex.split(entry["options"])),
            *("-o", f"plans/{name}.json"),
        ]
        print("$", shlex.join(["tap-plan", *command[1:]]), file=sys.stderr)
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
