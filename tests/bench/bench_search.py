"""How long the standard 175B instance takes.

End to end is a cold ``tap-plan`` (median wall clock of several runs); search time is ``search()`` alone, without
import and parse, with the model prepared anew for every run.

    python -m tests.bench.bench_search --json build/search.json [--runs 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tap_planner import api
from tap_planner.plan import PlanOptions, PlanRequest
from tests.bench.instances import DATA, DEVICE, table, write_json

STANDARD = {"batch": 1536, "seq": 2048, "mesh": "dp=128,tp=8", "cluster": f"128x8:{DEVICE}"}
"""GPT-3 175B on 128 nodes of 8."""
RUNS = 5


def end_to_end_s(data: Path) -> float:
    """Wall clock of one cold tap-plan."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).with_name("tap-plan")),
            *(str(data / "hm_gpt3_175b.onnx"), "--cluster", str(STANDARD["cluster"])),
            *("--batch", str(STANDARD["batch"]), "--dim", f"seq={STANDARD['seq']}", "--mesh", str(STANDARD["mesh"])),
            *("-q", "-o", str(Path(folder) / "plan.json")),
        ]
        started = time.perf_counter()
        subprocess.run(command, check=True)
        return time.perf_counter() - started


def search_s(data: Path) -> float:
    """Time of the search alone."""
    from tap_planner.search import search

    prepared = api.prepare_search(
        PlanRequest(
            model=data / "hm_gpt3_175b.onnx",
            cluster=str(STANDARD["cluster"]),
            options=PlanOptions(
                batch=int(STANDARD["batch"]),
                dims={"seq": int(STANDARD["seq"])},
                mesh=str(STANDARD["mesh"]),
                loss="mean",
            ),
        )
    )
    prepared.request.folded(1)
    started = time.perf_counter()
    search(prepared.request)
    return time.perf_counter() - started


def _times(name: str, measure: Callable[[Path], float], data: Path, runs: int) -> dict[str, object]:
    times = sorted(measure(data) for _ in range(runs))
    return {
        "figure": name,
        "median_s": round(statistics.median(times), 3),
        "least_s": round(times[0], 3),
        "most_s": round(times[-1], 3),
        "runs": runs,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, list[dict[str, object]]]:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the ONNX files")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args(arguments)
    result: dict[str, list[dict[str, object]]] = {
        "times": [
            _times("tap-plan, cold, end to end", end_to_end_s, options.data, options.runs),
            _times("search alone", search_s, options.data, options.runs),
        ],
    }
    print(table(result["times"]))
    write_json(options.json, result)
    return result


def test_search() -> None:
    """The figures can be taken; times are printed and never asserted."""
    assert len(main([])["times"]) == 2


if __name__ == "__main__":
    main()
