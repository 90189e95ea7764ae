"""The same inputs give the same bytes: digests of plans over hash seeds, core counts and repeated runs.

Every run is a process of its own of ``tap-plan``. The peak memory is that of the process and those
that it starts, together.

    python -m tests.bench.determinism --model tests/data/hm_mixtral_8x7b.onnx --json build/determinism.json
        [--seeds 0 1 2] [--cores 1 2] [--runs 5] -- --cluster 8x8:h100-sxm5-80gb --batch 256 --dim seq=4096
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.instances import table, write_json
from tests.bench.processes import measured

SEEDS = (0, 1, 2)
CORES = (1, 2)
RUNS = 5
COMMAND = "from tap_planner_cli.plan import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process."""

    digest: str
    seconds: float
    peak_bytes: int


def plan(model: Path, arguments: Sequence[str], seed: int, cores: int) -> Run:
    """Plan once.

    Args:
        model: the ONNX file.
        arguments: of ``tap-plan``.
        seed: of the hashes of strings.
        cores: the process may run on the first so many.
    """
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "plan.json"
        ended = measured(
            [sys.executable, "-c", COMMAND, str(model), *arguments, "--output", str(output)],
            environment={"PYTHONHASHSEED": str(seed)},
            before=lambda: os.sched_setaffinity(0, allowed),
        )
        digest = hashlib.sha256(output.read_bytes()).hexdigest()
    return Run(digest=digest, seconds=ended.seconds, peak_bytes=ended.peak_bytes)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run everything, print the table, write the JSON; end with an error where digests differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--cores", type=int, nargs="+", default=list(CORES))
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("planning", nargs="*", help="arguments of tap-plan, after --")
    options = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    for seed in options.seeds:
        for cores in options.cores:
            runs = [plan(options.model, options.planning, seed, cores) for _ in range(options.runs)]
            rows.append(
                {
                    "model": options.model.stem,
                    "seed": seed,
                    "cores": cores,
                    "runs": len(runs),
                    "digests": len({run.digest for run in runs}),
                    "digest": runs[0].digest,
                    "median_s": round(sorted(run.seconds for run in runs)[len(runs) // 2], 2),
                    "peak_mb": round(max(run.peak_bytes for run in runs) / 1e6, 1),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows))
    write_json(options.json, rows)
    if any(row["digests"] != 1 for row in rows) or len({row["digest"] for row in rows}) != 1:
        sys.exit("the plans differ")
    return rows


if __name__ == "__main__":
    main()
